"""The client's side of a refresh: tensors in, one transaction, the version that is live out.

    named tensors ──→ manifest (digests) ──→ Begin ──→ Lease
                      shm: written to the segment │ inline: chunks, a window ahead of the answers │ files, cuda_ipc: nothing
                                             Commit ──→ Applied
                      gloo, nccl: broadcasts

Only inline waits for the Lease before it sends Commit: with all others the service can stage and apply at one boundary between
two steps. torch is imported only here, and only when tensors come.
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
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Union, get_args

import msgspec
import numpy as np
import xxhash

from engine.types import KVPolicy, Refreshed, TensorInfo, manifest_digest
from rollout.client.link import Link
from transport import messages as m
from transport.errors import InvalidRequest, RequestTimeout, SourceUnreachable, WeightsRefused
from transport.weights import Offer
from transport.weights.cuda_ipc import Exports, digest, gpu_key
from transport.weights.distributed import Sender
from transport.weights.files import FilesOffer, describe_folder
from transport.weights.inline import InlineOffer, chunks
from transport.weights.manifest import pack_manifest
from transport.weights.shm import Segment, host_key

if TYPE_CHECKING:
    import torch

Via = Literal["auto", "shm", "inline", "files", "cuda_ipc", "gloo", "nccl"]
NamedTensors = Union["torch.nn.Module", Mapping[str, Any], Iterable[tuple[str, Any]], str, os.PathLike[str]]


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
    data: list[Any]
    """[bytes] uint8 of each, held until the refresh is over: arrays, or tensors that stay on their GPU; empty with files"""
    offer: Offer
    sender: Sender | None = None


class Placed(NamedTuple):
    """Where the service finds the bytes."""

    offer: Offer
    digests: list[str]
    sender: Sender | None = None


class Pusher:
    """Refreshes of one client, one after the other. The shared memory of the first one is used again by all others. `host`: an
    address of this machine that the service can reach, for gloo and nccl."""

    def __init__(self, link: Link, host: str = "127.0.0.1") -> None:
        self._link = link
        self._host = host
        self._turn = threading.Lock()
        self._segment = Segment()
        self._exports = Exports()

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
        if not isinstance(timeout, int | float) or not 0 <= timeout <= threading.TIMEOUT_MAX:
            raise InvalidRequest(f"timeout={timeout!r}: must be seconds, 0 to {threading.TIMEOUT_MAX:.0f}")
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
                if prepared.sender is not None:
                    prepared.sender.close()  # takes gloo 20 ms, for which nobody has to wait
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
        from engine.weights.staging import InvalidWeights, info_of, named_pairs, tensor_bytes

        try:
            pairs = named_pairs(named_tensors)
            infos = [info_of(name, tensor) for name, tensor in pairs]
        except InvalidWeights as error:
            raise WeightsRefused(str(error)) from None
        data: list[Any] = []
        placed: Placed | None = None
        if via in ("cuda_ipc", "nccl") or via == "auto" and pairs and all(on_gpu(tensor) for _, tensor in pairs):
            try:
                data, placed = self._place_on_gpu(pairs, via)
            except SourceUnreachable:
                if via != "auto":
                    raise
        if placed is None:
            data = [tensor_bytes(tensor) for _, tensor in pairs]
            placed = self._place(data, via)
        manifest = [msgspec.structs.replace(info, digest=digest) for info, digest in zip(infos, placed.digests, strict=True)]
        return Prepared(manifest, data, placed.offer, placed.sender)

    def _place(self, arrays: list[np.ndarray], via: Via) -> Placed:
        if via in ("auto", "shm"):
            try:
                return Placed(*self._share(arrays))
            except SourceUnreachable:
                if via == "shm":
                    raise
        digests = [xxhash.xxh3_128_hexdigest(array.data) for array in arrays]
        if via == "gloo":
            self._check_backend(via)
            sender = Sender("gloo", self._host, sum(map(len, arrays)))
            return Placed(sender.offer, digests, sender)
        return Placed(InlineOffer(), digests)

    def _share(self, arrays: list[np.ndarray]) -> tuple[Offer, list[str]]:
        key = host_key()
        if key is None or key not in self._capabilities:
            raise SourceUnreachable("this process and the service share no memory: another host, user or container")
        try:
            return self._segment.write(arrays)
        except OSError as error:
            raise SourceUnreachable(f"no shared memory for {sum(map(len, arrays))} bytes: {error}") from None

    def _place_on_gpu(self, pairs: list[tuple[str, Any]], via: Via) -> tuple[list[Any], Placed]:
        """The tensors' bytes, which stay where they are, and where that is."""
        for name, tensor in pairs:
            if not on_gpu(tensor):
                raise WeightsRefused(
                    f'tensor {name!r} is on {tensor.device}: via="{via}" takes tensors on a CUDA device; use "shm" on one '
                    'host, "gloo" or "inline" on any'
                )
        devices = {tensor.device for _, tensor in pairs}
        if via == "nccl":
            self._check_backend(via)
        elif not {gpu_key(device) for device in devices} <= set(self._capabilities):
            raise SourceUnreachable("this process and the service share no GPU: another host, or a service on another device")
        tensors = [tensor.detach().contiguous() for _, tensor in pairs]
        synchronize(devices)
        data = [as_bytes(tensor) for tensor in tensors]
        if via == "nccl":
            sender = Sender("nccl", self._host, sum(map(len, data)), min(devices, key=str))
            return data, Placed(sender.offer, [digest(one) for one in data], sender)
        offer = self._exports.offer(tensors)
        return data, Placed(offer, [digest(one) for one in data])

    @property
    def _capabilities(self) -> tuple[str, ...]:
        assert self._link.welcome is not None
        return self._link.welcome.capabilities

    def _check_backend(self, via: Via) -> None:
        if via not in self._capabilities:
            raise SourceUnreachable(f'the service has no {via} here; via="inline" takes no more than the connection')

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
        push_id, whole, request = secrets.token_hex(16), manifest_digest(prepared.manifest), self._link.request
        try:
            begun = request(lambda id: msgspec.structs.replace(begin, request_id=id, push_id=push_id))
            if isinstance(begin.offer, InlineOffer):
                lease: m.Lease = answer(begun, end - time.monotonic(), "lease")
                self._send_chunks(push_id, on_host(prepared.data), lease.window_bytes, end)
            committed = request(lambda id: m.Commit(id, push_id, whole))
            answer(begun, end - time.monotonic(), "lease")
            if prepared.sender is not None:
                _broadcast(prepared.sender, prepared.data, committed, end)
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


def _broadcast(sender: Sender, data: list[Any], committed: Future[m.Applied], end: float) -> None:
    """When the service does not take it all, its answer to Commit says why, and comes when this end has left the group."""
    try:
        sender.send(data, committed.done, end)
    except SourceUnreachable as error:
        sender.close()
        try:
            answer(committed, end - time.monotonic(), "refresh")
        except SourceUnreachable as theirs:
            raise error from theirs


def on_gpu(tensor: Any) -> bool:
    return bool(tensor.is_cuda)


def synchronize(devices: Iterable[Any]) -> None:
    """Wait until all that was issued on these CUDA devices is done, on whatever streams."""
    import torch

    for device in devices:
        torch.cuda.synchronize(device)


def as_bytes(tensor: Any) -> Any:
    """[bytes] uint8 view of a contiguous tensor."""
    import torch

    return tensor.view(-1).view(torch.uint8)


def on_host(data: list[Any]) -> list[np.ndarray]:
    """[bytes] uint8 arrays, copied from tensors that stayed on their device."""
    return [one if isinstance(one, np.ndarray) else one.cpu().numpy() for one in data]


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
