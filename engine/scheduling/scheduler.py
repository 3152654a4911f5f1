"""The scheduler: decides which tokens of which sequences the next step computes, and where their KV is stored. Works on
integers.

`plan()` decides a step, the pipeline launches it and calls `launched()`, `commit()` records what it sampled: at once, or after
the next step was planned and launched (`rollout.engine.pipeline`). One call of `plan()`:

    1. stop      sequences of clients without priority (fairness.py); the last in rank if KV blocks run out (preemption.py);
                 those of clients with more than their share of the slots
    2. evict     idle blocks leave the device for sequences that can start (admission.py)
    3. decode    one row for each sequence with one token to compute; in turn, if the step is to be short
    4. prefill   chunks for running sequences with more tokens to compute, while the token budget lasts
    5. start     waiting sequences: stopped, forked or preempted ones, then fresh prompts
    6. copy      ahead of need: full blocks to host memory, blocks of the next step to the device
    7. draft     if few rows run and all decode: likely tokens after the one that each computes (drafts.py)

`state.py` owns all state. Policies are functions that read it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol

from rollout.engine.scheduling import admission, fairness, output, preemption
from rollout.engine.scheduling.plan import Plan, SampledTokens, copies_only
from rollout.engine.scheduling.rows import build_plan, decode_rows, prefill_row
from rollout.engine.scheduling.sequence import GroupState, Row, Sequence, Submission
from rollout.engine.scheduling.state import SchedulerState
from rollout.engine.scheduling.stopping import StopStrings
from rollout.engine.values import Group, Sample, TokenChunk

MAX_SCORES = 1024
"""given tokens that one step scores: their logits are in memory together"""


class Drafting(Protocol):
    """Proposes tokens after the one that a decode row computes: `rollout.engine.scheduling.drafts.Drafts`."""

    def wanted(self, running: list[Sequence]) -> bool:
        """Return whether the next step needs the results of the step in flight."""

    def overlap(self, rows: list[Row], step: int) -> None:
        """Take note of the decode rows of a step that is planned with another in flight. step: its number."""

    def extend(self, rows: list[Row], budget: int, step: int, now: float) -> list[Row]:
        """Return the decode rows of a step, with drafts of at most `budget` tokens in all. now: seconds, its start."""

    def advanced(self, seconds: float) -> None:
        """Take note of how long the newest step had to advance recurrent states by drafts of the step before."""

    def ended(self, step: int, now: float) -> None:
        """Take note that the step of this number was read at `now` seconds."""

    def learn(self, seq: Sequence, expected: tuple[int, ...], drawn: list[int]) -> None:
        """Take note of which tokens of a draft were accepted. drawn: the tokens that were appended to the sequence."""


class NoDrafts:
    """Proposes nothing."""

    def wanted(self, running: list[Sequence]) -> bool:
        return False

    def overlap(self, rows: list[Row], step: int) -> None:
        pass

    def extend(self, rows: list[Row], budget: int, step: int, now: float) -> list[Row]:
        return rows

    def advanced(self, seconds: float) -> None:
        pass

    def ended(self, step: int, now: float) -> None:
        pass

    def learn(self, seq: Sequence, expected: tuple[int, ...], drawn: list[int]) -> None:
        raise AssertionError("a draft, and none was proposed")


class Scheduler:
    """Decides the steps, in the order that the module's docstring lists. `rollout.engine.scheduling.build.open_scheduler` makes
    one for a configuration."""

    def __init__(self, state: SchedulerState, drafts: Drafting) -> None:
        self.state, self.drafts = state, drafts
        self._round_robin = fairness.RoundRobin()
        self._planned = 0

    # ── a step ────────────────────────────────────────────────────────────────────────────────────────────────────────
    def plan(self) -> Plan | None:
        """Decide the next step. Returns a plan without rows if nothing can be computed now. Returns None, having changed
        nothing, if the decision needs the results of the step in flight: commit that step and call again."""
        state = self.state
        pending = bool(state.in_flight)
        if pending and self.drafts.wanted(state.running):
            return None  # the tokens that follow a draft are known only with its results
        now = state.clock()
        budget = state.credit.most_tokens(state.config.most_tokens, now)
        for store in state.stores:
            store.begin()
        if not self._stop_sequences():
            return None
        admission.make_room(state, budget)
        rows = self._decode(budget)
        filling = self._prefill(budget, len(rows))
        preemption.mirror(state)
        preemption.free_ahead(state)
        admission.prefetch(state, budget)
        self._planned += 1
        if filling:
            rows = sorted(rows + filling, key=lambda row: row.seq.age)
        elif pending:
            self.drafts.overlap(rows, self._planned)
        else:
            rows = self.drafts.extend(rows, budget - len(rows), self._planned, now)
        if not rows:
            return copies_only(self._planned, state.store.moves, state.state_advances, state.state_moves, state.window_moves)
        state.in_flight[self._planned] = rows
        if not pending:
            state.credit.step_began(now)
        return build_plan(state, self._planned, rows, pending)

    def grow_host(self, sizes: Iterable[int]) -> None:
        """Use more of the host pools. sizes: slots of each of `SchedulerState.stores`."""
        for store, size in zip(self.state.stores, sizes, strict=True):
            store.host.grow(size)

    def _stop_sequences(self) -> bool:
        """Apply the policies that stop sequences; each decides about the sequences that the policy before it left running.
        Returns False, having stopped and evicted nothing, if one of them would stop a sequence while a step is in flight: that
        step may finish some sequences, and a sequence with a pending token must not stop."""
        state, room = self.state, 0
        state.clients = fairness.priority_clients(state)
        for policy in (fairness.apply_priority, preemption.preempt, fairness.rebalance_slots):
            decision = policy(state)
            room = max(room, decision.room)
            if not decision.stops:
                continue
            if state.in_flight:
                return False
            preemption.evict_idle(state, room)
            for seq in decision.stops:
                state.stop(seq, decision.held)
                if decision.frees_kv:
                    preemption.release_kv(state, seq)
            if decision.frees_kv:
                room = preemption.running_need(state)
        preemption.evict_idle(state, room)
        state.others_wait = fairness.others_wait(state)
        return True

    def _decode(self, budget: int) -> list[Row]:
        """Make the rows of sequences with one token to compute: of all of them, in a short step of some in turn. Half of a
        short step is for prefill if there is any."""
        state = self.state
        if budget == state.config.most_tokens:
            return decode_rows(state, state.running)
        decoding = [seq for seq in state.running if seq.uncached == 1 and seq.given is None]
        if len(decoding) < len(state.running) or (len(state.waiting) and state.table.has_place):
            budget //= 2
        return decode_rows(state, self._round_robin.take(decoding, budget))

    def _prefill(self, budget: int, decoding: int) -> list[Row]:
        """Make the rows of sequences that have more than one token to compute and of those that can start, for a step of at
        most `budget` tokens, `decoding` of which are decoded. A short step has as few draws."""
        state, scores = self.state, MAX_SCORES
        short, budget = budget < state.config.most_tokens, budget - decoding
        planned: set[bytes] = set()
        rows: list[Row] = []

        def add(seq: Sequence) -> None:
            nonlocal budget, scores
            if row := prefill_row(state, seq, budget, scores, planned):
                rows.append(row)
                scores -= len(row.expected)
                budget -= max(row.count, row.draws) if short else row.count

        if decoding < len(state.running):
            for seq in [seq for seq in state.running if seq.uncached > 1 or seq.given is not None]:
                if budget > 0:
                    add(seq)
        while budget > 0 and state.table.has_place:
            waiting = admission.next_sequence(state)
            if waiting is None or not admission.start(state, waiting, budget):
                break
            add(waiting)
        return rows

    def sequences_of(self, plan: Plan) -> list[Sequence]:
        """Return the sequence of each row of a plan that is not committed."""
        return [row.seq for row in self.state.in_flight[plan.step]]

    def advanced(self, seconds: float) -> None:
        """Record that the recurrent states of a plan have advanced by accepted drafts, which took so long."""
        assert self.state.states is not None
        self.state.states.advanced()
        self.drafts.advanced(seconds)

    def launched(self, plan: Plan) -> None:
        """Record that the step is in flight."""
        output.launched(self.state, self.state.in_flight[plan.step])

    def commit(self, plan: Plan, sampled: SampledTokens) -> list[Sample]:
        """Record what the oldest step in flight sampled: tokens, forks, finished children. Returns the samples of these. Rows
        of children that finished while the step was in flight are skipped."""
        state = self.state
        rows, now, credit = state.in_flight.pop(plan.step), state.clock(), state.credit
        credit.step_ended(fairness.tokens_by_client(rows, plan.num_tokens, credit.only_client), now, state.others_wait)
        self.drafts.ended(plan.step, now)
        samples = output.record(state, rows, sampled, self.drafts.learn)
        credit.committed(state.clock() - now)
        return samples

    def offload_all(self) -> Plan:
        """Stop every sequence and offload its blocks, the first in rank first, as far as host memory has room. Returns a plan
        of copies."""
        state = self.state
        for store in state.stores:
            store.begin()
        for seq in sorted(state.running, key=lambda seq: seq.rank):
            state.stop(seq)
        for store in state.stores:
            store.offload_all()
        self._planned += 1
        return copies_only(self._planned, state.store.moves, state.state_advances, state.state_moves, state.window_moves)

    def fail_stuck(self) -> list[Sample]:
        """Finish the next group with an error, if nothing runs and nothing can start."""
        seq, state = admission.next_sequence(self.state), self.state
        assert seq is not None
        need = -(-seq.length // state.config.block_tokens)
        reason = f"{need} KV blocks are needed to continue and cannot be freed from a pool of {state.store.device.size}"
        return state.finish_all(seq.state, "error", reason)

    # ── groups ────────────────────────────────────────────────────────────────────────────────────────────────────────
    def submit(
        self, group: Group, client: str, seed: int, eos: frozenset[int], stops: StopStrings | None = None
    ) -> list[Sample]:
        """Queue a group. Returns the samples of the children that are complete already. Raises ValueError if the id is taken,
        if one child could never fit into the pool or has tokens after a stop string, or if its complete children would already
        end it."""
        state = self.state
        if group.id in state.groups:
            raise ValueError(f"group id {group.id!r} is in use by a group that is not finished; choose another")
        size = state.config.block_tokens
        need = -(-(len(group.prompt) + group.sampling.max_tokens) // size)
        if need > state.store.device.size:
            raise ValueError(
                f"prompt of {len(group.prompt)} + max_tokens {group.sampling.max_tokens} need {need} KV blocks of "
                f"{size} tokens, the pool has {state.store.device.size}; lower max_tokens or raise kv_tokens"
            )
        queued = GroupState(Submission(group, client, state.submitted, seed, state.clock()), eos, stops)
        enough = group.sampling.finish_after
        if enough is not None and len(queued.complete) >= enough:
            raise ValueError(
                f"finish_after={enough}: {len(queued.complete)} of the partial samples are complete; leave them out"
            )
        return state.add(queued)

    def chunks(self, group_id: str, since: Mapping[int, int], least: int, most: int) -> list[TokenChunk]:
        """Return new tokens of unfinished children beyond their first `since` tokens (by index, 0 if not named): of those with
        at least `least` new ones, at most `most` tokens in all, longest first. [] for an unknown id."""
        group = self.state.groups.get(group_id)
        return [] if group is None or not group.forked else chunks_of(group.sequences.values(), since, least, most)

    @property
    def overdue(self) -> bool:
        """Return whether a group may be past its deadline, or pinned KV may have expired."""
        now = self.state.clock()
        return self.state.deadlines.due(now) or self.state.pinned.due(now)

    def expire(self) -> list[Sample]:
        """Finish the groups that are past their deadline, and release pinned KV that has expired. Returns the samples of these
        groups."""
        state, now = self.state, self.state.clock()
        state.pinned.expire(now)
        return [sample for group in state.deadlines.take(now) for sample in state.finish_all(group, "deadline")]

    def refresh(self, version: int, kv: str) -> list[Sample]:
        """Record that the weights have another version, with no step in flight. kv: "keep" the KV of live groups, "recompute"
        it, or "abort" the groups. "recompute" drops all KV of started groups, whatever their `max_kv_lag`. A prompt without
        sampled tokens, or of a partial child, keeps KV as old as `max_kv_lag` allows. Returns the samples that this
        finishes."""
        assert kv in ("keep", "recompute", "abort")
        state, samples = self.state, list[Sample]()
        state.version = version
        if kv != "keep":
            state.pinned.release_all()
            state.conversations.forget_kv(version)
        for group in list(state.groups.values()):
            if kv == "abort" and group.started:
                samples += state.finish_all(group, "aborted")
                continue
            if kv != "keep":
                group.own = None
            if kv == "recompute" and group.started:
                group.oldest_kv = version
            samples += self._finish_stale(group)
            for seq in list(group.sequences.values()):
                if kv == "recompute" or not seq.drew:
                    state.tables.drop_older(seq, group.readable_from(version))
        return samples

    def _finish_stale(self, group: GroupState) -> list[Sample]:
        """Finish the children whose first token is too many versions behind the weights, including those whose group has not
        forked."""
        state, lag = self.state, group.group.sampling.max_version_lag
        if lag is None:
            return []
        oldest = state.version - lag
        samples = [state.finish(seq, "stale") for seq in list(group.sequences.values()) if is_stale(seq, oldest)]
        if not group.forked:
            stale = [child for index in group.resumed if is_stale(child := Sequence(group, index), oldest)]
            samples += [state.count_finished(child, "stale", state.clock() - group.arrived) for child in stale]
            group.leave_out([child.index for child in stale])
            samples += [] if group.uncancelled else state.finish_all(group, "aborted")
        return samples


def is_stale(seq: Sequence, oldest: int) -> bool:
    """Return whether weights before version `oldest` sampled the first token of a sequence."""
    return bool(seq.spans) and seq.spans[0][1] < oldest


def chunks_of(sequences: Iterable[Sequence], since: Mapping[int, int], least: int, most: int) -> list[TokenChunk]:
    """Return the new tokens of these; see `Scheduler.chunks`."""
    new = [(len(seq.output) - since.get(seq.index, 0), seq) for seq in sequences]
    chunks = []
    for count, seq in sorted((each for each in new if each[0] >= least), key=lambda each: (-each[0], each[1].index)):
        if most > 0:
            chunks.append(seq.chunk(len(seq.output) - count, min(count, most)))
        most -= count
    return chunks
