"""Maintains the block table of a sequence: prefix hits, allocation, indexing of full blocks, truncation."""

from __future__ import annotations

from rollout.engine.kv.block import Block
from rollout.engine.kv.prefix import block_key, content_key
from rollout.engine.kv.store import BlockStore
from rollout.engine.scheduling.counters import Counters
from rollout.engine.scheduling.sequence import Sequence


class BlockTables:
    """Writes `Sequence.blocks` and `Sequence.cached`, for `SchedulerState`."""

    def __init__(self, block_size: int, store: BlockStore, counters: Counters) -> None:
        self.block_size = block_size
        self.store = store
        self.counters = counters

    def find_cached(self, seq: Sequence, version: int) -> None:
        """Add full blocks from the prefix index to a running sequence. One token is left to compute, for its logits."""
        while block := self._next_known(seq, version):
            if block.device is None and not self.store.available:
                return
            self.store.retain(block)
            self.store.activate(block, full=True)
            seq.add_block(block)
            self._found(seq)

    def find_in_use(self, seq: Sequence, version: int) -> None:
        """Add full blocks from the prefix index to a waiting sequence, as long as running sequences use them, so that they need
        no room. The following blocks are looked up when it runs."""
        while block := self._next_known(seq, version):
            if not block.users:
                return
            self.store.retain(block)
            seq.blocks.append(block)
            self._found(seq)

    def _next_known(self, seq: Sequence, version: int) -> Block | None:
        """Return the block that continues the full ones of a sequence, if the index has it and a token is left to compute."""
        size = self.block_size
        parent = seq.blocks[-1].key if seq.blocks else None
        if seq.cached % size or seq.cached + size >= seq.length or (seq.blocks and parent is None):
            return None
        oldest, own = seq.state.readable_from(version), seq.state.own
        whole = own is not None and seq.cached + size <= own.tokens
        versions = own.of_block(seq.cached // size, size) if own is not None and whole else ()
        return self.store.index.find(parent, seq.tokens(seq.cached, size), oldest, versions)

    def _found(self, seq: Sequence) -> None:
        seq.cached += self.block_size
        self.counters.prefix_hit_tokens += self.block_size

    def extend(self, seq: Sequence, cached: int, version: int) -> None:
        """Allocate blocks to write tokens up to `cached`: copy a shared partial block first, then append new ones."""
        size = self.block_size
        if seq.cached % size:
            block = seq.blocks[-1]
            if block.owners > 1:
                seq.put_block(-1, self.store.copy(block) if self.store.available else self.store.take_over(block))
            if seq.blocks[-1].version != version:
                seq.blocks[-1].write(seq.cached % size, version)
        while len(seq.blocks) < -(-cached // size):
            seq.add_block(self.store.allocate(version))

    def fill(self, seq: Sequence, start: int) -> None:
        """Index the blocks that became full since token `start`, all of whose tokens are known."""
        size = self.block_size
        for i in range(start // size, seq.cached // size):
            block = seq.blocks[i]
            parent = seq.blocks[i - 1].key if i else None
            if block.key is not None or (i and parent is None):
                continue
            block.content = content_key(parent, seq.tokens(i * size, size))
            block.key = block_key(block.content, block.versions)
            self.store.index.add(block)

    def settle(self, seq: Sequence, cached: int) -> None:
        """Set the number of cached tokens of a running sequence, at least as many as before: index the blocks that became full,
        release the blocks after them."""
        start, seq.cached = seq.cached, cached
        seq.computed = max(seq.computed, cached)
        self.fill(seq, start)
        self.truncate(seq, -(-cached // self.block_size))

    def drop_older(self, seq: Sequence, oldest: int) -> None:
        """Release the first block that weights before version `oldest` computed, and all blocks after it. KV of the turn that
        the sequence continues may be older."""
        for i, block in enumerate(seq.blocks):
            if block.version < oldest and not self._is_own(seq, i, oldest):
                self.truncate(seq, i)
                return

    def _is_own(self, seq: Sequence, i: int, oldest: int) -> bool:
        """Return whether block `i` has KV of the turn that the sequence continues, and no other KV older than `oldest`."""
        own, block, size = seq.state.own, seq.blocks[i], self.block_size
        if own is None:
            return False
        known, cached = own.tokens - i * size, min(seq.cached - i * size, size)
        before = tuple(span for span in block.versions if span[0] < known)
        behind = [version for first, version in block.versions if first <= known][-1:]
        return before == own.of_block(i, size) != () and (cached <= known or behind[0] >= oldest)

    def cut_lost(self, seq: Sequence) -> None:
        """Release the first block that was dropped while the sequence waited, and all blocks after it."""
        for i, block in enumerate(seq.blocks):
            if block.lost:
                self.truncate(seq, i)
                return

    def cut_unused(self, seq: Sequence) -> bool:
        """Release all but the leading blocks that running sequences use. Returns whether any block was released."""
        kept = next((i for i, block in enumerate(seq.blocks) if not block.users), None)
        if kept is not None:
            self.truncate(seq, kept)
        return kept is not None

    def truncate(self, seq: Sequence, blocks: int) -> None:
        """Release all but the first `blocks`."""
        for block in reversed(seq.blocks[blocks:]):
            self.store.release(block, used=seq.running)
        seq.cut_blocks(blocks)
        seq.cached = min(seq.cached, blocks * self.block_size)
        seq.mirrored = min(seq.mirrored, blocks)

    def distrust(self, seq: Sequence) -> None:
        """Remove the blocks that only this sequence owns from the prefix index."""
        for block in seq.blocks:
            if block.owners == 1:
                self.store.index.remove(block)
