"""The turns of conversations: which children ended, so that a group may continue one of them.

    turn 1   p p p p o o o o                         ended; its KV is kept, or in the prefix index
    turn 2   p p p p o o o o t t t t o o o o o       a group whose prompt is all of it; `Group.after` names turn 1
             └── turn 1 ───┘ └ tool ┘

`after` is a hint. A turn that is not known (any more), or another client's, is no turn: the group is one like any other.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

import numpy as np
import xxhash

from engine.kv.versions import KVVersions
from engine.scheduling.sequence import Sequence
from engine.types import Group

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
    tokens: bytes
    """digest of the tokens that have it"""


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
        cached = min(seq.cached, known - 1)
        kv = KVVersions.of((block.versions for block in seq.blocks), cached, self.block_size)
        self._turns[state.group.id, seq.index] = Turn(state.client, state.order[0], kv, digest(seq.tokens(0, cached)))
        self._turns.move_to_end((state.group.id, seq.index))
        if len(self._turns) > MOST_TURNS:
            self._turns.popitem(last=False)

    def find(self, group: Group, client: str) -> Turn | None:
        """Return the turn that a group of this client continues; None if this client had no such child. Of a prompt that does
        not begin with the turn's tokens no KV is its own."""
        turn = self._turns.get(group.after) if group.after is not None else None
        if turn is None or turn.client != client:
            return None
        kv = turn.kv
        if kv is not None and kv.spans and kv.spans[0][1] >= self._readable_from:
            if len(group.prompt) > kv.tokens and digest(group.prompt[: kv.tokens]) == turn.tokens:
                return turn
        return turn._replace(kv=None)

    def forget_kv(self, version: int) -> None:
        """Let nobody read what weights before `version` computed for a turn, as a refresh asks that has KV computed again."""
        self._readable_from = version


def digest(tokens: np.ndarray) -> bytes:
    """Take 16 bytes that two sequences of int32 token ids share only if they are the same (xxh3-128)."""
    return xxhash.xxh3_128_digest(tokens.tobytes())
