"""What each running sequence computes next: its row of the step, and the blocks that the row writes to."""

from __future__ import annotations

from engine.blocks import BlockStore
from engine.config import EngineConfig
from engine.plan import Row
from engine.sequence import Sequence
from engine.sharing import computed_by_other
from engine.tables import BlockTables


class Rows:
    """A part of the scheduler; keeps no state of its own."""

    def __init__(self, config: EngineConfig, store: BlockStore, tables: BlockTables) -> None:
        self.config = config
        self.store = store
        self.tables = tables

    def decode(self, running: list[Sequence], version: int) -> list[Row]:
        """One for each sequence that has one token to compute and may draw another; there is room for all of them. Blocks are
        touched only where one begins, where the last one is still shared after a fork, and where other weights began it."""
        size, rows = self.config.block_size, []
        for seq in running:
            cached = seq.cached
            if seq.length - cached == 1 and seq.length < seq.limit:
                if cached % size == 0 or (last := seq.blocks[-1]).owners > 1 or last.version != version:
                    self.tables.extend(seq, cached + 1, version)
                rows.append(Row(seq, cached, 1, seq.draws))
        return rows

    def prefill(self, seq: Sequence, budget: int, planned: set[bytes], version: int) -> Row | None:
        """The next tokens of a running sequence, at most `budget`. None: it must wait for blocks, or for a row of this very
        step that computes the same prefix; `planned` has the keys of what this step computes."""
        size = self.config.block_size
        if seq.uncached > 1:
            self.tables.find_cached(seq, version)
            copied = bool(self.store.available and seq.cached % size and seq.blocks[-1].owners > 1)
            budget = min(budget, (len(seq.blocks) + self.store.available - copied) * size - seq.cached)
        count = min(seq.uncached, budget)
        if count <= 0:
            return None
        if seq.uncached > 1 and computed_by_other(seq, count, planned, size, version):
            return None
        samples = seq.draws if count == seq.uncached else 0
        self.tables.extend(seq, seq.cached + count, version)
        return Row(seq, seq.cached, count, samples)
