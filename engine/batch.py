"""Batch: the one place where the plan's ints become tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from engine.plan import Plan
from engine.sampler import SamplingBatch
from engine.transfers import to_device

MIN_ROWS = {torch.bfloat16: 2, torch.float16: 2}
"""Below this many rows a matrix product takes another path, and a token's numbers would depend on how many tokens stand
beside it; smaller batches are padded. 16 for every other dtype."""


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """The tensors of one step: T tokens (padded to P ≥ T) of R rows, S rows of logits, D draws."""

    input_ids: torch.Tensor
    """[1, P] int64"""
    position_ids: torch.Tensor
    """[1, P] int64"""
    num_tokens: int
    """T; what stands behind is padding"""
    slots: torch.Tensor
    """[T] int64 on the CPU: block * block_size + offset, where a token's KV goes"""
    query_starts: np.ndarray
    """[R + 1] int32: row r has the tokens query_starts[r] … query_starts[r + 1] - 1"""
    context_lens: np.ndarray
    """[R] int32: tokens that the last query of a row sees, itself included"""
    block_table: np.ndarray
    """[R, M] int32: device slots of each row's blocks"""
    shared: np.ndarray
    """[G, 3] int32: (first row, rows, leading blocks in common)"""
    logits_at: torch.Tensor
    """[S'] int64: tokens whose logits are wanted, padded like the tokens by repetition"""
    num_logits: int
    """S"""
    sampling: SamplingBatch
    """one entry for each draw"""
    attention: Any = None
    """what the attention backend prepared for this step"""

    @staticmethod
    def build(
        plan: Plan, block_size: int, device: torch.device, dtype: torch.dtype, drawn: torch.Tensor | None = None
    ) -> Batch:
        """drawn: [D] int32 on the device, what the step in flight draws: pending tokens are taken from it."""
        sequences, *numbers = zip(*plan.rows, strict=True)
        starts, counts, samples = (np.array(each, np.int32) for each in numbers)
        places = np.array([seq.place for seq in sequences])
        context_lens = starts + counts
        query_starts = np.zeros(len(sequences) + 1, np.int32)
        np.cumsum(counts, out=query_starts[1:])
        num_tokens = int(query_starts[-1])
        ids = np.empty(num_tokens, np.int64)
        ids[query_starts[:-1]] = [seq.newest for seq in sequences]  # decode; all other rows are written over
        for i in np.flatnonzero((counts > 1) | (samples == 0)).tolist():
            ids[query_starts[i] : query_starts[i + 1]] = sequences[i].tokens(starts[i], counts[i])
        row_of = np.repeat(np.arange(len(sequences)), counts)
        positions = np.arange(num_tokens) - query_starts[row_of] + starts[row_of]
        table = plan.columns.table[:, : -(-int(context_lens.max()) // block_size)][places]
        slots = table[row_of, positions // block_size].astype(np.int64) * block_size + positions % block_size
        sampled = np.flatnonzero(samples)
        logits_at = query_starts[sampled + 1].astype(np.int64) - 1
        wanted = logits_at if len(logits_at) else np.zeros(1, np.int64)
        whole = [padded(array, dtype) for array in (ids, positions, wanted)]
        input_ids, position_ids, wanted_at = to_device(whole, device)
        if ids.min() < 0:
            assert drawn is not None, "a token is pending, and nothing is in flight"
            input_ids = torch.where(input_ids < 0, drawn[(~input_ids).clamp(min=0)].long(), input_ids)
        return Batch(
            input_ids=input_ids[None],
            position_ids=position_ids[None],
            num_tokens=num_tokens,
            slots=torch.from_numpy(slots),
            query_starts=query_starts,
            context_lens=context_lens,
            block_table=table,
            shared=np.array(plan.shared, np.int32).reshape(-1, 3),
            logits_at=wanted_at,
            num_logits=len(logits_at),
            sampling=SamplingBatch.build(plan, places, samples, context_lens),
        )


def padded(values: np.ndarray, dtype: torch.dtype) -> np.ndarray:
    """Repeat the last value until there are as many rows as a product in this dtype needs."""
    least = MIN_ROWS.get(dtype, 16)
    return values if len(values) >= least else np.pad(values, (0, least - len(values)), mode="edge")
