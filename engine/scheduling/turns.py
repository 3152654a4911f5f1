"""The turns of conversations: which children ended, so that a group may continue one of them.

    turn 1   p p p p o o o o                         ended; its KV is kept, or in the prefix index
    turn 2   p p p p o o o o t t t t o o o o o       a group whose prompt is all of it; `Group.after` names turn 1
             └── turn 1 ───┘ └ tool ┘

`after` is a hint. A turn that is not known (any more), or another client's, is no turn: the group is one like any other.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

from engine.kv.versions import KVVersions
from engine.scheduling.sequence import Sequence

MOST_TURNS = 65_536
"""that are remembered: the newest"""

TurnId = tuple[str, int]
"""(group id, index) of a child"""


class Turn(NamedTuple):
    """What is remembered of a child that ended."""

    client: str
    since: int
    """number of the group that its conversation began with"""
    kv: KVVersions | None
    """what computed its KV: this and no other old KV is read by the turn that continues it"""


class Turns:
    """A part of the scheduler: turns that ended, by child."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self._turns: OrderedDict[TurnId, Turn] = OrderedDict()
        self._readable_from = 0

    def __len__(self) -> int:
        return len(self._turns)

    def note(self, seq: Sequence) -> None:
        """Remember a child that ends and still holds its blocks."""
        state, known = seq.state, seq.num_prompt + len(seq.output)
        kv = KVVersions.of((block.versions for block in seq.blocks), min(seq.cached, known - 1), self.block_size)
        self._turns[state.group.id, seq.index] = Turn(state.client, state.order[0], kv)
        self._turns.move_to_end((state.group.id, seq.index))
        if len(self._turns) > MOST_TURNS:
            self._turns.popitem(last=False)

    def find(self, after: TurnId | None, client: str) -> Turn | None:
        """Return the turn that a group of this client continues; None if this client had no such child."""
        turn = self._turns.get(after) if after is not None else None
        if turn is None or turn.client != client:
            return None
        spans = turn.kv.spans if turn.kv is not None else ()
        return turn if spans and spans[0][1] >= self._readable_from else turn._replace(kv=None)

    def forget_kv(self, version: int) -> None:
        """Let nobody read what weights before `version` computed for a turn, as a refresh asks that has KV computed again."""
        self._readable_from = version
