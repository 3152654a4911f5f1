"""K and V in the pools as numbers, for backends that read them with torch; FP8 is decoded."""

from __future__ import annotations

from typing import NamedTuple

import torch

from rollout.engine.kv import fp8
from rollout.engine.kv.pages import PagedKV


class Cells(NamedTuple):
    """K or V of one layer in the device pool, as views: one cell per token and head."""

    numbers: torch.Tensor
    """[blocks, kv_heads, block_size, width]: numbers, or fp8 codes"""
    scales: torch.Tensor | None = None
    """[blocks, kv_heads, block_size] bf16; None: not fp8"""

    def write(self, slots: torch.Tensor, values: torch.Tensor) -> None:
        """Store values [T, kv_heads, width] in slots [T] int64, each block · block_size + offset."""
        size = self.numbers.shape[2]
        block, at = slots // size, slots % size
        if self.scales is None:
            self.numbers[block, :, at] = values.to(self.numbers.dtype)
        else:
            self.numbers[block, :, at], self.scales[block, :, at] = fp8.encode(values)

    def read(self, blocks: torch.Tensor) -> torch.Tensor:
        """Return [N, kv_heads, block_size, width] fp32 of N blocks."""
        if self.scales is None:
            return self.numbers[blocks].float()
        return fp8.decode(self.numbers[blocks], self.scales[blocks])


def keys_and_values(kv: PagedKV, layer: int) -> tuple[Cells, Cells]:
    """View K and V of a layer in the device pool."""
    if kv.data.dim() == 6:
        return Cells(kv.data[:, layer, 0]), Cells(kv.data[:, layer, 1])
    geometry, starts = kv.geometry, kv.geometry.starts(kv.block_size)
    at = kv.data.flatten(1)[:, starts[layer] : starts[layer + 1]]
    heads, head_dim, value_dim = geometry.shapes[layer]
    tokens = heads * kv.block_size
    middle, end = tokens * head_dim, tokens * (head_dim + value_dim)
    shape = len(at), heads, kv.block_size, -1
    keys, values = at[:, :middle].view(shape), at[:, middle:end].view(shape)
    if not geometry.fp8:
        return Cells(keys), Cells(values)
    scales = at[:, end:].view(torch.bfloat16).view(*shape[:3], 2)
    return Cells(keys, scales[..., 0]), Cells(values, scales[..., 1])
