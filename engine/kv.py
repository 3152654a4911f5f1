"""The bytes of KV: one pool on the device, one in host memory, and every copy there is.

    data [blocks, layers, 2, kv_heads, block_size, head_dim]      device and host alike

          block 0                                   block 1
          ┌ layer 0 ───────┬ layer 1 ───────┬ … ┐   ┌ …
          │ K heads│V heads│ K heads│V heads│   │   │
          └────────┴───────┴────────┴───────┴───┘   └

All layers of a block lie together, so that fork copy, offload and restore of a block move one contiguous row. What lies
inside K and V of one layer is the attention backend's business. Block-major layout: transformers' continuous batching.
"""

from __future__ import annotations

import mmap
from typing import NamedTuple

import torch

from engine.pool import Moves


class KVGeometry(NamedTuple):
    """What one token of KV is."""

    layers: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype

    @property
    def bytes_per_token(self) -> int:
        return self.layers * 2 * self.kv_heads * self.head_dim * self.dtype.itemsize


class PagedKV:
    """Both pools. Written by the attention backend (device) and by `move`."""

    def __init__(
        self, geometry: KVGeometry, block_size: int, device_blocks: int, host_blocks: int, device: torch.device
    ) -> None:
        self.geometry = geometry
        self.block_size = block_size
        self.block_bytes = geometry.bytes_per_token * block_size
        shape = (geometry.layers, 2, geometry.kv_heads, block_size, geometry.head_dim)
        self.data = _allocate((device_blocks, *shape), geometry.dtype, device)
        """[blocks, layers, 2, kv_heads, block_size, head_dim] on the device; zero at first, so that no NaN lies in it"""
        self.host = _allocate((host_blocks, *shape), geometry.dtype, torch.device("cpu"), pinned=device.type == "cuda")
        """the same shape in host memory, pinned on CUDA"""
        self._rows = self.data.flatten(1)
        self._host_rows = self.host.flatten(1)

    def move(self, moves: Moves) -> None:
        """All copies of a step, in the order that `Moves` promises."""
        for source, target, pairs in (
            (self._rows, self._host_rows, moves.offloads),
            (self._host_rows, self._rows, moves.restores),
            (self._rows, self._rows, moves.copies),
        ):
            if pairs:
                copy_rows(source, target, pairs)


def copy_rows(source: torch.Tensor, target: torch.Tensor, pairs: list[tuple[int, int]]) -> None:
    """Row pairs (from, to) of two [rows, width] tensors. No row may be both a source and a destination of one call, unless it
    is read before it is written, which one gather on each side guarantees."""
    from_rows = torch.tensor([pair[0] for pair in pairs], device=source.device)
    to_rows = torch.tensor([pair[1] for pair in pairs], device=target.device)
    if len(pairs) == 1:
        target[pairs[0][1]].copy_(source[pairs[0][0]])
        return
    gathered = source.index_select(0, from_rows)
    target.index_copy_(0, to_rows, gathered.to(target.device))


def _allocate(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, pinned: bool = False) -> torch.Tensor:
    if device.type != "cpu" or pinned:
        return torch.zeros(shape, dtype=dtype, device=device, pin_memory=pinned)
    size = dtype.itemsize
    for length in shape:
        size *= length
    if size == 0:
        return torch.zeros(shape, dtype=dtype)
    # An anonymous map costs no memory until it is written, is zero, page-aligned, and can ask for huge pages: blocks are
    # scattered, and with 4 KiB pages their reads miss the TLB.
    memory = mmap.mmap(-1, size)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype).view(shape)
