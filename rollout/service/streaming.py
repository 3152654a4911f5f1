"""Tokens of children that run, for clients that asked for them: `Sampling.stream_every`.

    engine --chunks--> Streaming.next -> Progress -> session's queue -> client          Ack(progress=number) -> read

Nothing is kept of what was sent: the sample brings everything once more. A client that does not read gets nothing new until it
has, and then a larger chunk, so what waits for it is bounded.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine.types import Group, TokenChunk
from rollout.service.engine_api import EngineLike
from transport.columns import pack_progress
from transport.messages import Progress

MOST_TOKENS = 16_384
"""of one Progress"""
MOST_UNREAD = 2
"""Progress messages that a client may have been sent and not read"""


@dataclass(slots=True)
class StreamedGroup:
    """What a client was told of a group."""

    engine_id: str
    every: int
    partials: dict[int, int]
    """tokens that children had when the group came, by index"""
    told: dict[int, int]
    """tokens that the client knows, by index; those of `partials` included"""


class Streaming:
    """Of one client. Written by the service's loop only."""

    def __init__(self) -> None:
        self._groups: dict[str, StreamedGroup] = {}
        """by the client's name for them; the one told longest ago first"""
        self._sent = self._read = 0
        """numbers of the last Progress on this connection: made, and read by the client"""

    def hold(self, group_id: str, group: Group) -> None:
        """Stream a group that the engine has taken, if it asks for that."""
        if every := group.sampling.stream_every:
            partials = {child.index: len(child.token_ids) for child in group.partials}
            self._groups[group_id] = StreamedGroup(group.id, every, partials, partials.copy())

    def drop(self, group_id: str) -> None:
        """Forget a group that has ended or is not wanted any more."""
        self._groups.pop(group_id, None)

    def restart(self) -> None:
        """Begin again on a new connection: nobody knows how much of what was sent has arrived."""
        self._sent = self._read = 0
        for streamed in self._groups.values():
            streamed.told = streamed.partials.copy()

    def read(self, number: int) -> None:
        """Note that the client has read this Progress, and all before it."""
        self._read = max(self._read, min(number, self._sent))

    def next(self, engine: EngineLike) -> Progress | None:
        """Gather what is new in enough tokens, unless too much waits to be read. None: nothing to send."""
        if not self._groups or self._sent - self._read >= MOST_UNREAD:
            return None
        room, found = MOST_TOKENS, dict[str, list[TokenChunk]]()
        for group_id, streamed in self._groups.items():
            if room <= 0:
                break
            least = min(streamed.every, MOST_TOKENS)
            if chunks := engine.chunks(streamed.engine_id, streamed.told, least, room):
                found[group_id] = chunks
                room -= sum(len(chunk.token_ids) for chunk in chunks)
        if not found:
            return None
        for group_id, chunks in found.items():
            streamed = self._groups[group_id] = self._groups.pop(group_id)
            streamed.told |= {chunk.index: chunk.first + len(chunk.token_ids) for chunk in chunks}
        self._sent += 1
        return pack_progress(self._sent, found)
