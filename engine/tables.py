"""How a sequence comes by its blocks: found in the prefix index, extended by new ones, indexed once full, cut back."""

from __future__ import annotations

from engine.blocks import BlockStore
from engine.config import EngineConfig
from engine.prefix import block_key
from engine.sequence import Sequence
from engine.stats import Counters


class BlockTables:
    """A part of the scheduler, with which it writes `Sequence.blocks`."""

    def __init__(self, config: EngineConfig, store: BlockStore, counters: Counters) -> None:
        self.block_size = config.block_size
        self.store = store
        self.counters = counters

    def find_cached(self, seq: Sequence, version: int) -> None:
        """Full blocks that the prefix index knows are taken over instead of computed. One token stays to be computed, for its
        logits."""
        size = self.block_size
        oldest = version - seq.state.group.sampling.max_kv_lag
        while seq.cached % size == 0 and seq.cached + size < seq.length:
            parent = seq.blocks[-1].key if seq.blocks else None
            if seq.blocks and parent is None:
                return
            block = self.store.index.find(parent, seq.tokens(seq.cached, size), version, oldest)
            if block is None or (block.device is None and not self.store.available):
                return
            self.store.adopt(block)
            self.store.pin(block, full=True)
            seq.add_block(block)
            seq.cached += size
            self.counters.prefix_hit_tokens += size

    def extend(self, seq: Sequence, cached: int, version: int) -> None:
        """Blocks to write tokens up to `cached`: a shared partial block is copied first, new ones are taken."""
        size = self.block_size
        if seq.cached % size:
            block = seq.blocks[-1]
            if block.owners > 1:
                seq.put_block(-1, self.store.copy(block) if self.store.available else self.store.take_over(block))
            if seq.blocks[-1].version != version:
                seq.blocks[-1].mixed = True
        while len(seq.blocks) < -(-cached // size):
            seq.add_block(self.store.new(version))

    def fill(self, seq: Sequence, start: int) -> None:
        """Blocks that became full, with tokens that are all known, get their key, and can be found from now on."""
        size = self.block_size
        for i in range(start // size, seq.cached // size):
            block = seq.blocks[i]
            parent = seq.blocks[i - 1].key if i else None
            if block.key is not None or block.mixed or (i and parent is None):
                continue
            block.key = block_key(parent, seq.tokens(i * size, size), block.version)
            self.store.index.add(block)

    def drop_older(self, seq: Sequence, oldest: int) -> None:
        """Give up what was computed by weights before `oldest`, and all that follows it."""
        for i, block in enumerate(seq.blocks):
            if block.version < oldest:
                self.truncate(seq, i)
                return

    def truncate(self, seq: Sequence, blocks: int) -> None:
        for block in reversed(seq.blocks[blocks:]):
            self.store.disown(block, used=seq.running)
        seq.cut_blocks(blocks)
        seq.cached = min(seq.cached, blocks * self.block_size)
        seq.mirrored = min(seq.mirrored, blocks)

    def distrust(self, seq: Sequence) -> None:
        """What this sequence alone holds is never found by the prefix index again."""
        for block in seq.blocks:
            if block.owners == 1:
                self.store.index.remove(block)
