"""Storage of KV: one pool on the device, one in host memory, and all copies between and within them.

    data [blocks, layers, 2, kv_heads, block_size, head_dim]      both pools
         [blocks, layers, kv_heads · block_size · (head_dim + value_dim)]      if K and V have different widths
         [blocks, layers, kv_heads · block_size · (head_dim + value_dim + 4)]  bytes, if KV is stored in fp8: codes of K,
                                                                                codes of V, and the scales of both
         [blocks, numbers of a block]      if layers have KV of different shapes: the second or third form for each layer, one
                                           after the other

          block 0                                   block 1
          ┌ layer 0 ───────┬ layer 1 ───────┬ … ┐   ┌ …
          │ K heads│V heads│ K heads│V heads│   │   │
          └────────┴───────┴────────┴───────┴───┘   └

All layers of a block are adjacent, so a fork, an offload or a restore of a block copies one contiguous row. The attention
backend defines the layout inside K and V of one layer. Block-major layout as in transformers' continuous batching.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

import torch

from rollout.engine.config import KVName
from rollout.engine.kv.block import BlockCopies, Copied, Spans
from rollout.engine.kv.copies import ALL_SLOTS, CopyEngine, step_claims
from rollout.engine.kv.pools import Pools
from rollout.engine.kv.sizing import PoolSizes
from rollout.engine.memory import DeviceMemory

if TYPE_CHECKING:
    from rollout.engine.kv.routes import RoutePages
    from rollout.engine.kv.states import StatePages

SCALE_BYTES = 4
"""bytes of the two bf16 scales of KV in fp8, of K and of V, per token and head"""


class LayerShape(NamedTuple):
    """Shape of the KV of one token in one layer."""

    kv_heads: int
    head_dim: int
    """width of K"""
    value_dim: int
    """width of V"""


class KVGeometry(NamedTuple):
    """Shape and dtype of the KV of one token. Layers are those that store KV, counted from 0."""

    layers: int
    kv_heads: int
    """0: layers differ"""
    head_dim: int
    """width of K; 0: layers differ"""
    dtype: torch.dtype
    """dtype in which the model computes K and V"""
    other_value_dim: int | None = None
    """width of V; None: the same as of K"""
    fp8: bool = False
    """stored as `rollout.engine.kv.fp8` defines, not in `dtype`"""
    different: tuple[LayerShape, ...] = ()
    """shape of each layer, if they differ"""

    @staticmethod
    def of(shapes: Sequence[LayerShape], dtype: torch.dtype) -> KVGeometry:
        """Return the geometry of layers of these shapes."""
        first = shapes[0] if shapes else LayerShape(0, 0, 0)
        if any(shape != first for shape in shapes):
            return KVGeometry(len(shapes), 0, 0, dtype, different=tuple(shapes))
        other = first.value_dim if first.value_dim != first.head_dim else None
        return KVGeometry(len(shapes), first.kv_heads, first.head_dim, dtype, other)

    @property
    def shapes(self) -> tuple[LayerShape, ...]:
        """Shape of each layer."""
        return self.different or (LayerShape(self.kv_heads, self.head_dim, self.value_dim),) * self.layers

    @property
    def value_dim(self) -> int:
        return self.head_dim if self.other_value_dim is None else self.other_value_dim

    @property
    def stored(self) -> torch.dtype:
        """Dtype of the pools."""
        return torch.uint8 if self.fp8 else self.dtype

    @property
    def bytes_per_token(self) -> int:
        scales = SCALE_BYTES if self.fp8 else 0
        return sum(heads * ((k + v) * self.stored.itemsize + scales) for heads, k, v in self.shapes)

    def kept_as(self, kv_dtype: KVName) -> KVGeometry:
        """Return the geometry of pools for `EngineConfig.kv_dtype`."""
        return self._replace(fp8=kv_dtype == "fp8_e4m3")

    def part(self, layers: Sequence[int]) -> KVGeometry:
        """Return the geometry of these layers alone, which may be none."""
        shapes = self.shapes
        return KVGeometry.of([shapes[layer] for layer in layers], self.dtype)._replace(fp8=self.fp8)

    def block_shape(self, block_size: int) -> tuple[int, ...]:
        """Return the shape of one block in the pools. Raises ValueError if fp8 scales would not be aligned."""
        if self.different or not self.layers:
            return (self.starts(block_size)[-1],)
        if self.fp8 or self.value_dim != self.head_dim:
            return (self.layers, self._numbers(self.shapes[0], block_size))
        return (self.layers, 2, self.kv_heads, block_size, self.head_dim)

    def starts(self, block_size: int) -> list[int]:
        """Return where each layer begins in a block, and the end of the last one, in elements of the pools."""
        return [0, *accumulate(self._numbers(shape, block_size) for shape in self.shapes)]

    def _numbers(self, shape: LayerShape, block_size: int) -> int:
        """Return the elements of a layer of a block."""
        codes = shape.kv_heads * block_size * (shape.head_dim + shape.value_dim)
        if not self.fp8:
            return codes
        if shape.head_dim % 2 or shape.value_dim % 2:
            raise ValueError(f"kv_dtype=fp8_e4m3: heads of {shape.head_dim} and {shape.value_dim} numbers: both must be even")
        if codes % SCALE_BYTES:
            raise ValueError(
                f"kv_dtype=fp8_e4m3 with block_size={block_size}: a layer of a block has {codes} numbers, which must be a "
                f"multiple of {SCALE_BYTES}; choose a block_size that is a multiple of {SCALE_BYTES}"
            )
        return codes + shape.kv_heads * block_size * SCALE_BYTES


class LayerPlace(NamedTuple):
    """Where a layer that stores KV has it."""

    windowed: bool
    """in the pools of layers with a sliding window"""
    layer: int
    """of those in the same pools, counted from 0"""


class PagedKV(Pools):
    """Both pools of KV, and those of recurrent state if the model has any. The attention backend writes the device pool, `move`
    writes both. `routes`: pools of routes, if they are kept. Layers with a sliding window may have pools of their own,
    `window`, with other blocks (`join`)."""

    def __init__(
        self,
        geometry: KVGeometry,
        sizes: PoolSizes,
        memory: DeviceMemory,
        copy_engine: CopyEngine | None = None,
        states: StatePages | None = None,
    ) -> None:
        """Allocate both pools.

        Args:
            copy_engine: runs the copies of a step; None: `SyncCopies`.
            states: of the model's recurrent layers.

        Raises:
            ValueError: the memory cannot be allocated.
        """
        shape, commit = geometry.block_shape(sizes.block_size), (sizes.commit_device, sizes.commit_host)
        super().__init__(shape, geometry.stored, (sizes.device, sizes.host), memory, commit)
        self.geometry = geometry
        self.block_size = sizes.block_size
        self.block_bytes = geometry.bytes_per_token * sizes.block_size
        self.starts = geometry.starts(sizes.block_size)
        """where each layer begins in a block, in elements of the pools"""
        self.states = states
        self.routes: RoutePages | None = None
        self.window: PagedKV | None = None
        """pools of the layers with a sliding window; None: the KV of all layers is here"""
        self.places: tuple[LayerPlace, ...] = ()
        """of all layers that store KV, if there is a `window`"""
        self.is_window = False
        """these are the pools of the layers with a sliding window"""
        if copy_engine is not None:
            self.copy_engine = copy_engine

    def join(self, window: PagedKV, windowed: Sequence[bool]) -> None:
        """Add the pools of the layers with a sliding window. windowed: for each layer that stores KV, whether it is there."""
        assert sum(windowed) == window.geometry.layers and len(windowed) == window.geometry.layers + self.geometry.layers
        self.window, window.is_window = window, True
        counted = [0, 0]
        for each in windowed:
            self.places += (LayerPlace(each, counted[each]),)
            counted[each] += 1

    @property
    def dtype_name(self) -> str:
        """`EngineConfig.kv_dtype`, or the name of the model's dtype."""
        return "fp8_e4m3" if self.geometry.fp8 else str(self.geometry.dtype).removeprefix("torch.")

    @property
    def host_ready(self) -> int:
        """Return how many of the first blocks of the host pool may be used; it grows while memory is pinned."""
        return super().host_ready if self.routes is None else min(super().host_ready, self.routes.host_ready)

    @property
    def host_sizes(self) -> list[int]:
        """Return `host_ready` of each kind of pools: KV, that of windows, recurrent states."""
        return [pools.host_ready for pools in (self, self.window, self.states) if pools is not None]

    def release(self) -> None:
        """Free the memory of the device pools; their contents are lost."""
        super().release()
        for pools in (self.states, self.routes, self.window):
            if pools is not None:
                pools.release()

    def restore(self) -> None:
        """Re-allocate the device pools, filled with zeros."""
        super().restore()
        for pools in (self.states, self.routes, self.window):
            if pools is not None:
                pools.restore()

    def move(self, moves: BlockCopies, spans: Spans | None = None) -> Copied:
        """Run all copies of a step in the order of `BlockCopies`. Call it at every step, also without copies.

        Args:
            spans: positions that the following compute uses; None: it may use any slot.

        Returns:
            The copies that finished since the last call; on the CPU, the copies of this call.
        """
        if self.routes is not None:
            self.routes.move(moves)
        claims = ALL_SLOTS if spans is None else step_claims(len(self.data), self.block_size, spans)
        return self.copy_engine.run(moves, self.copy, claims)
