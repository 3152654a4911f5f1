"""Applies the results of a step to its sequences: marks tokens as pending at the launch, appends them once they are read, forks
and finishes children. Also handles failed steps."""

from __future__ import annotations

from collections.abc import Callable
from itertools import repeat
from typing import NamedTuple

import numpy as np

from rollout.engine.kv.versions import KVVersions
from rollout.engine.scheduling.plan import SampledTokens, TopLogprobs
from rollout.engine.scheduling.sequence import Row, Sequence
from rollout.engine.scheduling.state import SchedulerState
from rollout.engine.scheduling.stopping import TokenCounts
from rollout.engine.values import FinishReason, Sample

Learn = Callable[[Sequence, tuple[int, ...], list[int]], None]
"""called with a sequence, its draft and the tokens that were appended"""


class _Draws(NamedTuple):
    """What a step sampled."""

    each: list[tuple[int, float, float | None, bool]]
    """token, log-prob, log-prob at temperature 1, and whether the logits were finite"""
    top: TopLogprobs | None
    routes: np.ndarray | None
    ranks: np.ndarray | None


def launched(state: SchedulerState, rows: list[Row]) -> None:
    """Record that a step is in flight. Its KV counts as computed from here on, because the device executes later steps after
    it. The tokens that it samples are pending."""
    size, draw = state.config.block_tokens, 0
    for row in rows:
        seq, start, count, draws = row.seq, row.start, row.count, row.draws
        forked = seq.state.forked
        if row.expected:
            count -= draws - 1  # the draws decide how many of the expected tokens count
        if count > 1 or not draws or not forked:
            state.counters.computed(seq, start, count)
        seq.cached = start + count
        if start % size + count >= size and not seq.pending:
            state.tables.fill(seq, start)
        if draws and forked:
            seq.expect(draw)
        draw += draws
    if state.windows is not None:
        for row in rows:
            if row.count > 1:
                state.windows.trim(row.seq)
    if state.states is not None:
        state.states.launched(rows)


def record(state: SchedulerState, rows: list[Row], sampled: SampledTokens, learn: Learn) -> list[Sample]:
    """Append the tokens that a step sampled to its sequences, fork groups, finish children. Rows whose child finished while the
    step was in flight are skipped. Returns the samples of the children that finished; those of groups that end with their first
    `finish_after` children are decided over all rows."""
    samples: list[Sample] = []
    first_k: list[tuple[Sequence, FinishReason]] = []
    raws = repeat(None) if sampled.raw_logprobs is None else sampled.raw_logprobs.tolist()
    each = [*zip(sampled.tokens.tolist(), sampled.logprobs.tolist(), raws, sampled.finite.tolist(), strict=False)]
    draws = _Draws(each, sampled.top, _know_prompts(rows, sampled), sampled.ranks)
    size, draw = state.config.block_tokens, 0

    def finish(seq: Sequence, reason: FinishReason) -> None:
        if reason in ("stop", "length") and seq.state.first_k_pending:
            first_k.append((seq, reason))
        else:
            samples.append(state.finish(seq, reason, seq.not_finite() if reason == "error" else None))

    for row in rows:
        seq = row.seq
        if seq.ended:
            state.counters.unused_draws += row.draws
        elif row.expected:
            had = len(seq.output)
            reason = _append_run(state, row, draws, draw)
            if seq.given is None:
                learn(seq, row.expected, seq.output[had:])
            if reason is not None:
                finish(seq, reason)
        elif not row.draws:
            continue
        elif seq.state.forked:
            reason = _append(state, seq, draws, draw)
            if reason is not None:
                finish(seq, reason)
            elif seq.pending and seq.cached % size == 0:
                state.tables.fill(seq, row.start + row.count)  # the next step computes this token
        else:
            for at, child in enumerate(state.fork(seq), draw):
                reason = _append(state, child, draws, at)
                if reason is not None:
                    finish(child, reason)
            state.counters.began(seq.state, state.clock())
            samples += [each for index in seq.state.cancelled for each in state.abort(seq.state.group.id, index)]
        draw += row.draws
    assert draw == len(each)
    return samples + _finish_first_k(state, first_k) if first_k else samples


def _know_prompts(rows: list[Row], sampled: SampledTokens) -> np.ndarray | None:
    """Give groups the routes of their prompts. Returns those of the draws, [D, layers, chosen]; None if no row wants them."""
    if sampled.routes is None:
        return None
    for row, routes in sampled.routes.prompts.items():
        group = rows[row].seq.state
        if group.prompt_routes is None:
            group.prompt_routes = routes
    return sampled.routes.draws


def _append_run(state: SchedulerState, row: Row, draws: _Draws, first: int) -> FinishReason | None:
    """Append the draws from `first` on of a row that computed the tokens it expected, up to the end of the child or the first
    draw that is another token; later ones are dropped. Returns the finish reason if the child ends."""
    seq, expected, had = row.seq, row.expected, len(row.seq.output)
    reason = None
    for at in range(row.draws):
        reason = _append(state, seq, draws, first + at)
        if reason is not None or at == len(expected) or draws.each[first + at][0] != expected[at]:
            break
    if reason != "error":
        state.tables.settle(seq, seq.cached + len(seq.output) - had - 1)
        if state.states is not None and row.drafted:
            state.states.accept(seq, seq.cached - row.start)
    return reason


def _append(state: SchedulerState, seq: Sequence, draws: _Draws, draw: int) -> FinishReason | None:
    """Append one sampled token to a sequence. Returns the finish reason if the child ends with it."""
    (token, logprob, raw_logprob, finite), version = draws.each[draw], state.version
    if not finite:
        state.tables.distrust(seq)
        return "error"
    if seq.version != version or len(seq.output) == seq.num_output_at_start:
        _note_kv(state, seq)
    seq.append(token, logprob, raw_logprob, version)
    if seq.tracked is not None:
        _track(seq.tracked, token, draws, draw)
    if seq.given is not None:
        state.counters.scored_tokens += 1
        other = token != seq.given[len(seq.output) - 1]  # only if it was drawn again
        return "scored" if other or finish_reason(seq, token) is not None else None
    state.counters.generated_tokens += 1
    return finish_reason(seq, token)


def _track(tracked: TokenCounts, token: int, draws: _Draws, draw: int) -> None:
    """Append what a group asks for beside tokens and log-probs."""
    tracked.append(token)
    if draws.top is not None:
        tracked.append_top(draws.top, draw)
        if draws.ranks is not None and draws.ranks[draw]:
            tracked.ranks.append(int(draws.ranks[draw]))
    if draws.routes is not None:
        tracked.append_routes(draws.routes, draw)


def _note_kv(state: SchedulerState, seq: Sequence) -> None:
    """Record which weights computed the KV that the next token of a sequence attends to: its first one since it started, or
    since a refresh. Nothing to look up if it began with the live weights and may read no older KV."""
    group, began = seq.state, seq.spans[0][1] if seq.spans else state.version
    if began == state.version and group.own is None and not group.group.sampling.max_kv_lag:
        return
    known = KVVersions.of((block.versions for block in seq.blocks), seq.cached, state.config.block_tokens)
    seq.note_kv(known.spans, state.version)


def finish_reason(seq: Sequence, token: int) -> FinishReason | None:
    """Return why a child that samples ends with `token`, its newest; None: it does not."""
    state, output = seq.state, len(seq.output)
    if (token in state.eos or (seq.tracked is not None and seq.tracked.found)) and output > state.group.sampling.min_tokens:
        return "stop"
    if seq.num_prompt + output == seq.limit:
        return "length"
    return "cut" if state.cut_at is not None and output >= state.cut_at else None


def _finish_first_k(state: SchedulerState, done: list[tuple[Sequence, FinishReason]]) -> list[Sample]:
    """Finish children that ended in a step, of groups that end with their first `finish_after`, and the siblings that are cut
    then. The shorter child counts first, of equal ones the lower index. A child that ended too late is cut as well if it is
    longer than `min_len_to_cut`: a shorter one would have ended by itself in a later step, too."""
    samples = []
    for seq, reason in sorted(done, key=lambda each: (each[0].state.number, len(each[0].output), each[0].index)):
        if not seq.ended:  # aborted where its group forked
            counts = seq.state.first_k_pending or len(seq.output) <= seq.state.group.sampling.min_len_to_cut
            samples.append(state.finish(seq, reason if counts else "cut"))
    for group in {seq.state.number: seq.state for seq, _ in done if not seq.state.first_k_pending}.values():
        group.cut_at = group.group.sampling.min_len_to_cut
        cut = [seq for seq in group.sequences.values() if len(seq.output) >= group.cut_at]
        samples += [state.finish(seq, "cut") for seq in cut]
    return samples


# ── failed steps ──────────────────────────────────────────────────────────────────────────────────────────────────────────
def copies_failed(state: SchedulerState, step: int) -> None:
    """Discard a plan of whose KV copies only a part was made: preempt the sequences whose blocks may hold garbage, and drop
    their KV."""
    state.counters.failed_moves += 1
    broken = [store.move_failed() for store in state.stores]
    if state.states is not None:
        broken[-1] |= state.states.advances_failed()  # the last one of `stores`
    for row in state.in_flight.pop(step, []):
        state.tables.truncate(row.seq, -(-row.seq.cached // state.config.block_tokens))
    for seq in list(state.running):
        if not set().union(*broken).isdisjoint([*seq.blocks, *seq.window, seq.state_in, seq.state_out]):
            state.stop(seq)
            state.tables.truncate(seq, 0)
            state.counters.recompute_preemptions += 1
    for store, blocks in zip(state.stores, broken, strict=True):
        store.discard(blocks)


def launch_failed(state: SchedulerState, step: int, reason: str) -> list[Sample]:
    """Discard a plan that could not be launched, and finish the groups of its rows with an error."""
    return _fail(state, [row.seq for row in state.in_flight.pop(step)], reason)


def step_failed(state: SchedulerState, step: int, reason: str) -> list[Sample]:
    """Discard a launched step that failed. Finish every running group with an error, clear the prefix index and drop the KV of
    waiting sequences: any of them may share KV that the step wrote."""
    del state.in_flight[step]
    state.pinned.release_all()
    for store in state.stores:
        store.forget_all()
    for seq in state.waiting:
        state.tables.truncate(seq, 0)
    return _fail(state, list(state.running), reason)


def _fail(state: SchedulerState, sequences: list[Sequence], reason: str) -> list[Sample]:
    """Finish the groups of these sequences with an error. The contents of their blocks are not reused."""
    groups = {seq.state.number: seq.state for seq in sequences if not seq.ended}
    for seq in sequences:
        state.tables.distrust(seq)
    return [sample for group in groups.values() for sample in state.finish_all(group, "error", reason)]
