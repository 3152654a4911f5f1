"""Attention backend for CUDA: Triton kernels over tiles, with index arrays at static addresses.

    arrays   int32   ┌ counts ┬ positions ┬ parts ┬ slots ┬ small tiles ┬ large tiles ┬ block table … ┐
                       2        P           P       P       6 · tiles     6 · tiles     R · M

One pinned array on the host, one on the device, and one copy per step between them. All arrays before the table have room for
the largest step and fixed addresses, so a captured CUDA graph reads the arrays of the step that it replays.
"""

from __future__ import annotations

import math
import os
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch

from rollout.engine.cuda import tiles as cutting
from rollout.engine.cuda.compiled import compiled_by, triton_version
from rollout.engine.cuda.launches import KNOWN, Launches, LaunchLimits, choose, over_blocks, power_of_two, with_codes
from rollout.engine.cuda.tiles import COLUMNS, PADDING, Tiles, chunk_tokens, cut, most_tiles
from rollout.engine.forward.attention import CannotAttend, Scores, StepCapacity
from rollout.engine.forward.batch import Batch
from rollout.engine.kv.fp8 import is_fp8, scales_as
from rollout.engine.kv.pages import PagedKV

ARITHMETIC = "triton/1"
"""of the kernels; every change of their sums or roundings increases the version"""
PARTS_OF_A_ROW = 32
"""partial results per sequence, on average, for which memory is reserved at least; rows beyond that are not split, with the
same numbers"""
PARTIAL_SHARE = 128
"""one part in this many of the device's memory may hold partial results"""
CONVERTS_FP8 = 89
"""compute capability, times 10, from which a device converts e4m3 in hardware; on older ones the kernel shifts bits, with the
same result"""
EXACT = {"enable_fp_fusion": False}
"""round every product and every sum separately, so that merging in `attend` and in `merge` gives the same bits"""
LOG2E = math.log2(math.e)


class TritonUnavailable(CannotAttend):
    """Triton cannot run here; the message says why."""


class Prepared(NamedTuple):
    """Inputs of a step's attention at static addresses, in the order drawn above, and the kernels to launch."""

    counts: torch.Tensor
    positions: torch.Tensor
    parts: torch.Tensor
    slots: torch.Tensor
    small: torch.Tensor
    large: torch.Tensor
    table: torch.Tensor
    launched: tuple[bool, bool, bool] = (True, True, True)
    """`attend` for small tiles, for large tiles, `merge`; a kernel without work is not launched"""


class TritonAttention:
    """CUDA attention backend (`rollout.engine.forward.attention.Backend`). A query's numbers depend neither on how its step is
    cut into tiles nor on shared prefixes. Raises TritonUnavailable."""

    name = "triton"

    def __init__(self, device: torch.device, capacity: StepCapacity, programs: int | None = None, kernels: Any = None) -> None:
        """Allocate the static arrays.

        Args:
            programs: programs that run at the same time, the same number for each KV head; None = as many as fill the device.
            kernels: replaces `rollout.engine.cuda.attention_kernels` in tests.
        """
        if not capacity.q_heads:
            raise TritonUnavailable("the model's layers have different numbers of query heads")
        self._kernels = kernels or _import(device)
        self.arithmetic = arithmetic_on(device)
        self.device = device
        self.capacity = capacity
        limits, processors = _limits(device)
        self._capability = limits.capability
        self._converts = device.type == "cuda" and limits.capability >= CONVERTS_FP8
        """whether the device converts e4m3"""
        try:
            self.launches: Launches = choose(capacity.group, capacity.widest, capacity.itemsize, limits)
        except ValueError as error:
            raise TritonUnavailable(str(error)) from error
        """for small and for large tiles"""
        self.launches_in_fp8 = with_codes(self.launches, capacity.widest)
        at_once = [programs or processors * launch.programs for launch in self.launches]
        self.groups = (max(1, at_once[0] // capacity.kv_heads), max(1, at_once[1] // capacity.kv_heads))
        """programs that run at the same time per KV head, for small and for large tiles"""
        memory = torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else 0
        self.max_parts = parts_for(memory, capacity)
        tiles = most_tiles(capacity.tokens, capacity.rows, max(self.groups))
        sizes = (2, capacity.tokens, capacity.tokens, capacity.tokens, COLUMNS * tiles, COLUMNS * tiles)
        self._starts = np.cumsum((0, *sizes))
        on_device = device.type == "cuda"
        length = int(self._starts[-1]) + capacity.rows * capacity.columns
        self._host = torch.zeros(length, dtype=torch.int32, pin_memory=on_device)
        self._arrays = torch.zeros(length, dtype=torch.int32, device=device)
        self.partial = torch.empty((self.max_parts, capacity.q_heads, capacity.value_dim), device=device)
        """[parts, q_heads, value_dim] fp32: result of one chunk each, not divided by its sum yet"""
        self.sums = torch.empty((self.max_parts, capacity.q_heads, 2), device=device)
        """[parts, q_heads, 2] fp32: maximum of the scores (times log2 e) and sum of the weights of each partial result"""
        self._sent: Any = torch.cuda.Event() if on_device else None

    def __str__(self) -> str:
        return f"Triton attention ({self.device})"

    def prepare(self, batch: Batch, kv: PagedKV) -> Prepared:
        """Cut the step into tiles and send them to the device. Returns views of the static arrays."""
        counts, positions, parts, slots, small, large, table = self._views(self._host.numpy())
        t, blocks = batch.num_tokens, batch.block_table
        for share, max_parts in ((len(batch.shared) > 0, self.max_parts), (False, self.max_parts), (False, 0)):
            tiles = self._cut(batch, kv, share, max_parts)
            if max(tiles.small.size, tiles.large.size) <= len(small):
                break  # otherwise retry with fewer tiles; the numbers are the same
        if self._sent is not None:
            self._sent.synchronize()  # wait for the previous copy of these arrays, which ends before the step in flight begins
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
        launched = (len(tiles.small) > 0, len(tiles.large) > 0, tiles.num_parts > 0)
        return Prepared._make((*self._views(self._arrays), launched))

    def _cut(self, batch: Batch, kv: PagedKV, share: bool, max_parts: int) -> Tiles:
        small, large = (launch.rows // self.capacity.group for launch in self._launches_over(kv))
        return cut(
            batch.query_starts, batch.context_lens, batch.block_table, share, block_size=kv.block_size, sizes=(small, large),
            groups=self.groups, max_parts=max_parts,
        )  # fmt: skip

    def _launches_over(self, kv: PagedKV) -> Launches:
        launches = self.launches_in_fp8 if is_fp8(kv.data) else self.launches
        return over_blocks(launches, kv.block_size, self.capacity.widest, self._capability)

    def _views(self, whole: Any) -> tuple[Any, ...]:
        ends = (*self._starts[1:].tolist(), len(whole))
        return tuple(whole[start:end] for start, end in zip(self._starts.tolist(), ends, strict=True))

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        batch: Batch,
        kv: PagedKV,
        scores: Scores,
    ) -> torch.Tensor:
        if key is None or value is None:
            return self.attend_stored(layer, query, batch, kv, scores)
        (padded, heads, dim), data, width = key.shape, kv.data, value.shape[2]
        assert key.stride(2) == value.stride(2) == 1
        self._kernels.store[(padded,)](
            key, value, data, scales_as(data, torch.int16), batch.attention.slots, begin_of(layer, kv), data.stride(0),
            *key.stride()[:2], *value.stride()[:2], HEADS=heads, HEADS_PAD=power_of_two(heads), DIM=dim,
            DIM_PAD=power_of_two(max(dim, width, 16)), VALUE=width, BLOCK=kv.block_size, FP8=is_fp8(data),
        )  # fmt: skip
        return self.attend_stored(layer, query, batch, kv, scores)

    def slots_of(self, batch: Batch) -> torch.Tensor:
        """Return [P …] int32 on the device: slots for K and V of each token; -1 for padding."""
        slots: torch.Tensor = batch.attention.slots
        return slots

    def attend_stored(self, layer: int, query: torch.Tensor, batch: Batch, kv: PagedKV, scores: Scores) -> torch.Tensor:
        """Do the same as `attend` for a step whose K and V are in the pool."""
        arrays: Prepared = batch.attention
        (padded, q_heads, dim), heads = query.shape, self.capacity.kv_heads
        assert query.stride(2) == 1
        group, block, data, width = q_heads // heads, kv.block_size, kv.data, self.capacity.value_dim
        layer_at, stride = begin_of(layer, kv), data.stride(0)
        values = {
            "HEADS": heads, "VALUE": width, "VALUE_PAD": power_of_two(max(width, 16)), "SINKS": scores.sinks is not None,
        }  # fmt: skip
        shape = {**values, "DIM": dim, "DIM_PAD": power_of_two(max(dim, 16))}
        cap, window = scores.softcap, scores.window
        scaling, before = (cap or scores.scaling) * LOG2E, scores.scaling / cap if cap else 0.0
        sinks = self.sums if scores.sinks is None else scores.sinks
        assert scores.sinks is None or sinks.shape == (q_heads,)
        chunks = {"CHUNK": chunk_tokens(block), "SPAN": cutting.SPAN_CHUNKS}
        kept = {"FP8": is_fp8(data), "NATIVE": self._converts}
        out = torch.empty((padded, q_heads, width), dtype=query.dtype, device=query.device)
        kernels, (*attends, merges) = self._kernels, arrays.launched
        for kind, launch in enumerate(self._launches_over(kv)):
            if attends[kind]:
                kernels.attend[(self.groups[kind] * heads,)](
                    query, out, data, scales_as(data, torch.int32), arrays.table, arrays.positions, arrays.parts,
                    self.partial, self.sums, (arrays.small, arrays.large)[kind], arrays.counts[kind:],
                    layer_at, stride, *query.stride()[:2], out.stride(0), scaling, window, before, sinks, CAP=cap != 0,
                    GROUP=group, BLOCK=block, M=launch.rows, N=launch.keys, COLUMNS=COLUMNS, WIDEN=query.device.type == "cpu",
                    num_warps=launch.warps, num_stages=launch.stages, **shape, **chunks, **kept, **EXACT,
                )  # fmt: skip
        if merges or padded > batch.num_tokens:
            kernels.merge[(padded, heads)](
                out, arrays.positions, arrays.parts, self.partial, self.sums, out.stride(0), window, sinks,
                GROUP=group, GROUP_PAD=power_of_two(group), **values, **chunks, **EXACT,
            )  # fmt: skip
        return out


class PreparedKinds(NamedTuple):
    """`Prepared` of each kind of layer."""

    of: dict[tuple[int, int, int, int], Prepared]
    launched: tuple[bool, bool, bool]
    """kernels that any of them launches"""


class TritonByShape:
    """`TritonAttention` for layers of different shapes: one of each kind, with arrays of its own."""

    name = TritonAttention.name

    def __init__(self, device: torch.device, capacity: StepCapacity, programs: int | None = None) -> None:
        """Raise TritonUnavailable."""
        self.capacity, self.arithmetic = capacity, arithmetic_on(device)
        self._kinds = {
            (each.q_heads, each.kv_heads, each.head_dim, each.value_dim): TritonAttention(device, each, programs)
            for each in capacity.each()
        }

    def __str__(self) -> str:
        kinds = ", ".join(f"{q} over {kv} heads of {dim}" for q, kv, dim, _ in self._kinds)
        return f"{next(iter(self._kinds.values()))}, {kinds}"

    def prepare(self, batch: Batch, kv: PagedKV) -> PreparedKinds:
        """Prepare the step for each kind of layer."""
        of = {kind: each.prepare(batch, kv) for kind, each in self._kinds.items()}
        small, large, merges = (any(each) for each in zip(*(each.launched for each in of.values()), strict=True))
        return PreparedKinds(of, (small, large, merges))

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        batch: Batch,
        kv: PagedKV,
        scores: Scores,
    ) -> torch.Tensor:
        kind = (query.shape[1], *kv.geometry.shapes[layer])
        prepared: PreparedKinds = batch.attention
        own = replace(batch, attention=prepared.of[kind]._replace(launched=prepared.launched))
        return self._kinds[kind].attend(layer, query, key, value, own, kv, scores)


class TritonByWindow:
    """Two backends: one for pools of layers with full attention, one for those of layers with a sliding window, since a step
    has other arrays for these."""

    name = TritonAttention.name

    def __init__(self, device: torch.device, capacity: StepCapacity) -> None:
        """Raise TritonUnavailable."""
        self.arithmetic = arithmetic_on(device)
        self.capacity, self.even = capacity, not capacity.different
        """even: all layers have one shape"""
        self._full, self._windowed = (_of_one_table(device, replace(capacity, windowed=False)) for _ in range(2))
        if isinstance(self._full, TritonAttention) and isinstance(self._windowed, TritonAttention):
            self._windowed.partial, self._windowed.sums = self._full.partial, self._full.sums  # layers run one after the other

    def __str__(self) -> str:
        return f"{self._full}, windows apart"

    def of(self, kv: PagedKV) -> TritonAttention | TritonByShape:
        """Return the backend of these pools."""
        return self._windowed if kv.is_window else self._full

    def prepare(self, batch: Batch, kv: PagedKV) -> Prepared | PreparedKinds:
        return self.of(kv).prepare(batch, kv)

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        batch: Batch,
        kv: PagedKV,
        scores: Scores,
    ) -> torch.Tensor:
        return self.of(kv).attend(layer, query, key, value, batch, kv, scores)

    def slots_of(self, batch: Batch) -> torch.Tensor:
        """Return the same as `TritonAttention.slots_of`."""
        slots: torch.Tensor = batch.attention.slots
        return slots

    def attend_stored(self, layer: int, query: torch.Tensor, batch: Batch, kv: PagedKV, scores: Scores) -> torch.Tensor:
        """Do the same as `TritonAttention.attend_stored`, for layers of one shape."""
        backend = self.of(kv)
        assert isinstance(backend, TritonAttention)
        return backend.attend_stored(layer, query, batch, kv, scores)


def triton_attention(device: torch.device, capacity: StepCapacity) -> TritonAttention | TritonByShape | TritonByWindow:
    """Return the backend for a capacity. Raises TritonUnavailable."""
    return TritonByWindow(device, capacity) if capacity.windowed else _of_one_table(device, capacity)


def _of_one_table(device: torch.device, capacity: StepCapacity) -> TritonAttention | TritonByShape:
    return TritonByShape(device, capacity) if capacity.different else TritonAttention(device, capacity)


def arithmetic_on(device: torch.device) -> str:
    """Name the arithmetic of the kernels as they are compiled for a device, such as "triton/1/t3.9/sm90". Raises
    TritonUnavailable."""
    try:
        return f"{ARITHMETIC}/{compiled_by(device)}"
    except ImportError as error:
        raise TritonUnavailable(f"Triton cannot be imported ({error})") from error


def begin_of(layer: int, kv: PagedKV) -> int:
    """Return where a layer begins in a block, in elements of the pool."""
    return kv.starts[layer] if kv.data.dim() == 2 else layer * kv.data.stride(1)


def _import(device: torch.device) -> Any:
    """Import the kernels. Raises TritonUnavailable if Triton is missing or needs a GPU that does not exist."""
    if device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        raise TritonUnavailable("on the CPU, Triton runs only in its interpreter: set TRITON_INTERPRET=1")
    try:
        triton_version()
        from rollout.engine.cuda import attention_kernels as triton_kernels
    except ImportError as error:
        raise TritonUnavailable(f"Triton cannot be imported ({error}); it comes with the CUDA builds of torch") from error
    return triton_kernels


def _limits(device: torch.device) -> tuple[LaunchLimits, int]:
    """Return the limits of a device and its number of streaming multiprocessors. The interpreter uses those of an H100, and
    one."""
    if device.type == "cpu":
        return KNOWN[90], 1
    of: Any = torch.cuda.get_device_properties(device)
    return LaunchLimits(
        10 * of.major + of.minor,
        of.shared_memory_per_block_optin,
        of.shared_memory_per_multiprocessor,
        of.regs_per_multiprocessor,
    ), of.multi_processor_count


def parts_for(memory: int, capacity: StepCapacity) -> int:
    """Return the number of partial results for which a device with this many bytes has room."""
    of_one = 4 * capacity.q_heads * (capacity.value_dim + 2)
    return max(PARTS_OF_A_ROW * capacity.rows, memory // PARTIAL_SHARE // of_one)
