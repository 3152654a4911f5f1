"""The client's side of a refresh: tensors in, one transaction, the version that is live out.

    named tensors ──→ ways[via].offer… ──→ Sender: manifest (digests), offer
                                             Begin  ──→ Lease
                      Sender.before_commit   chunks of inline, a window ahead of the answers; nothing with all others
                                             Commit ──→ Applied
                      Sender.after_commit    broadcasts of gloo and nccl

Only inline waits for the Lease before it sends Commit: with all others the service can stage and apply at one boundary between
two steps. How bytes travel is told by `transport.weights` alone. torch is imported only when tensors come.
"""

from __future__ import annotations

import os
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Union, get_args

import msgspec
import numpy as np

from engine.types import Adapter, KVPolicy, Limits, Refreshed, manifest_digest
from rollout.client.link import Link
from rollout.logs import logger
from transport import messages as m
from transport.checks import check_refreshed
from transport.errors import InvalidRequest, NotBelieved, RequestTimeout, RolloutError, SourceUnreachable, WeightsRefused
from transport.weights import Sender, Via, ways
from transport.weights.manifest import pack_manifest, pack_targets
from transport.weights.tensors import Tensors

if TYPE_CHECKING:
    import torch

NamedTensors = Union["torch.nn.Module", Mapping[str, Any], Iterable[tuple[str, Any]], str, os.PathLike[str]]

log = logger(__name__)


class RefreshHandle:
    """A refresh under way."""

    def __init__(self) -> None:
        self.future: Future[Refreshed] = Future()

    @property
    def done(self) -> bool:
        return self.future.done()

    def result(self, timeout: float | None = None) -> Refreshed:
        """Wait until the version is live. Raises what `RolloutClient.refresh` raises; RequestTimeout after `timeout` seconds,
        and the refresh goes on."""
        done, _ = wait([self.future], timeout)
        if not done:
            raise RequestTimeout(f"the refresh is not done after {timeout} s")
        return self.future.result()


class RefreshRequest(NamedTuple):
    """What a refresh is to do, as Begin says it."""

    version: int | None
    kv: KVPolicy
    partial: bool
    adapter: Adapter | None = None
    """what the tensors are for, if they are those of an adapter"""

    def check(self) -> None:
        """Check the arguments. Raises InvalidRequest naming one."""
        if self.kv not in get_args(KVPolicy):
            raise InvalidRequest(f"kv={self.kv!r}: must be one of {', '.join(get_args(KVPolicy))}")
        if self.version is not None and (type(self.version) is not int or not 0 <= self.version < 2**63):
            raise InvalidRequest(f"version={self.version!r}: must be an integer from 0 to 2**63 - 1, or None for the next")
        if not isinstance(self.partial, bool):
            raise InvalidRequest(f"partial={self.partial!r}: must be True or False")


class WeightSender:
    """Refreshes of one client, one after the other. What a way keeps (shared memory, exported storages) serves all of them.
    `host`: an address of this machine that the service can reach, for gloo and nccl."""

    def __init__(self, link: Link, host: str = "127.0.0.1") -> None:
        self._link = link
        self._turn = threading.Lock()
        self._ways = ways(host)

    def start(self, named_tensors: NamedTensors, wanted: RefreshRequest, via: Via, timeout: float) -> RefreshHandle:
        """Read the tensors, then push them in a thread. Raises InvalidRequest and WeightsRefused for what can be told before
        that, RequestTimeout where another refresh of this client takes too long."""
        wanted.check()
        if via not in self._ways:
            raise InvalidRequest(f"via={via!r}: must be one of {', '.join(self._ways)}")
        if not isinstance(timeout, int | float) or not 0 <= timeout <= threading.TIMEOUT_MAX:
            raise InvalidRequest(f"timeout={timeout!r}: must be seconds, 0 to {threading.TIMEOUT_MAX:.0f}")
        started = time.monotonic()
        if not self._turn.acquire(timeout=timeout):
            raise RequestTimeout(f"another refresh of this client takes longer than {timeout} s")
        handle = RefreshHandle()

        def run() -> None:
            try:
                handle.future.set_result(self._push(sender, wanted, started, started + timeout))
            except BaseException as error:
                handle.future.set_exception(error)
            finally:
                sender.close()  # takes gloo 20 ms, for which nobody has to wait
                self._turn.release()

        try:
            sender = self._offer(named_tensors, via)
            threading.Thread(target=run, name="rollout-refresh", daemon=True).start()
        except BaseException:
            self._turn.release()
            raise
        return handle

    def close(self) -> None:
        """Free what the ways keep, when no refresh runs any more."""
        with self._turn:
            for way in self._ways.values():
                way.close()

    def _offer(self, named_tensors: NamedTensors, via: Via) -> Sender:
        if isinstance(named_tensors, str | os.PathLike):
            sender = self._ways[via].offer_folder(Path(os.path.abspath(named_tensors)))
        else:
            assert self._link.welcome is not None
            sender = self._ways[via].offer_tensors(read(named_tensors), self._link.welcome.capabilities)
        log.debug("refresh offered via=%s tensors=%d reason=%r", sender.via, len(sender.manifest), sender.reason)
        return sender

    def _push(self, sender: Sender, wanted: RefreshRequest, started: float, end: float) -> Refreshed:
        """Refresh by this way, or, where the service cannot take it, by the one that stands in for it."""
        try:
            refreshed = RefreshTransaction(self._link, sender, wanted, end).run()
        except RolloutError as error:
            if sender.instead is None or not isinstance(error, sender.instead_of):
                raise
            other = sender.instead(sender)
            other.reason = f"{sender.via}: {error.message}"
            log.info("refresh offered again via=%s after=%s reason=%r", other.via, sender.via, error.message)
            try:
                return self._push(other, wanted, started, end)
            finally:
                other.close()
        sender.applied(refreshed)
        return msgspec.structs.replace(refreshed, seconds=time.monotonic() - started, reason=sender.reason)


class RefreshTransaction:
    """One refresh on the connection, from Begin to Applied; the `Channel` of its sender. `end`: time.monotonic at which it is
    given up."""

    def __init__(self, link: Link, sender: Sender, wanted: RefreshRequest, end: float) -> None:
        self._link = link
        self._sender = sender
        self._wanted = wanted
        self._end = end
        self._push_id = secrets.token_hex(16)

    def run(self) -> Refreshed:
        """Refresh. Raises what the service refuses it with, RequestTimeout; nothing stays staged then."""
        try:
            return self._commit()
        except BaseException:
            self._link.request(lambda id: m.Abandon(id, self._push_id))  # harmless where nothing is left of it
            raise

    @property
    def limits(self) -> Limits:
        assert self._link.welcome is not None
        return self._link.welcome.limits

    def window_bytes(self) -> int:
        lease: m.Lease = self._answer(self._begun, "lease")
        return lease.window_bytes

    def chunk(self, offset: int, views: list[np.ndarray]) -> Callable[[], None]:
        staged = self._link.request(lambda id: m.Chunk(id, self._push_id, offset, views))

        def wait_until_staged() -> None:
            self._answer(staged, "answer to a chunk")

        return wait_until_staged

    def _commit(self) -> Refreshed:
        sender, wanted, request = self._sender, self._wanted, self._link.request
        manifest, whole = pack_manifest(sender.manifest), manifest_digest(sender.manifest)
        adapter = wanted.adapter
        targets, base = (None, None) if adapter is None else (pack_targets(adapter.targets), adapter.base)
        version = self._link.seen.next_version() if wanted.version is None else wanted.version
        fields = self._push_id, manifest, sender.offer, version, wanted.partial, wanted.kv, targets, base
        self._begun: Future[m.Lease] = request(lambda id: m.Begin(id, *fields))
        sender.before_commit(self)
        committed: Future[m.Applied] = request(lambda id: m.Commit(id, self._push_id, whole))
        self._answer(self._begun, "lease")
        try:
            sender.after_commit(committed.done, self._end)
        except SourceUnreachable as error:
            self._say_why(error, committed)
        applied: m.Applied = self._answer(committed, "refresh; weights_status() tells what came of it")
        try:
            check_refreshed(applied.refreshed, wanted.version)
        except ValueError as error:
            raise NotBelieved(f"the service answered what cannot be: {error}") from None
        return applied.refreshed

    def _say_why(self, error: SourceUnreachable, committed: Future[m.Applied]) -> None:
        """Raise what the service answers where the sender failed: it knows why, and says so when this end has left."""
        self._sender.close()
        try:
            self._answer(committed, "refresh")
        except SourceUnreachable as theirs:
            raise error from theirs

    def _answer(self, future: Future[Any], what: str) -> Any:
        return answer(future, self._end - time.monotonic(), what)


def read(named_tensors: Any) -> Tensors:
    """Read the names and bytes of a module, a state dict or pairs. Raises WeightsRefused naming the tensor at fault."""
    from engine.weights.tensors import InvalidWeights, flat_bytes, info_of, named_pairs

    try:
        pairs = named_pairs(named_tensors)
        infos = [info_of(name, tensor) for name, tensor in pairs]
    except InvalidWeights as error:
        raise WeightsRefused(str(error)) from None
    tensors = Tensors(infos, [flat_bytes(tensor) for _, tensor in pairs])
    if tensors.on_gpus:
        tensors.hashes = device_digests()
    return tensors


def device_digests() -> Callable[[Sequence[Any]], list[str]] | None:
    """Return what takes the digests of tensors on GPUs where they lie; None: without Triton, or where a trainer has not the
    engine's CUDA part, their bytes come to the host for that."""
    try:
        from engine.cuda.digests import device_hashes, digests_of
    except ImportError:
        return None
    return digests_of if device_hashes() else None


def answer(future: Future[Any], timeout: float | None, what: str) -> Any:
    """Wait for the result of a request. Raises RequestTimeout after `timeout` seconds; the link does not ask again then."""
    try:
        return future.result(timeout)
    except RequestTimeout:
        raise
    except TimeoutError:
        future.cancel()
        raise RequestTimeout(f"no {what} within {timeout:.3g} s") from None
