"""Pause, resume, drain, sleep and wake: requests of clients that concern the whole service.

When a client that paused the service or put it to sleep is forgotten, the service resumes or wakes, so that no other client
waits for a request that cannot come.
"""

from __future__ import annotations

from rollout.engine.values import Mode, Tag
from rollout.logs import logger
from rollout.service.engine_api import EngineLike, HasReplicas
from rollout.service.session import Session
from rollout.transport import messages as m
from rollout.transport.errors import Busy, InvalidRequest
from rollout.transport.frames import pack

MAX_WAITING = 1024
"""requests that may wait for one event"""

REMEDY = {Mode.PAUSED: "resume first", Mode.ASLEEP: "wake it first", Mode.WITHOUT_WEIGHTS: "refresh first"}

log = logger(__name__)


class Lifecycle:
    """Written by the service's thread only."""

    def __init__(self, engine: EngineLike) -> None:
        self._engine = engine
        self._holders: list[Session] = []
        """sessions that paused or drained the service"""
        self._drains: list[tuple[Session, int]] = []
        """(session, request id) of requests that wait until the service is drained"""
        self._aborts: list[tuple[Session, int]] = []
        """the same, until all groups have ended"""
        self._sleeper: Session | None = None
        """the session that put the service to sleep"""
        self._asleep = m.Asleep(0, 0)
        self._woken: tuple[Session, int] | None = None
        """answer to the last sleep, and the last wake request: after a reconnect they are repeated"""

    @property
    def has_waiters(self) -> bool:
        """Whether requests wait for the end of all groups."""
        return bool(self._aborts or self._drains)

    def handle(self, session: Session, control: m.Control) -> None:
        """Handle a request. Drain and abort_all are answered later. Raises Busy."""
        if control.action == "resume":
            self._resume()
        elif control.action == "drain" and (remedy := REMEDY.get(mode := self._engine.mode)):
            raise Busy(f"the service is {mode.value}, so no group can finish: {remedy}")
        elif control.action == "abort_all":
            _wait(self._aborts, session, control.request_id)
            return
        else:
            if session not in self._holders:
                self._holders.append(session)
            if control.action == "drain":
                _wait(self._drains, session, control.request_id)
                return
            self._engine.pause()
        session.reply(pack(m.Done(control.request_id)))

    def change_replicas(self, session: Session, message: m.Replicas) -> None:
        """Add, remove or drain replicas of a fleet. Raises InvalidRequest for a service without replicas."""
        if not isinstance(self._engine, HasReplicas):
            raise InvalidRequest("this service has one engine: start it with `rollout serve --replicas N` to have several")
        try:
            self._engine.change_replicas(message.action, message.count, message.name)
        except ValueError as error:
            raise InvalidRequest(str(error)) from None
        session.reply(pack(m.Done(message.request_id)))

    def sleep(self, session: Session, message: m.Sleep, refreshing: str | None) -> None:
        """Put the engine to sleep. refreshing: name of the client whose refresh is open. Raises Busy, InvalidRequest."""
        if refreshing is not None:
            raise Busy(f"{refreshing} is staging a refresh: sleep when it is done")
        if self._engine.mode is not Mode.ASLEEP:
            freed = self._engine.sleep(message.level)
            log.info("engine asleep level=%d client=%d freed_gib=%.2f", message.level, session.number, freed / 2**30)
            self._sleeper, self._asleep = session, m.Asleep(message.request_id, freed)
        elif (self._sleeper, self._asleep.request_id) != (session, message.request_id):
            raise InvalidRequest("the service is asleep already: wake it first")
        session.reply(pack(self._asleep))

    def wake(self, session: Session, message: m.Wake) -> None:
        """Wake the engine, or its weights or KV alone. Raises InvalidRequest if they are not asleep."""
        if self._woken != (session, message.request_id):
            try:
                self._wake(message.tags)
            except ValueError as error:
                raise InvalidRequest(str(error)) from None
            self._woken = session, message.request_id
        session.reply(pack(m.Done(message.request_id)))

    def answer_waiters(self) -> None:
        """Answer abort_all, and drain once the engine is drained. Called when no aborted group is left."""
        for session, request_id in self._aborts:
            session.reply(pack(m.Done(request_id)))
        self._aborts.clear()
        if self._drains and self._engine.drain():
            for session, request_id in self._drains:
                session.reply(pack(m.Done(request_id)))
            self._drains.clear()

    def forget(self, session: Session) -> None:
        """Undo the pause and the sleep of a session, if no other session paused too."""
        held = session in self._holders
        self._holders = [holder for holder in self._holders if holder is not session]
        for waiting in (self._drains, self._aborts):
            waiting[:] = [(one, request_id) for one, request_id in waiting if one is not session]
        if held and not self._holders:
            self._resume()
        if session is self._sleeper and self._engine.mode is Mode.ASLEEP:
            self._wake(None)
            if self._engine.weights.dropped:
                log.warning("weights dropped, a refresh is needed before sampling gone_client=%d", session.number)

    def _wake(self, tags: tuple[Tag, ...] | None) -> None:
        self._engine.wake(tags)
        if self._engine.mode is not Mode.ASLEEP:
            self._sleeper = None

    def _resume(self) -> None:
        self._holders.clear()
        self._engine.resume()
        for session, request_id in self._drains:
            session.reply(pack(m.Refused(Busy.kind, "the service was resumed before it was drained", None, request_id)))
        self._drains.clear()


def _wait(waiting: list[tuple[Session, int]], session: Session, request_id: int) -> None:
    """Add a request; a repeated one once. Raises Busy."""
    if (session, request_id) in waiting:
        return
    if len(waiting) >= MAX_WAITING:
        raise Busy(f"{len(waiting)} requests wait for this already; try again when they are answered")
    waiting.append((session, request_id))
