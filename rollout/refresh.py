"""The client's side of a refresh: tensors in, one transaction, the version that is live out.

    named tensors ──→ manifest (digests) ──→ Begin ──→ Lease
                      shm: written to the segment │ inline: chunks, a window ahead of the answers │ files: nothing
                                             Commit ──→ Applied

Over shared memory and files everything is in place before Begin, so Commit follows it without waiting for the Lease: the
service can stage and apply at one boundary between two steps. torch is imported only here, and only when tensors come.
"""

from __future__ import annotations

import os
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import msgspec
import numpy as np
import xxhash

from engine.request import KVPolicy, Refreshed, TensorInfo, manifest_digest
from rollout.link import Link
from transport import messages as m
from transport.errors import InvalidRequest, RequestTimeout, SourceUnreachable, WeightsRefused
from transport.weights import Offer
from transport.weights.files import FilesOffer, describe_folder
from transport.weights.inline import InlineOffer, chunks
from transport.weights.manifest import pack_manifest
from transport.weights.shm import Segment, host_key

Via = Literal["auto", "shm", "inline", "files"]
NamedTensors = Mapping[str, Any] | Iterable[tuple[str, Any]] | str | os.PathLike[str]


class RefreshHandle:
    """A refresh under way."""

    def __init__(self) -> None:
        self.future: Future[Refreshed] = Future()

    @property
    def done(self) -> bool:
        return self.future.done()

    def result(self, timeout: float | None = None) -> Refreshed:
        """Waits until the version is live. Raises what `RolloutClient.refresh` raises; RequestTimeout after `timeout` seconds,
        and the refresh goes on."""
        done, _ = wait([self.future], timeout)
        if not done:
            raise RequestTimeout(f"the refresh is not done after {timeout} s")
        return self.future.result()


class Prepared(NamedTuple):
    """Tensors that have been read."""

    manifest: list[TensorInfo]
    arrays: list[np.ndarray]
    """[bytes] uint8 of each; empty if they lie in files"""
    offer: Offer


class Pusher:
    """Refreshes of one client, one after the other. The shared memory of the first one is used again by all others."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._turn = threading.Lock()
        self._segment = Segment()

    def start(
        self, named_tensors: NamedTensors, version: int | None, kv: KVPolicy, via: Via, partial: bool, timeout: float
    ) -> RefreshHandle:
        """Reads the tensors, then goes on in a thread of its own. What is wrong with them is raised here already."""
        for name, value, choices in (("kv", kv, get_args(KVPolicy)), ("via", via, get_args(Via))):
            if value not in choices:
                raise InvalidRequest(f"{name}={value!r}: must be one of {', '.join(choices)}")
        if version is not None and (type(version) is not int or not 0 <= version < 2**63):
            raise InvalidRequest(f"version={version!r}: must be an integer from 0 to 2**63 - 1, or None for the next")
        if not isinstance(partial, bool):
            raise InvalidRequest(f"partial={partial!r}: must be True or False")
        started = time.monotonic()
        if not self._turn.acquire(timeout=timeout):
            raise RequestTimeout(f"another refresh of this client takes longer than {timeout} s")
        handle = RefreshHandle()

        def run() -> None:
            try:
                handle.future.set_result(self._push(prepared, version, kv, partial, via == "auto", started, timeout))
            except BaseException as error:
                handle.future.set_exception(error)
            finally:
                self._turn.release()

        try:
            prepared = self._prepare(named_tensors, via)
            threading.Thread(target=run, name="rollout-refresh", daemon=True).start()
        except BaseException:
            self._turn.release()
            raise
        return handle

    def close(self) -> None:
        """When no refresh runs any more, the shared memory goes."""
        with self._turn:
            self._segment.close()

    def _prepare(self, named_tensors: NamedTensors, via: Via) -> Prepared:
        if isinstance(named_tensors, str | os.PathLike):
            if via not in ("auto", "files"):
                raise InvalidRequest(f'via="{via}" takes tensors, not the path of a folder')
            folder = Path(os.path.abspath(named_tensors))
            return Prepared(describe_folder(folder), [], FilesOffer(str(folder)))
        if via == "files":
            raise InvalidRequest('via="files" takes the path of a folder of safetensors: save the model and give its folder')
        from engine.staging import InvalidWeights, describe, named_pairs

        try:
            described = [describe(name, tensor) for name, tensor in named_pairs(named_tensors)]
        except InvalidWeights as error:
            raise WeightsRefused(str(error)) from None
        arrays = [data for _, data in described]
        offer, digests = self._place(arrays, via)
        manifest = [msgspec.structs.replace(info, digest=digest) for (info, _), digest in zip(described, digests, strict=True)]
        return Prepared(manifest, arrays, offer)

    def _place(self, arrays: list[np.ndarray], via: Via) -> tuple[Offer, list[str]]:
        """Where the service will find the bytes, and their digests."""
        if via != "inline":
            try:
                return self._share(arrays)
            except SourceUnreachable:
                if via == "shm":
                    raise
        return InlineOffer(), [xxhash.xxh3_128_hexdigest(array.data) for array in arrays]

    def _share(self, arrays: list[np.ndarray]) -> tuple[Offer, list[str]]:
        assert self._link.welcome is not None
        key = host_key()
        if key is None or key not in self._link.welcome.capabilities:
            raise SourceUnreachable("this process and the service share no memory: another host, user or container")
        try:
            return self._segment.write(arrays)
        except OSError as error:
            raise SourceUnreachable(f"no shared memory for {sum(map(len, arrays))} bytes: {error}") from None

    def _push(
        self,
        prepared: Prepared,
        version: int | None,
        kv: KVPolicy,
        partial: bool,
        fall_back: bool,
        started: float,
        timeout: float,
    ) -> Refreshed:
        end = started + timeout
        begin = m.Begin(0, "", pack_manifest(prepared.manifest), prepared.offer, version, partial, kv)
        try:
            refreshed = self._transact(begin, prepared, end)
        except SourceUnreachable:
            if not fall_back or isinstance(begin.offer, FilesOffer):
                raise
            refreshed = self._transact(msgspec.structs.replace(begin, offer=InlineOffer()), prepared, end)
        return msgspec.structs.replace(refreshed, seconds=time.monotonic() - started)

    def _transact(self, begin: m.Begin, prepared: Prepared, end: float) -> Refreshed:
        push_id, digest, request = secrets.token_hex(16), manifest_digest(prepared.manifest), self._link.request
        try:
            begun = request(lambda id: msgspec.structs.replace(begin, request_id=id, push_id=push_id))
            if isinstance(begin.offer, InlineOffer):
                lease: m.Lease = answer(begun, end - time.monotonic(), "lease")
                self._send_chunks(push_id, prepared.arrays, lease.window_bytes, end)
            committed = request(lambda id: m.Commit(id, push_id, digest))
            answer(begun, end - time.monotonic(), "lease")
            applied: m.Applied = answer(committed, end - time.monotonic(), "refresh; weights_status() tells what came of it")
        except BaseException:
            request(lambda id: m.Abandon(id, push_id))  # harmless where nothing is left of it
            raise
        return applied.refreshed

    def _send_chunks(self, push_id: str, arrays: list[np.ndarray], window: int, end: float) -> None:
        assert self._link.welcome is not None
        limits = self._link.welcome.limits
        flying: deque[tuple[Future[m.Staged], int]] = deque()
        in_flight = 0
        for offset, views in chunks(arrays, limits):
            size = sum(map(len, views))
            while flying and in_flight + size > window:
                staged, landed = flying.popleft()
                answer(staged, end - time.monotonic(), "answer to a chunk")
                in_flight -= landed
            flying.append((self._link.request(_chunk(push_id, offset, views)), size))
            in_flight += size


def _chunk(push_id: str, offset: int, views: list[np.ndarray]) -> Callable[[int], m.Chunk]:
    return lambda request_id: m.Chunk(request_id, push_id, offset, views)


def answer(future: Future[Any], timeout: float | None, what: str) -> Any:
    """The result of a request. RequestTimeout after `timeout` seconds; nobody asks again for it after a reconnect then."""
    try:
        return future.result(timeout)
    except RequestTimeout:
        raise
    except TimeoutError:
        future.cancel()
        raise RequestTimeout(f"no {what} within {timeout:.3g} s") from None
