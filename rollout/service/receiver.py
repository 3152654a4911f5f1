"""What comes in: frames to messages, checked, to the loop that serves them; what cannot be served goes back as a refusal."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter

from engine.types import Limits
from rollout.logs import logger
from rollout.service.access import Access
from rollout.service.running import described
from rollout.service.session import Sessions
from transport import messages as m
from transport.errors import GroupFailed, RolloutError
from transport.frames import Decoder, Frame, frame_bytes, pack
from transport.sockets import ServiceTransport

log = logger(__name__)

Handle = Callable[[bytes, m.ClientMessage], None]
"""serves a message of a peer, or raises the typed error that goes back to it"""


class Receiver:
    """For the service's loop."""

    def __init__(self, transport: ServiceTransport, limits: Limits, access: Access, sessions: Sessions, handle: Handle) -> None:
        self.decoder: Decoder[m.ClientMessage] = Decoder(m.ClientMessage, limits)
        self.messages = 0
        """taken, from anybody"""
        self.malformed = 0
        """that were no messages of this protocol"""
        self._transport = transport
        self._access = access
        self._sessions = sessions
        self._handle = handle

    def receive(self, wait: float, began: Callable[[], float]) -> bool:
        """Take messages, one from each connection in turn. True: none waits any more.

        Args:
            wait: longest time for a first one, in seconds.
            began: is called when it is there; returns for how many seconds messages may be taken."""
        received = self._transport.receive(wait, 1)
        until = began() + perf_counter()
        while received:
            for peer, frames in received:
                self.take(peer, frames)
            if perf_counter() >= until:
                return False
            received = self._transport.receive(0.0, 1)
        return True

    def take(self, peer: bytes, frames: list[Frame]) -> None:
        """Have a message served, or refuse it."""
        request_id = None
        self.messages += 1
        if session := self._sessions.at(peer):
            session.taken_bytes += frame_bytes(frames)
        try:
            try:
                message = self.decoder.unpack(frames)
            except RolloutError:
                self.malformed += 1
                raise
            request_id = getattr(message, "request_id", None)
            self._access.check(peer, message)
            self._handle(peer, message)
        except RolloutError as error:
            self._refuse(peer, error, request_id)
        except Exception as error:
            log.exception("message not served")
            self._refuse(peer, GroupFailed(f"the service failed on this message: {described(error)}"), request_id)

    def _refuse(self, peer: bytes, error: RolloutError, request_id: int | None) -> None:
        refused = pack(m.Refused(error.kind, error.message, error.group_id, request_id))
        session = self._sessions.at(peer)
        if session is not None:
            session.reply(refused)
        else:
            self._transport.send(peer, refused)  # no session, nothing to keep it in: a stranger that does not read loses it
