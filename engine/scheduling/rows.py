"""Rows of a step: what each running sequence computes next, the blocks that the row writes, and the plan of all rows."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from rollout.engine.kv.block import Block
from rollout.engine.kv.prefix import block_key, content_key
from rollout.engine.scheduling.plan import LogitAdjustment, Plan, SharedPrefix
from rollout.engine.scheduling.sequence import GroupState, Row, Sequence
from rollout.engine.scheduling.state import SchedulerState


def decode_rows(state: SchedulerState, sequences: list[Sequence]) -> list[Row]:
    """Make the rows of sequences that have one token to compute and may sample another; there is room for all. A block table
    changes only if the token begins a block, or if the last block is shared after a fork or was begun by other weights."""
    size, version, rows = state.config.block_tokens, state.version, list[Row]()
    for seq in sequences:
        cached = seq.cached
        if seq.length - cached == 1 and seq.length < seq.limit and seq.given is None:
            if seq.pending and counts_tokens(seq):
                continue  # until the token is known
            if state.states is not None and seq.junction:
                state.states.pass_junction(seq)
            if cached % size == 0 or (last := seq.blocks[-1]).owners > 1 or last.version != version:
                state.tables.extend(seq, cached + 1, version)
            rows.append(Row(seq, cached, 1, seq.num_next_samples, ()))
    return rows


def prefill_row(state: SchedulerState, seq: Sequence, budget: int, scores: int, planned: set[bytes]) -> Row | None:
    """Make the row of the next tokens of a running sequence, at most `budget`, that scores at most `scores` tokens. None: it
    waits for blocks, or for a row of this step that computes the same prefix. planned: keys of the blocks that this step
    computes."""
    size, version = state.config.block_tokens, state.version
    if seq.uncached > 1 or seq.given is not None:
        state.tables.find_cached(seq, version)
        available = state.available
        copied = bool(available and seq.cached % size and seq.blocks[-1].owners > 1)
        budget = min(budget, (len(seq.blocks) + available - copied) * size - seq.cached)
    count = min(seq.uncached, budget)
    if state.states is not None:
        state.states.pass_junction(seq)
        count = tokens_to_junction(seq, count)
    if count <= 0:
        return None
    finds_more = state.states is None or not seq.cached  # with a state, blocks of other sequences cannot be used
    if seq.uncached > 1 and finds_more and computed_by_other(seq, count, planned, size, version):
        return None
    samples, expected = (seq.num_next_samples if count == seq.uncached else 0), ()
    if samples and seq.given is not None:
        if scores <= 0:
            return None
        done, samples = len(seq.output), min(1 + seq.given_left, 1 + budget - count, scores)
        expected = tuple(seq.given[done : done + samples].tolist())
        count += samples - 1
    state.tables.extend(seq, seq.cached + count, version)
    return Row(seq, seq.cached, count, samples, expected)


def counts_tokens(seq: Sequence) -> bool:
    """Return whether the next token of a sequence depends on how often tokens occur: then all of them must be known."""
    return seq.tracked is not None and seq.tracked.counts is not None


def build_plan(state: SchedulerState, step: int, rows: list[Row], pending: bool) -> Plan:
    """Build the plan of at least one row. It copies what it needs of the sequences and the running table. pending:
    tokens of a step in flight may be among those to compute."""
    table, block_size = state.table, state.config.block_tokens
    sequences = [row.seq for row in rows]
    starts = np.array([row.start for row in rows], np.int32)
    counts = np.array([row.count for row in rows], np.int32)
    samples = np.array([row.draws for row in rows], np.int32)
    places, ends = np.array([seq.place for seq in sequences]), starts + counts
    first_token = counts.cumsum() - counts
    token_ids = _token_ids(rows, first_token, ((counts > 1) | (samples == 0)).nonzero()[0].tolist())
    pending_draws = [seq.pending_draw for seq in sequences] if pending else []
    pending_tokens = first_token[[i for i, draw in enumerate(pending_draws) if draw is not None]]
    token_ids[pending_tokens] = 0
    sampling = table.sampling.take(places.repeat(samples))
    positions = ends.repeat(samples) - sampling["prompt"]
    for i in (samples > 1).nonzero()[0].tolist():
        if not rows[i].expected:  # a fork: a draw for each fresh child
            first = int(samples[:i].sum())
            sampling["index"][first : first + samples[i]] = sequences[i].state.fresh
    logits, given = _look_ahead(rows, samples, positions)
    reads, writes = ([], []) if state.states is None else state.states.slots_of(rows)
    columns = -(-int(ends.max()) // block_size)
    return Plan(
        step=step,
        starts=starts,
        counts=counts,
        samples=samples,
        logits=logits,
        token_ids=token_ids,
        pending_tokens=pending_tokens,
        pending_draws=np.array([draw for draw in pending_draws if draw is not None], np.int64),
        block_table=table.table[:, :columns][places],
        sampling=sampling,
        positions=positions,
        given=given,
        adjustments=tuple(_adjustments(sampling["adjusted"], rows)),
        forbidden=_forbidden(positions < sampling["min_tokens"], rows),
        shared=tuple(shared_prefixes(rows, block_size)) if state.config.advanced.share_prefix else (),
        moves=state.store.moves,
        state_reads=np.array(reads, np.int32),
        state_writes=np.array(writes, np.int32),
        state_advances=state.state_advances,
        state_moves=state.state_moves,
        window_table=np.zeros((0, 0), np.int32) if table.windows is None else table.windows[:, :columns][places],
        window_moves=state.window_moves,
        prompt_routes=_prompt_routes(rows) if np.count_nonzero(sampling["routed_experts"]) else (),
    )


def _prompt_routes(rows: list[Row]) -> tuple[tuple[int, int], ...]:
    """Return (row, tokens) of the prompts whose routes are to be read: of groups that want them and do not have them. All
    tokens of the prompt but the last are cached when a row of it draws."""
    groups = [(row.seq.state, row.draws) for row in rows]
    wanted = {
        state.number: (i, len(state.group.prompt) - 1)
        for i, (state, draws) in enumerate(groups)
        if draws and state.group.sampling.routed_experts and state.prompt_routes is None
    }
    return tuple(wanted.values())


def _token_ids(rows: list[Row], first_token: np.ndarray, more: list[int]) -> np.ndarray:
    """Return [T] int32 tokens to compute, row after row. first_token: where each row begins. more: rows that compute more than
    the newest token, or another one."""
    newest = np.array([row.seq.last_token for row in rows], np.int32)
    if not more:
        return newest
    token_ids = np.empty(int(first_token[-1] + rows[-1].count), np.int32)
    token_ids[first_token] = newest
    for i in more:
        row = rows[i]
        ahead = row.expected[: row.draws - 1] if row.draws else ()
        known = row.seq.tokens(row.start, row.count - len(ahead))
        token_ids[first_token[i] : first_token[i] + row.count] = [*known.tolist(), *ahead] if ahead else known
    return token_ids


def _look_ahead(rows: list[Row], samples: np.ndarray, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return `logits` and `given` of a plan, and correct the `positions` of draws that do not follow the last token of their
    row."""
    logits, given = np.minimum(samples, 1), np.full(len(positions), -1, np.int32)
    for i in [i for i, row in enumerate(rows) if row.expected]:
        logits[i], first = samples[i], int(samples[:i].sum())
        draws = slice(first, first + samples[i])
        positions[draws] -= np.arange(samples[i])[::-1]
        if len(rows[i].expected) == samples[i]:
            given[draws] = rows[i].expected
    return logits, given


def _forbidden(early: np.ndarray, rows: list[Row]) -> tuple[tuple[int, tuple[int, ...]], ...]:
    """Return the tokens that `min_tokens` forbids, as `Plan.forbidden`. early: [D] bool, draws to which it applies."""
    if not np.count_nonzero(early):
        return ()
    groups = [row.seq.state for row in rows for _ in range(row.draws)]
    return tuple((draw, groups[draw].stop_ids) for draw in early.nonzero()[0].tolist())


def _adjustments(adjusted: np.ndarray, rows: list[Row]) -> Iterator[LogitAdjustment]:
    """Yield how the logits of the draws `adjusted`, [D] bool, are changed: at a fork once for all children, in a row with
    expected tokens for each draw, after the tokens before it."""
    if not np.count_nonzero(adjusted):
        return
    first = 0
    for row in rows:
        if row.draws and adjusted[first]:
            tracked = row.seq.tracked
            assert tracked is not None
            if row.expected:
                yield from (tracked.adjustment(first + at, 1, row.expected[:at]) for at in range(row.draws))
            else:
                yield tracked.adjustment(first, row.draws)
        first += row.draws


def shared_prefixes(rows: list[Row], block_size: int) -> list[SharedPrefix]:
    """Find runs of rows of one group that share their prompt blocks."""
    shared: list[SharedPrefix] = []
    first = blocks = tokens = 0
    group: GroupState | None = None
    last: Block | None = None  # of the prefix of the run; None: its rows do not have all of it

    def end_run(end: int) -> None:
        if last is not None and end - first > 1:
            shared.append(SharedPrefix(first, end - first, blocks))

    for i, row in enumerate(rows):
        seq = row.seq
        if seq.state is not group or row.start < tokens or seq.blocks[blocks - 1] is not last:
            end_run(i)
            first, group = i, seq.state
            blocks = seq.num_prompt // block_size
            tokens = blocks * block_size
            last = seq.blocks[blocks - 1] if blocks and row.start >= tokens else None
    end_run(len(rows))
    return shared


def computed_by_other(seq: Sequence, count: int, planned: set[bytes], block_size: int, version: int) -> bool:
    """Return whether another row of this step computes the block that the next `count` tokens of `seq` start with. Otherwise
    add the full blocks of these tokens to `planned`, keys of the blocks that this step computes."""
    first = seq.cached // block_size
    parent = seq.blocks[first - 1].key if first else None
    if (first and parent is None) or (seq.cached % block_size and seq.blocks[-1].version != version):
        return False

    def key(i: int) -> bytes:
        return block_key(content_key(parent, seq.tokens(i * block_size, block_size)), ((0, version),))

    if seq.cached % block_size == 0 and key(first) in planned:
        return True  # whether or not this row would fill that block
    for i in range(first, (seq.cached + count) // block_size):
        parent = key(i)
        planned.add(parent)
    return False


def tokens_to_junction(seq: Sequence, count: int) -> int:
    """Return how many of the next `count` tokens of a sequence its row computes, so that a row ends at its junction."""
    return min(count, seq.junction - seq.cached) if seq.junction > seq.cached else count
