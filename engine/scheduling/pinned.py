"""KV of children that have ended, kept for the turn that continues them (`Sampling.kv_ttl_s`).

A kept child owns its blocks, the partial last one included, like a sequence that waits. Of all blocks that nobody uses these go
to host memory first, whole turns at once, and are given up last: after the prefix cache, and after KV of waiting sequences
for which host memory has no room. What is given up is found in the prefix index until that needs the room.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Collection, Iterator

import numpy as np

from engine.kv.block import Block
from engine.kv.store import BlockStore
from engine.scheduling.block_tables import BlockTables
from engine.scheduling.conversations import TurnId
from engine.scheduling.sequence import Sequence
from engine.scheduling.timers import Timers

KEPT_SHARE = 0.5
"""of the blocks of both pools, at most so many are kept"""


class PinnedKV:
    """A part of the scheduler: the children that have ended and still own their blocks."""

    def __init__(self, store: BlockStore, tables: BlockTables) -> None:
        self.store = store
        self.tables = tables
        self.blocks: Counter[Block] = Counter()
        """how many kept children own each block"""
        self._children: OrderedDict[TurnId, Sequence] = OrderedDict()
        """oldest first"""
        self._of_group: dict[str, set[int]] = {}
        """their indices by group"""
        self._on_device: OrderedDict[TurnId, None] = OrderedDict()
        """those that have not left for host memory"""
        self._ends: Timers[Sequence] = Timers(lambda seq: self._children.get(_id(seq)) is seq)

    def __len__(self) -> int:
        return len(self._children)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._children.values())

    # ── a child's KV comes and goes ───────────────────────────────────────────────────────────────────────────────────
    def keep(self, seq: Sequence, until: float, ran: bool) -> None:
        """Keep the KV of a child that ends, of all its tokens but the last: that one's is the next turn's to compute.
        ran: it did when it ended."""
        seq.cached = min(seq.cached, seq.num_prompt + len(seq.output) - 1)
        blocks = -(-seq.cached // self.tables.block_size)
        for block in reversed(seq.blocks[blocks:]):
            self.store.disown(block, used=ran)
        seq.cut_blocks(blocks)
        for block in seq.blocks if ran else ():
            self.store.unpin(block)
        key = _id(seq)
        self.release(*key)
        self._children[key], self._on_device[key] = seq, None
        self._of_group.setdefault(key[0], set()).add(key[1])
        self.blocks.update(seq.blocks)
        self._ends.add(until, seq)
        self._bound()

    def hand_over(self, key: TurnId | None, to: Sequence) -> int:
        """Let the sequence that continues a kept child have its KV, if it begins with the same tokens; either way it is not
        kept any more. Returns how many tokens are cached then."""
        if key is None or key not in self._children:
            return 0
        seq = self._remove(key)
        self.tables.cut_lost(seq)
        same = seq.cached < to.length and np.array_equal(seq.tokens(0, seq.cached), to.tokens(0, seq.cached))
        if not same:
            self.tables.truncate(seq, 0)
        to.blocks, seq.blocks = seq.blocks, []
        to.cached = to.computed = seq.cached
        return to.cached

    def release(self, group_id: str, index: int | None = None) -> None:
        """Give up what is kept of a child, or of all children of a group."""
        some = self._of_group.get(group_id, set())
        for each in sorted(some) if index is None else some & {index}:
            self.tables.truncate(self._remove((group_id, each)), 0)

    def release_all(self) -> None:
        """Give up everything."""
        for key in list(self._children):
            self.release(*key)

    def due(self, now: float) -> bool:
        """True if a child may have been kept long enough."""
        return self._ends.due(now)

    def expire(self, now: float) -> None:
        """Give up the children that were kept long enough."""
        for seq in self._ends.take(now):
            self.release(*_id(seq))

    # ── making room ───────────────────────────────────────────────────────────────────────────────────────────────────
    def offload(self, need: int, but: Collection[Block]) -> None:
        """Offload children, oldest first, until so many device slots are available or host memory is full. `but`: blocks that
        stay."""
        while self._on_device and self.store.available < need:
            key = next(iter(self._on_device))
            for block in self._children[key].blocks:
                if block.users == 0 and block.device is not None and block not in but and not self.store.offload(block):
                    return
            del self._on_device[key]

    def give_way(self, but: Collection[Block]) -> bool:
        """Let an idle block that is left on the device go to host memory, or give up a child that owns it. `but`: blocks that
        stay. Returns whether there was one."""
        block = next((block for block in self.store.idle if block in self.blocks and block not in but), None)
        if block is None:
            return False
        if not self.store.offload(block):
            self.release(*next(key for key, seq in self._children.items() if block in seq.blocks))
        return True

    # ── private ───────────────────────────────────────────────────────────────────────────────────────────────────────
    def _remove(self, key: TurnId) -> Sequence:
        seq = self._children.pop(key)
        self._on_device.pop(key, None)
        self._of_group[key[0]].remove(key[1])
        if not self._of_group[key[0]]:
            del self._of_group[key[0]]
        self.blocks.subtract(seq.blocks)
        for block in seq.blocks:
            if not self.blocks[block]:
                del self.blocks[block]
        return seq

    def _bound(self) -> None:
        """Give up children of the client that keeps most, its oldest first, until few enough are kept."""
        most = KEPT_SHARE * (self.store.device.size + self.store.host.size)
        while self._children and max(len(self.blocks), len(self._children)) > most:
            greedy, _ = Counter(seq.state.client for seq in self).most_common(1)[0]
            self.release(*next(key for key, seq in self._children.items() if seq.state.client == greedy))


def _id(seq: Sequence) -> TurnId:
    return seq.state.group.id, seq.index
