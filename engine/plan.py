"""The plan of one step: what the scheduler decided, frozen. `Batch.build` turns it into tensors, `Scheduler.commit` takes it
back with what the step drew."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from engine.columns import Columns
from engine.pool import Moves
from engine.sequence import Sequence


class Row(NamedTuple):
    """Compute `count` tokens of `sequence` from position `start` on. Prefill, a chunk of it, decode and prefill after a soft
    reset are the same row with other numbers."""

    sequence: Sequence
    start: int
    count: int
    samples: int
    """tokens to draw from the logits of the row's last token: 0 in the middle of a prefill, n where a group forks"""


class SharedPrefix(NamedTuple):
    """Rows `first_row` … `first_row + num_rows - 1` have their first `num_blocks` blocks in common, all of them full."""

    first_row: int
    num_rows: int
    num_blocks: int


class Plan(NamedTuple):
    rows: tuple[Row, ...]
    """rows of one group stand side by side"""
    shared: tuple[SharedPrefix, ...]
    moves: Moves
    columns: Columns
    """where the sequences of the rows have their places; valid until the step is launched"""

    @property
    def num_tokens(self) -> int:
        return sum(row.count for row in self.rows)


class Drawn(NamedTuple):
    """What the sampler drew, one entry for each sample of each row in the order of the plan."""

    tokens: np.ndarray
    """[samples] int32"""
    logprobs: np.ndarray
    """[samples] float32, of the distribution drawn from"""
    raw_logprobs: np.ndarray | None
    """[samples] float32 at temperature 1 without truncation; None if no row asked"""
    finite: np.ndarray
    """[samples] bool: False where the logits held NaN or infinity, so that nothing was drawn"""


class Cuts(NamedTuple):
    """What D draws leave out of their distributions."""

    any: np.ndarray
    """[D] bool: it leaves something out"""
    top_k: np.ndarray
    """[D] int64, 0 = off"""
    top_p: np.ndarray
    """[D] float32"""
    min_p: np.ndarray
    """[D] float32"""
    forbidden: list[tuple[int, list[int]]]
    """(draw, tokens), draws ascending"""
