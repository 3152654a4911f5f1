"""The scheduler's state, and the transitions of a sequence: start, stop, fork, finish. Only this module changes the state of a
sequence.

add ──► waiting ──start──► running ──fork──► one sequence for each child, running or waiting
           ▲                  │
           └───────stop───────┤
abort, deadline, refresh ─────┴──finish──► Sample
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from rollout.engine.config import EngineConfig
from rollout.engine.kv.block import BlockCopies, PoolCounts
from rollout.engine.kv.store import BlockStore
from rollout.engine.scheduling.block_tables import BlockTables
from rollout.engine.scheduling.conversation import ConversationIndex, FinishedTurn, PinnedKV, Timers
from rollout.engine.scheduling.counters import Counters, Rates
from rollout.engine.scheduling.credit import ClientCredit
from rollout.engine.scheduling.queue import RunningTable, WaitingQueue
from rollout.engine.scheduling.sequence import GroupState, Row, Sequence
from rollout.engine.values import FinishReason, Sample

if TYPE_CHECKING:
    from rollout.engine.scheduling.states import StateSlots
    from rollout.engine.scheduling.windows import WindowBlocks

CONTINUED: frozenset[FinishReason] = frozenset(("stop", "length", "cut", "deadline"))
"""finish reasons of a child that another turn may continue"""


class Decision(NamedTuple):
    """What a policy decides before a step: which running sequences stop."""

    stops: list[Sequence]
    room: int = 0
    """device slots that the running sequences need in this step; idle blocks are evicted for them before a sequence stops"""
    held: bool = False
    """the sequences stop because other clients have priority"""
    frees_kv: bool = False
    """the KV of these sequences leaves the device at once; otherwise it stays while there is room"""


class SchedulerState:
    """Owns groups, queues, the block store and pinned KV, and is the only writer of groups and sequences, together with
    `BlockTables` (blocks) and `rollout.engine.scheduling.output` (tokens)."""

    def __init__(
        self,
        config: EngineConfig,
        pools: PoolCounts,
        clock: Callable[[], float],
        states: StateSlots | None = None,
        windows: WindowBlocks | None = None,
    ) -> None:
        """Begin without groups (`rollout.engine.scheduling.build.open_state`).

        Args:
            clock: returns seconds, never falling.
            states: slots of recurrent state; None: the model has none.
            windows: blocks of layers with a sliding window; None: all layers hold the KV of all tokens.
        """
        self.config, self.clock = config, clock
        self.counters, self.rates = Counters(), Rates()
        self.store = BlockStore(pools.device_blocks, pools.host_blocks, config.prefix_cache)
        self.states, self.windows = states, windows
        self.tables = BlockTables(config.block_tokens, self.store, self.counters, self.states, self.windows)
        self.table = RunningTable(config.most_seqs, min(pools.max_blocks, pools.device_blocks), self.windows is not None)
        self.waiting = WaitingQueue()
        self.credit = ClientCredit(config.foreground_s)
        self.pinned = PinnedKV(self.tables)
        self.conversations = ConversationIndex(config.block_tokens)
        self.groups: dict[str, GroupState] = {}
        """the groups that are not finished, by id"""
        self.deadlines: Timers[GroupState] = Timers(lambda group: self.groups.get(group.group.id) is group)
        self.submitted = 0
        """groups that were queued"""
        self.version = 0
        """of the weights"""
        self.admitting = True
        """False: groups that have not started stay in the queue"""
        self.clients: Collection[str] = ()
        """the clients whose sequences the newest plan computes; see `rollout.engine.scheduling.fairness.priority_clients`"""
        self.others_wait = False
        """other clients have sequences that could run"""
        self.in_flight: dict[int, list[Row]] = {}
        """rows of the plans that are neither committed nor discarded, by the plan's number"""
        self.copies_ahead = bool(config.advanced.copy_ahead and pools.host_blocks)
        """room is made a step before it is needed, so that a step writes no slot that its own copies free"""

    @property
    def running(self) -> list[Sequence]:
        """Return the running sequences, oldest first."""
        return self.table.sequences

    @property
    def kv_stores(self) -> list[BlockStore]:
        """Return the stores of KV: of layers with full attention, and of those with a window."""
        return [self.store] if self.windows is None else [self.store, self.windows.store]

    @property
    def stores(self) -> list[BlockStore]:
        """Return the stores of KV and of recurrent states."""
        return self.kv_stores if self.states is None else [*self.kv_stores, self.states.store]

    @property
    def available(self) -> int:
        """Return for how many new blocks each store of KV has a device slot, without evicting a block that has owners."""
        available = self.store.available
        return available if self.windows is None else min(available, self.windows.store.available)

    @property
    def window_moves(self) -> BlockCopies:
        """Return the copies of KV of windows of the step being planned."""
        return BlockCopies() if self.windows is None else self.windows.store.moves

    @property
    def state_moves(self) -> BlockCopies:
        """Return the copies of recurrent states of the step being planned."""
        return BlockCopies() if self.states is None else self.states.store.moves

    @property
    def state_advances(self) -> np.ndarray:
        """Return the advances of recurrent states of the step being planned: see `Plan`."""
        return np.zeros((0, 4), np.int32) if self.states is None else self.states.advances

    @property
    def has_work(self) -> bool:
        """Return whether a sequence runs, or waits and may start."""
        return bool(self.running or self.waiting.clients(started=not self.admitting))

    # ── groups ────────────────────────────────────────────────────────────────────────────────────────────────────────
    def add(self, group: GroupState) -> list[Sample]:
        """Queue a group. Returns the samples of the children that are complete already."""
        self.submitted += 1
        group.finished = len(group.complete)
        complete = [
            (Sequence(group, partial.index, partial), group.complete.get(partial.index)) for partial in group.group.partials
        ]
        samples = [self.count_finished(child, reason, 0.0) for child, reason in complete if reason is not None]
        if not group.fresh and not group.resumed:
            return samples
        self.groups[group.group.id] = group
        turn = self.conversations.find(group.group, group.client)
        if turn is not None:
            group.age, group.own = (turn.since, group.number), turn.kv
        for index in group.fresh[:1] or group.resumed:
            group.sequences[index] = seq = Sequence(group, index)
            if turn is not None:
                self.counters.kept_tokens += self._continue(seq, turn)
            self.waiting.put(seq)
        if group.group.sampling.deadline_s is not None:
            self.deadlines.add(group.arrived + group.group.sampling.deadline_s, group)
        self.credit.arrived(group.client, group.arrived)
        return samples

    def _continue(self, seq: Sequence, turn: FinishedTurn) -> int:
        """Give a sequence the pinned KV of the turn that it continues, as far as its group may read that. Returns how many
        tokens are cached then."""
        self.pinned.hand_over(seq.state.group.after, seq)
        if turn.kv is None:  # too old to be read as KV of the turn, though `max_kv_lag` may allow a part of it
            self.tables.drop_older(seq, seq.state.readable_from(self.version))
        return seq.cached

    def count_finished(self, child: Sequence, reason: FinishReason, seconds: float, error: str | None = None) -> Sample:
        """Count a child that finishes without having been scheduled. Returns its sample."""
        self.counters.ended[reason] += 1
        return child.sample(reason, seconds, error)

    # ── transitions ───────────────────────────────────────────────────────────────────────────────────────────────────
    def start(self, seq: Sequence, least_run: int) -> None:
        """Move a sequence from waiting to running, and restore its blocks. least_run: tokens to sample before it is preempted
        again, unless nothing else frees memory. Raises OutOfBlocks."""
        if self.states is not None:
            self.states.start(seq)
        self.waiting.remove(seq, served=True)
        seq.state.started = True
        for i, block in enumerate(seq.blocks):
            self.store.activate(block, full=i < seq.cached // self.config.block_tokens)
        if self.windows is not None:
            self.windows.start(seq)
        self.table.enter(seq, least_run)

    def stop(self, seq: Sequence, held: bool = False) -> None:
        """Move a sequence from running to waiting. It keeps its blocks. held: other clients have priority."""
        assert not seq.pending, "a sequence stops while a token of it is pending"
        if self.windows is not None:
            self.windows.trim(seq)
        self.table.leave(seq)
        for store, blocks in self.tables.held(seq):
            for block in blocks:
                store.deactivate(block)
        if self.states is not None:
            self.states.stop(seq)
        seq.held = held
        self.waiting.put(seq)

    def fork(self, seq: Sequence) -> list[Sequence]:
        """Make the children of a sequence whose prompt is cached; all share its blocks. Children without a free place wait, and
        so do those that have more tokens to compute. Returns the children that sample from the prompt, in the order of their
        draws."""
        state = seq.state
        state.forked = True
        seq.num_next_samples = 1
        if self.windows is not None:
            self.windows.trim(seq)
        children = [seq, *seq.fork()]
        runs_on = self.states is None or self.states.fork(seq, children[1:])
        for child in children[1:]:
            state.sequences[child.index] = child
            for store, blocks in self.tables.held(child):
                store.share(blocks)
            if self.table.has_place and child.index not in state.resumed and (self.states is None or self.states.has_free):
                for store, blocks in self.tables.held(child):
                    for block in blocks:
                        store.activate(block, full=True)
                if self.states is not None:
                    self.states.start(child)
                self.table.enter(child, self.config.advanced.min_run_tokens)
            else:
                self.waiting.put(child)
        if not runs_on:
            self.stop(seq)
        self.counters.forks += len(children) - 1
        self.counters.fork_saved_tokens += (len(children) - 1) * seq.num_prompt
        self.counters.fork_shared_blocks += (len(children) - 1) * (seq.num_prompt // self.config.block_tokens)
        return children[: len(state.fresh)]

    def has_slot(self, seq: Sequence) -> bool:
        """Return whether a sequence that waits could have the slots of recurrent state that it needs to run; evicts states of
        others for them."""
        return self.states is None or self.states.make_room(self.states.needed(seq), seq.state_in)

    def finish(self, seq: Sequence, reason: FinishReason, error: str | None = None) -> Sample:
        """Finish a child, which runs or waits, and release or pin its blocks. Returns its sample."""
        ran = seq.running
        if ran:
            self.table.leave(seq)
        else:
            self.waiting.remove(seq)
        seq.ended = True
        state, now = seq.state, self.clock()
        self._leave_blocks(seq, ran, now, continues=reason in CONTINUED)
        del state.sequences[seq.index]
        if reason in ("stop", "length"):
            state.finished += 1
        if not state.sequences:
            del self.groups[state.group.id]
            self.credit.left(state.client, now)
        sample = self.count_finished(seq, reason, now - state.arrived, error)
        state.finished_outputs[seq.index] = sample.token_ids
        return sample

    def _leave_blocks(self, seq: Sequence, ran: bool, now: float, continues: bool) -> None:
        """Pin the blocks of a child that finishes, if its group asks for that, or release them. continues: a turn may
        follow."""
        if continues and not ran:
            self.tables.cut_lost(seq)
        if continues and seq.output and seq.cached:
            self.pinned.release(seq.state.group.id, seq.index)  # of an earlier group with this id: another turn by now
            self.conversations.note(seq)
            if kv_ttl_s := seq.state.group.sampling.kv_ttl_s:
                if self.states is not None and ran:
                    self.states.stop(seq)
                self.pinned.pin(seq, now + kv_ttl_s, ran)
                return
        if self.states is not None:
            self.states.release(seq, used=ran)
        for store, blocks in self.tables.held(seq):
            for block in reversed(blocks):  # so that the least recently used end of a chain is its tail, not its root
                store.release(block, used=ran)
            blocks.clear()

    def finish_all(self, state: GroupState, reason: FinishReason, error: str | None = None) -> list[Sample]:
        """Finish every child that is not finished; before the fork these are all n."""
        if not state.forked:
            only = self.finish(state.sequences[state.fresh[0]], reason, error)
            others = [Sequence(state, index) for index in (*state.fresh[1:], *state.resumed)]
            return [only, *(self.count_finished(child, reason, only.seconds, error) for child in others)]
        return [self.finish(seq, reason, error) for seq in list(state.sequences.values())]

    def abort(self, group_id: str, index: int | None = None) -> list[Sample]:
        """Finish the children that are not finished, or one of them, as aborted, and release pinned KV. Returns their samples;
        [] for an unknown id or index. A child of a group that has not forked finishes at the fork, unless no other is left."""
        self.pinned.release(group_id, index)
        state = self.groups.get(group_id)
        if state is None:
            return []
        if index is None:
            return self.finish_all(state, "aborted")
        if state.forked:
            return [self.finish(state.sequences[index], "aborted")] if index in state.sequences else []
        if index in state.fresh or index in state.resumed:
            state.cancelled.add(index)
        return [] if state.uncancelled else self.finish_all(state, "aborted")
