"""The transport of a client that has a memo and no service: answers requests from the stored Welcome and refreshes alone."""

from __future__ import annotations

import hashlib
import json
import math
import secrets
import threading
import time
from collections import deque
from typing import Any, NamedTuple

import msgspec
import numpy as np

from rollout.client.memo import Memo, refresh_name
from rollout.engine.values import Refreshed, Served, manifest_digest
from rollout.transport import messages as m
from rollout.transport.errors import GroupFailed, InvalidRequest, RolloutError, WeightsRefused
from rollout.transport.frames import Decoder, Frame, pack
from rollout.transport.weights.delta import WIDTHS
from rollout.transport.weights.manifest import unpack_manifest

LEASE_S = 30.0
WINDOW_BYTES = 64 << 20
MOST_TENSORS = 1_000_000
"""of a manifest"""


class StagedOffline(NamedTuple):
    """Weights that a refresh would make live."""

    version: int
    digest: str
    adapter: bool
    bytes: int
    """of the tensors that were offered"""
    began: float
    """time.monotonic"""


class OfflineEnd:
    """The client's end of a connection to the recorded service, whose weights begin with the recorded ones.

    Raises ValueError if the memo has no Welcome."""

    refusal = ""

    def __init__(self, memo: Memo) -> None:
        recorded = memo.welcome()
        if recorded is None:
            raise ValueError(
                f"memo {memo.folder.path}: nothing was recorded in this folder: run once with the address of a service"
            )
        self.address = f"memo {memo.folder.path}"
        self.connected, self.connections = True, 1
        kept = tuple(name for name in recorded.capabilities if name == m.DIGESTS)
        new = {"incarnation": secrets.token_hex(16), "capabilities": kept, "starts": 0, "groups": None}
        self._welcome = msgspec.structs.replace(recorded, **new)
        self._memo = memo
        self._live = Served(recorded.version, recorded.digest)
        self._base = ""
        """digest of the weights without an adapter, as far as this client has sent them"""
        self._staged: dict[str, StagedOffline] = {}
        """by push id"""
        self._decoder: Decoder[Any] = Decoder(m.ClientMessage, recorded.limits)
        self._changed = threading.Condition()
        self._answers: deque[list[Frame]] = deque()
        self._woken = True  # the new connection is an event

    def receive(self, timeout: float, sending: bool = False) -> list[list[Frame]]:
        with self._changed:
            self._changed.wait_for(lambda: self._answers or self._woken, timeout)
            self._woken = False
            received = list(self._answers)
            self._answers.clear()
        return received

    def send(self, frames: list[Frame]) -> bool:
        """Answer a message of the client. True: it was taken."""
        message = self._decoder.unpack(frames)
        try:
            answer = self._answer(message)
        except RolloutError as error:
            names = {name: getattr(message, name, None) for name in ("request_id", "group_id")}
            answer = m.Refused(error.kind, error.message, **names)
        if answer is not None:
            with self._changed:
                self._answers.append(pack(answer))
                self._changed.notify_all()
        return True

    def wake(self) -> None:
        with self._changed:
            self._woken = True
            self._changed.notify_all()

    def close(self, linger: float = 0.0) -> None:
        self.connected = False

    def _answer(self, message: Any) -> msgspec.Struct | None:
        live = self._live
        match message:
            case m.Hello(number=number):
                groups = np.zeros((0, m.DIGEST_BYTES), np.uint8)
                changes = {"hello": number, "version": live.version, "digest": live.digest, "groups": groups}
                return msgspec.structs.replace(self._welcome, **changes)
            case m.Heartbeat():
                return m.Alive(0, live.version, digest=live.digest)
            case m.StatusRequest(request_id=number) | m.WeightsRequest(request_id=number):
                status = {"state": "offline", "version": live.version, "digest": live.digest, "metrics": {}}
                return m.StatusReply(number, json.dumps(status).encode())
            case m.Control() | m.Sleep() | m.Wake() | m.Replicas() | m.Share():
                raise InvalidRequest("offline: this client has no service to control; leave this call out without one")
            case m.Submit():
                raise GroupFailed("offline: this client has no service that computes")
            case _:
                return self._refresh(message)

    def _refresh(self, message: Any) -> msgspec.Struct | None:
        match message:
            case m.Begin(request_id=number, push_id=push):
                staged = self._staged[push] = self._begun(message)
                return m.Lease(number, staged.version, LEASE_S, WINDOW_BYTES)
            case m.Chunk(request_id=number) | m.Prepare(request_id=number):
                return m.Staged(number)
            case m.Commit(request_id=number, push_id=push):
                if push not in self._staged:
                    raise WeightsRefused("this refresh has not begun, or was abandoned")
                return m.Applied(number, self._committed(self._staged.pop(push)))
            case m.Abandon(request_id=number, push_id=push):
                self._staged.pop(push, None)
                return m.Done(number)
        return None

    def _begun(self, begin: m.Begin) -> StagedOffline:
        """Return the weights after a refresh. Raises WeightsRefused for one that was not recorded."""
        live = self._live
        version = live.version + 1 if begin.version is None else begin.version
        if version <= live.version:
            raise WeightsRefused(f"version {version} is not above the live one, {live.version}")
        adapter = None if begin.adapter is None else (sha(begin.adapter), begin.base)
        tensors = unpack_manifest(begin.manifest, MOST_TENSORS)
        manifest = manifest_digest(tensors)
        data = self._memo.get(refresh_name(self._welcome, manifest, begin.partial, adapter, live.digest + self._base))
        if data is None:
            raise WeightsRefused(
                f"offline: these weights (version {version}, after {live.digest[:16]}…) were never live while the memo "
                "recorded: the run diverged from the recorded one before this refresh"
            )
        size = sum(math.prod(info.shape) * WIDTHS[info.dtype] for info in tensors)
        return StagedOffline(version, data.decode(), begin.adapter is not None, size, time.monotonic())

    def _committed(self, staged: StagedOffline) -> Refreshed:
        """Make weights live. Nothing was sent, and nothing paused."""
        self._live = Served(staged.version, staged.digest)
        self._base = self._base if staged.adapter else staged.digest
        seconds = time.monotonic() - staged.began
        return Refreshed(
            version=staged.version, via="memory", bytes=staged.bytes, seconds=seconds, staged_seconds=seconds,
            paused_seconds=0.0, digest=staged.digest,
        )  # fmt: skip


class RefreshRecorder:
    """Stores which weights the refreshes of a client have led to."""

    def __init__(self, memo: Memo) -> None:
        self._memo = memo
        self._base = ""
        """as `OfflineEnd._base`"""

    def applied(self, info: m.Welcome, before: Served | None, begin: m.Begin, manifest: str, digest: str) -> None:
        """Store a refresh, unless it depends on weights before it that are unknown.

        Args:
            before: the live weights to which it was applied; None: another client may have changed them.
            manifest: digest of what was sent.
            digest: of the weights after it."""
        adapter = None if begin.adapter is None else (sha(begin.adapter), begin.base)
        if before is not None or not (begin.partial or adapter):
            known = "" if before is None else before.digest + self._base
            self._memo.keep(refresh_name(info, manifest, begin.partial, adapter, known), digest.encode())
        self._base = self._base if begin.adapter is not None else digest


def sha(array: np.ndarray) -> bytes:
    """Return the SHA-256 of an array."""
    return hashlib.sha256(np.ascontiguousarray(array).tobytes()).digest()
