"""Who runs: which sequences stop, and which of those that wait start, by clients, slots and room for KV."""

from __future__ import annotations

from collections.abc import Collection
from itertools import chain, islice

from engine.config import EngineConfig
from engine.kv.store import BlockStore
from engine.scheduling.block_tables import BlockTables
from engine.scheduling.counters import Counters
from engine.scheduling.fairness import Fairness
from engine.scheduling.pinned import PinnedKV
from engine.scheduling.preemption import Pressure, is_absent
from engine.scheduling.queue import WaitingQueue
from engine.scheduling.running import RunningTable
from engine.scheduling.sequence import Sequence


class Admission:
    """A part of the scheduler: moves sequences from waiting to running and back. Those that fork or end are with `Groups`."""

    def __init__(
        self,
        config: EngineConfig,
        store: BlockStore,
        tables: BlockTables,
        running_table: RunningTable,
        waiting: WaitingQueue,
        shares: Fairness,
        counters: Counters,
        kept: PinnedKV,
    ) -> None:
        self.config = config
        self.store = store
        self.tables = tables
        self.running_table = running_table
        self.running = running_table.sequences
        self.waiting = waiting
        self.shares = shares
        self.counters = counters
        self.pressure = Pressure(config, store, counters, kept)
        self.admitting = True
        """False: groups that have not started stay where they are"""
        self.clients: Collection[str] = ()
        """those that the last plan computes; see `Fairness.foreground`"""
        self.holding = False
        """others than these have work"""

    @property
    def has_work(self) -> bool:
        """True if something runs, or waits and may start."""
        return bool(self.running or self.waiting.clients(started=not self.admitting))

    @property
    def must_preempt(self) -> bool:
        """True if `hold_others`, `preempt` or `yield_slots` would stop a sequence."""
        clients = self._foreground()
        return (
            any(client not in clients for client in self.running_table.of_client)
            or self.pressure.must_preempt(self.running)
            or bool(self._over_share(self._first_waiting(clients), clients))
        )

    # ── before a step, in this order ──────────────────────────────────────────────────────────────────────────────────
    def hold_others(self) -> None:
        """Choose the clients that are computed, and stop the sequences of all others. Their KV stays while there is room."""
        self.clients = self._foreground()
        for seq in [seq for seq in self.running if seq.state.client not in self.clients]:
            self.stop(seq, held=True)
        self.holding = any(client not in self.clients for client in self.waiting.clients(started=not self.admitting))

    def preempt(self) -> None:
        """Stop sequences until the others have room to take a step. Their blocks are offloaded, or dropped: a soft reset, which
        keeps the leading blocks that others use."""
        victims = self.pressure.victims(self.running)
        for seq in victims:
            self.stop(seq)
            if not self.pressure.offload(seq):
                self.counters.soft_resets += self.tables.cut_unused(seq)
        if victims:
            self.pressure.reclaim_idle(sum(self.pressure.need(seq) for seq in self.running))

    def yield_slots(self) -> None:
        """Stop sequences of clients with more than their share of the slots, if all are taken and another client's turn has
        come. Their KV stays until its room is needed."""
        for seq in self._over_share(self.next(), self.clients):
            self.stop(seq)

    def make_room(self, most: int) -> None:
        """Evict idle blocks for the sequence that is next, or, where some clients go before others or did, for all that can
        start in a step of `most` tokens."""
        seq = self.next()
        slots = min(self.config.most_seqs, most) - len(self.running)
        if seq is None or not self.store.idle or slots <= 0:
            return
        upcoming = [seq]
        if self.holding or seq.held:
            upcoming = [*islice(self.waiting.of(self.clients, started=not self.admitting), slots)]
        self.pressure.make_room(upcoming, self.running, most)

    def copy_ahead(self, most: int) -> None:
        """Let copies run beside this step, of at most `most` tokens, that the next one needs: room for what it writes, blocks
        of the sequences that it can start, in their order."""
        self.pressure.free_ahead(self.running)
        first, running = self.next(), list(self.running)
        places = min(self.config.most_seqs, most) - len(running)
        if not self.pressure.ahead or first is None or not running:
            return
        others = (seq for seq in self.waiting.of(self.clients, started=not self.admitting) if seq is not first)
        for seq in islice(chain((first,), others), max(0, places)):
            self.tables.cut_lost(seq)
            if not self.pressure.prefetch(seq, running, most - len(running)):
                return
            running.append(seq)

    # ── starting and stopping ─────────────────────────────────────────────────────────────────────────────────────────
    def next(self) -> Sequence | None:
        """Return the sequence that is next to start. If nothing runs, that is one with KV on the device that another would
        take."""
        seq = self._first_waiting(self.clients)
        if seq is None or self.running or self.holding:
            return seq
        return self.pressure.first_alone(seq, self.waiting)

    def start(self, seq: Sequence, budget: int, version: int) -> bool:
        """Start a waiting sequence if its blocks and the next chunk, of at most `budget` tokens, fit beside what runs. Returns
        whether it did. Where copies run ahead its blocks are on the device before, unless nothing else runs. version: of the
        weights."""
        self.tables.cut_lost(seq)
        self.tables.find_in_use(seq, version)
        if self.pressure.ahead and self.running and is_absent(seq):
            return False
        if not self.pressure.fits(seq, self.running, budget):
            return False
        least_run = self.pressure.least_run(seq)
        self.waiting.remove(seq, served=True)
        seq.state.started = True
        for i, block in enumerate(seq.blocks):
            self.store.pin(block, full=i < seq.cached // self.config.block_size)
        self.running_table.enter(seq, least_run)
        return True

    def stop(self, seq: Sequence, held: bool = False) -> None:
        """Move a sequence from running to waiting. It keeps its blocks. held: because other clients go first."""
        assert not seq.pending, "a sequence stops whose last token is not known yet"
        self.running_table.leave(seq)
        for block in seq.blocks:
            self.store.unpin(block)
        seq.held = held
        self.waiting.put(seq)

    def _foreground(self) -> Collection[str]:
        """Return the clients whose sequences may be computed now."""
        return self.shares.foreground({*self.running_table.of_client, *self.waiting.clients(started=not self.admitting)})

    def _first_waiting(self, clients: Collection[str]) -> Sequence | None:
        return self.waiting.next(self.running_table.of_client, clients, started=not self.admitting)

    def _over_share(self, seq: Sequence | None, clients: Collection[str]) -> list[Sequence]:
        """Return the running sequences that give their slots to the client of `seq`, which waits."""
        if seq is None or self.running_table.has_place:
            return []
        waiting = {client: count for client, count in self.waiting.counts().items() if client in clients}
        return self.pressure.sequences_over_share(seq.state.client, waiting, self.running_table.of_client, self.running)
