"""The client's side of a refresh: one transaction from tensors to live weights.

    named tensors ──→ transports[via].offer… ──→ Sender: manifest (digests), offer
                                                   Begin  ──→ Lease
                            Sender.before_commit   chunks (inline, delta), a window ahead of the answers
                                                   Commit ──→ Applied
                            Sender.after_commit    broadcasts (gloo, nccl)

Only chunks wait for the Lease before Commit: otherwise the service can stage and apply between the same two steps. The weight
transports are in `rollout.transport.weights`. torch is imported when the first tensors are given.
"""

from __future__ import annotations

import os
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, Union, get_args

import msgspec
import numpy as np

from rollout.client.connection import answer
from rollout.client.link import Link
from rollout.engine.values import Adapter, KVPolicy, Limits, Refreshed, Served, manifest_digest
from rollout.logs import logger
from rollout.transport import messages as m
from rollout.transport.checks import check_refreshed
from rollout.transport.errors import (
    InvalidRequest,
    NotBelieved,
    RequestTimeout,
    RolloutError,
    SourceUnreachable,
    WeightsRefused,
)
from rollout.transport.weights import Via
from rollout.transport.weights.ends import Sender
from rollout.transport.weights.manifest import pack_manifest, pack_targets
from rollout.transport.weights.sending import transports
from rollout.transport.weights.tensors import Tensors

if TYPE_CHECKING:
    import torch

NamedTensors = Union["torch.nn.Module", Mapping[str, Any], Iterable[tuple[str, Any]], str, os.PathLike[str]]

log = logger(__name__)


class RefreshHandle:
    """A refresh in progress."""

    def __init__(self) -> None:
        self.future: Future[Refreshed] = Future()
        self.future.set_running_or_notify_cancel()  # the end of a wait does not stop it

    @property
    def done(self) -> bool:
        """Whether the version is live, or the refresh failed."""
        return self.future.done()

    def result(self, timeout: float | None = None) -> Refreshed:
        """Wait until the version is live. Raises as `RolloutClient.refresh`, and RequestTimeout after `timeout` seconds, while
        the refresh continues."""
        done, _ = wait([self.future], timeout)
        if not done:
            raise RequestTimeout(f"the refresh is not done after {timeout} s")
        return self.future.result()


class RefreshRequest(NamedTuple):
    """Arguments of a refresh, as in Begin."""

    version: int | None
    kv: KVPolicy
    partial: bool
    adapter: Adapter | None = None
    """targets of the tensors, if they are those of an adapter"""

    def check(self) -> None:
        """Check the arguments. Raises InvalidRequest naming one."""
        if self.kv not in get_args(KVPolicy):
            raise InvalidRequest(f"kv={self.kv!r}: must be one of {', '.join(get_args(KVPolicy))}")
        if self.version is not None and (type(self.version) is not int or not 0 <= self.version < 2**63):
            raise InvalidRequest(f"version={self.version!r}: must be an integer from 0 to 2**63 - 1, or None for the next")
        if not isinstance(self.partial, bool):
            raise InvalidRequest(f"partial={self.partial!r}: must be True or False")


class RefreshObserver(Protocol):
    """Takes note of the refreshes of a client that are live."""

    def applied(self, info: m.Welcome, before: Served | None, begin: m.Begin, manifest: str, digest: str) -> None:
        """Take a refresh. before: the live weights to which it was applied, None: unknown; manifest: its digest; digest: of the
        weights after it."""


class WeightSender:
    """Sends the refreshes of one client, one after the other. Its transports keep shared memory and exported storages for the
    next one.

    Args:
        host: an address of this machine that the service can reach, for gloo and nccl.
        observer: takes note of each refresh that is live."""

    def __init__(self, link: Link, host: str = "127.0.0.1", observer: RefreshObserver | None = None) -> None:
        self._link, self._observer = link, observer
        self._one = threading.Lock()
        """held during a refresh"""
        self._transports = transports(host)

    def start(self, named_tensors: NamedTensors, wanted: RefreshRequest, via: Via, timeout: float) -> RefreshHandle:
        """Read the tensors, then send them in a thread. Raises InvalidRequest and WeightsRefused for invalid arguments and
        tensors, RequestTimeout if another refresh of this client takes too long."""
        wanted.check()
        if via not in self._transports:
            raise InvalidRequest(f"via={via!r}: must be one of {', '.join(self._transports)}")
        if not isinstance(timeout, int | float) or not 0 <= timeout <= threading.TIMEOUT_MAX:
            raise InvalidRequest(f"timeout={timeout!r}: must be seconds, 0 to {threading.TIMEOUT_MAX:.0f}")
        started = time.monotonic()
        if not self._one.acquire(timeout=timeout):
            raise RequestTimeout(f"another refresh of this client takes longer than {timeout} s")
        handle = RefreshHandle()

        def run() -> None:
            try:
                handle.future.set_result(self._push(sender, wanted, started, started + timeout))
            except BaseException as error:
                handle.future.set_exception(error)
            finally:
                sender.close()  # after the result: gloo takes 20 ms
                self._one.release()

        try:
            sender = self._offer(named_tensors, via)
            threading.Thread(target=run, name="rollout-refresh", daemon=True).start()
        except BaseException:
            self._one.release()
            raise
        return handle

    def close(self) -> None:
        """Free the memory of the transports when no refresh runs."""
        with self._one:
            for transport in self._transports.values():
                transport.close()

    def _offer(self, named_tensors: NamedTensors, via: Via) -> Sender:
        if isinstance(named_tensors, str | os.PathLike):
            sender = self._transports[via].offer_folder(Path(os.path.abspath(named_tensors)))
        else:
            assert self._link.welcome is not None
            sender = self._transports[via].offer_tensors(read(named_tensors), self._link.welcome.capabilities)
        log.debug("refresh offered via=%s tensors=%d reason=%r", sender.via, len(sender.manifest), sender.reason)
        return sender

    def _push(self, sender: Sender, wanted: RefreshRequest, started: float, end: float) -> Refreshed:
        """Refresh by this sender, or by its fallback if the service cannot reach the source."""
        try:
            refreshed = RefreshTransaction(self._link, sender, wanted, end, self._observer).run()
        except RolloutError as error:
            if sender.fallback is None or not isinstance(error, sender.fallback_after):
                raise
            other = sender.fallback(sender)
            other.reason = f"{sender.via}: {error.message}"
            log.info("refresh offered again via=%s after=%s reason=%r", other.via, sender.via, error.message)
            try:
                return self._push(other, wanted, started, end)
            finally:
                other.close()
        sender.applied(refreshed)
        return msgspec.structs.replace(refreshed, seconds=time.monotonic() - started, reason=sender.reason)


class RefreshTransaction:
    """One refresh, from Begin to Applied; the `Channel` of its sender. end: time.monotonic at which it fails."""

    def __init__(
        self, link: Link, sender: Sender, wanted: RefreshRequest, end: float, observer: RefreshObserver | None = None
    ) -> None:
        self._link, self._observer = link, observer
        self._sender = sender
        self._wanted = wanted
        self._end = end
        self._push_id = secrets.token_hex(16)

    def run(self) -> Refreshed:
        """Refresh. Raises the error of the service, RequestTimeout; nothing stays staged then."""
        try:
            return self._commit()
        except BaseException:
            self._link.request(lambda id: m.Abandon(id, self._push_id))  # does nothing if it has ended
            raise

    @property
    def limits(self) -> Limits:
        assert self._link.welcome is not None
        return self._link.welcome.limits

    def window_bytes(self) -> int:
        lease: m.Lease = self._answer(self._lease, "lease")
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
        version = self._link.weights.next_version() if wanted.version is None else wanted.version
        fields = self._push_id, manifest, sender.offer, version, wanted.partial, wanted.kv, targets, base
        info, before = self._link.welcome, self._link.weights.live
        self._lease: Future[m.Lease] = request(lambda id: m.Begin(id, *fields))
        sender.before_commit(self)
        committed: Future[m.Applied] = request(lambda id: m.Commit(id, self._push_id, whole))
        self._answer(self._lease, "lease")
        try:
            sender.after_commit(committed.done, self._end)
        except SourceUnreachable as error:
            self._raise_cause(error, committed)
        applied: m.Applied = self._answer(committed, "refresh; weights_status() tells which weights are live")
        try:
            check_refreshed(applied.refreshed, wanted.version)
        except ValueError as error:
            raise NotBelieved(f"the service sent an impossible answer: {error}") from None
        if self._observer is not None and info is not None:
            # of another client's refresh this one may not know yet: only the next version leaves no room for it
            is_next = applied.refreshed.version == before.version + 1 and self._link.welcome is info
            self._observer.applied(info, before if is_next else None, m.Begin(0, *fields), whole, applied.refreshed.digest)
        return applied.refreshed

    def _raise_cause(self, error: SourceUnreachable, committed: Future[m.Applied]) -> None:
        """Raise the service's reason for a failed sender; the service answers when this end has left."""
        self._sender.close()
        try:
            self._answer(committed, "refresh")
        except SourceUnreachable as theirs:
            raise error from theirs

    def _answer(self, future: Future[Any], what: str) -> Any:
        return answer(future, self._end - time.monotonic(), what)


def read(named_tensors: Any) -> Tensors:
    """Read the names and bytes of a module, a state dict or pairs. Raises WeightsRefused naming the invalid tensor."""
    from rollout.engine.weights.tensors import InvalidWeights, flat_bytes, info_of, named_pairs

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
    """Return the function that digests tensors on their GPU. None without Triton or the engine's CUDA part: then their bytes
    are copied to the host for that."""
    try:
        from rollout.engine.cuda.digests import digests_of, has_triton
    except ImportError:
        return None
    return digests_of if has_triton() else None
