"""The scheduler: which tokens of which sequences the next step computes, and where their KV lives. Policy only, in ints.

`plan()` decides, the engine launches that and says so (`launched()`), `commit()` records what was drawn: at once, or
after the next step has been planned and launched (`engine.in_flight`). One call of `plan()`:

    1. foreground    clients that were idle go first: while they have work, the sequences of all others stop (engine.shares)
    2. make room     the running sequences need blocks to grow; if too few, the last in rank are preempted (engine.pressure);
                     all slots are taken and a client with less than its share waits: others give some up
    3. decode        one row for each sequence that has one token to compute; in turn, where steps are to be short
    4. prefill       chunks for the running sequences that have more, while the token budget lasts
    5. start         waiting sequences: forked, preempted or reset ones, then fresh prompts
    6. mirror        ahead of pressure, copies of full blocks to host memory

It is the only writer of sequences, groups, both pools and the prefix index.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from heapq import heappop, heappush
from itertools import islice

from engine.config import EngineConfig
from engine.kv.store import BlockStore
from engine.scheduling.block_tables import BlockTables
from engine.scheduling.counters import Counters
from engine.scheduling.plan import Drawn, Plan, copies_only
from engine.scheduling.preemption import Pressure
from engine.scheduling.rows import Rows, plan_of
from engine.scheduling.running import RunningTable
from engine.scheduling.sequence import GroupState, Row, Sequence
from engine.scheduling.shares import Shares, Turns
from engine.scheduling.sharing import shared_prefixes
from engine.scheduling.waiting import WaitingQueue
from engine.types import Begun, FinishReason, Group, Sample


class Scheduler:
    """Decides the steps; the module's docstring has the order. `max_blocks`: blocks of the longest sequence of the model."""

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
        self.store = BlockStore(device_blocks, host_blocks, config.prefix_cache)
        self.running_table = RunningTable(config.max_num_seqs, min(max_blocks, device_blocks))
        self.running = self.running_table.sequences
        self.running_of = self.running_table.of_client
        self.waiting = WaitingQueue()
        self.groups: dict[str, GroupState] = {}
        self.version = 0
        self.admitting = True
        """False: groups that have not begun stay where they are"""
        self.counters = counters
        self.tables = BlockTables(config, self.store, counters)
        self.rows = Rows(config, self.store, self.tables)
        self.pressure = Pressure(config, self.store, counters)
        self.shares = Shares(config.foreground_s)
        self._clock = clock
        self._submitted = 0
        self._planned = 0
        self._deadlines: list[tuple[float, int, str]] = []
        """heap of (time, number of the group, its id)"""
        self._held = False
        """the last plan left clients out that have work"""
        self._timed = 0.0
        """when the last step was committed, or the one in flight planned if that was later"""
        self._committing = 0.0
        """seconds of the last commit, part of the next step"""
        self._turns = Turns()
        self._rows: dict[int, list[Row]] = {}
        """of the steps that were planned and not committed, by number: the way back from a plan to its sequences"""

    # ── groups ────────────────────────────────────────────────────────────────────────────────────────────────────────
    def submit(self, group: Group, client: str, seed: int, eos: frozenset[int]) -> list[Sample]:
        """Take a group on. Returns the children that are complete already. Raises ValueError if the id is taken, one child
        could never fit into the pool, or as many are complete as end the group."""
        if group.id in self.groups:
            raise ValueError(f"group id {group.id!r} is in use by a group that is not finished; choose another")
        need = -(-(len(group.prompt) + group.sampling.max_tokens) // self.block_size)
        if need > self.store.device.size:
            raise ValueError(
                f"prompt of {len(group.prompt)} + max_tokens {group.sampling.max_tokens} need {need} KV blocks of "
                f"{self.block_size} tokens, the pool has {self.store.device.size}; lower max_tokens or raise kv_tokens"
            )
        state = GroupState(group, client, self._submitted, seed, self._clock(), eos)
        enough = group.sampling.finish_after
        if enough is not None and len(state.complete) >= enough:
            raise ValueError(f"finish_after={enough}: {len(state.complete)} of the begun children are complete; leave them out")
        self._submitted += 1
        samples = [self._complete(state, begun) for begun in group.begun if begun.index in state.complete]
        if not state.fresh and not state.resumed:
            return samples
        self.groups[group.id] = state
        for index in state.fresh[:1] or state.resumed:
            state.sequences[index] = Sequence(state, index)
            self.waiting.put(state.sequences[index])
        if group.sampling.deadline_s is not None:
            heappush(self._deadlines, (state.arrived + group.sampling.deadline_s, state.number, group.id))
        self.shares.arrived(client, state.arrived)
        return samples

    def _complete(self, state: GroupState, begun: Begun) -> Sample:
        """The sample of a child that had its last token when it came."""
        reason = state.complete[begun.index]
        state.finished += 1
        self.counters.ended[reason] += 1
        return Sequence(state, begun.index, begun).sample(reason, 0.0)

    @property
    def has_work(self) -> bool:
        """Something runs, or waits and may start."""
        if self.admitting:
            return bool(self.groups)
        return bool(self.running or self.waiting.clients(begun=True))

    def abort(self, group_id: str, index: int | None = None) -> list[Sample]:
        """End the children that are not finished, or one of them. Returns them with what they have; [] for an unknown id or
        index. A child of a group that has not forked ends when it does, unless none is left then."""
        state = self.groups.get(group_id)
        if state is None:
            return []
        if index is None:
            return self._end_group(state, "aborted")
        if state.forked:
            return [self._end(state.sequences[index], "aborted")] if index in state.sequences else []
        if index in state.fresh or index in state.resumed:
            state.cancelled.add(index)
        left = len(state.fresh) + len(state.resumed) - len(state.cancelled)
        return [] if left else self._end_group(state, "aborted")

    @property
    def overdue(self) -> bool:
        """A group may be past its deadline."""
        return bool(self._deadlines) and self._deadlines[0][0] <= self._clock()

    def expire(self) -> list[Sample]:
        """End the groups that are past their deadline. Returns their unfinished children with what they have."""
        samples: list[Sample] = []
        while self.overdue:
            _, number, group_id = heappop(self._deadlines)
            state = self.groups.get(group_id)
            if state is not None and state.number == number:
                samples += self._end_group(state, "deadline")
        return samples

    def plan(self) -> Plan:
        """Decide the next step. No rows: nothing can be done now."""
        now = self._clock()
        most = self.shares.most_tokens(self.config.max_batch_tokens, now)
        self.store.begin()
        clients = self._foreground()
        self._hold_others(clients)
        self._preempt(self.pressure.victims(self.running))
        self._yield_to_starved(clients)
        self._make_room(clients, most)
        planned: set[bytes] = set()
        rows = self.rows.decode(self._in_turn(most), self.version)
        decoding = len(rows)
        budget = most - decoding
        unfinished = [seq for seq in self.running if seq.uncached > 1] if decoding < len(self.running) else []
        for seq in unfinished:
            if budget and (row := self.rows.prefill(seq, budget, planned, self.version)):
                rows.append(row)
                budget -= row[2]
        while budget > 0 and len(self.running) < self.config.max_num_seqs:
            seq = self._next(clients)
            if seq is None or not self._start(seq, budget, planned):
                break
            if row := self.rows.prefill(seq, budget, planned, self.version):
                rows.append(row)
                budget -= row[2] if most == self.config.max_batch_tokens else max(row[2], row[3])
        self.pressure.mirror(self.running)
        if len(rows) > decoding:
            rows.sort(key=lambda row: row[0].age)
        self._planned += 1
        if not rows:
            return copies_only(self._planned, self.store.moves)
        shared = tuple(shared_prefixes(rows, self.block_size)) if self.config.share_prefix else ()
        pending, self._rows[self._planned] = bool(self._rows), rows
        if not pending:
            self._timed = now - self._committing
        return plan_of(self._planned, rows, shared, self.store.moves, self.running_table, self.block_size, pending)

    def sequences_of(self, plan: Plan) -> list[Sequence]:
        """The sequence of each row of a plan that is not committed."""
        return [row[0] for row in self._rows[plan.step]]

    @property
    def must_preempt(self) -> bool:
        """True if the next plan would stop a sequence. The step in flight must be committed first: it may end some, and no
        sequence stops while a token of it is pending."""
        clients = self._foreground()
        seq = self._first_waiting(clients)
        return (
            any(client not in clients for client in self.running_of)
            or self.pressure.must_preempt(self.running)
            or bool(seq and self._sequences_over_share(seq, clients))
        )

    def offload_all(self) -> Plan:
        """Stop every sequence and offload its blocks, the first in rank first, as far as host memory has room. Returns a plan
        of copies."""
        self.store.begin()
        for seq in sorted(self.running, key=lambda seq: seq.rank):
            self._stop(seq)
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
                self._stop(seq)
                self.tables.truncate(seq, 0)
                self.counters.soft_resets += 1
        self.store.discard(broken)

    def launched(self, plan: Plan) -> None:
        """Note that the step is in flight: from here on its KV counts as computed, since whatever reads it comes later on the
        device, and the tokens that it samples are pending."""
        size, at = self.block_size, 0
        for seq, start, count, draws in self._rows[plan.step]:
            forked = seq.state.forked
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

    def commit(self, plan: Plan, drawn: Drawn) -> list[Sample]:
        """Record what the oldest step in flight drew: tokens, forks, ends. Returns the children that ended. Rows of those
        that ended while the step was under way are passed over."""
        samples: list[Sample] = []
        racing: list[tuple[Sequence, FinishReason]] = []
        tokens, logprobs, finite = drawn.tokens.tolist(), drawn.logprobs.tolist(), drawn.finite.tolist()
        raws = drawn.raw_logprobs
        size, at = self.block_size, 0
        rows, now = self._rows.pop(plan.step), self._clock()
        self.shares.computed(self._tokens_of_clients(rows, plan.num_tokens), now - self._timed, self._held)
        self._timed = now
        for seq, start, count, draws in rows:
            if seq.ended:
                self.counters.unused_draws += draws
                at += draws
            elif draws:
                forks = not seq.state.forked
                for child in self._fork(seq) if forks else (seq,):
                    raw = None if raws is None else float(raws[at])
                    reason = self._take_token(child, tokens[at], logprobs[at], raw, finite[at])
                    if reason in ("stop", "length") and seq.state.races:
                        racing.append((child, reason))
                    elif reason is not None:
                        samples.append(self._end(child, reason, child.not_finite() if reason == "error" else None))
                    elif child.pending and child.cached % size == 0:
                        self.tables.fill(child, start + count)  # the next step computes the token that is known only now
                    at += 1
                if forks:
                    samples += [each for index in seq.state.cancelled for each in self.abort(seq.state.group.id, index)]
        assert at == len(tokens)
        samples += self._finish(racing) if racing else []
        self._committing = self._clock() - now
        return samples

    def launch_failed(self, plan: Plan, reason: str) -> list[Sample]:
        """End the groups of a plan that could not be launched with an error; the plan is void."""
        return self._fail([row[0] for row in self._rows.pop(plan.step)], reason)

    def step_failed(self, plan: Plan, reason: str) -> list[Sample]:
        """End every group that runs with an error, clear the prefix index and drop the KV of those that wait: a launched step
        failed, and any of them may have taken over KV that it wrote. The plan is void."""
        del self._rows[plan.step]
        self.store.forget_all()
        for seq in self.waiting:
            self.tables.truncate(seq, 0)
        return self._fail(list(self.running), reason)

    def _fail(self, sequences: list[Sequence], reason: str) -> list[Sample]:
        """End the groups of these with an error. What their blocks hold is not reused."""
        states = {seq.state.number: seq.state for seq in sequences if not seq.ended}
        for seq in sequences:
            self.tables.distrust(seq)
        return [sample for state in states.values() for sample in self._end_group(state, "error", reason)]

    def fail_stuck(self) -> list[Sample]:
        """Nothing runs, nothing can start: end the group that is next with an error rather than wait for ever."""
        seq = self._first_waiting(self._foreground())
        assert seq is not None
        need = -(-seq.length // self.block_size)
        reason = f"{need} KV blocks are needed to go on and cannot be freed from a pool of {self.store.device.size}"
        return self._end_group(seq.state, "error", reason)

    def refresh(self, version: int, kv: str) -> list[Sample]:
        """The weights are another version now. `kv`: "keep" the KV of live sequences, "recompute" it, or "abort" them.
        Recomputed is all KV of groups that have begun, whatever their `max_kv_lag`. A prompt of which nothing was drawn
        yet, or of a child that goes on, keeps KV as old as that allows. Returns the samples that this ends."""
        assert kv in ("keep", "recompute", "abort")
        self.version = version
        samples: list[Sample] = []
        for state in list(self.groups.values()):
            if kv == "abort" and state.begun:
                samples += self._end_group(state, "aborted")
                continue
            if kv == "recompute" and state.begun:
                state.oldest_kv = version
            for seq in list(state.sequences.values()):
                lag = state.group.sampling.max_version_lag
                if lag is not None and seq.spans and seq.spans[0][1] < version - lag:
                    samples.append(self._end(seq, "stale"))
                elif kv == "recompute" or not seq.drew:
                    self.tables.drop_older(seq, state.readable_from(version))
        return samples

    # ── who is computed ───────────────────────────────────────────────────────────────────────────────────────────────
    def _foreground(self) -> Collection[str]:
        """The clients whose sequences may be computed now."""
        return self.shares.foreground({*self.running_of, *self.waiting.clients(begun=not self.admitting)})

    def _hold_others(self, clients: Collection[str]) -> None:
        """Stop the sequences of all but these clients. Their KV stays until its room is needed."""
        others = [seq for seq in self.running if seq.state.client not in clients]
        for seq in others:
            self._stop(seq, held=True)
        self._held = bool(others) or any(c not in clients for c in self.waiting.clients(not self.admitting))

    def _in_turn(self, most: int) -> list[Sequence]:
        """The running sequences that may decode in a step of at most `most` tokens: all, but in a short step in turn. Half of a
        short step is for prefill if there is any to do."""
        if most == self.config.max_batch_tokens:
            return self.running
        decoding = [seq for seq in self.running if seq.uncached == 1]
        if len(decoding) < len(self.running) or (len(self.waiting) and len(self.running) < self.config.max_num_seqs):
            most //= 2
        return self._turns.take(decoding, most)

    def _tokens_of_clients(self, rows: list[Row], total: int) -> Mapping[str, int]:
        """Tokens of a step by client."""
        if (client := self.shares.only_client) is not None:
            return {client: total}
        tokens = Counter[str]()
        for seq, _, count, _ in rows:
            tokens[seq.state.client] += count
        return tokens

    def _next(self, clients: Collection[str]) -> Sequence | None:
        """Who waits and is next to start. If nothing runs, that is whoever has KV on the device that another would take."""
        seq = self._first_waiting(clients)
        if seq is None or self.running or self._held:
            return seq
        return self.pressure.first_alone(seq, self.waiting)

    def _first_waiting(self, clients: Collection[str]) -> Sequence | None:
        return self.waiting.next(self.running_of, clients, begun=not self.admitting)

    # ── starting and stopping ─────────────────────────────────────────────────────────────────────────────────────────
    def _start(self, seq: Sequence, budget: int, planned: set[bytes]) -> bool:
        """Let a waiting sequence run if its blocks and the next chunk fit beside what runs."""
        self.tables.cut_lost(seq)
        self.tables.find_in_use(seq, self.version)
        if not self.pressure.fits(seq, self.running, budget):
            return False
        least_run = self.pressure.least_run(seq)
        self.waiting.remove(seq, served=True)
        seq.state.begun = True
        for i, block in enumerate(seq.blocks):
            self.store.pin(block, full=i < seq.cached // self.block_size)
        self.running_table.enter(seq, least_run)
        return True

    def _stop(self, seq: Sequence, held: bool = False) -> None:
        """From running to waiting. It keeps its blocks. held: because other clients go first."""
        assert not seq.pending, "a sequence stops whose last token is not known yet"
        self.running_table.leave(seq)
        for block in seq.blocks:
            self.store.unpin(block)
        seq.held = held
        self.waiting.put(seq)

    def _preempt(self, victims: list[Sequence]) -> None:
        """Stop the victims: their blocks move to host memory, or are dropped (soft reset)."""
        for seq in victims:
            self._stop(seq)
            if not self.pressure.offload(seq):
                self._soft_reset(seq)
        if victims:
            self.pressure.reclaim_idle(sum(self.pressure.need(seq) for seq in self.running))

    def _yield_to_starved(self, clients: Collection[str]) -> None:
        """Every slot is taken and another client's turn has come: some stop. Their KV stays until its room is needed."""
        seq = self._next(clients)
        if seq is None:
            return
        for last in self._sequences_over_share(seq, clients):
            self._stop(last)

    def _make_room(self, clients: Collection[str], most: int) -> None:
        """Blocks that nobody uses leave for the sequence that is next; for all that can start in a step of `most` tokens where
        some clients go before others, or did."""
        seq = self._next(clients)
        slots = min(self.config.max_num_seqs, most) - len(self.running)
        if seq is None or not self.store.idle or slots <= 0:
            return
        upcoming = [seq]
        if self._held or seq.held:
            upcoming = [*islice(self.waiting.of(clients, begun=not self.admitting), slots)]
        self.pressure.make_room(upcoming, self.running, most)

    def _sequences_over_share(self, seq: Sequence, clients: Collection[str]) -> list[Sequence]:
        """Who gives its slot to the client of `seq`, which waits."""
        if len(self.running) < self.config.max_num_seqs:
            return []
        waiting = {client: count for client, count in self.waiting.counts().items() if client in clients}
        return self.pressure.sequences_over_share(seq.state.client, waiting, self.running_of, self.running)

    def _soft_reset(self, seq: Sequence) -> None:
        """Give the KV up but for the leading blocks that others use; the rest is prefilled again from whatever the prefix index
        still has."""
        self.counters.soft_resets += self.tables.cut_unused(seq)

    # ── after a step ──────────────────────────────────────────────────────────────────────────────────────────────────
    def _fork(self, seq: Sequence) -> list[Sequence]:
        """The prompt is cached: all children share its blocks. Those that find no place to run wait like anyone else, and so do
        those that have more to prefill. Returns the fresh ones, in the order of their draws."""
        seq.state.forked = True
        seq.num_next_samples = 1
        children = [seq, *seq.fork()]
        for child in children[1:]:
            seq.state.sequences[child.index] = child
            self.store.share(child.blocks)
            if len(self.running) < self.config.max_num_seqs and child.index not in seq.state.resumed:
                for block in child.blocks:
                    self.store.pin(block, full=True)
                self.running_table.enter(child, self.config.min_run_tokens)
            else:
                self.waiting.put(child)
        self.counters.forks += len(children) - 1
        self.counters.fork_saved_tokens += (len(children) - 1) * seq.num_prompt
        self.counters.fork_shared_blocks += (len(children) - 1) * (seq.num_prompt // self.block_size)
        return children[: len(seq.state.fresh)]

    def _take_token(self, seq: Sequence, token: int, logprob: float, raw: float | None, finite: bool) -> FinishReason | None:
        """Append what was drawn. Returns why that ends the child, if it does."""
        if not finite:
            self.tables.distrust(seq)
            return "error"
        seq.append(token, logprob, raw, self.version)
        self.counters.generated_tokens += 1
        state, sampling = seq.state, seq.state.group.sampling
        if token in state.eos and len(seq.output) > sampling.min_tokens:
            return "stop"
        if seq.num_prompt + len(seq.output) == seq.limit:
            return "length"
        if sampling.finish_after is not None and not state.races and len(seq.output) >= sampling.min_len_to_cut:
            return "cut"
        return None

    def _finish(self, racing: list[tuple[Sequence, FinishReason]]) -> list[Sample]:
        """End children that a step has ended, of groups that end with their first `finish_after`, and the siblings that are to
        be cut then. The shorter child counts first, of equal ones the lower index; one that comes too late is cut as well."""
        samples = []
        for seq, reason in sorted(racing, key=lambda each: (each[0].state.number, len(each[0].output), each[0].index)):
            if not seq.ended:  # cancelled where its group forked
                samples.append(self._end(seq, reason if seq.state.races else "cut"))
        for state in {seq.state.number: seq.state for seq, _ in racing if not seq.state.races}.values():
            least = state.group.sampling.min_len_to_cut
            late = [seq for seq in state.sequences.values() if len(seq.output) >= least]
            samples += [self._end(seq, "cut") for seq in late]
        return samples

    def _end(self, seq: Sequence, reason: FinishReason, error: str | None = None) -> Sample:
        seq_ran = seq.running
        if seq_ran:
            self.running_table.leave(seq)
        else:
            self.waiting.remove(seq)
        for block in reversed(seq.blocks):  # so that the least recently used end of a chain is its tail, not its root
            self.store.disown(block, used=seq_ran)
        seq.blocks.clear()
        seq.ended = True
        state, now = seq.state, self._clock()
        state.finished += reason in ("stop", "length")
        del state.sequences[seq.index]
        if not state.sequences:
            del self.groups[state.group.id]
            self.shares.left(state.client, now)
        self.counters.ended[reason] += 1
        return seq.sample(reason, now - state.arrived, error)

    def _end_group(self, state: GroupState, reason: FinishReason, error: str | None = None) -> list[Sample]:
        """End every child that is not finished; before the fork that is all n of them."""
        if not state.forked:
            only = self._end(state.sequences[state.fresh[0]], reason, error)
            others = [*state.fresh[1:], *state.resumed]
            self.counters.ended[reason] += len(others)
            return [only, *(Sequence(state, i).sample(reason, only.seconds, error) for i in others)]
        return [self._end(seq, reason, error) for seq in list(state.sequences.values())]
