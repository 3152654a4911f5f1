"""Streams tokens of unfinished children to clients that want them (`Sampling.stream_every`).

    engine.chunks → Streaming.next → Progress → queue of the session → client          Ack(progress=number) → read

Sent chunks are not stored: the finished sample contains all tokens. A client that does not read gets nothing new until it does,
and then a larger chunk, so the memory for it is bounded.
"""

from __future__ import annotations

from dataclasses import dataclass

from rollout.engine.values import Group, TokenChunk
from rollout.service.engine_api import EngineLike
from rollout.transport.columns import pack_progress
from rollout.transport.messages import Progress

MOST_TOKENS = 16_384
"""in one Progress message"""
MOST_UNREAD = 2
"""Progress messages that may be sent before the client has read the first"""


@dataclass(slots=True)
class StreamedGroup:
    """How much of a group a client has received."""

    engine_id: str
    every: int
    """fewest new tokens of a child in a chunk"""
    partial: dict[int, int]
    """tokens of the partial samples that the group was submitted with, by index"""
    sent: dict[int, int]
    """tokens sent so far, by index; includes `partial`"""


class Streaming:
    """The streamed groups of one client. Written by the service's thread only. most_tokens: in one Progress message."""

    def __init__(self, most_tokens: int = MOST_TOKENS) -> None:
        self._most_tokens = most_tokens
        self._groups: dict[str, StreamedGroup] = {}
        """by the client's group id, least recently sent first"""
        self._sent = self._read = 0
        """numbers of the last Progress on this connection: sent, and read by the client"""

    def hold(self, group_id: str, group: Group) -> None:
        """Stream a submitted group if its `Sampling.stream_every` is set."""
        if every := group.sampling.stream_every:
            partial = {child.index: len(child.token_ids) for child in group.partials}
            self._groups[group_id] = StreamedGroup(group.id, every, partial, partial.copy())

    def drop(self, group_id: str) -> None:
        """Forget a group that has finished or was dropped."""
        self._groups.pop(group_id, None)

    def restart(self) -> None:
        """Start again on a new connection, because it is unknown how much has arrived on the old one."""
        self._sent = self._read = 0
        for streamed in self._groups.values():
            streamed.sent = streamed.partial.copy()

    def read(self, number: int) -> None:
        """Record that the client has read this Progress and all before it."""
        self._read = max(self._read, min(number, self._sent))

    def next(self, engine: EngineLike) -> Progress | None:
        """Collect the new tokens of children that have enough. None if there are none, or if the client must read first."""
        if not self._groups or self._sent - self._read >= MOST_UNREAD:
            return None
        room, found = self._most_tokens, dict[str, list[TokenChunk]]()
        for group_id, streamed in self._groups.items():
            if room <= 0:
                break
            least = min(streamed.every, self._most_tokens)
            if chunks := engine.chunks(streamed.engine_id, streamed.sent, least, room):
                found[group_id] = chunks
                room -= sum(len(chunk.token_ids) for chunk in chunks)
        if not found:
            return None
        for group_id, chunks in found.items():
            streamed = self._groups[group_id] = self._groups.pop(group_id)
            streamed.sent |= {chunk.index: chunk.first + len(chunk.token_ids) for chunk in chunks}
        self._sent += 1
        return pack_progress(self._sent, found)
