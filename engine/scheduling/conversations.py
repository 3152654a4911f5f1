"""The turns of conversations: which children ended, so that a group may continue one of them.

    turn 1   p p p p o o o o                         ended; its KV is kept, or in the prefix index
    turn 2   p p p p o o o o t t t t o o o o o       a group whose prompt is all of it; `Group.after` names turn 1
             └── turn 1 ───┘ └ tool ┘

`after` is a hint. A turn that is not known (any more), or another client's, is no turn: the group is one like any other.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec
import numpy as np
import xxhash

from engine.kv.versions import KVVersions
from engine.scheduling.sequence import Sequence
from engine.types import Group

MOST_TURNS = 65_536
"""that are remembered: the newest"""

TurnId = tuple[str, int]
"""(group id, index) of a child"""


class FinishedTurn(NamedTuple):
    """What is remembered of a child that ended."""

    client: str
    since: int
    """number of the group that its conversation began with"""
    kv: KVVersions | None
    """what computed its KV: this and no other old KV is read by the turn that continues it"""
    tokens: bytes
    """digest of the tokens that have it"""


class ConversationIndex:
    """A part of the scheduler: turns that ended, by child. A ring of packed records, some 110 bytes for each: hundreds of them
    end in a second, and few are asked for."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self._keys = np.zeros(MOST_TURNS, np.uint64)
        self._packed: list[bytes | None] = [None] * MOST_TURNS
        self._noted = 0
        """turns so far; the next one's place follows from it"""
        self._readable_from = 0

    def note(self, seq: Sequence) -> None:
        """Remember a child that ends and still holds its blocks."""
        state, known = seq.state, seq.num_prompt + len(seq.output)
        cached = min(seq.cached, known - 1)
        kv = KVVersions.of((block.versions for block in seq.blocks), cached, self.block_size)
        turn = FinishedTurn(state.client, state.order[0], kv, digest(seq.tokens(0, cached)))
        place = self._noted % MOST_TURNS
        self._keys[place] = _key((state.group.id, seq.index))
        self._packed[place] = msgspec.msgpack.encode(turn)
        self._noted += 1

    def find(self, group: Group, client: str) -> FinishedTurn | None:
        """Return the turn that a group of this client continues; None if this client had no such child. Of a prompt that does
        not begin with the turn's tokens no KV is its own."""
        turn = self._newest(group.after) if group.after is not None else None
        if turn is None or turn.client != client:
            return None
        kv = turn.kv
        if kv is not None and kv.spans and kv.spans[0][1] >= self._readable_from:
            if len(group.prompt) > kv.tokens and digest(group.prompt[: kv.tokens]) == turn.tokens:
                return turn
        return turn._replace(kv=None)

    def _newest(self, child: TurnId) -> FinishedTurn | None:
        """Look through all places, which takes some 20 µs: an index would be as large again as what it finds."""
        places = np.flatnonzero(self._keys == _key(child))
        ages = (self._noted - 1 - places) % MOST_TURNS
        packed = self._packed[places[ages.argmin()]] if len(places) else None
        return None if packed is None else msgspec.msgpack.decode(packed, type=FinishedTurn)

    def forget_kv(self, version: int) -> None:
        """Let nobody read what weights before `version` computed for a turn, as a refresh asks that has KV computed again."""
        self._readable_from = version


def digest(tokens: np.ndarray) -> bytes:
    """Take 16 bytes that two sequences of int32 token ids share only if they are the same (xxh3-128)."""
    return xxhash.xxh3_128_digest(tokens.tobytes())


def _key(child: TurnId) -> np.uint64:
    """Take 64 bits of a child's name. Two that share them are told apart by their clients and tokens."""
    group_id, index = child
    return np.uint64(xxhash.xxh3_64_intdigest(f"{index}/{group_id}".encode()))
