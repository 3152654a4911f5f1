"""The service's attention on CUDA over whole sequences of any number and length."""

from __future__ import annotations

from typing import Any

import torch

from rollout.engine.cuda.attention import TritonAttention
from rollout.engine.forward.attention import Scores, StepCapacity

Heads = tuple[int, int, int, int, int]
"""query heads, KV heads, widths of K and of V, bytes of a number"""


class DeviceAttention:
    """`rollout.engine.forward.attention.Backend` on a GPU for batches of any size. Its arrays grow to the largest batch so
    far. A batch is prepared once for all layers of one shape. programs: concurrent programs of the kernel; None = chosen for
    the device."""

    def __init__(self, device: torch.device, programs: int | None = None) -> None:
        self._device = device
        self._programs = programs
        self._kinds: dict[Heads, TritonAttention] = {}
        self._prepared: dict[Heads, tuple[Any, Any]] = {}
        """the batch that the arrays describe, and what `prepare` returned for it"""

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        batch: Any,
        kv: Any,
        scores: Scores,
    ) -> torch.Tensor:
        wanted = StepCapacity(
            tokens=max(len(query), 16), rows=max(len(batch.block_table), 16), columns=batch.block_table.shape[1],
            q_heads=query.shape[1], kv_heads=key.shape[1], head_dim=key.shape[2], itemsize=query.element_size(),
            other_value_dim=None if value.shape[2] == key.shape[2] else value.shape[2],
        )  # fmt: skip
        kind = heads_of(wanted)
        inner = self._fitting(kind, wanted)
        if kind not in self._prepared or self._prepared[kind][0] is not batch:
            self._prepared[kind] = batch, inner.prepare(batch, kv)
        batch.attention = self._prepared[kind][1]
        return inner.attend(layer, query, key, value, batch, kv, scores)

    def _fitting(self, kind: Heads, wanted: StepCapacity) -> TritonAttention:
        inner = self._kinds.get(kind)
        if inner is None or not _fits(wanted, inner.capacity):
            self._kinds[kind] = inner = TritonAttention(self._device, wanted, self._programs)
            self._prepared.pop(kind, None)
        return inner


def heads_of(capacity: StepCapacity) -> Heads:
    """Return what the arrays of one `TritonAttention` are for."""
    return capacity.q_heads, capacity.kv_heads, capacity.head_dim, capacity.value_dim, capacity.itemsize


def _fits(wanted: StepCapacity, has: StepCapacity) -> bool:
    table = wanted.rows * wanted.columns <= has.rows * has.columns
    return wanted.tokens <= has.tokens and wanted.rows <= has.rows and table
