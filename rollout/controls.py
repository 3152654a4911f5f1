"""Pause, resume and drain, asked by clients for the service as a whole.

A client that holds the service and goes away lets go: nobody is left waiting for a resume that cannot come.
"""

from __future__ import annotations

from rollout.protocols import EngineLike
from rollout.session import Session
from transport import messages as m
from transport.errors import Busy
from transport.frames import pack


class Controls:
    """Written by the service's loop only."""

    def __init__(self, engine: EngineLike) -> None:
        self._engine = engine
        self._holders: list[Session] = []
        self._drains: list[tuple[Session, int]] = []
        """(who waits, request)"""

    def take(self, session: Session, control: m.Control) -> None:
        if control.action == "resume":
            self._resume()
        elif control.action == "drain" and self._engine.paused:
            raise Busy("the service is paused, so nothing runs to its end: resume first")
        elif control.action != "abort_all":
            self._holders.append(session)
            if control.action == "drain":
                self._drains.append((session, control.request_id))
                return
            self._engine.paused = True
        session.reply(pack(m.Done(control.request_id)))

    def work(self) -> None:
        """Tell those who wait for the drain that nothing runs any more."""
        if self._drains and self._engine.drain():
            for session, request_id in self._drains:
                session.reply(pack(m.Done(request_id)))
            self._drains.clear()

    def forget(self, session: Session) -> None:
        held = session in self._holders
        self._holders = [holder for holder in self._holders if holder is not session]
        self._drains = [(waiting, request_id) for waiting, request_id in self._drains if waiting is not session]
        if held and not self._holders:
            self._resume()

    def _resume(self) -> None:
        self._holders.clear()
        self._engine.resume()
        for session, request_id in self._drains:
            session.reply(pack(m.Refused(Busy.kind, "the service was resumed before it was drained", None, request_id)))
        self._drains.clear()
