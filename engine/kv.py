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

MADV_POPULATE_WRITE = 23
"""of Linux 5.14; Python has no name for it yet"""


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
    """Both pools. Written by the attention backend (device) and by `move`.

    `take_now`: whether the memory of the device pool, and that of the host pool, is taken at once, so that no step waits for
    its first touch; otherwise it is taken as blocks are first used."""

    def __init__(
        self,
        geometry: KVGeometry,
        block_size: int,
        device_blocks: int,
        host_blocks: int,
        device: torch.device,
        take_now: tuple[bool, bool] = (False, False),
    ) -> None:
        self.geometry = geometry
        self.block_size = block_size
        self.block_bytes = geometry.bytes_per_token * block_size
        shape = (geometry.layers, 2, geometry.kv_heads, block_size, geometry.head_dim)
        self.data = _allocate((device_blocks, *shape), geometry.dtype, device, take_now=take_now[0])
        """[blocks, layers, 2, kv_heads, block_size, head_dim] on the device; zero at first, so that no NaN lies in it"""
        host = torch.device("cpu")
        pinned = device.type == "cuda"
        self.host = _allocate((host_blocks, *shape), geometry.dtype, host, pinned=pinned, take_now=take_now[1])
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
    """Row pairs (from, to) of two [rows, width] tensors; every row is read before any is written."""
    sources, targets = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    chained = source is target and not set(sources).isdisjoint(targets)
    if source.is_cpu and target.is_cpu and not chained:
        for row, place in pairs:  # one memcpy each, and no memory in between
            target[place].copy_(source[row])
        return
    gathered = source.index_select(0, torch.tensor(sources, device=source.device))
    target.index_copy_(0, torch.tensor(targets, device=target.device), gathered.to(target.device))


def _allocate(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, pinned: bool = False, take_now: bool = False
) -> torch.Tensor:
    if device.type != "cpu" or pinned:
        return torch.zeros(shape, dtype=dtype, device=device, pin_memory=pinned)
    size = dtype.itemsize
    for length in shape:
        size *= length
    if size == 0:
        return torch.zeros(shape, dtype=dtype)
    # An anonymous map costs no memory until it is written, is zero, page-aligned, and can ask for huge pages: blocks are
    # scattered, and with 4 KiB pages their reads miss the TLB.
    try:
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise ValueError(
            f"a KV pool of {size / 2**30:.1f} GiB cannot be had here: {error}; lower kv_gib or kv_tokens"
        ) from error
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    if take_now:
        try:
            memory.madvise(MADV_POPULATE_WRITE)
        except OSError:  # a kernel before 5.14, or no Linux: the first touch does it
            pass
    return torch.frombuffer(memory, dtype=dtype).view(shape)
