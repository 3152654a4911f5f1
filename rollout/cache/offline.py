"""Answers clients from the recorded entries alone, without a service or a model. Refuses groups and refreshes that were not
recorded."""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np

from rollout.cache.keys import KnownWeights, refresh_name
from rollout.cache.store import FolderStore
from rollout.cache.upstream import Arrived
from rollout.engine.types import Refreshed, Served
from rollout.transport import messages as m
from rollout.transport.errors import InvalidRequest, RolloutError, WeightsRefused
from rollout.transport.frames import Decoder, Frame, pack

LEASE_S = 30.0
WINDOW_BYTES = 64 << 20


class OfflineWeights:
    """The weights that the recorded service would have now, and the refreshes that lead from them to others. They begin anew
    when the last client has left.

    Args:
        recorded: Welcome of the service that was recorded."""

    def __init__(self, recorded: m.Welcome, store: FolderStore) -> None:
        self._recorded, self._store = recorded, store
        self.clients = 0
        self.restart()

    def restart(self) -> None:
        """Return to the first weights."""
        capabilities = tuple(name for name in self._recorded.capabilities if name == m.DIGESTS)
        new = {"incarnation": secrets.token_hex(16), "capabilities": capabilities, "starts": 0, "groups": None}
        self.welcome = msgspec.structs.replace(self._recorded, **new)
        self.known = KnownWeights()
        self.known.welcomed(self.welcome)

    def begin(self, begin: m.Begin) -> tuple[int, str]:
        """Return version and digest of the weights after a refresh. Raises WeightsRefused for one that was not recorded."""
        live = self.known.live
        version = live.version + 1 if begin.version is None else begin.version
        if version <= live.version:
            raise WeightsRefused(f"version {version} is not above the live one, {live.version}")
        data = self._store.get(refresh_name(begin, self.known))
        if data is None:
            raise WeightsRefused(
                f"offline: these weights (version {version}, after {live.digest[:16]}…) were never live while the cache "
                "recorded: the run diverged from the recorded one before this refresh"
            )
        return version, data.decode()

    def commit(self, version: int, digest: str, adapter: bool) -> Refreshed:
        """Make weights live."""
        self.known.seen(Served(version, digest))
        if not adapter:
            self.known.base = digest
        return Refreshed(
            version=version, via="memory", bytes=1, seconds=0.0, staged_seconds=0.0, paused_seconds=0.0, digest=digest
        )


class OfflineService:
    """Answers one client.

    Args:
        arrived: called with each answer, before `send` returns."""

    def __init__(self, weights: OfflineWeights, arrived: Callable[[Arrived], None]) -> None:
        self.patient = False
        self._weights = weights
        self._arrived = arrived
        self._decoder: Decoder[Any] = Decoder(m.ClientMessage, weights.welcome.limits)
        self._staged: dict[str, tuple[int, str, bool]] = {}
        """version, digest and whether it is an adapter, by push id"""
        self._closed = False
        if not weights.clients:
            weights.restart()
        weights.clients += 1

    def send(self, frames: list[Frame]) -> None:
        """Answer a message."""
        message = self._decoder.unpack(frames)
        try:
            answer = self._answer(message)
        except RolloutError as error:
            answer = m.Refused(error.kind, error.message, request_id=getattr(message, "request_id", None))
        if answer is not None:
            self._arrived(pack(answer))

    def close(self) -> None:
        """Note that the client has left."""
        self._weights.clients -= not self._closed
        self._closed = True

    def _answer(self, message: Any) -> msgspec.Struct | None:
        live = self._weights.known.live
        match message:
            case m.Hello(number=number):
                groups = np.zeros((0, m.DIGEST_BYTES), np.uint8)
                changes = {"hello": number, "version": live.version, "digest": live.digest, "groups": groups}
                return msgspec.structs.replace(self._weights.welcome, **changes)
            case m.Heartbeat():
                return m.Alive(0, live.version, digest=live.digest)
            case m.StatusRequest(request_id=number) | m.WeightsRequest(request_id=number):
                status = {"state": "offline", "version": live.version, "digest": live.digest, "metrics": {}}
                return m.StatusReply(number, json.dumps(status).encode())
            case m.Control(request_id=number) | m.Wake(request_id=number):
                return m.Done(number)
            case m.Sleep(request_id=number):
                return m.Asleep(number, 0)
            case m.Replicas(request_id=number) | m.Share(request_id=number):
                raise InvalidRequest("offline: there is no service behind this cache")
            case _:
                return self._refresh(message)

    def _refresh(self, message: Any) -> msgspec.Struct | None:
        match message:
            case m.Begin(request_id=number, push_id=push):
                version, digest = self._weights.begin(message)
                self._staged[push] = version, digest, message.adapter is not None
                return m.Lease(number, version, LEASE_S, WINDOW_BYTES)
            case m.Chunk(request_id=number) | m.Prepare(request_id=number):
                return m.Staged(number)
            case m.Commit(request_id=number, push_id=push):
                if push not in self._staged:
                    raise WeightsRefused("this refresh has not begun, or was abandoned")
                return m.Applied(number, self._weights.commit(*self._staged.pop(push)))
            case m.Abandon(request_id=number, push_id=push):
                self._staged.pop(push, None)
                return m.Done(number)
        return None
