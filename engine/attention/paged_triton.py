"""The attention backend for CUDA: Triton kernels over tiles, index arrays at static addresses.

    arrays   int32   ┌ counts ┬ positions ┬ parts ┬ slots ┬ small tiles ┬ large tiles ┬ block table … ┐
                       2        P           P       P       6 · tiles     6 · tiles     R · M

One pinned array on the host, one on the device, and one copy a step between them. All but the table has room for the largest
step and lies always at the same place, so a captured CUDA graph reads the arrays of the step that is replayed.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from engine.attention.tiles import COLUMNS, PADDING, Tiles, chunk_tokens, cut, most_tiles, program_groups, tile_rows
from engine.batch import Batch
from engine.config import EngineConfig
from engine.kv import PagedKV

PARTS_OF_A_ROW = 32
"""partial results that there is memory for, for each sequence on average; rows beyond that are not split (same numbers)"""
PROGRAMS_OF_A_PROCESSOR = 2
"""programs whose registers one streaming multiprocessor holds"""
LAUNCH = {"N": 64, "num_warps": 4}
"""of `attend`: keys that a tile meets at once; threads / 32"""
EXACT = {"enable_fp_fusion": False}
"""a product and a sum are rounded each, wherever they stand: merging in `attend` and in `merge` gives the same bits"""
LOG2E = math.log2(math.e)


def stages(row_bytes: int, shared_bytes: int) -> int:
    """Of `attend`'s pipeline. Triton counts the block table, the addresses and the copies of K and V as one each, so that with
    fewer than 5 no copy is under way while products run. It takes them where two programs find room for so many blocks of keys:
    `row_bytes` of a token's K for one head, `shared_bytes` that a program of the device can have (Hopper: 227 KiB)."""
    return 5 if row_bytes <= 256 and shared_bytes >= 227 * 1024 else 2


class TritonUnavailable(RuntimeError):
    """Triton cannot run here; the message says why."""


@dataclass(frozen=True, slots=True)
class Capacity:
    """The largest step."""

    tokens: int
    rows: int
    columns: int
    """blocks of the longest sequence"""
    q_heads: int
    """0 = not the same in all layers"""
    kv_heads: int
    head_dim: int

    @staticmethod
    def of(config: EngineConfig, model: Any) -> Capacity:
        """`model`: an `engine.engine.ModelLike`."""
        return Capacity(
            tokens=max(config.max_batch_tokens, 16),  # a smaller batch is padded
            rows=max(config.max_num_seqs, 16),
            columns=-(-model.context // config.block_size),
            q_heads=model.q_heads,
            kv_heads=model.geometry.kv_heads,
            head_dim=model.geometry.head_dim,
        )


class TritonAttention:
    """A CUDA attention backend (`engine.attention.seam.Backend`). A query's numbers do not depend on how its step was cut into
    tiles, nor on what is shared. Raises TritonUnavailable."""

    name = "triton"

    def __init__(self, device: torch.device, capacity: Capacity, programs: int | None = None) -> None:
        """programs: that run at once, of which each KV head has as many; None = enough for the device."""
        if not capacity.q_heads:
            raise TritonUnavailable("the model's layers have different numbers of query heads")
        self._kernels = _import(device)
        self.device = device
        self.capacity = capacity
        groups = program_groups(programs or _programs(device), capacity.kv_heads)
        self.programs = groups * capacity.kv_heads
        self.max_parts = PARTS_OF_A_ROW * capacity.rows
        tiles = most_tiles(capacity.tokens, capacity.rows, groups)
        sizes = (2, capacity.tokens, capacity.tokens, capacity.tokens, COLUMNS * tiles, COLUMNS * tiles)
        self._starts = np.cumsum((0, *sizes))
        on_device = device.type == "cuda"
        length = int(self._starts[-1]) + capacity.rows * capacity.columns
        self._host = torch.zeros(length, dtype=torch.int32, pin_memory=on_device)
        self._arrays = torch.zeros(length, dtype=torch.int32, device=device)
        self.partial = torch.empty((self.max_parts, capacity.q_heads, capacity.head_dim), device=device)
        """[parts, q_heads, head_dim] fp32: of one chunk each, not yet divided by its sum"""
        self.sums = torch.empty((self.max_parts, capacity.q_heads, 2), device=device)
        """[parts, q_heads, 2] fp32: maximum of the scores (times log2 e) and sum of the weights of a partial result"""
        self._shared_bytes = torch.cuda.get_device_properties(device).shared_memory_per_block_optin if on_device else 0
        self._sent: Any = torch.cuda.Event() if on_device else None

    def __str__(self) -> str:
        return f"Triton attention ({self.device})"

    def prepare(self, batch: Batch, kv: PagedKV) -> tuple[torch.Tensor, ...]:
        """Cut the step into tiles and send them to the device. Returns views of the static arrays, in the order drawn above."""
        counts, positions, parts, slots, small, large, table = self._views(self._host.numpy())
        t, blocks = batch.num_tokens, batch.block_table
        for share, max_parts in ((len(batch.shared) > 0, self.max_parts), (False, self.max_parts), (False, 0)):
            tiles = self._cut(batch, kv, share, max_parts)
            if max(tiles.small.size, tiles.large.size) <= len(small):
                break  # else fewer of them, and the same numbers
        if self._sent is not None:
            self._sent.synchronize()  # the copy that reads what is written here: over when the step in flight has begun
        counts[:] = len(tiles.small), len(tiles.large)
        lengths = np.diff(batch.query_starts)
        positions[:t] = np.arange(t) + np.repeat(batch.context_lens - batch.query_starts[1:], lengths)
        parts[:t], parts[t:] = tiles.parts, PADDING
        slots[:t], slots[t:] = batch.slots.numpy(), -1
        small[: tiles.small.size], large[: tiles.large.size] = tiles.small.ravel(), tiles.large.ravel()
        table[: blocks.size] = blocks.ravel()
        used = int(self._starts[-1]) + blocks.size
        self._arrays[:used].copy_(self._host[:used], non_blocking=True)
        if self._sent is not None:
            self._sent.record()
        return self._views(self._arrays)

    def _cut(self, batch: Batch, kv: PagedKV, share: bool, max_parts: int) -> Tiles:
        heads = kv.geometry.kv_heads
        return cut(
            batch.query_starts, batch.context_lens, batch.block_table, share, block_size=kv.block_size,
            group=self.capacity.q_heads // heads, kv_heads=heads, programs=self.programs, max_parts=max_parts,
        )  # fmt: skip

    def _views(self, whole: Any) -> tuple[Any, ...]:
        ends = (*self._starts[1:].tolist(), len(whole))
        return tuple(whole[start:end] for start, end in zip(self._starts.tolist(), ends, strict=True))

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        batch: Batch,
        kv: PagedKV,
        scaling: float,
        window: int,
    ) -> torch.Tensor:
        counts, positions, parts, slots, small, large, table = batch.attention
        (padded, q_heads, dim), heads = query.shape, kv.geometry.kv_heads
        assert query.stride(2) == key.stride(2) == value.stride(2) == 1
        group, block, data = q_heads // heads, kv.block_size, kv.data
        layer_at, stride = layer * data.stride(1), data.stride(0)
        shape = {"HEADS": heads, "DIM": dim, "DIM_PAD": _power_of_two(max(dim, 16)), "BLOCK": block}
        out = torch.empty((padded, q_heads, dim), dtype=query.dtype, device=query.device)
        kernels, chunk = self._kernels, chunk_tokens(block)
        ahead = stages(shape["DIM_PAD"] * data.itemsize, self._shared_bytes)
        kernels.store[(padded,)](
            key, value, data, slots, layer_at, stride, *key.stride()[:2], *value.stride()[:2],
            HEADS_PAD=_power_of_two(heads), **shape,
        )  # fmt: skip
        for i, (tiles, rows) in enumerate(zip((small, large), tile_rows(group), strict=True)):
            kernels.attend[(self.programs,)](
                query, out, data, table, positions, parts, self.partial, self.sums, tiles, counts[i:],
                layer_at, stride, *query.stride()[:2], out.stride(0), scaling * LOG2E, window,
                GROUP=group, CHUNK=chunk, M=rows, COLUMNS=COLUMNS, WIDEN=query.device.type == "cpu", num_stages=ahead,
                **shape, **LAUNCH, **EXACT,
            )  # fmt: skip
        kernels.merge[(padded, heads)](
            out, positions, parts, self.partial, self.sums, out.stride(0), window,
            HEADS=heads, GROUP=group, GROUP_PAD=_power_of_two(group), DIM=dim, DIM_PAD=shape["DIM_PAD"], CHUNK=chunk,
            **EXACT,
        )  # fmt: skip
        return out


def _import(device: torch.device) -> Any:
    """The kernels. Raises TritonUnavailable where Triton is missing, or would need a GPU that is not there."""
    if device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        raise TritonUnavailable("Triton runs on the CPU in its interpreter only: set TRITON_INTERPRET=1")
    try:
        from engine.attention import triton_kernels
    except ImportError as error:
        raise TritonUnavailable(f"Triton cannot be imported ({error}); it comes with the CUDA builds of torch") from error
    return triton_kernels


def _programs(device: torch.device) -> int:
    """That run at once."""
    if device.type == "cpu":
        return 1  # the interpreter's
    return PROGRAMS_OF_A_PROCESSOR * torch.cuda.get_device_properties(device).multi_processor_count


def _power_of_two(least: int) -> int:
    return 1 << (least - 1).bit_length()
