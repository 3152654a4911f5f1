"""The scheduler: which tokens of which sequences the next step computes, and where their KV lives. Policy only, in ints.

`plan()` decides, the engine launches that and says so (`launched()`), `commit()` records what was drawn: at once, or
after the next step has been planned and launched (`engine.pipeline`). One call of `plan()`:

    1. hold others   clients that were idle go first: while they have work, the sequences of all others stop (shares.py)
    2. preempt       the running sequences need blocks to grow; if too few, the last in rank are preempted (preemption.py)
    3. yield slots   all are taken and a client with less than its share waits: others give some up
    4. make room     idle blocks leave the device for sequences that can start
    5. decode        one row for each sequence that has one token to compute; in turn, where the step is to be short
    6. prefill       chunks for the running sequences that have more, while the token budget lasts
    7. start         waiting sequences: held, forked, preempted or reset ones, then fresh prompts
    8. copy ahead    ahead of pressure, copies of full blocks to host memory; what the next step needs, beside this one
    9. draft         where few rows run and all decode: likely tokens behind the one that each computes (drafts.py)

`admission.py` has 1 to 4 and what starts a sequence, `groups.py` what forks and ends one, `rows.py` a row and the plan of all,
`recording.py` what becomes of the draws.

It is the only writer of sequences, groups, both pools and the prefix index.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from engine.config import EngineConfig
from engine.kv.store import BlockStore
from engine.scheduling.admission import Admission
from engine.scheduling.block_tables import BlockTables
from engine.scheduling.counters import Counters
from engine.scheduling.drafts import Drafts
from engine.scheduling.fairness import Fairness, RoundRobin, tokens_by_client
from engine.scheduling.groups import Groups
from engine.scheduling.plan import Plan, SampledTokens, copies_only
from engine.scheduling.queue import WaitingQueue
from engine.scheduling.recording import record
from engine.scheduling.rows import RowBuilder, plan_of
from engine.scheduling.running import RunningTable
from engine.scheduling.sequence import Row, Sequence
from engine.scheduling.shared_prefix import shared_prefixes
from engine.scheduling.stops import Stops
from engine.types import Group, Sample

SCORED_AT_ONCE = 1024
"""given tokens of one step: their logits are in memory together"""


class Scheduler:
    """Decides the steps; the module's docstring has the order. `max_blocks`: blocks of the longest sequence of the model.
    `clock`: seconds that only go up."""

    def __init__(
        self,
        config: EngineConfig,
        *,
        device_blocks: int,
        host_blocks: int,
        max_blocks: int,
        counters: Counters,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.config = config
        self.block_size = config.block_size
        self.counters = counters
        self.store = store = BlockStore(device_blocks, host_blocks, config.prefix_cache)
        self.running_table = running = RunningTable(config.most_seqs, min(max_blocks, device_blocks))
        self.running = running.sequences
        self.waiting = waiting = WaitingQueue()
        self.shares = shares = Fairness(config.foreground_s)
        self.tables = tables = BlockTables(config, store, counters)
        self.rows = RowBuilder(config, store, tables)
        self.drafts = Drafts(config.drafts or 0, store, tables, counters)
        self.children = Groups(config, store, tables, running, waiting, shares, counters, clock)
        self.admission = Admission(config, store, tables, running, waiting, shares, counters, self.children.kept)
        self.groups = self.children.of_id
        self.version = 0
        """of the weights"""
        self._clock = clock
        self._round_robin = RoundRobin()
        self._planned = 0
        self._rows: dict[int, list[Row]] = {}
        """of the steps that were planned and not committed, by number: the way back from a plan to its sequences"""

    # ── groups ────────────────────────────────────────────────────────────────────────────────────────────────────────
    def submit(self, group: Group, client: str, seed: int, eos: frozenset[int], stops: Stops | None = None) -> list[Sample]:
        """Queue a group. Returns the children that are complete already; see `Groups.submit`."""
        return self.children.submit(group, client, seed, eos, stops)

    def abort(self, group_id: str, index: int | None = None) -> list[Sample]:
        """End the children that are not finished, or one of them; see `Groups.abort`."""
        return self.children.abort(group_id, index)

    def expire(self) -> list[Sample]:
        """End what has had its time; see `Groups.expire`. Returns the unfinished children with what they have."""
        return self.children.expire()

    @property
    def overdue(self) -> bool:
        """True if something may have had its time."""
        return self.children.overdue

    @property
    def has_work(self) -> bool:
        """True if something runs, or waits and may start."""
        return self.admission.has_work

    @property
    def admitting(self) -> bool:
        """False: groups that have not started stay where they are."""
        return self.admission.admitting

    @admitting.setter
    def admitting(self, value: bool) -> None:
        self.admission.admitting = value

    # ── a step ────────────────────────────────────────────────────────────────────────────────────────────────────────
    def plan(self) -> Plan:
        """Decide the next step. No rows: nothing can be done now."""
        now = self._clock()
        most = self.shares.most_tokens(self.config.most_tokens, now)
        self.store.begin()
        self.admission.hold_others()
        self.admission.preempt()
        self.admission.yield_slots()
        self.admission.make_room(most)
        decoding = self._decode(most)
        filling = self._prefill(most, len(decoding))
        self.admission.pressure.mirror(self.running)
        self.admission.copy_ahead(most)
        pending, self._planned = bool(self._rows), self._planned + 1
        if filling:
            rows = sorted(decoding + filling, key=lambda row: row[0].age)
        else:
            rows = decoding if pending else self.drafts.extend(decoding, most - len(decoding), self.version, self._planned, now)
        if not rows:
            return copies_only(self._planned, self.store.moves)
        shared = tuple(shared_prefixes(rows, self.block_size)) if self.config.advanced.share_prefix else ()
        self._rows[self._planned] = rows
        if not pending:
            self.shares.step_began(now)
        return plan_of(self._planned, rows, shared, self.store.moves, self.running_table, self.block_size, pending)

    def _decode(self, most: int) -> list[Row]:
        """Make the rows of one token each, for a step of at most `most`: of all sequences that have one to compute, but in a
        short step of some in turn. Half of a short step is for prefill if there is any to do."""
        if most == self.config.most_tokens:
            return self.rows.decode(self.running, self.version)
        decoding = [seq for seq in self.running if seq.uncached == 1 and seq.given is None]
        if len(decoding) < len(self.running) or (len(self.waiting) and self.running_table.has_place):
            most //= 2
        return self.rows.decode(self._round_robin.take(decoding, most), self.version)

    def _prefill(self, most: int, decoding: int) -> list[Row]:
        """Make the rows of sequences that have more than one token to compute and of those that can start, for a step of at
        most `most` tokens, so many of which are decoded. A short step has as few draws."""
        budget, short, scores = most - decoding, most < self.config.most_tokens, SCORED_AT_ONCE
        planned: set[bytes] = set()
        rows: list[Row] = []

        def add(seq: Sequence) -> None:
            nonlocal budget, scores
            if row := self.rows.prefill(seq, budget, scores, planned, self.version):
                rows.append(row)
                scores -= len(row[4])
                budget -= max(row[2], row[3]) if short else row[2]

        if decoding < len(self.running):
            for seq in [seq for seq in self.running if seq.uncached > 1 or seq.given is not None]:
                if budget > 0:
                    add(seq)
        while budget > 0 and self.running_table.has_place:
            waiting = self.admission.next()
            if waiting is None or not self.admission.start(waiting, budget, self.version):
                break
            add(waiting)
        return rows

    def sequences_of(self, plan: Plan) -> list[Sequence]:
        """Return the sequence of each row of a plan that is not committed."""
        return [row[0] for row in self._rows[plan.step]]

    @property
    def must_preempt(self) -> bool:
        """True if the next plan would stop a sequence. The step in flight must be committed first: it may end some, and no
        sequence stops while a token of it is pending."""
        return self.admission.must_preempt

    @property
    def would_draft(self) -> bool:
        """True if the next plan may draft if no step is in flight: what comes after a draft is known with the draws only."""
        return self.drafts.wanted(self.running)

    def offload_all(self) -> Plan:
        """Stop every sequence and offload its blocks, the first in rank first, as far as host memory has room. Returns a plan
        of copies."""
        self.store.begin()
        for seq in sorted(self.running, key=lambda seq: seq.rank):
            self.admission.stop(seq)
        self.store.offload_all()
        self._planned += 1
        return copies_only(self._planned, self.store.moves)

    def moved(self) -> None:
        """Note that the plan's copies are done."""
        self.store.moved()

    def move_failed(self, plan: Plan) -> None:
        """Reset the sequences whose blocks cannot be trusted, as the plan's copies stopped in the middle; the plan is void."""
        self.counters.failed_moves += 1
        broken = self.store.move_failed()
        for seq, *_ in self._rows.pop(plan.step, []):
            self.tables.truncate(seq, -(-seq.cached // self.block_size))
        for seq in list(self.running):
            if any(block in broken for block in seq.blocks):
                self.admission.stop(seq)
                self.tables.truncate(seq, 0)
                self.counters.soft_resets += 1
        self.store.discard(broken)

    def launched(self, plan: Plan) -> None:
        """Note that the step is in flight: from here on its KV counts as computed, since whatever reads it comes later on the
        device, and the tokens that it samples are pending."""
        size, at = self.block_size, 0
        for seq, start, count, draws, expected in self._rows[plan.step]:
            forked = seq.state.forked
            if expected:
                count -= draws - 1  # how many of the others count is known with the draws
            if count > 1 or not draws or not forked:
                self.counters.computed(seq, start, count)
            seq.cached = cached = start + count
            if cached > seq.computed:
                seq.computed = cached
            if cached // size > start // size and not seq.pending:
                self.tables.fill(seq, start)
            if draws and forked:
                seq.expect(at)
            at += draws

    def commit(self, plan: Plan, drawn: SampledTokens) -> list[Sample]:
        """Record what the oldest step in flight drew: tokens, forks, ends. Returns the children that ended. Rows of those
        that ended while the step was under way are passed over."""
        rows, now = self._rows.pop(plan.step), self._clock()
        self.shares.step_ended(tokens_by_client(rows, plan.num_tokens, self.shares.only_client), now, self.admission.holding)
        self.drafts.ended(plan.step, now)
        samples = record(self.children, self.drafts, rows, drawn, self.version)
        self.shares.committed(self._clock() - now)
        return samples

    def launch_failed(self, plan: Plan, reason: str) -> list[Sample]:
        """End the groups of a plan that could not be launched with an error; the plan is void."""
        return self._fail([row[0] for row in self._rows.pop(plan.step)], reason)

    def step_failed(self, plan: Plan, reason: str) -> list[Sample]:
        """End every group that runs with an error, clear the prefix index and drop the KV of those that wait: a launched step
        failed, and any of them may have taken over KV that it wrote. The plan is void."""
        del self._rows[plan.step]
        self.children.kept.release_all()
        self.store.forget_all()
        for seq in self.waiting:
            self.tables.truncate(seq, 0)
        return self._fail(list(self.running), reason)

    def _fail(self, sequences: list[Sequence], reason: str) -> list[Sample]:
        """End the groups of these with an error. What their blocks hold is not reused."""
        states = {seq.state.number: seq.state for seq in sequences if not seq.ended}
        for seq in sequences:
            self.tables.distrust(seq)
        return [sample for state in states.values() for sample in self.children.end_all(state, "error", reason)]

    def fail_stuck(self) -> list[Sample]:
        """End the group that is next with an error, where nothing runs and nothing can start."""
        seq = self.admission.next()
        assert seq is not None
        need = -(-seq.length // self.block_size)
        reason = f"{need} KV blocks are needed to go on and cannot be freed from a pool of {self.store.device.size}"
        return self.children.end_all(seq.state, "error", reason)

    def refresh(self, version: int, kv: str) -> list[Sample]:
        """Note that the weights are another version, with no step in flight. kv: see `Groups.refresh`. Returns the samples that
        this ends."""
        self.version = version
        return self.children.refresh(version, kv)
