"""What each running sequence computes next: its row of the step, the blocks that the row writes, and the plan of all rows."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from engine.config import EngineConfig
from engine.kv.block import BlockCopies
from engine.kv.store import BlockStore
from engine.scheduling.block_tables import BlockTables
from engine.scheduling.plan import LogitAdjustment, Plan, SharedPrefix
from engine.scheduling.running import RunningTable
from engine.scheduling.sequence import Row, Sequence
from engine.scheduling.shared_prefix import computed_by_other


class RowBuilder:
    """A part of the scheduler; keeps no state of its own."""

    def __init__(self, config: EngineConfig, store: BlockStore, tables: BlockTables) -> None:
        self.config = config
        self.store = store
        self.tables = tables

    def decode(self, running: list[Sequence], version: int) -> list[Row]:
        """Make the rows of sequences that have one token to compute and may sample another; there is room for all. Blocks are
        touched only where one begins, where the last one is still shared after a fork, and where other weights began it."""
        size, rows = self.config.block_size, list[Row]()
        for seq in running:
            cached = seq.cached
            if seq.length - cached == 1 and seq.length < seq.limit and seq.given is None:
                if seq.pending and counts_tokens(seq):
                    continue  # it waits for the step that makes the token known
                if cached % size == 0 or (last := seq.blocks[-1]).owners > 1 or last.version != version:
                    self.tables.extend(seq, cached + 1, version)
                rows.append((seq, cached, 1, seq.num_next_samples, ()))
        return rows

    def prefill(self, seq: Sequence, budget: int, scores: int, planned: set[bytes], version: int) -> Row | None:
        """Make the row of the next tokens of a running sequence, at most `budget`, and score `scores` at most. None: it must
        wait for blocks, or for a row of this very step that computes the same prefix; `planned` has the keys of what this step
        computes."""
        size = self.config.block_size
        if seq.uncached > 1 or seq.given is not None:
            self.tables.find_cached(seq, version)
            copied = bool(self.store.available and seq.cached % size and seq.blocks[-1].owners > 1)
            budget = min(budget, (len(seq.blocks) + self.store.available - copied) * size - seq.cached)
        count = min(seq.uncached, budget)
        if count <= 0:
            return None
        if seq.uncached > 1 and computed_by_other(seq, count, planned, size, version):
            return None
        samples, expected = (seq.num_next_samples if count == seq.uncached else 0), ()
        if samples and seq.given is not None:
            if scores <= 0:
                return None
            done, samples = len(seq.output), min(1 + seq.given_left, 1 + budget - count, scores)
            expected = tuple(seq.given[done : done + samples].tolist())
            count += samples - 1
        self.tables.extend(seq, seq.cached + count, version)
        return seq, seq.cached, count, samples, expected


def counts_tokens(seq: Sequence) -> bool:
    """Tell whether what it draws depends on its tokens also beside the model: then all of them must be known."""
    return seq.tracked is not None and seq.tracked.counts is not None


def plan_of(
    step: int,
    rows: list[Row],
    shared: tuple[SharedPrefix, ...],
    moves: BlockCopies,
    table: RunningTable,
    block_size: int,
    pending: bool,
) -> Plan:
    """Make the plan of at least one row, as a value: copies of what it needs of the sequences and of `table`. `pending`: tokens
    of a step in flight may be among those to compute."""
    sequences, *numbers, expected = zip(*rows, strict=True)
    starts, counts, samples = (np.array(each, np.int32) for each in numbers)
    places, ends = np.array([seq.place for seq in sequences]), starts + counts
    first_token = np.cumsum(counts) - counts
    token_ids = _token_ids(rows, first_token, np.flatnonzero((counts > 1) | (samples == 0)).tolist())
    pending_draws = [seq.pending_draw for seq in sequences] if pending else []
    pending_tokens = first_token[[i for i, draw in enumerate(pending_draws) if draw is not None]]
    token_ids[pending_tokens] = 0
    row_of_draw = np.repeat(np.arange(len(rows)), samples)
    sampling = table.sampling.take(places[row_of_draw])
    positions = ends[row_of_draw] - sampling["prompt"]
    for i in np.flatnonzero(samples > 1).tolist():
        if not expected[i]:  # a fork: a draw for each fresh child
            first = int(samples[:i].sum())
            sampling["index"][first : first + samples[i]] = sequences[i].state.fresh
    logits, given = _look_ahead(samples, expected, positions)
    forbids = np.flatnonzero(positions < sampling["min_tokens"]).tolist()
    return Plan(
        step=step,
        starts=starts,
        counts=counts,
        samples=samples,
        logits=logits,
        token_ids=token_ids,
        pending_tokens=pending_tokens,
        pending_draws=np.array([draw for draw in pending_draws if draw is not None], np.int64),
        block_table=table.table[:, : -(-int(ends.max()) // block_size)][places],
        sampling=sampling,
        positions=positions,
        given=given,
        adjustments=tuple(_adjustments(sampling["adjusted"], sequences, samples, expected)),
        forbidden=tuple((draw, sequences[row_of_draw[draw]].state.stop_ids) for draw in forbids),
        shared=shared,
        moves=moves,
    )


def _token_ids(rows: list[Row], first_token: np.ndarray, more: list[int]) -> np.ndarray:
    """Return [T] int32 tokens to compute, row after row; `first_token` has where each begins, and of the rows `more` it is not
    the newest token alone."""
    token_ids = np.empty(int(first_token[-1] + rows[-1][2]), np.int32)
    token_ids[first_token] = [row[0].last_token for row in rows]
    for i in more:
        seq, start, count, samples, expected = rows[i]
        ahead = expected[: samples - 1] if samples else ()
        known = seq.tokens(start, count - len(ahead))
        token_ids[first_token[i] : first_token[i] + count] = [*known.tolist(), *ahead] if ahead else known
    return token_ids


def _look_ahead(
    samples: np.ndarray, expected: tuple[tuple[int, ...], ...], positions: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return `logits` and `given` of a plan, and correct the `positions` of draws that do not stand behind their row's last
    token."""
    logits, given = np.minimum(samples, 1), np.full(len(positions), -1, np.int32)
    for i in [i for i, tokens in enumerate(expected) if tokens]:
        logits[i], first = samples[i], int(samples[:i].sum())
        draws = slice(first, first + samples[i])
        positions[draws] -= np.arange(samples[i])[::-1]
        if len(expected[i]) == samples[i]:
            given[draws] = expected[i]
    return logits, given


def _adjustments(
    adjusted: np.ndarray, sequences: tuple[Sequence, ...], samples: np.ndarray, expected: tuple[tuple[int, ...], ...]
) -> Iterator[LogitAdjustment]:
    """Yield how logits are changed, those of the draws that are `adjusted`, [D] bool: of a fork once for all children, of a row
    that looks ahead for each draw, behind the tokens that stand before it."""
    if not adjusted.any():
        return
    first = 0
    for seq, draws, tokens in zip(sequences, samples.tolist(), expected, strict=True):
        if draws and adjusted[first]:
            assert seq.tracked is not None
            if tokens:
                yield from (seq.tracked.adjustment(first + at, 1, tokens[:at]) for at in range(draws))
            else:
                yield seq.tracked.adjustment(first, draws)
        first += draws
