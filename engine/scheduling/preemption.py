"""What happens when KV runs out: which sequences are preempted, where their KV goes, and when there is room to start again.

    offload      blocks of a preempted sequence that no running one uses go to host memory; a shared prefix with its last child
    soft reset   host memory is full, or computing again is cheaper than copying: the KV is dropped
    mirror       full blocks are copied to host memory ahead of need, so that preempting copies only partial blocks
    ahead        where copies run beside the compute, room for the next step is made while this one runs

What a soft reset costs is bounded at the start: a sequence whose KV could be lost again starts when there is room for all that
it has to compute and for a share of what it then draws, beside the growth of those that run (docs/decisions/pressure.md).

Batched offload and soft reset are ideas of transformers' continuous batching (changes #45184, #43150, #46587).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from itertools import islice

from engine.config import EngineConfig
from engine.kv.block import Block
from engine.kv.store import BlockStore
from engine.scheduling.counters import Counters
from engine.scheduling.pinned import PinnedKV
from engine.scheduling.sequence import Sequence

COMPUTED_PER_DRAWN = 8
"""tokens of KV that could be lost, for each token that is drawn before they are: what bounds the work of soft resets"""


class Pressure:
    """Policy over the scheduler's `BlockStore`; keeps no state of its own."""

    def __init__(self, config: EngineConfig, store: BlockStore, counters: Counters, kept: PinnedKV) -> None:
        self.config = config
        self.store = store
        self.counters = counters
        self.kept = kept
        self.ahead = bool(config.advanced.copy_ahead and store.host.size)
        """room is made a step before it is needed, so that a step writes no slot which its own copies give up"""
        self.steps = 1 + self.ahead
        """that there must be room for"""

    def need(self, seq: Sequence) -> int:
        """Return how many blocks a running sequence must get to compute its next token, or two where copies run ahead."""
        last = min(seq.cached + self.steps, seq.limit - 1)
        return self._growth(seq, max(seq.cached + 1, last))

    def must_preempt(self, running: list[Sequence]) -> bool:
        """True if there is no room for all of them to take a step, or two."""
        room = self.store.available + len(self.store.idle)
        return self.steps * len(running) > room and sum(map(self.need, running)) > room

    def victims(self, running: list[Sequence]) -> list[Sequence]:
        """Return the sequences to preempt so that the others can take a step: none if there is room, else the last in rank,
        enough of them that the rest can grow by `lookahead_blocks` (together at most a sixteenth of the pool). The first in
        rank always stays, so something always gets done."""
        if self.steps * len(running) <= self.store.available:
            return []  # nobody needs more than one a step
        need = sum(map(self.need, running))
        if need <= self.store.available or self.reclaim_idle(need) or len(running) <= 1:
            return []
        order = sorted(running, key=lambda seq: seq.rank)
        chosen: list[Sequence] = []
        gained = 0
        ahead, most = self.config.advanced.lookahead_blocks, self.store.device.size // 16
        for rested in (True, False):
            for seq in reversed(order[1:]):
                stay = len(running) - len(chosen)
                enough = max(need, min(stay * ahead, most)) if rested else need
                if self.store.available + gained >= enough or stay == 1:
                    return chosen
                if seq not in chosen and (not rested or seq.ran >= seq.least_run):
                    chosen.append(seq)
                    need -= self.need(seq)
                    gained += sum(block.users == 1 for block in seq.blocks)
        return chosen

    def sequences_over_share(
        self, client: str, waiting: dict[str, int], running_of: Counter[str], running: list[Sequence]
    ) -> list[Sequence]:
        """Return the running sequences that give their slots to `client`, which waits: none if it has its share of all slots,
        else the last in rank of whoever has most, down to their own share. `waiting`, `running_of`: counts by client."""
        has = +running_of
        share = max(1, self.config.most_seqs // len(waiting.keys() | has.keys()))
        chosen: list[Sequence] = []
        for _ in range(min(share - has[client], waiting[client])):
            other, most = max(has.items(), key=lambda item: item[1])
            rested = [seq for seq in running if seq.state.client == other and seq.ran >= seq.least_run and seq not in chosen]
            if most <= share or not rested:
                break
            chosen.append(max(rested, key=lambda seq: seq.rank))
            has[other] -= 1
        return chosen

    def fits(self, seq: Sequence, running: list[Sequence], budget: int) -> bool:
        """Return whether a waiting sequence can start: there is `_room_for` it, and `_room_beside` those that run."""
        room = self._room_for(seq, budget)
        goes_on = seq.held and not _absent(seq) and not self._could_be_lost(seq)
        if self.store.available >= room + (0 if goes_on else self._room_beside(seq, running)):
            return True
        if running:
            return False
        # nothing runs, so nothing will be freed: evict blocks of others that wait; one block at a time will do
        absent = _absent(seq)
        self.reclaim_idle(max(room, absent + 1), set(seq.blocks))
        return self.store.available >= absent + (1 if room > absent and seq.cached % self.config.block_size == 0 else 0)

    def first_alone(self, seq: Sequence, waiting: Iterable[Sequence]) -> Sequence:
        """Choose who starts where nothing runs and it is the turn of `seq`: the first in rank of those whose KV lies idle on
        the device, if `seq` could only have their room and they would have to compute again. So a turn among clients lasts
        until a group is done, and not a single child of it."""
        fresh = sum(block.host is None for block in self.store.idle)
        beside = self._room_for(seq, self.config.most_tokens) <= self.store.available
        if not fresh or beside or self._can_offload(fresh, fresh * self.config.block_size):
            return seq
        idle = (other for other in waiting if other.started and other.blocks and other.blocks[0] in self.store.idle)
        return min(idle, key=lambda other: other.rank, default=seq)

    def make_room(self, waiting: list[Sequence], running: list[Sequence], most: int) -> None:
        """Evict idle blocks for waiting sequences, as many of the first of these as fit then into a step of `most`
        tokens. For the beginning of a plan: slots that its restores and copies take must stay what they are."""
        mine = {block for seq in waiting for block in seq.blocks}
        room = self.store.available + sum(block not in mine for block in self.store.idle)
        budget = most - len(running)
        need = starting = 0
        for seq in waiting:
            more = self._room_for(seq, budget) + (1 if starting else self._room_beside(seq, running))
            if budget <= 0 or need + more > room:
                break
            need += more
            budget -= seq.uncached
            starting += 1
        if self.store.available < need:
            self.reclaim_idle(need, mine)

    def least_run(self, seq: Sequence) -> int:
        """Return how many tokens a waiting sequence draws, if it starts now, before it is preempted, unless nothing else makes
        room."""
        if not self._could_be_lost(seq):
            return self.config.advanced.min_run_tokens
        share = -(-seq.uncached // COMPUTED_PER_DRAWN)
        return max(self.config.advanced.min_run_tokens, min(share, seq.limit - seq.length))

    def _could_be_lost(self, seq: Sequence) -> bool:
        """True if a waiting sequence has more than a token to compute, and would be reset if it were preempted then."""
        return seq.uncached > 1 and not self._can_offload(-(-seq.length // self.config.block_size), seq.length)

    def _room_for(self, seq: Sequence, budget: int) -> int:
        """Return how many slots a waiting sequence needs, for blocks that are not on the device and for new ones: of its next
        token or chunk if preempting it would lose nothing; else of all that it has to compute and of its least run."""
        if self._could_be_lost(seq):
            return _absent(seq) + self._growth(seq, self._after(seq, self.least_run(seq)))
        return _absent(seq) + self._growth(seq, seq.cached + min(seq.uncached, budget))

    def _room_beside(self, seq: Sequence, running: list[Sequence]) -> int:
        """Return how many slots stay free for those that run when `seq` starts. Where preempting it would lose nothing: one for
        each of them, so that it is not preempted again at once (together at most a thirty-second of the pool), and what is left
        of the least run of those who would lose something. Else all that they grow by until it is computed and has made its
        least run."""
        if not self._could_be_lost(seq):
            owed = (seq for seq in running if seq.ran < seq.least_run > self.config.advanced.min_run_tokens)
            kept = sum(self._growth(seq, self._after(seq, seq.least_run - seq.ran)) for seq in owed)
            return min(len(running), 1 + self.store.device.size // 32) + kept
        to_compute = seq.uncached + sum(other.uncached for other in running if other.uncached > 1)
        steps = self.least_run(seq) - (-to_compute // (self.config.most_tokens - len(running)))
        return sum(other.num_next_samples * self._growth(other, self._after(other, steps)) for other in running)

    def _after(self, seq: Sequence, draws: int) -> int:
        """Return how many tokens have KV when a sequence has drawn so many more."""
        return min(seq.length + draws, seq.limit) - 1

    def _growth(self, seq: Sequence, cached: int) -> int:
        """Return how many new slots KV of so many tokens in all takes."""
        size = self.config.block_size
        copied = seq.cached < cached and seq.cached % size and seq.blocks[-1].owners > 1
        return max(0, -(-cached // size) - len(seq.blocks)) + bool(copied)

    def reclaim_idle(self, need: int, keep: Collection[Block] = ()) -> bool:
        """Evict blocks whose owners all wait until `need` slots are available. Returns whether they are. First those of ended
        children leave for host memory; then those with the fewest owners go, since what many own would be computed again by
        each of them, and of these the newest; last ended children are given up."""
        self.kept.offload(need, keep)
        while (short := need - self.store.available) > 0:
            leaving = self._leaving(short, keep)
            for block in leaving:
                if not self.store.offload(block):
                    self.store.drop(block)
            if not leaving and not self.kept.give_way(keep):
                return False
        return True

    def _leaving(self, short: int, keep: Collection[Block]) -> list[Block]:
        """Choose at most `short` idle blocks that no ended child keeps."""
        kept = self.kept.blocks
        idle = (block for block in reversed(self.store.idle) if block not in keep and block not in kept)
        leaving = [*islice((block for block in idle if block.owners == 1), short)]  # nearly always enough: not all are sorted
        if leaving:
            return leaving
        others = (block for block in reversed(self.store.idle) if block not in keep and block not in kept)
        return sorted(others, key=lambda block: block.owners)[:short]

    def offload(self, seq: Sequence) -> bool:
        """Move the idle blocks of a stopped sequence to host memory. False if they do not fit there, or if prefilling them
        again is cheaper; nothing has been moved then."""
        leaving = [block for block in seq.blocks if block.users == 0 and block.device is not None]
        if not self._can_offload(sum(block.host is None for block in leaving), seq.cached):
            return False
        for block in leaving:
            if not self.store.offload(block):
                self.store.drop(block)
        seq.offloads += 1
        self.counters.offloads += 1
        return True

    def free_ahead(self, running: list[Sequence]) -> None:
        """Let cached blocks leave the device beside this step, so that the next one finds slots that no copy reads: one for
        each sequence and those of a chunk, together at most a sixteenth of the pool."""
        if self.ahead:
            soon = len(running) + self.config.most_tokens // self.config.block_size
            self.store.free_ahead(min(soon, self.store.device.size // 16))

    def prefetch(self, seq: Sequence, running: list[Sequence], budget: int) -> bool:
        """Copy the blocks of a waiting sequence to the device beside this step, if it could start in a step of `budget` tokens
        beside those that run. Returns whether it could."""
        if not self.fits(seq, running, budget):
            return False
        for block in seq.blocks:
            if block.device is None:
                self.store.prefetch(block)
        return True

    def mirror(self, running: list[Sequence]) -> None:
        """Copy, when the pool will run out soon, full blocks of the sequences that are preempted first: the last in rank."""
        size = self.config.block_size
        soon = 2 * self.config.advanced.lookahead_blocks * len(running)
        if not self.config.advanced.mirror_ahead or self.store.available > soon:
            return
        left = self.config.advanced.mirror_blocks_per_step
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

    def _can_offload(self, blocks: int, tokens: int) -> bool:
        """True if blocks with KV of so many tokens would be offloaded and not dropped: they fit into host memory, and that
        pays."""
        return bool(self.store.host.size) and blocks <= self.store.host_available and self._copy_pays(blocks, tokens)

    def _copy_pays(self, blocks: int, tokens: int) -> bool:
        """True if copying so many blocks out and back takes no longer than prefilling the tokens again, at the measured rates,
        or while one of them is not known."""
        copy, prefill = self.counters.copy_blocks_per_second, self.counters.prefill_tokens_per_second
        if not copy or not prefill:
            return True
        return 2 * blocks / copy <= tokens / prefill


def is_absent(seq: Sequence) -> bool:
    """True if a block of a sequence is not on the device."""
    return any(block.device is None for block in seq.blocks)


def _absent(seq: Sequence) -> int:
    """Return how many blocks of a sequence are not on the device."""
    return sum(block.device is None for block in seq.blocks)
