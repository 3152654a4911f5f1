"""The bytes of KV: one pool on the device, one in host memory, and every copy there is.

    data [blocks, layers, 2, kv_heads, block_size, head_dim]      device and host alike
         [blocks, layers, kv_heads · block_size · (head_dim + value_dim)]      where K and V have different widths

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

import numpy as np
import torch

from engine.kv.block import Moves, Spans
from engine.kv.copies import Copied, Copy, InLine, Lane, Unknown, Uses
from engine.memory import Memory

MADV_POPULATE_WRITE = 23
"""of Linux 5.14; Python has no name for it yet"""


class KVGeometry(NamedTuple):
    """What one token of KV is."""

    layers: int
    kv_heads: int
    head_dim: int
    """of K"""
    dtype: torch.dtype
    other_value_dim: int | None = None
    """of V, where it has a width of its own"""

    @property
    def value_dim(self) -> int:
        return self.head_dim if self.other_value_dim is None else self.other_value_dim

    @property
    def bytes_per_token(self) -> int:
        return self.layers * self.kv_heads * (self.head_dim + self.value_dim) * self.dtype.itemsize

    def block_shape(self, block_size: int) -> tuple[int, ...]:
        """Of one block in the pools."""
        if self.value_dim == self.head_dim:
            return (self.layers, 2, self.kv_heads, block_size, self.head_dim)
        return (self.layers, self.kv_heads * block_size * (self.head_dim + self.value_dim))


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
        memory: Memory,
        lane: Lane | None = None,
        take_now: tuple[bool, bool] = (False, False),
    ) -> None:
        """lane: runs the copies of a step; None = in line with the compute."""
        self.geometry = geometry
        self.block_size = block_size
        self.block_bytes = geometry.bytes_per_token * block_size
        shape = geometry.block_shape(block_size)
        self._region = None if memory.is_host else memory.region(device_blocks * self.block_bytes)
        """that the pool lies in; None: it moves with a sleep, or is the host's"""
        if self._region is not None:
            self._region.need(device_blocks * self.block_bytes)
            self.data, self._map = self._region.data.zero_().view(geometry.dtype).view(device_blocks, *shape), None
        else:
            self.data, self._map = _allocate((device_blocks, *shape), geometry.dtype, memory, on_device=True)
        """[blocks, *block_shape] on the device; zero at first, so that no NaN lies in it"""
        self.host, host_map = _allocate((host_blocks, *shape), geometry.dtype, memory, on_device=False)
        """the same shape in host memory, pinned on CUDA"""
        self._take_now = take_now[0]
        for mapped, now in ((self._map, take_now[0]), (host_map, take_now[1])):
            if now:
                _populate(mapped)
        self.memory = memory
        self.lane: Lane = InLine() if lane is None else lane
        self._rows = self.data.flatten(1)
        self._host_rows = self.host.flatten(1)
        self._copy = Copy(
            out=lambda pairs: copy_rows(self._rows, self._host_rows, pairs),
            into=lambda pairs: copy_rows(self._host_rows, self._rows, pairs),
            within=lambda pairs: copy_within(self._rows, pairs, self.memory),
        )

    @property
    def stays(self) -> bool:
        """The pool has the same address after `take_back`."""
        return self._region is not None or self._map is not None

    def release(self) -> None:
        """Give the memory of the device pool back; its shape stays, and its address where `stays` says so. What lies in it is
        gone."""
        self.lane.finish()
        if self._region is not None:
            self._region.release()
        elif self._map is not None:
            self._map.madvise(mmap.MADV_DONTNEED)
        else:
            self.data.untyped_storage().resize_(0)

    def take_back(self) -> None:
        """Undo `release`: the pool is there again, and zero."""
        if self._region is not None:
            self._region.restore()
            self._region.data.zero_()
        elif self._map is not None:
            if self._take_now:
                _populate(self._map)
        else:
            self.data.untyped_storage().resize_(self.data.nbytes)
            self.data.zero_()

    def move(self, moves: Moves, spans: Spans | None = None) -> Copied:
        """Run all copies of a step, as `Moves` promises; called at every step, copies or none. spans: of the compute that
        follows; None: it may use any slot. Returns the copies that have ended since the last call: on the CPU these ones."""
        claims = Unknown() if spans is None else Uses(len(self.data), self.block_size, spans)
        return self.lane.run(moves, self._copy, claims)


def keys_and_values(kv: PagedKV, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
    """View the device pool as K [blocks, kv_heads, block_size, head_dim] and V [blocks, kv_heads, block_size, value_dim]."""
    if kv.data.dim() == 6:
        return kv.data[:, layer, 0], kv.data[:, layer, 1]
    geometry, at = kv.geometry, kv.data[:, layer]
    end = geometry.kv_heads * kv.block_size * geometry.head_dim
    shape = len(at), geometry.kv_heads, kv.block_size, -1
    return at[:, :end].view(shape), at[:, end:].view(shape)


def copy_within(rows: torch.Tensor, pairs: list[tuple[int, int]], memory: Memory) -> None:
    """Copy row pairs (from, to) of a [rows, width] tensor; every row is read before any is written."""
    sources, targets = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    if set(sources).isdisjoint(targets):
        copy_rows(rows, rows, pairs)
    else:
        read, written = memory.send([np.array(sources), np.array(targets)])
        rows.index_copy_(0, written, rows.index_select(0, read))


def copy_rows(source: torch.Tensor, target: torch.Tensor, pairs: list[tuple[int, int]]) -> None:
    """Copy row pairs (from, to) of two [rows, width] tensors, or of one where no row is both read and written."""
    for row, place in pairs:  # a row is long: one copy each, and no memory in between
        target[place].copy_(source[row], non_blocking=True)


def _allocate(
    shape: tuple[int, ...], dtype: torch.dtype, memory: Memory, on_device: bool
) -> tuple[torch.Tensor, mmap.mmap | None]:
    """Allocate a tensor of zeros on the device, or in the host memory beside it. Returns it and the map that it lies in, if it
    does."""
    if on_device and not memory.is_host:
        return torch.zeros(shape, dtype=dtype, device=memory.device), None
    size = dtype.itemsize
    for length in shape:
        size *= length
    if size == 0:
        return torch.zeros(shape, dtype=dtype), None
    try:
        mapped = memory.host_map(size)
    except OSError as error:
        raise ValueError(
            f"a KV pool of {size / 2**30:.1f} GiB cannot be had here: {error}; lower kv_gib or kv_tokens, or cpu_offload_gib"
        ) from error
    return torch.frombuffer(mapped, dtype=dtype).view(shape), mapped


def _populate(memory: mmap.mmap | None) -> None:
    if memory is not None:
        try:
            memory.madvise(MADV_POPULATE_WRITE)
        except OSError:  # a kernel before 5.14, or no Linux: the first touch does it
            pass
