"""How the service takes leave of its clients."""

from __future__ import annotations

import time

from rollout.logs import logger
from rollout.service.running import Running
from rollout.service.session import Sessions
from transport import messages as m
from transport.errors import ProtocolError
from transport.frames import Decoder, pack
from transport.sockets import ServiceTransport

POLL_S = 0.005

log = logger(__name__)


def end_groups(running: Running, sessions: Sessions, transport: ServiceTransport, deadline: float) -> None:
    """End every group as "aborted"; those of an engine that works elsewhere until the deadline (of time.monotonic)."""
    try:
        running.abort_all(sessions)
        running.end_some(None)
        while running.awaits_ends and time.monotonic() < deadline:
            transport.receive(POLL_S)
            running.step(sessions)
    except Exception:  # a broken engine: its clients are told that the service closes, at least
        log.exception("engine.abort failed")


def say_closing(
    sessions: Sessions, transport: ServiceTransport, decoder: Decoder[m.ClientMessage], reason: str, deadline: float
) -> None:
    """Send what waits and then Closing to every client. Returns when all have answered that they have it (Goodbye), or at the
    deadline (of time.monotonic). Anything else that comes is too late: Closing answers it as well."""
    for session in sessions:
        session.reply(pack(m.Closing(reason)))
    while time.monotonic() < deadline and any(session.peer is not None for session in sessions):
        for session in sessions:
            session.flush(transport.send)
        for peer, frames in transport.receive(POLL_S):
            try:
                message = decoder.unpack(frames)
            except ProtocolError:
                continue
            gone = sessions.at(peer)
            if gone is not None and isinstance(message, m.Goodbye):
                sessions.close(gone)
