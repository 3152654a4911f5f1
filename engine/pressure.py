"""What happens when KV runs out: who leaves the device, where to, and when there is room to come back.

    offload      a parked sequence takes along the blocks that nobody else uses now; a shared prefix goes with the last child
    soft reset   host memory is full, or computing again is cheaper than copying: the KV is dropped
    mirror       full blocks are copied to host memory ahead of need, so that parking copies only partial blocks

Batched offload and soft reset are ideas of transformers' continuous batching (changes #45184, #43150, #46587).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

from engine.blocks import BlockStore
from engine.config import EngineConfig
from engine.pool import Block
from engine.sequence import Sequence
from engine.stats import Counters


class Pressure:
    """Policy over the scheduler's `BlockStore`; keeps no state of its own."""

    def __init__(self, config: EngineConfig, store: BlockStore, counters: Counters) -> None:
        self.config = config
        self.store = store
        self.counters = counters

    def need(self, seq: Sequence) -> int:
        """Blocks that a running sequence must get to compute its next token."""
        if seq.cached % self.config.block_size == 0:
            return 0 if len(seq.blocks) * self.config.block_size > seq.cached else 1
        return int(seq.blocks[-1].owners > 1)

    def must_park(self, running: list[Sequence]) -> bool:
        """There is no room for all of them to take a step."""
        room = self.store.available + len(self.store.idle)
        return len(running) > room and sum(map(self.need, running)) > room

    def victims(self, running: list[Sequence]) -> list[Sequence]:
        """The sequences to park so that the others can take a step: none if there is room, else the last in rank, enough of
        them that the rest can grow by `lookahead_blocks` (together at most a sixteenth of the pool). The first in rank always
        stays, so something always gets done."""
        if len(running) <= self.store.available:
            return []  # nobody needs more than one
        need = sum(map(self.need, running))
        if need <= self.store.available or self.reclaim_idle(need) or len(running) <= 1:
            return []
        order = sorted(running, key=lambda seq: seq.rank)
        chosen: list[Sequence] = []
        gained = 0
        ahead, most = self.config.lookahead_blocks, self.store.device.size // 16
        for rested in (True, False):
            for seq in reversed(order[1:]):
                stay = len(running) - len(chosen)
                enough = max(need, min(stay * ahead, most)) if rested else need
                if self.store.available + gained >= enough or stay == 1:
                    return chosen
                if seq not in chosen and (not rested or seq.ran >= self.config.min_run_tokens):
                    chosen.append(seq)
                    need -= self.need(seq)
                    gained += sum(block.users == 1 for block in seq.blocks)
        return chosen

    def over_share(
        self, client: str, waiting: dict[str, int], running_of: Counter[str], running: list[Sequence]
    ) -> list[Sequence]:
        """Of the running sequences those that give their slots to `client`, which waits: none if it has its share of all slots,
        else the last in rank of whoever has most, down to their own share. `waiting`, `running_of`: counts by client."""
        has = +running_of
        share = max(1, self.config.max_num_seqs // len(waiting.keys() | has.keys()))
        chosen: list[Sequence] = []
        for _ in range(min(share - has[client], waiting[client])):
            other, most = max(has.items(), key=lambda item: item[1])
            rested = [
                seq
                for seq in running
                if seq.state.client == other and seq.ran >= self.config.min_run_tokens and seq not in chosen
            ]
            if most <= share or not rested:
                break
            chosen.append(max(rested, key=lambda seq: seq.rank))
            has[other] -= 1
        return chosen

    def fits(self, seq: Sequence, running: list[Sequence], budget: int) -> bool:
        """Whether a waiting sequence can run now: its blocks come to the device, a chunk of it or its next token finds room,
        and a block is left over for each that runs (together at most a thirty-second of the pool), so that it is not parked
        again at once."""
        absent, growth = self._room_for(seq, budget)
        if self.store.available >= absent + growth + self._reserve(running):
            return True
        if running:
            return False
        # nothing runs, so nothing will be freed: blocks of others that wait leave, and one block at a time will do
        self.reclaim_idle(absent + max(growth, 1), set(seq.blocks))
        return self.store.available >= absent + (1 if growth and seq.cached % self.config.block_size == 0 else 0)

    def make_room(self, seq: Sequence, running: list[Sequence], budget: int) -> None:
        """Blocks that nobody uses leave for a waiting sequence, if it fits then. For the beginning of a plan: slots that its
        restores and copies take must stay what they are."""
        mine = set(seq.blocks)
        need = sum(self._room_for(seq, budget)) + self._reserve(running)
        spare = sum(block not in mine for block in self.store.idle)
        if self.store.available < need <= self.store.available + spare:
            self.reclaim_idle(need, mine)

    def _room_for(self, seq: Sequence, budget: int) -> tuple[int, int]:
        """Slots for the blocks of a waiting sequence that are not on the device, and for the new ones of its next chunk."""
        size = self.config.block_size
        absent = sum(block.device is None for block in seq.blocks)
        growth = -(-(seq.cached + min(seq.uncached, budget)) // size) - len(seq.blocks)
        return absent, growth + bool(seq.cached % size and seq.blocks[-1].owners > 1)

    def _reserve(self, running: list[Sequence]) -> int:
        return min(len(running), 1 + self.store.device.size // 32)

    def reclaim_idle(self, need: int, keep: Collection[Block] = ()) -> bool:
        """Blocks whose owners all wait leave the device, newest first, until `need` are available."""
        while self.store.available < need:
            block = next((block for block in reversed(self.store.idle) if block not in keep), None)
            if block is None:
                return False
            if not self.store.offload(block):
                self.store.lose(block)
        return True

    def offload(self, seq: Sequence) -> bool:
        """Move the idle blocks of a stopped sequence to host memory. False if they do not fit there, or if prefilling them
        again is cheaper; nothing has been moved then."""
        leaving = [block for block in seq.blocks if block.users == 0 and block.device is not None]
        fresh = sum(block.host is None for block in leaving)
        if not self.store.host.size or fresh > self.store.host_available or not self._copy_pays(fresh, seq):
            return False
        for block in leaving:
            if not self.store.offload(block):
                self.store.lose(block)
        seq.offloads += 1
        self.counters.offloads += 1
        return True

    def mirror(self, running: list[Sequence]) -> None:
        """When the pool will run out soon, copy full blocks of the sequences that are parked first: the last in rank."""
        size = self.config.block_size
        soon = 2 * self.config.lookahead_blocks * len(running)
        if not self.config.mirrors or self.store.available > soon:
            return
        left = self.config.mirror_blocks_per_step
        for seq in sorted(running, key=lambda seq: seq.rank, reverse=True):
            while left and seq.mirrored < seq.cached // size:
                block = seq.blocks[seq.mirrored]
                if block.host is None:
                    if self.store.host.free <= self.store.host.size // 4 or not self.store.mirror(block):
                        return
                    left -= 1
                seq.mirrored += 1
            if not left:
                return

    def _copy_pays(self, blocks: int, seq: Sequence) -> bool:
        """Copying so many blocks out and back takes no longer than prefilling the tokens again, at the measured rates. True
        while one of them is not known."""
        copy, prefill = self.counters.copy_blocks_per_second, self.counters.prefill_tokens_per_second
        if not copy or not prefill:
            return True
        return 2 * blocks / copy <= seq.cached / prefill
