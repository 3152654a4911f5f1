"""Batch: converts the integers of a plan to tensors."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch

from rollout.engine.forward.adjust import in_place
from rollout.engine.forward.sampling import SamplingBatch
from rollout.engine.memory import DeviceMemory
from rollout.engine.scheduling.plan import Plan

MIN_ROWS = {torch.bfloat16: 2, torch.float16: 2}
"""Fewest rows of a matrix product. With fewer rows, libraries use another code path, so that a token's numbers would depend on
the number of tokens in the step; smaller batches are padded. 16 for all other dtypes."""


class StateRows(NamedTuple):
    """Slots of the rows of a step. Several rows may read a slot; a row may write the slot that it reads; no row writes a slot
    that another row reads."""

    query_starts: np.ndarray
    """[R + 1] int32: row r has tokens query_starts[r] … query_starts[r + 1] - 1"""
    reads: np.ndarray
    """[R] int32: slot of the state before the row's first token; -1: zeros"""
    writes: np.ndarray
    """[R] int32: slot that gets the state after its last token; -1: none, and its inputs are kept for the next step"""


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """Tensors of one step: T tokens (padded to P ≥ T) of R rows, S rows of logits, D draws."""

    input_ids: torch.Tensor
    """[1, P] int64"""
    position_ids: torch.Tensor
    """[1, P] int64"""
    num_tokens: int
    """T; the tokens after it are padding"""
    slots: torch.Tensor
    """[T] int64 on the CPU: block * block_size + offset of the KV of each token"""
    query_starts: np.ndarray
    """[R + 1] int32: row r has tokens query_starts[r] … query_starts[r + 1] - 1"""
    context_lens: np.ndarray
    """[R] int32: tokens that the last query of a row attends to, including itself"""
    block_table: np.ndarray
    """[R, M] int32: device slots of the blocks of each row"""
    shared: np.ndarray
    """[G, 3] int32: (first row, number of rows, leading blocks that they share)"""
    logits_at: torch.Tensor
    """[S'] int64: tokens that need logits, padded like the tokens by repetition"""
    num_logits: int
    """S"""
    sampling: SamplingBatch
    """one entry per draw"""
    attention: Any = None
    """metadata that the attention backend prepared for this step"""
    states: StateRows | None = None
    """slots of recurrent state; None: the model has none"""
    state_rows: torch.Tensor | None = None
    """[3, R + 1] int64 on a device of its own: the same as `states`, query_starts, reads and writes, whose last entries are not
    used; None: the kernels read host memory"""
    windowed: Batch | None = None
    """the same step for layers with a sliding window: with their slots and block table, whose columns are 0 where a block has
    left the window, and `attention` of their own; None: all layers have the same blocks"""

    @staticmethod
    def build(
        plan: Plan, block_size: int, memory: DeviceMemory, dtype: torch.dtype, drawn: torch.Tensor | None = None
    ) -> Batch:
        """Convert a plan of at least one row to tensors in `memory`.

        Args:
            dtype: of the products; it decides the padding.
            drawn: [D] int32 on the device: tokens that the step in flight samples, the values of pending tokens.
        """
        starts, counts, blocks = plan.starts, plan.counts, plan.block_table
        query_starts = np.zeros(plan.num_rows + 1, np.int32)
        counts.cumsum(out=query_starts[1:])
        row_of = np.arange(plan.num_rows).repeat(counts)
        positions = np.arange(plan.num_tokens) + (starts - query_starts[:-1]).repeat(counts)
        slots = _slots(blocks, row_of, positions, block_size)
        behind = (query_starts[1:] - plan.logits.cumsum()).repeat(plan.logits)
        logits_at = np.arange(len(behind)) + behind
        least = MIN_ROWS.get(dtype, 16)
        wanted = logits_at if len(logits_at) else np.zeros(1, np.int64)
        states = StateRows(query_starts, plan.state_reads, plan.state_writes) if len(plan.state_writes) else None
        whole = [padded(array, least) for array in (plan.token_ids.astype(np.int64), positions, wanted)]
        table = [] if states is None or memory.is_host else [rows_as_table(states).ravel()]
        send = in_place if memory.is_host else memory.send
        input_ids, position_ids, wanted_at, pending_at, draws, *sent = send([*whole, *_pending(plan, least), *table])
        if len(draws):
            assert drawn is not None, "a token is pending, and nothing is in flight"
            input_ids.index_copy_(0, pending_at, drawn[draws].long())
        batch = Batch(
            input_ids=input_ids[None],
            position_ids=position_ids[None],
            num_tokens=plan.num_tokens,
            slots=torch.from_numpy(slots),
            query_starts=query_starts,
            context_lens=starts + counts,
            block_table=blocks,
            shared=np.array(plan.shared, np.int32).reshape(-1, 3),
            logits_at=wanted_at,
            num_logits=len(logits_at),
            sampling=SamplingBatch.build(plan),
            states=states,
            state_rows=sent[0].view(3, -1) if sent else None,
        )
        if not plan.window_table.size:
            return batch
        shared = batch.shared.copy()
        shared[:, 2] = 0  # rows of a group may share blocks, but some have left these behind: only the tables tell
        slots = _slots(plan.window_table, row_of, positions, block_size)
        windowed = replace(batch, slots=torch.from_numpy(slots), block_table=plan.window_table, shared=shared)
        return replace(batch, windowed=windowed)


def _slots(table: np.ndarray, row_of: np.ndarray, positions: np.ndarray, block_size: int) -> np.ndarray:
    """Return [T] int64: slots of tokens at these positions of these rows."""
    block, offset = np.divmod(positions, block_size)
    slots: np.ndarray = table[row_of, block].astype(np.int64) * block_size + offset
    return slots


def padded(values: np.ndarray, least: int) -> np.ndarray:
    """Repeat the last value until there are at least `least` values."""
    return values if len(values) >= least else values.take(np.minimum(np.arange(least), len(values) - 1))


def _pending(plan: Plan, least: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the positions of the pending tokens among the padded tokens, and their draws. Padding repeats the last token,
    which may be pending."""
    at, draws, tokens = plan.pending_tokens, plan.pending_draws, plan.num_tokens
    if len(at) and tokens < least and at[-1] == tokens - 1:
        at = np.concatenate([at, np.arange(tokens, least)])
    return at, padded(draws, len(at))


def rows_as_table(rows: StateRows) -> np.ndarray:
    """Return [3, R + 1] int64 query_starts, reads and writes; the last entries of reads and writes are not used."""
    none = np.full(1, -1, np.int64)
    reads, writes = (np.concatenate([each, none]) for each in (rows.reads, rows.writes))
    return np.stack([rows.query_starts.astype(np.int64), reads, writes])
