"""Maintains the block table of a sequence: prefix hits, allocation, indexing of full blocks, truncation."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from rollout.engine.kv.block import Block
from rollout.engine.kv.prefix import block_key, content_key
from rollout.engine.kv.store import BlockStore
from rollout.engine.scheduling.counters import Counters
from rollout.engine.scheduling.sequence import Sequence

if TYPE_CHECKING:
    from rollout.engine.scheduling.states import StateSlots
    from rollout.engine.scheduling.windows import WindowBlocks


class FoundPrefix(NamedTuple):
    """A prefix from which a sequence can continue."""

    depth: int
    """full blocks of full attention"""
    window: list[Block]
    """blocks of the window before its end that the sequence does not have, in order"""
    state: Block | None
    """snapshot of the recurrent state after it"""


class BlockTables:
    """Writes `Sequence.blocks` and `Sequence.cached`, for `SchedulerState`."""

    def __init__(
        self,
        block_size: int,
        store: BlockStore,
        counters: Counters,
        states: StateSlots | None = None,
        windows: WindowBlocks | None = None,
    ) -> None:
        self.block_size = block_size
        self.store = store
        self.counters = counters
        self.states = states
        self.windows = windows

    def held(self, seq: Sequence) -> list[tuple[BlockStore, list[Block]]]:
        """Return the KV blocks of a sequence in each store of KV."""
        full = self.store, seq.blocks
        return [full] if self.windows is None else [full, (self.windows.store, seq.window)]

    @property
    def slots(self) -> int:
        """Return the slots of all pools of KV."""
        stores = [self.store] if self.windows is None else [self.store, self.windows.store]
        return sum(store.device.size + store.host.size for store in stores)

    def in_window(self, seq: Sequence, position: int) -> bool:
        """Return whether a sequence holds the window of a position, as far as it holds KV at all."""
        return self.windows is None or seq.window_first <= self.windows.first(position)

    def find_cached(self, seq: Sequence, version: int) -> None:
        """Add full blocks from the prefix index to a running sequence: as many as each kind of layer can continue from, and as
        there is room for. One token is left to compute, for its logits. With recurrent state, only a sequence that has computed
        nothing; where more blocks are known, a row of it is to end there and leave a snapshot."""
        if self.states is not None and seq.cached:
            return
        chain = self._known_chain(seq, version, in_use=False)
        if chain is seq.blocks:
            seq.junction = 0
            return
        found = self._deepest(seq, chain[: self._room_along(seq, chain)], in_use=False)
        if self.states is not None:
            seq.junction = len(chain) * self.block_size if len(chain) > found.depth else 0
        if self.windows is not None and not self.windows.has_room(found.window):
            return
        if found.state is not None and self.states is not None and not self.states.adopt(seq, found.state):
            return
        self._adopt(seq, chain, found)

    def find_in_use(self, seq: Sequence, version: int) -> None:
        """Add full blocks from the prefix index to a waiting sequence, as long as running sequences use them, so that they need
        no room. The following blocks are looked up when it runs, with recurrent state all of them."""
        if self.states is None:
            chain = self._known_chain(seq, version, in_use=True)
            if chain is not seq.blocks:
                self._adopt(seq, chain, self._deepest(seq, chain, in_use=True))

    def _known_chain(self, seq: Sequence, version: int, in_use: bool) -> list[Block]:
        """Return the blocks of a sequence and the full ones that continue them in the index, leaving a token to compute. Its
        own list: there are none."""
        chain = seq.blocks
        if seq.cached % self.block_size == 0 and not (chain and chain[-1].key is None):
            while (block := self._known(seq, chain, version)) and (block.users or not in_use):
                chain = [*chain] if chain is seq.blocks else chain
                chain.append(block)
        return chain

    def _room_along(self, seq: Sequence, chain: list[Block]) -> int:
        """Return how many blocks of a chain a running sequence can hold on the device."""
        taken = 0
        for i in range(len(seq.blocks), len(chain)):
            taken += chain[i].device is None or not chain[i].owners
            if taken > self.store.available:
                return i
        return len(chain)

    def _deepest(self, seq: Sequence, chain: list[Block], in_use: bool) -> FoundPrefix:
        """Return the longest prefix of a chain from which each kind of layer can continue: a kind may shorten it, and then the
        others are asked again."""
        found = FoundPrefix(len(chain), [], None)
        while True:
            depth, window, state = found
            if self.windows is not None:
                depth, window = self.windows.find(seq, chain[:depth], in_use)
            if self.states is not None:
                depth, state = self.states.find(chain[:depth])
            before, found = found.depth, FoundPrefix(depth, window, state)
            if depth == before:
                return found

    def _adopt(self, seq: Sequence, chain: list[Block], found: FoundPrefix) -> None:
        """Give a sequence the blocks that were found."""
        added = chain[len(seq.blocks) : found.depth]
        own = [(self.store, added)] if self.windows is None else [(self.store, added), (self.windows.store, found.window)]
        for store, blocks in own:
            for block in blocks:
                store.retain(block)
        for store, blocks in own if seq.running else ():
            for block in blocks:
                store.activate(block, full=True)
        for block in added:
            if seq.running:
                seq.add_block(block)
            else:
                seq.blocks.append(block)
        seq.cached += len(added) * self.block_size
        self.counters.prefix_hit_tokens += len(added) * self.block_size
        if self.windows is not None and added:
            self.windows.adopt(seq, found.depth, found.window)

    def _known(self, seq: Sequence, blocks: list[Block], version: int) -> Block | None:
        """Return the block that continues these full ones, which have keys, with the tokens of a sequence."""
        size, start = self.block_size, len(blocks) * self.block_size
        if start + size >= seq.length:
            return None
        oldest, own = seq.state.readable_from(version), seq.state.own
        whole = own is not None and start + size <= own.tokens
        versions = own.of_block(start // size, size) if own is not None and whole else ()
        return self.store.index.find(blocks[-1].key if blocks else None, seq.tokens(start, size), oldest, versions)

    def extend(self, seq: Sequence, cached: int, version: int) -> None:
        """Allocate blocks to write tokens up to `cached`: copy a shared partial block first, then append new ones."""
        size = self.block_size
        if self.windows is not None:
            self.windows.extend(seq, cached, version)
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
            if self.windows is not None:
                self.windows.index(seq, i, block)

    def settle(self, seq: Sequence, cached: int) -> None:
        """Set the number of cached tokens of a running sequence, at least as many as before: index the blocks that became full,
        release the blocks after them."""
        start, seq.cached = seq.cached, cached
        self.fill(seq, start)
        self.truncate(seq, -(-cached // self.block_size))
        if self.windows is not None:
            self.windows.trim(seq)

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
        """Release the first block that was dropped while the sequence waited, and all blocks after it; all if its recurrent
        state or a block of its window was dropped."""
        if (seq.state_in is not None and seq.state_in.lost) or any(block.lost for block in seq.window):
            self.truncate(seq, 0)
        for i, block in enumerate(seq.blocks):
            if block.lost:
                self.truncate(seq, i)
                return

    def cut_unused(self, seq: Sequence) -> bool:
        """Release all but the leading blocks that running sequences use. Returns whether any block was released."""
        kept = next((i for i, block in enumerate(seq.blocks) if not block.users), None)
        if any(not block.users for block in seq.window):
            kept = 0
        if kept is not None:
            self.truncate(seq, kept)
        return kept is not None

    def truncate(self, seq: Sequence, blocks: int) -> None:
        """Release all but the first `blocks`; all, with the recurrent state, if that is of more tokens; all if the window
        before their end is missing."""
        if self.states is not None and blocks * self.block_size < seq.cached:
            blocks = 0
            self.states.drop(seq)
        if self.windows is not None:
            blocks = blocks if blocks * self.block_size >= seq.cached or self.windows.covers(seq, blocks) else 0
            self.windows.truncate(seq, blocks)
        for block in reversed(seq.blocks[blocks:]):
            self.store.release(block, used=seq.running)
        seq.cut_blocks(blocks)
        seq.computed = max(seq.computed, seq.cached)
        seq.cached = min(seq.cached, blocks * self.block_size)
        seq.mirrored = min(seq.mirrored, blocks)

    def distrust(self, seq: Sequence) -> None:
        """Remove the blocks that only this sequence owns from the prefix index, and the snapshots along its blocks."""
        if self.states is not None:
            self.states.forget_along(seq.blocks)
        for store, blocks in self.held(seq):
            for block in blocks:
                if block.owners == 1:
                    store.index.remove(block)
