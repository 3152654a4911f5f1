"""The scheduler and the block store under random schedules, without torch: KV cells are Python
tuples (token id, version, a hash of these and of all cells before).

A step executes the plan on these cells, as another process would: every plan is sent as bytes. A token is a hash of all ids
that its row sees through the block table, so any wrong block shows in what comes out; the versions show KV of other weights,
and the hash KV that was computed behind other KV.
Copies fail on demand. Where steps overlap, the scheduler plans the next one before it is told what the last one drew.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np

from rollout.engine.kv.block import BlockCopies, PoolCounts, SlotCounts, WindowCounts
from rollout.engine.scheduling.build import open_scheduler
from rollout.engine.scheduling.output import copies_failed
from rollout.engine.scheduling.plan import Plan, SampledTokens, TopLogprobs
from rollout.engine.scheduling.stops import stops_of
from rollout.engine.values import Group, Limits, PartialSample, Sample, Sampling
from rollout.engine.vocabulary import Vocabulary
from rollout.transport.checks import NOTHING, check_kv, version_at
from tests.support.configs import engine_config
from tests.support.invariants import check
from tests.support.plans import sent

VOCAB = 97
EOS = 0
TOKEN_S = 0.01
Cell = tuple[int, int, int]


def cell(before: Cell | None, token: int, version: int) -> Cell:
    """Make the KV of a token that `version` computed behind `before`."""
    return token, version, hash((before and before[2], token, version))


Rules = tuple[tuple[int, ...], ...]
"""how the logits of a draw are changed, as far as it is other than for its siblings: tokens seen, (token, how often)"""


def draw(ids: tuple[int, ...], seed: int, index: int, rules: Rules = ()) -> int:
    """Draw the next token behind these: anything at all; with every other seed mostly what can be guessed, with half of these
    the end behind every other 5."""
    number = hash((ids, seed, index, rules))
    if seed % 4 == 3 and ids[-1] == 5 and number % 2:
        return EOS
    return 1 + ids[-1] % 5 if seed % 2 and number // 2 % 4 else number // 8 % VOCAB


VOCABULARY = Vocabulary([b"abc"[token % 3 :][: 1 + token % 2] for token in range(VOCAB)])


def stop_of(group: Group, tokens: list[int]) -> tuple[int, str] | None:
    """Find where the first stop string begins in the text of these tokens, and which that is, by plain search."""
    text = VOCABULARY.text(tokens).decode()
    return min(((text.find(string), string) for string in group.sampling.stop if string in text), default=None)


def ended_by(group: Group, tokens: list[int]) -> bool:
    """Whether a child with these tokens has ended by its last one, other than by their number."""
    return bool(tokens) and (tokens[-1] in eos_of(group) or stop_of(group, tokens) is not None)


def rules_of(group: Group, output: list[int]) -> Rules:
    """Return what a child with this output must be drawn by."""
    sampling, prompt = group.sampling, group.prompt.tolist()
    if not sampling.changes_logits:
        return ()
    repeats = sampling.repetition_penalty != 1
    penalised = repeats or sampling.presence_penalty or sampling.frequency_penalty
    seen = {*(prompt if repeats else ()), *(output if penalised else ())}
    return tuple(sorted(seen)), *(sorted(Counter(output).items()) if penalised else ())


def rules_by_draw(plan: Plan) -> dict[int, Rules]:
    """Return the rules that a plan has, by draw."""
    found: dict[int, Rules] = {}
    for each in plan.adjustments:
        counts = sorted(zip(each.counted.tolist(), each.counts.tolist(), strict=True))
        assert len(set(each.seen.tolist())) == len(each.seen)
        found |= {each.first + i: (tuple(sorted(each.seen.tolist())), *counts) for i in range(each.draws)}
    return found


def logprob(ids: tuple[int, ...], token: int) -> float:
    """Return the log-prob of a token behind these."""
    return -float(hash((ids, token)) % 1000)


def eos_of(group: Group) -> frozenset[int]:
    return frozenset() if group.sampling.ignore_eos else frozenset({EOS})


def expected(group: Group) -> list[list[int]]:
    """Return what each child must be."""
    children = []
    for index in range(group.sampling.n):
        tokens: list[int] = []
        while len(tokens) < group.sampling.max_tokens and not ended_by(group, tokens):
            seen = (*group.prompt.tolist(), *tokens)
            tokens.append(draw(seen, group.sampling.seed or 0, index, rules_of(group, tokens)))
        children.append(tokens)
    return children


def top_of(tokens: list[int], k: int) -> np.ndarray:
    """Return [tokens, k] ids that stand for the most probable ones where these were drawn."""
    return (np.add.outer(tokens, np.arange(k)) % VOCAB).astype(np.int32)


def most_probable(tokens: list[int], plan: Plan) -> TopLogprobs | None:
    """Return what a step gives that drew `tokens`: in as many columns as one of its draws asks for."""
    ids = top_of(tokens, int(plan.sampling["top_logprobs"].max(initial=0)))
    return TopLogprobs(ids, -ids.astype(np.float32)) if ids.size else None


def check_top(sample: Sample, k: int) -> None:
    """Assert that each token has the most probable ones of its own draw, and that there are none where nobody asked."""
    ids, logprobs = sample.top_ids, sample.top_logprobs
    if not k:
        assert ids is None and logprobs is None
    else:
        assert ids is not None and logprobs is not None and logprobs.dtype == np.float32
        want = top_of(sample.token_ids.tolist(), k)
        assert np.array_equal(ids, want) and ids.shape == want.shape and np.array_equal(logprobs, -want)


def check_logprobs(group: Group, sample: Sample) -> None:
    prompt, tokens = tuple(group.prompt.tolist()), tuple(sample.token_ids.tolist())
    assert sample.logprobs.tolist() == [logprob(prompt + tokens[:at], token) for at, token in enumerate(tokens)]


def check_lag(sample: Sample, lag: int | None) -> None:
    """Assert that no token was drawn by weights further ahead of the first one's than `max_version_lag`."""
    versions = [version for _, version in sample.weight_versions]
    assert lag is None or not versions or versions[-1] - versions[0] <= lag


def check_kv_versions(sample: Sample, read: dict[tuple[str, int, int], list[int]]) -> None:
    """Assert that a sample says which weights computed the KV that each of its draws attended to."""
    for at in range(len(sample.token_ids)):
        attended = read.get((sample.group_id, sample.index, at))
        if attended is not None:
            said = [version_at(sample.weight_versions, at)] * (sample.prompt_tokens + at)
            for token, position, version in sample.kv_versions:
                if token <= at:
                    said[position:] = [version] * len(said[position:])
            assert said == attended, "a sample attended to KV of other weights than it says"


class Harness:
    def __init__(
        self,
        device_blocks: int,
        host_blocks: int,
        overlap: bool = False,
        slots: SlotCounts | None = None,
        windows: WindowCounts | None = None,
        **config: Any,
    ) -> None:
        """slots: of recurrent state, if the model is to have any: the state after a token is its cell. windows: of layers with
        a sliding window, if it is to have any: their cells are the same, in pools of their own."""
        self.config = engine_config(kv_tokens=1, overlap_steps=overlap, **config)
        self.now = 0.0
        """of the scheduler's clock; a token takes TOKEN_S"""
        pools = PoolCounts(device_blocks, host_blocks, device_blocks, slots, windows)
        self.scheduler = open_scheduler(self.config, pools, clock=lambda: self.now)
        self.states, self.host_states = ([[None]] * each for each in slots or (0, 0))
        self.copied_states = 0
        self.inputs: list[tuple[list[int], int]] = []
        """of each row of the newest step: its tokens, and the version of the weights"""
        self.snapshots: dict[bytes, list[Cell | None]] = {}
        size = self.config.block_tokens
        self.device: list[list[Cell | None]] = [[None] * size for _ in range(device_blocks)]
        self.host: list[list[Cell | None]] = [[None] * size for _ in range(host_blocks)]
        self.windows, pools_of_windows = windows, (windows.device, windows.host) if windows else (0, 0)
        self.window_device, self.window_host = ([[None] * size for _ in range(each)] for each in pools_of_windows)
        self.groups: dict[str, Group] = {}
        self.oldest: dict[str, int] = {}
        """oldest version whose KV a group may read, from when it began"""
        self.clients: dict[str, str] = {}
        self.own: dict[str, list[Cell | None]] = {}
        """KV of the turn that a group continues, which it may read whatever its age"""
        self.turns: dict[tuple[str, int], list[Cell | None]] = {}
        """KV of the children that ended"""
        self.got: dict[tuple[str, int], Sample] = {}
        self.read: dict[tuple[str, int, int], list[int]] = {}
        """which versions computed the KV that each draw attended to, by group, child and tokens of output before it"""
        self.overlap = overlap
        self.flight: tuple[Plan, SampledTokens] | None = None
        """the step that was launched and is not committed"""
        self.copied_blocks = 0
        self.mirrors_fail = False
        self.stamped: dict[bytes, list[Cell | None]] = {}
        add = self.scheduler.state.store.index.add

        def stamp(block: Any) -> None:
            add(block)
            self.stamped.setdefault(block.key, list(self.device[block.device]))

        self.scheduler.state.store.index.add = stamp  # type: ignore[method-assign]
        note = self.scheduler.state.conversations.note

        def look(seq: Any) -> None:
            note(seq)
            cells = [each for block in seq.blocks for each in self.cells(block)]
            self.turns[seq.state.group.id, seq.index] = cells[: seq.cached]

        self.scheduler.state.conversations.note = look  # type: ignore[method-assign]

    def cells(self, block: Any) -> list[Cell | None]:
        return self.host[block.host] if block.device is None else self.device[block.device]

    def submit(
        self,
        id: str,
        prompt: list[int],
        client: str = "",
        indices: list[int] | None = None,
        partials: dict[int, int] | None = None,
        score: bool = False,
        after: tuple[str, int] | None = None,
        **sampling: Any,
    ) -> bool:
        """Submit a group. `partials`: tokens that children have already, at most; all but the last one that they will have.
        `score`: tokens are given, others than would be drawn."""
        wanted = None if indices is None else tuple(indices)
        group = Group(id, np.array(prompt, np.int32), Sampling(**sampling), wanted, after=after)
        if score:
            group = with_given(group)
        elif partials:
            lag = group.sampling.max_version_lag
            group = with_partials(group, partials, 0 if lag is None else max(0, self.scheduler.state.version - lag))
        group.validate(Limits(), VOCAB, 10_000)
        try:
            stops = stops_of(group, lambda: VOCABULARY)
            self.scheduler.submit(group, client, group.sampling.seed or 0, eos_of(group), stops)
        except ValueError:
            return False
        self.groups[id], self.clients[id] = group, client
        if after is not None and self.clients.get(after[0]) == client:
            self.own[id] = self.turns.get(after, [])
        return True

    def history(self, child: tuple[str, int]) -> list[int]:
        """Return prompt and output of a child that has ended."""
        return [*self.groups[child[0]].prompt.tolist(), *self.got[child].token_ids.tolist()]

    def take(self, samples: list[Sample]) -> None:
        for sample in samples:
            assert (sample.group_id, sample.index) not in self.got, "a child was delivered twice"
            check_kv_versions(sample, self.read)
            group = self.groups[sample.group_id]
            had = None if group.score else {child.index: child for child in group.partials}.get(sample.index)
            check_kv(sample, group, had if len(sample.token_ids) else None, NOTHING)
            self.got[sample.group_id, sample.index] = sample

    def refresh(self, kv: str) -> None:
        self.land()
        version = self.scheduler.state.version + 1
        ended = self.scheduler.refresh(version, kv)
        self.take(ended)
        self.check_stale(version, ended)
        if kv != "keep":
            self.own.clear()
            self.turns.clear()
        for id, oldest in self.oldest.items():
            state = self.scheduler.state.groups.get(id)
            if kv == "recompute":  # whatever lag a new sample allows
                self.oldest[id] = version
            elif state is not None and not state.forked:
                self.oldest[id] = max(oldest, version - state.group.sampling.max_kv_lag)

    def step(self, fail_copy: int | None = None) -> None:
        """Run a step. `fail_copy`: the copies stop after that many of them."""
        self.take(self.scheduler.expire())
        planned = self.scheduler.plan()
        if planned is None:
            assert self.flight, "a decision waits for results, and nothing is in flight"
            self.land()
            planned = self.scheduler.plan()
        assert planned is not None
        plan = sent(planned)
        for seq in self.scheduler.state.running:
            group = seq.state.group
            self.oldest.setdefault(group.id, self.scheduler.state.version - group.sampling.max_kv_lag)
        if plan.moves.mirrors and self.mirrors_fail:
            fail_copy = plan.moves.blocks - len(plan.moves.mirrors)
        moves = plan.state_moves.blocks + plan.moves.blocks + plan.window_moves.blocks
        advances = len(plan.state_advances)
        if (moves and fail_copy is not None) or (advances and fail_copy == 0):
            if self.advance(plan, fails=fail_copy == 0):
                self.move_all(plan, fail_copy)
            self.land()
            copies_failed(self.scheduler.state, plan.step)
            return
        self.advance(plan)
        self.move_all(plan, None)
        for store in self.scheduler.state.stores:
            store.moved()
        if not plan.num_rows:
            assert self.flight or self.scheduler.state.running or not self.scheduler.state.waiting, "stuck"
            self.land()
            return
        drawn = self.compute(plan)
        self.now += TOKEN_S if self.config.drafts else plan.num_tokens * TOKEN_S  # where it pays to draft
        self.scheduler.launched(plan)
        last, self.flight = self.flight, (plan, drawn)
        self.commit(last)
        if not self.overlap or plan.followed:
            self.land()

    def land(self) -> None:
        flight, self.flight = self.flight, None
        self.commit(flight)

    def commit(self, flight: tuple[Plan, SampledTokens] | None) -> None:
        if flight is not None:
            self.take(self.scheduler.commit(*flight))

    def advance(self, plan: Plan, fails: bool = False) -> bool:
        """Advance the states of rows with drafts. Returns whether that was done; fails: it spoils them."""
        states = []
        for row, tokens, read, _ in plan.state_advances.tolist():
            state, (inputs, version) = self.states[read][0] if read >= 0 else None, self.inputs[row]
            for token in inputs[:tokens]:
                state = cell(state, token, version)
            states.append(state)
        for state, written in zip(states, plan.state_advances[:, 3].tolist(), strict=True):
            self.states[written] = [(-1, -1, -1)] if fails else [state]
        if len(states) and not fails:
            self.scheduler.advanced(0.0)
        return not (fails and states)

    def move_all(self, plan: Plan, stop: int | None) -> None:
        """Copy states and KV; the copies stop after `stop` of them."""
        states = plan.state_moves.blocks
        self.copied_states += self.move(plan.state_moves, stop, self.states, self.host_states)
        if stop is None or stop >= states:
            left = None if stop is None else stop - states
            self.copied_blocks += self.move(plan.moves, left)
            if left is None or left >= plan.moves.blocks:
                left = None if left is None else left - plan.moves.blocks
                self.move(plan.window_moves, left, self.window_device, self.window_host)

    def move(self, moves: BlockCopies, stop: int | None, device: Any = None, host: Any = None) -> int:
        """Copy between two pools, those of KV if none are given. Returns how many copies were made."""
        done, (device, host) = 0, (self.device, self.host) if device is None else (device, host)
        for source, target, pairs in (
            (device, host, moves.offloads),
            (host, device, moves.restores),
            (device, device, moves.copies),
            (device, host, moves.mirrors),
            (host, device, moves.prefetches),
        ):
            read = [list(source[pair[0]]) for pair in pairs]
            for cells, (_, to) in zip(read, pairs, strict=True):
                if done == stop:
                    target[to] = [(-1, -1, -1)] * len(cells)
                    return done
                target[to] = cells
                done += 1
        return done

    def compute(self, plan: Plan) -> SampledTokens:
        size, version = self.config.block_tokens, self.scheduler.state.version
        assert plan.num_tokens <= self.config.most_tokens and plan.num_rows <= self.config.most_seqs
        sequences = self.scheduler.sequences_of(plan)
        starts, ends, tables = plan.starts.tolist(), (plan.starts + plan.counts).tolist(), plan.block_table.tolist()
        ids = plan.token_ids.tolist()
        for at, number in zip(plan.pending_tokens.tolist(), plan.pending_draws.tolist(), strict=True):
            assert self.flight is not None
            ids[at] = int(self.flight[1].tokens[number])
        left = iter(ids)
        self.compute_states(plan, ids)
        for seq, start, end, slots in zip(sequences, starts, ends, tables, strict=True):
            assert [block.device for block in seq.blocks] == slots[: len(seq.blocks)]
            for position in range(start, end):
                block = seq.blocks[position // size]
                assert block.owners == 1 or position // size < start // size or start % size == 0
                before = self.device[slots[(position - 1) // size]][(position - 1) % size] if position else None
                self.device[slots[position // size]][position % size] = cell(before, next(left), version)
        self.compute_windows(plan)
        rules = rules_by_draw(plan)
        tokens: list[int] = []
        logprobs: list[float] = []
        wanted = zip(plan.samples.tolist(), plan.logits.tolist(), strict=True)
        for seq, end, slots, (samples, logits) in zip(sequences, ends, tables, wanted, strict=True):
            cells = [each for slot in slots for each in self.device[slot]][:end]
            assert None not in cells, "a row reads KV that was never written"
            state = seq.state
            oldest = self.oldest[state.group.id]
            turn = [*self.own.get(state.group.id, []), *[None] * len(cells)]
            fresh = all(each[1] >= oldest or each == own for each, own in zip(cells, turn, strict=False) if each)
            assert fresh, "a row reads KV of older weights than it may"
            before = zip([None, *cells], cells, strict=False)
            assert all(each == cell(last, *each[:2]) for last, each in before if each), "KV computed behind other KV"
            seen = tuple(each[0] for each in cells if each)
            for behind in range(logits - 1, -1, -1):
                for at in range(len(tokens), len(tokens) + samples // logits):
                    context = seen[: end - behind]
                    assert plan.positions[at] == len(context) - seq.num_prompt
                    own = draw(context, int(plan.sampling["seed"][at]), int(plan.sampling["index"][at]), rules.get(at, ()))
                    assert plan.given[at] < 0 or rules.get(at, ()) == rules_of(state.group, list(context[seq.num_prompt :]))
                    tokens.append(own if plan.given[at] < 0 else int(plan.given[at]))
                    key = state.group.id, int(plan.sampling["index"][at]), int(plan.positions[at])
                    self.read[key] = [each[1] for each in cells[: len(context)] if each]
                    logprobs.append(logprob(context, tokens[-1]))
        return SampledTokens(
            np.array(tokens, np.int32),
            np.array(logprobs, np.float32),
            None,
            np.ones(len(tokens), bool),
            most_probable(tokens, plan),
        )

    def compute_windows(self, plan: Plan) -> None:
        """Write the cells of each row into the blocks of its window. Those that its queries attend to must be those of the full
        blocks."""
        if self.windows is None:
            return
        size, tables = self.config.block_tokens, zip(plan.block_table.tolist(), plan.window_table.tolist(), strict=True)
        starts, ends = plan.starts.tolist(), (plan.starts + plan.counts).tolist()
        for seq, start, end, (full, window) in zip(self.scheduler.sequences_of(plan), starts, ends, tables, strict=True):
            columns = [0] * seq.window_first + [block.device for block in seq.window]
            assert window[: len(columns)] == columns and not any(window[len(columns) :])
            for position in range(start, end):
                block = seq.window[position // size - seq.window_first]
                assert block.owners == 1 or position // size < start // size or start % size == 0
                self.window_device[window[position // size]][position % size] = self.device[full[position // size]][
                    position % size
                ]
            for position in range(max(0, start - self.windows.tokens + 1), end):
                at, inside = position // size, position % size
                assert at >= seq.window_first, "a block left the window too early"
                assert self.window_device[window[at]][inside] == self.device[full[at]][inside], "a window has other KV"

    def compute_states(self, plan: Plan, ids: list[int]) -> None:
        """Advance the state of each row by its tokens. The cell of a token behind the state must be that behind its KV."""
        reads, writes = plan.state_reads.tolist(), plan.state_writes.tolist()
        written = [slot for slot in writes if slot >= 0]
        assert len(set(written)) == len(written), "two rows write one slot"
        readers, slots = Counter(reads), zip(reads, writes, strict=True)
        assert all(readers[to] == (came == to) for came, to in slots if to >= 0), "a slot is written and read"
        before = [self.states[slot][0] if slot >= 0 else None for slot in reads]
        left, size, self.inputs = iter(ids), self.config.block_tokens, []
        rows = zip(before, writes, plan.starts.tolist(), plan.counts.tolist(), plan.block_table.tolist(), strict=True)
        for state, slot, start, count, table in rows if len(writes) else ():
            kv = self.device[table[(start - 1) // size]][(start - 1) % size] if start else None
            assert state == kv, "a state is not that of the tokens before its row"
            tokens, version = [next(left) for _ in range(count)], self.scheduler.state.version
            self.inputs.append((tokens, version))
            for token in tokens:
                state = cell(state, token, version)
            if slot >= 0:
                self.states[slot] = [state]

    def check(self) -> None:
        """Assert every invariant: the store's, and that what the index finds is there, on the device and in host memory."""
        check(self.scheduler)
        store = self.scheduler.state.store
        for block in {*store.device.holder, *store.host.holder} - {None}:
            assert block is not None
            if store.index.holds(block):
                assert block.device is None or self.device[block.device] == self.stamped[block.key]  # type: ignore[index]
                assert block.host is None or self.host[block.host] == self.stamped[block.key]  # type: ignore[index]
        self.check_snapshots()
        self.check_windows()
        for prefix, group in self.scheduler.state.groups.items():
            assert len(group.sequences) <= self.groups[prefix].sampling.n

    def check_snapshots(self) -> None:
        """Assert that the snapshots of states are as they were left."""
        states = self.scheduler.state.states
        if states is not None:
            for key in states.store.index.keys():
                block = states.store.index.get(key)
                assert block is not None
                now = self.host_states[block.host] if block.device is None else self.states[block.device]
                assert self.snapshots.setdefault(key, now) == now, "a snapshot was written over"

    def check_windows(self) -> None:
        """Assert that the blocks of windows that the index finds have the KV of the full blocks with their keys, and that a
        sequence holds no more than its window, and what its newest row computed."""
        state = self.scheduler.state
        if state.windows is None:
            return
        for key in state.windows.store.index.keys():
            block = state.windows.store.index.get(key)
            assert block is not None and key == block.key
            assert block.device is None or self.window_device[block.device] == self.stamped[key]
            assert block.host is None or self.window_host[block.host] == self.stamped[key]
        size = self.config.block_tokens
        newest = {row.seq: row.count for rows in state.in_flight.values() for row in rows}
        for seq in [*state.running, *state.waiting, *state.pinned]:
            assert self.windows is not None
            assert len(seq.window) <= self.windows.most_held(size) - (-newest.get(seq, 0) // size), (
                "blocks stay behind a window"
            )

    def finish(self, most_steps: int = 5000) -> None:
        """Run to the end; every child is there, is what it must be, and no block is left over."""
        for number in range(most_steps):
            if not self.scheduler.state.groups:
                break
            self.step()
            if number % 8 == 0:
                self.check()
        assert not self.scheduler.state.groups, "no end in sight"
        self.land()
        assert not self.scheduler.state.in_flight, "a plan is neither committed nor void"
        for id, group in self.groups.items():
            wanted = {index: want for index, want in enumerate(expected(group)) if index in group.wanted}
            for index, want in wanted.items():
                sample = self.got[id, index]
                got = sample.token_ids.tolist()
                check_logprobs(group, sample)
                if group.score:
                    given = {child.index: child.token_ids.tolist() for child in group.partials}[index]
                    assert got == given[: len(got)] and (sample.finish_reason == "scored") == (got == given)
                elif sample.finish_reason in ("aborted", "stale", "cut"):
                    assert want[: len(got)] == got
                    whole = got == want and sample.finish_reason == "cut"
                    assert not whole or len(got) > group.sampling.min_len_to_cut, "ended by itself before it could be cut"
                else:
                    stopped = stop_of(group, want)
                    assert got == want and sample.finish_reason == ("stop" if ended_by(group, want) else "length")
                    assert (sample.text_end, sample.stopped_by) == (stopped or (None, None))
                check_top(sample, group.sampling.top_logprobs)
                check_lag(sample, group.sampling.max_version_lag)
            self.check_cut(group, [self.got[id, index] for index in wanted])
        assert len(self.got) == sum(len(group.wanted) for group in self.groups.values())
        self.scheduler.state.pinned.release_all()
        for store in self.scheduler.state.stores:
            store.forget_cached()
            assert store.device.free == store.device.size and store.host.free == store.host.size and not len(store.index)

    def check_stale(self, version: int, ended: list[Sample]) -> None:
        """Assert that a refresh to `version` has ended the children that began too far behind, forked or not, and no others."""
        for sample in ended:
            if sample.finish_reason == "stale":
                lag = self.groups[sample.group_id].sampling.max_version_lag
                assert lag is not None and sample.weight_versions[0][1] < version - lag
        for id in self.scheduler.state.groups:
            lag = self.groups[id].sampling.max_version_lag
            for child in () if lag is None or self.groups[id].score else self.groups[id].partials:
                assert (id, child.index) in self.got or child.weight_versions[0][1] >= version - lag, "it goes on, stale"

    def check_cut(self, group: Group, samples: list[Sample]) -> None:
        """Assert that siblings are cut once enough have ended by themselves, and not before."""
        ended, enough = [sample.finish_reason for sample in samples], group.sampling.finish_after
        by_themselves = ended.count("stop") + ended.count("length")
        if enough is None:
            assert "cut" not in ended
        elif "cut" in ended:
            assert by_themselves >= enough
        if enough is not None:
            least = group.sampling.min_len_to_cut
            assert sum(s.finish_reason in ("stop", "length") and len(s.token_ids) > least for s in samples) <= enough
        cut = [sample for sample in samples if sample.finish_reason == "cut"]
        assert all(len(sample.token_ids) >= group.sampling.min_len_to_cut for sample in cut)


def with_partials(group: Group, partials: dict[int, int], version: int) -> Group:
    """Return the same group whose children have so many of their tokens already, drawn by the weights `version`, as far as that
    leaves one to draw."""
    children = []
    for index, tokens in enumerate(expected(group)):
        have = min(partials.get(index, 0), len(tokens) - 1)
        if have and index in group.wanted:
            prompt = tuple(group.prompt.tolist())
            had = [logprob((*prompt, *tokens[:at]), tokens[at]) for at in range(have)]
            ids, logprobs = np.array(tokens[:have], np.int32), np.array(had, np.float32)
            top = top_of(tokens[:have], group.sampling.top_logprobs)
            columns = {"top_ids": top, "top_logprobs": -top.astype(np.float32)} if top.size else {}
            children.append(
                PartialSample(index=index, token_ids=ids, logprobs=logprobs, weight_versions=[(0, version)], **columns)
            )
    return msgspec.structs.replace(group, partials=tuple(children))


def with_given(group: Group) -> Group:
    """Return the same group, to score: of each child as many tokens as it may have, stop tokens in the middle among them."""
    children, seed = [], group.sampling.seed or 0
    for index in group.wanted:
        length = 1 + hash((seed, index)) % group.sampling.max_tokens
        ids = np.array([hash((seed, index, at)) % VOCAB for at in range(length)], np.int32)
        zeros = np.zeros(length, np.float32)
        children.append(PartialSample(index=index, token_ids=ids, logprobs=zeros, weight_versions=[(0, 0)]))
    return msgspec.structs.replace(group, partials=tuple(children), score=True)


def random_harness(
    r: random.Random, foreground_s: float, drafts: int, slots: SlotCounts | None = None, windows: WindowCounts | None = None
) -> Harness:
    size = r.choice([1, 2, 4, 8])
    return Harness(
        r.choice([10, 16, 32, 128]),
        r.choice([0, 3, 20, 200]),
        block_size=size,
        max_num_seqs=r.choice([1, 2, 5, 16]),
        max_batch_tokens=r.choice([16, 32, 64]),
        mirror_ahead=r.random() < 0.5,
        copy_ahead=r.random() < 0.5,
        prefix_cache=r.random() < 0.7,
        lookahead_blocks=r.choice([1, 2, 4]),
        min_run_tokens=r.choice([0, 1, 8]),
        overlap=r.random() < 0.5,
        foreground_s=foreground_s,
        drafts=drafts,
        slots=slots,
        windows=windows,
    )


def random_windows(r: random.Random) -> WindowCounts:
    """Draw the pools of layers with a window: at least the blocks of one sequence."""
    return WindowCounts(r.choice([1, 2, 3, 7, 8, 16, 24]), r.choice([26, 30, 40, 128]), r.choice([0, 3, 30, 200]))


def random_slots(r: random.Random) -> SlotCounts:
    """Draw the slots of recurrent state."""
    return SlotCounts(r.choice([2, 3, 6, 40]), r.choice([0, 2, 50]))


def policies(r: random.Random, n: int) -> dict[str, Any]:
    """Draw policies: some children only, some that have begun, a group that ends with its first ones, and a priority."""
    wanted = sorted(r.sample(range(n), r.randrange(1, n + 1)))
    some = r.random() < 0.3
    return {
        "indices": wanted if some else None,
        "partials": {index: r.randrange(12) for index in range(n)} if r.random() < 0.3 else None,
        "finish_after": r.randrange(1, (len(wanted) if some else n) + 1) if r.random() < 0.3 else None,
        "priority": r.choice([0, 0, 1, -1]),
        "top_logprobs": r.choice([0, 0, 1, 3]),
    }


KV_TTL_S = [0.0, 0.5, 1000.0, 1000.0]


def random_turn(h: Harness, r: random.Random, number: int, lag: int, most: int = 6) -> None:
    """Continue a child with less than `most` tokens: mostly its client does and says so; sometimes another one, or nobody names
    it, or the history is another."""
    after = r.choice(list(h.got))
    prompt = [*h.history(after), *(r.randrange(1, VOCAB) for _ in range(r.randrange(most)))]
    if r.random() < 0.2:
        prompt[r.randrange(len(prompt))] = r.randrange(1, VOCAB)
    h.submit(
        f"t{number}",
        prompt,
        client=h.clients[after[0]] if r.random() < 0.8 else "other",
        partials={0: r.randrange(4)} if r.random() < 0.1 else None,
        after=after if r.random() < 0.7 else None,
        n=r.choice([1, 1, 3]),
        max_tokens=r.choice([1, 3, 12]),
        seed=number,
        max_kv_lag=lag,
        kv_ttl_s=r.choice(KV_TTL_S),
    )


LOGIT_RULES: list[dict[str, Any]] = [
    {},
    {},
    {"repetition_penalty": 1.5},
    {"presence_penalty": 1.0},
    {"logit_bias": {3: 1.0}},
]


def random_schedule(
    seed: int,
    operations: int = 50,
    on_check: Callable[[Harness], None] = Harness.check,
    recurrent: bool = False,
    windows: bool = False,
) -> Harness:
    """Submit, abort, refresh, step and broken copies in random order and at random times, the invariants checked after each.
    recurrent: of a model with recurrent state. windows: of one that has layers with a sliding window."""
    r, time, more, turns, changes, bounds = (random.Random(seed) for _ in range(6))
    drafts, slots = more.choice([0, 2, 6]), random_slots(random.Random(seed)) if recurrent else None
    sliding = random_windows(random.Random(seed)) if windows else None
    h = random_harness(r, time.choice([0.0, 0.1, 1.0]), drafts, slots, sliding)
    base = [r.randrange(1, VOCAB) for _ in range(40)]
    breaks = r.random() < 0.4
    lags = r.choice([[0], [0, 1, 2], [2]])
    measured = r.random() < 0.5
    for number in range(operations):
        h.now += time.choice([0.0, 0.0, 0.1, 10.0])
        kind = r.random()
        if turns.random() < 0.15 and h.got:
            random_turn(h, turns, number, turns.choice(lags))
        elif kind < 0.3:
            prompt = base[: r.randrange(0, 30)] + [r.randrange(1, VOCAB) for _ in range(r.randrange(1, 6))]
            n = r.choice([1, 2, 3, 7])
            rules = policies(r, n) if seed % 2 else {}
            rules |= changes.choice(LOGIT_RULES)
            most = r.choice([1, 3, 12])
            rules |= {"max_version_lag": bounds.choice([None, None, 0, 1])}
            rules |= {"min_len_to_cut": bounds.randrange(most + 1) if rules.get("finish_after") else 0}
            rules |= {"stop": changes.choice([(), ("abca", "ccc"), ("bcbc",)])} if seed % 4 == 3 else {}
            if more.random() < 0.2:
                rules |= {"score": True, "finish_after": None, "min_len_to_cut": 0}
            h.submit(
                f"g{number}",
                prompt,
                client=r.choice("abc"),
                n=n,
                max_tokens=most,
                seed=number,
                max_kv_lag=r.choice(lags),
                kv_ttl_s=turns.choice(KV_TTL_S),
                **rules,
            )
        elif kind < 0.36 and h.groups:
            index = r.choice([None, 0, 1]) if seed % 2 else None
            h.take(h.scheduler.state.abort(r.choice(list(h.groups)), index))
        elif kind < 0.4:
            h.refresh(r.choice(["keep", "recompute", "abort"]))
        else:
            if measured:  # as an engine that times its copies and prefills: now the one is cheaper, now the other
                h.scheduler.state.rates.copy_blocks_per_second = r.choice([0.0, 1.0, 1e6])
                h.scheduler.state.rates.prefill_tokens_per_second = r.choice([0.0, 1.0, 1e6])
            h.step(r.randrange(4) if breaks and r.random() < 0.2 else None)
        on_check(h)
    h.finish()
    return h


def conversations(seed: int, recurrent: bool = False, windows: bool = False) -> Harness:
    """Run turns to the end, many of them over refreshes and with tools that say much. recurrent: of a model with recurrent
    state. windows: of one that has layers with a sliding window."""
    r = random.Random(seed)
    h = Harness(
        r.choice([24, 48, 128]),
        r.choice([0, 10, 200]),
        block_size=r.choice([2, 4, 8]),
        max_num_seqs=r.choice([2, 8]),
        max_batch_tokens=r.choice([8, 16]),
        mirror_ahead=r.random() < 0.5,
        copy_ahead=r.random() < 0.5,
        prefix_cache=r.random() < 0.8,
        min_run_tokens=r.choice([0, 4]),
        overlap=r.random() < 0.5,
        slots=random_slots(random.Random(seed)) if recurrent else None,
        drafts=random.Random(seed + 1).choice([0, 2, 6]) if recurrent else 0,
        windows=random_windows(random.Random(seed)) if windows else None,
    )
    lags = r.choice([[0], [0, 1]])
    for number in range(60):
        h.now += r.choice([0.0, 0.0, 0.1, 1.0])
        kind = r.random()
        if kind < 0.1:
            prompt = [r.randrange(1, 3) for _ in range(r.randrange(1, 12))]
            sampling = {"n": r.choice([1, 2]), "max_tokens": r.choice([3, 12]), "max_kv_lag": r.choice(lags)}
            h.submit(f"g{number}", prompt, client=r.choice("ab"), seed=number, kv_ttl_s=r.choice(KV_TTL_S), **sampling)
        elif kind < 0.2 and h.got:
            random_turn(h, r, number, r.choice(lags), most=30)
        elif kind < 0.3:
            h.refresh(r.choice(["keep", "keep", "keep", "recompute", "abort"]))
        else:
            h.step()
        h.check()
    h.finish()
    return h


def tight_schedule(seed: int, windows: bool = False) -> None:
    """Run groups of up to 32 children to the end over a pool that hardly holds one of them. windows: of a model that has layers
    with a sliding window, in a pool that hardly holds one sequence's."""
    r = random.Random(seed)
    size = r.choice([2, 4, 8])
    longest = r.randrange(8, 60)
    blocks = -(-longest // size)
    more = random.Random(seed)
    width = more.choice([1, 3, 8, 20])
    sliding = WindowCounts(width, int((-(-width // size) + 2) * more.uniform(1.0, 2.0)), more.choice([0, 3, 400]))
    h = Harness(
        int(blocks * r.uniform(1.0, 1.5)),
        r.choice([0, 5, 400]),
        block_size=size,
        max_num_seqs=r.choice([2, 8, 32]),
        max_batch_tokens=32,
        mirror_ahead=r.random() < 0.5,
        copy_ahead=r.random() < 0.5,
        min_run_tokens=r.choice([0, 4]),
        lookahead_blocks=r.choice([1, 2]),
        overlap=r.random() < 0.5,
        drafts=r.choice([0, 3]),
        windows=sliding if windows else None,
    )
    for number in range(r.randrange(1, 5)):
        prompt = [r.randrange(1, 97) for _ in range(r.randrange(1, longest))]
        n, most = r.choice([1, 4, 32]), longest - len(prompt)
        assert h.submit(f"g{number}", prompt, client=r.choice("ab"), n=n, max_tokens=most, seed=number)
    h.finish(20_000)
