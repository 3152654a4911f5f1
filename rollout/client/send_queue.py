"""What the client has to say on its connection, and how far it may go ahead of the service.

The service tells (Alive) how many bytes it has taken. A client is never more than UNTAKEN_BYTES ahead, besides chunks of
weights, which have a window of their own: a service in a long step need not hold what a trainer has all at once, and does not
take it for a flood.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import TypeVar

from engine.types import Limits
from transport.frames import Frame, frame_bytes
from transport.messages import UNTAKEN_BYTES

ENTRY_OVERHEAD = 16
"""bytes of an entry of Ack besides the group's id"""

T = TypeVar("T")


class SendQueue:
    """Queues messages, and lets them go as far ahead of the service as it allows. For the client's I/O thread."""

    def __init__(self) -> None:
        self._waiting: deque[list[Frame]] = deque()
        self._chunks: dict[int, int] = {}
        """bytes of the chunks that are not answered, by request"""
        self._paced = False
        self._sent_bytes = self._taken_bytes = 0
        """since Welcome: given to the socket, and taken by the service as far as it has said"""

    def __bool__(self) -> bool:
        return bool(self._waiting)

    @property
    def blocked(self) -> bool:
        """Whether the next message has to wait for the service to take what was sent. Longer ones than may be ahead go
        alone."""
        ahead = self._sent_bytes - self._taken_bytes
        most = UNTAKEN_BYTES + sum(self._chunks.values())
        return self._paced and bool(self._waiting) and ahead > 0 and ahead + frame_bytes(self._waiting[0]) > most

    def add(self, *messages: list[Frame]) -> None:
        self._waiting.extend(messages)

    def add_chunk(self, request_id: int, frames: list[Frame]) -> None:
        """Let a chunk go ahead by agreement, until it is answered."""
        self._chunks[request_id] = frame_bytes(frames)

    def answered(self, request_id: int) -> None:
        self._chunks.pop(request_id, None)

    def clear(self) -> None:
        """Forget what waits: it will not be sent."""
        self._waiting.clear()

    def start(self, paced: bool) -> None:
        """Count from here, as the other end does. `paced`: the service says what it has taken."""
        self._paced = paced
        self._sent_bytes = self._taken_bytes = 0

    def taken(self, taken_bytes: int) -> None:
        """Note what the service has taken, as Alive says."""
        self._taken_bytes = taken_bytes

    def send(self, send: Callable[[list[Frame]], bool]) -> None:
        """Give the socket what it takes."""
        while self._waiting and not self.blocked and send(self._waiting[0]):
            self._sent_bytes += frame_bytes(self._waiting.popleft())


def portions(ids: list[T], limits: Limits) -> Iterator[list[T]]:
    """Cut a list of ids, or of (id, index), into portions that a header holds."""
    most = max(1, limits.max_header_bytes // (limits.max_id_bytes + ENTRY_OVERHEAD) - 1)
    for start in range(0, len(ids), most):
        yield ids[start : start + most]
