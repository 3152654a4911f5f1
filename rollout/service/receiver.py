"""Receives messages: decodes and checks frames, has the loop handle the messages, and answers invalid ones with `Refused`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from rollout.engine.values import Limits
from rollout.logs import logger
from rollout.service.engine_groups import described
from rollout.service.session import Sessions
from rollout.transport import messages as m
from rollout.transport.errors import GroupFailed, ProtocolError, RolloutError
from rollout.transport.frames import Decoder, Frame, frame_bytes, pack
from rollout.transport.sockets import ServiceTransport

log = logger(__name__)

Handle = Callable[[bytes, m.ClientMessage], None]
"""handles a message of a connection; raises the typed error for the client"""


class Receiver:
    """The receiving side of the service's loop.

    Args:
        handle: called with each message of this protocol.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        transport: ServiceTransport,
        limits: Limits,
        sessions: Sessions,
        handle: Handle,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.messages = 0
        """messages received from all connections"""
        self.malformed = 0
        """of these, frames that are no message of this protocol"""
        self._decoder: Decoder[m.ClientMessage] = Decoder(m.ClientMessage, limits)
        self._transport = transport
        self._sessions = sessions
        self._handle = handle
        self._clock = clock

    def receive(self, wait: float, began: Callable[[], float]) -> bool:
        """Receive and handle messages, one from each connection in turn. Returns whether no message is left.

        Args:
            wait: longest time to wait for the first message, in seconds.
            began: called when the wait has ended; returns for how many seconds messages may be handled."""
        received = self._transport.receive(wait, 1)
        until = began() + self._clock()
        while received:
            for peer, frames in received:
                self._receive_one(peer, frames)
            if self._clock() >= until:
                return False
            received = self._transport.receive(0.0, 1)
        return True

    def goodbyes(self, wait: float) -> Iterator[bytes]:
        """Yield the connections that send Goodbye; other messages are dropped. For a service that closes."""
        for peer, frames in self._transport.receive(wait):
            try:
                message = self._decoder.unpack(frames)
            except ProtocolError:
                continue
            if isinstance(message, m.Goodbye):
                yield peer

    def _receive_one(self, peer: bytes, frames: list[Frame]) -> None:
        request_id = None
        self.messages += 1
        if session := self._sessions.at(peer):
            session.taken_bytes += frame_bytes(frames)
        try:
            try:
                message = self._decoder.unpack(frames)
            except ProtocolError:
                self.malformed += 1
                raise
            request_id = getattr(message, "request_id", None)
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
            self._transport.send(peer, refused)  # without a session it is not queued: a peer that does not read loses it
