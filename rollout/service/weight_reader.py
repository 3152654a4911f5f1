"""Verifies the digest of the live weights: reads all their bytes between steps, in time slices. Requests that arrive before a
pass begins share it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from rollout.engine.values import Mode
from rollout.logs import logger
from rollout.service.engine_api import EngineLike
from rollout.service.session import Session
from rollout.transport import messages as m
from rollout.transport.errors import Busy, GroupFailed
from rollout.transport.frames import pack

MAX_WAITING = 256
"""requests that may wait for the next pass"""

log = logger(__name__)

Asker = tuple[Session, int, Callable[[str], None]]
"""(session, request id, function that is called with the digest)"""


class WeightReader:
    """Written by the service's thread only. True while requests wait. clock: seconds, monotonic."""

    def __init__(self, engine: EngineLike, clock: Callable[[], float] = time.monotonic) -> None:
        self._engine = engine
        self._clock = clock
        self._next: list[Asker] = []
        """requests for the next pass"""
        self._served: list[Asker] = []
        """requests that the current pass answers"""
        self._pass: Iterator[str | None] | None = None
        self._state = (0, False, False)
        """version, asleep, dropped: of the weights when the pass began"""

    def __bool__(self) -> bool:
        return bool(self._next or self._served)

    def ask(self, session: Session, request_id: int, reply: Callable[[str], None]) -> None:
        """Call `reply` with the digest once a pass has read the weights. Raises Busy."""
        if len(self._next) >= MAX_WAITING:
            raise Busy(f"{len(self._next)} requests to verify the weights wait; try again when they are answered")
        self._next.append((session, request_id, reply))

    def forget(self, session: Session) -> None:
        """Drop the requests of a session."""
        self._next = [asker for asker in self._next if asker[0] is not session]
        self._served = [asker for asker in self._served if asker[0] is not session]

    def work(self, end: float) -> None:
        """Read until `end` of the clock, or to the end of a pass. New weights restart the pass. If it fails, all requests are
        refused."""
        if not (self._next or self._served):
            return
        try:
            self._read(end)
        except Exception as error:
            log.exception("reading the live weights failed")
            failed, self._served, self._next, self._pass = [*self._served, *self._next], [], [], None
            reason = f"the service failed on this message: {type(error).__name__}: {error}"
            for session, request_id, _ in failed:
                session.reply(pack(m.Refused(GroupFailed.kind, reason, None, request_id)))

    def _read(self, end: float) -> None:
        engine = self._engine
        state = engine.version, engine.mode is Mode.ASLEEP, engine.weights.dropped
        if self._pass is None or self._state != state:
            self._served += self._next
            self._next = []
            self._pass, self._state = engine.weights.read_live(), state
        for digest in self._pass:
            if digest is not None:
                self._pass = None
                served, self._served = self._served, []
                for _, _, reply in served:
                    reply(digest)
                return
            if self._clock() >= end:
                return
