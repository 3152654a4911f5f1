"""Passes over all bytes of the live weights, in portions between the steps: digests of them as they lie there, for those who
ask to verify, shared by everybody who has asked before a pass began; and copies to share (`rollout.service.weight_export`)."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from engine.types import Mode
from rollout.logs import logger
from rollout.service.engine_api import EngineLike
from rollout.service.session import Session
from rollout.service.weight_export import WeightExport
from transport import messages as m
from transport.errors import Busy, GroupFailed
from transport.frames import pack

MAX_WAITING = 256
"""requests that may wait for a pass"""

log = logger(__name__)

Asker = tuple[Session, int, Callable[[str], None]]
"""(who, request, what is called with the digest)"""


class WeightReader:
    """Written by the service's loop only. True while somebody waits."""

    def __init__(self, engine: EngineLike) -> None:
        self._engine = engine
        self._next: list[Asker] = []
        self._served: list[Asker] = []
        """by the pass that is under way"""
        self._pass: Iterator[str | None] | None = None
        self._state = (0, False, False)
        """of the weights when the pass began"""
        self.sharing = WeightExport(engine)

    def __bool__(self) -> bool:
        return bool(self._next or self._served or self.sharing)

    def ask(self, session: Session, request_id: int, reply: Callable[[str], None]) -> None:
        """Have `reply` called with the digest. Raises Busy."""
        if len(self._next) >= MAX_WAITING:
            raise Busy(f"{len(self._next)} requests to verify the weights wait; try again when they are answered")
        self._next.append((session, request_id, reply))

    def forget(self, session: Session) -> None:
        self._next = [asker for asker in self._next if asker[0] is not session]
        self._served = [asker for asker in self._served if asker[0] is not session]
        self.sharing.forget(session)

    def work(self, end: float) -> None:
        """Read until `end` (time.perf_counter), or to the end of a pass. New weights begin it again. Whoever asked is told if
        it fails."""
        self.sharing.work(end)
        if not (self._next or self._served):
            return
        try:
            self._read(end)
        except Exception as error:
            log.exception("live weights not read")
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
            if time.perf_counter() >= end:
                return
