"""Copies the live weights to shared memory for another service on this host. The copy is written in portions between steps, and
kept until other weights are live or the sessions that requested it are gone."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import xxhash

from rollout.engine.values import Mode, TensorInfo, manifest_digest
from rollout.logs import logger
from rollout.service.engine_api import EngineLike, HasTensors, OwnTensors
from rollout.service.session import Session
from rollout.transport import messages as m
from rollout.transport.errors import Busy, GroupFailed, InvalidRequest, RolloutError
from rollout.transport.frames import pack
from rollout.transport.weights.shm import Segment

PORTION_BYTES = 8 << 20
MAX_WAITING = 64
"""requests that may wait for the copy"""
WITHOUT_WEIGHTS = (Mode.ASLEEP, Mode.WITHOUT_WEIGHTS, Mode.TORN)

log = logger(__name__)


class WeightExport:
    """Written by the service's thread only. True while requests wait. clock: seconds, monotonic."""

    def __init__(self, engine: EngineLike, clock: Callable[[], float] = time.monotonic) -> None:
        self._engine = engine
        self._clock = clock
        self._segment = Segment()
        self._waiting: list[tuple[Session, int]] = []
        self._answered: list[Session] = []
        """sessions that may read the copy"""
        self._writing: Iterator[TensorInfo | None] | None = None
        self._manifest: list[TensorInfo] = []
        self._answer: dict[str, Any] | None = None
        """the reply to all requests while these weights are live"""

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def ask(self, session: Session, request_id: int) -> None:
        """Reply once the weights are copied. Raises Busy, InvalidRequest."""
        if not isinstance(self._engine.weights, HasTensors):
            raise InvalidRequest("this service has no weights of its own to share: it is a router, ask one of its replicas")
        self._check()
        if len(self._waiting) >= MAX_WAITING:
            raise Busy(f"{len(self._waiting)} requests to share the weights wait; try again when they are answered")
        if (session, request_id) not in self._waiting:
            self._waiting.append((session, request_id))

    def forget(self, session: Session) -> None:
        """Drop the requests of a session, and the copy if no other session may read it."""
        self._waiting = [asker for asker in self._waiting if asker[0] is not session]
        if session in self._answered:
            self._answered.remove(session)
            if not self._answered:
                self.discard()

    def discard(self) -> None:
        """Free the copy, when other weights are live or no session needs it. A copy in progress starts again."""
        self._writing = self._answer = None
        self._answered.clear()
        self._segment.close()

    def work(self, end: float) -> None:
        """Copy until `end` of the clock, and reply once the copy is complete. If it fails, all requests are refused."""
        try:
            while self._waiting and self._answer is None:
                self._check()
                self._copy()
                if self._clock() >= end:
                    return
        except Exception as error:
            self._fail(error)
        for session, request_id in self._waiting:
            self._answered.append(session)
            session.reply_status(request_id, self._answer or {})
        self._waiting.clear()

    @property
    def _own(self) -> OwnTensors:
        weights = self._engine.weights
        assert isinstance(weights, HasTensors), "`ask` refuses"
        return weights.own

    def _check(self) -> None:
        if (mode := self._engine.mode) in WITHOUT_WEIGHTS:
            raise Busy(f"the service is {mode.value}: it has no weights to share")

    def _copy(self) -> None:
        """Copy one portion."""
        if self._writing is None:
            self._writing, self._manifest = self._portions(), []
        for info in self._writing:
            if info is None:
                return
            self._manifest.append(info)
        total = sum(self._own.size(info.name)[0] for info in self._manifest)
        self._answer = {
            "version": self._engine.version,
            "digest": manifest_digest(self._manifest),
            "manifest": msgspec.to_builtins(self._manifest),
            "offer": msgspec.to_builtins(self._segment.offer(total)),
        }

    def _portions(self) -> Iterator[TensorInfo | None]:
        """Write all tensors. Yields None after each portion, and the manifest's entry at the end of each tensor."""
        own = self._own
        infos = own.manifest()
        memory, at = self._segment.reserve(sum(own.size(info.name)[0] for info in infos)), 0
        for info in infos:
            size, item_bytes = own.size(info.name)
            portion, digest = max(1, PORTION_BYTES // item_bytes) * item_bytes, xxhash.xxh3_128()
            for start in range(0, size, portion):
                piece = own.read_slice(info.name, start, min(portion, size - start))
                memory[at : at + len(piece)] = piece
                digest.update(piece.data)
                at += len(piece)
                yield None
            yield msgspec.structs.replace(info, digest=digest.hexdigest())

    def _fail(self, error: Exception) -> None:
        what = f"weights not shared: {type(error).__name__}: {error}"
        refusal = error if isinstance(error, RolloutError) else GroupFailed(what)
        log.warning("weights not shared reason=%r", refusal.message)
        for session, request_id in self._waiting:
            session.reply(pack(m.Refused(refusal.kind, refusal.message, None, request_id)))
        self._waiting.clear()
        self.discard()
