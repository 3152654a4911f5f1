"""Attention backend for CPUs: calls `c/attention.c`, compiled for any instruction set, through ctypes.

The layout of K and V inside a block depends on the instruction set (see the C file), so only this process can read it.
"""

from __future__ import annotations

import ctypes
from functools import lru_cache
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from rollout.engine.cpu.build import build, check_layout, load
from rollout.engine.cpu.isa import best, isa_of
from rollout.engine.cpu.kernels import Tuning
from rollout.engine.cpu.openmp import symbols
from rollout.engine.forward.attention import Scores, located

if TYPE_CHECKING:
    from rollout.engine.forward.batch import Batch
    from rollout.engine.kv.pages import PagedKV

MAX_GROUP, MAX_DIM, MAX_BLOCK, MAX_PLAIN = 64, 576, 512, 64 * 256
LANES = 16
"""block sizes and head dimensions that are multiples of this are packed in the pool"""
NO_GROUPS = np.empty((0, 3), np.int32)
PLAN_ERRORS = {
    1: "a row has no tokens, or more tokens than context_lens allows",
    2: "a block id in block_table is outside the pool",
    3: "a slot is outside the pool",
    4: "block_table has fewer columns than a row has blocks",
    5: "shared: (first row, rows, blocks) must be in order, inside the batch and apart",
    6: "shared: rows with shared leading blocks do not have the same blocks in block_table",
}


class _Step(ctypes.Structure):
    """`Step` of c/attention.c."""

    _fields_ = [
        ("data", ctypes.c_void_p),
        *(
            (name, ctypes.c_int64)
            for name in ("blocks", "block_bytes", "kv_heads", "block_size", "dim", "value_dim", "q_heads", "bf16")
        ),
        ("layer_at", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("rows", "tokens", "table_row", "threads", "share", "pairs")),
        *((name, ctypes.c_void_p) for name in ("query_starts", "context_lens", "table", "slots", "chunks")),
        ("num_chunks", ctypes.c_int64),
        ("heads", ctypes.c_int64),
        ("parallel", ctypes.c_void_p),
        ("barrier", ctypes.c_void_p),
    ]


class NativeStep:
    """Index arrays of one step in the layout of the kernel, for all layers of one shape. Immutable."""

    def __init__(self, struct: _Step, at: np.ndarray, keep: tuple[object, ...]) -> None:
        self.pointer, self.address = ctypes.byref(struct), ctypes.addressof(struct)
        self.tokens: int = struct.tokens
        self.q_heads: int = struct.q_heads
        self.shape = (struct.kv_heads, struct.dim)
        self.value_dim: int = struct.value_dim
        self.at = at
        """[layers] int64: bytes from the beginning of a block to the layer; -1: it has another shape"""
        self.dtype = torch.bfloat16 if struct.bf16 else torch.float32
        self._keep = keep


class Widths(NamedTuple):
    """Sizes of a layer's K and V in a block of the pool."""

    kv_heads: int
    block_size: int
    head_dim: int
    value_dim: int


class _Pool(NamedTuple):
    """A pool as the kernel reads it."""

    widths: Widths
    block_bytes: int
    is_bf16: bool
    begins: np.ndarray
    """[layers] int64, read-only: bytes from the beginning of a block to each layer, where all are of one size"""
    begins_at: int
    """its address"""


class LayerCalls(NamedTuple):
    """Attention calls of all layers of a step, for a running team of threads (`rollout_attend_within`)."""

    function: int
    """address"""
    calls: ctypes.Array[ctypes.c_char]
    size: int
    """bytes of one call"""


class LayerScores:
    """What all layers of a model ask of attention, as the kernel reads it. They have neither soft caps nor sinks."""

    def __init__(self, scores: list[Scores]) -> None:
        assert not any(each.softcap or each.sinks is not None for each in scores)
        self.count = len(scores)
        self.scaling = (ctypes.c_float * self.count)(*(each.scaling for each in scores))
        self.window = (ctypes.c_int64 * self.count)(*(each.window for each in scores))
        self.in_order = (ctypes.c_int64 * self.count)(*range(self.count))


class NativeAttention:
    """CPU attention backend (`rollout.engine.forward.attention.Backend`).

    The output of a query has the same bits alone or in a batch, in decode or in any prefill chunk, with a shared prefix or not,
    with any number of threads, and on any instruction set of the same arithmetic; it differs between block sizes."""

    name = "native"

    def __init__(self, threads: int | None = None, isa: str | None = None) -> None:
        """threads: None = torch's number at each step. isa: a name of `rollout.engine.cpu.isa`, None = the best one of this
        CPU.

        Raises NativeUnavailable (no compiler, compilation failed) and ValueError (unknown isa, threads < 1)."""
        if threads is not None and threads < 1:
            raise ValueError(f"threads={threads}: must be at least 1, or None for torch's number")
        self.threads = threads
        self.isa = isa or best()
        self.library = build(self.isa)
        self.arithmetic = isa_of(self.isa).arithmetic
        lib = _load(self.library)
        self._plan, self._attend, self._calls = lib.rollout_plan, lib.rollout_attend, lib.rollout_calls
        self._within: int = ctypes.cast(lib.rollout_attend_within, ctypes.c_void_p).value or 0
        self._call_bytes: int = lib.rollout_call_bytes()
        tuning = Tuning()
        lib.rollout_tune(ctypes.byref(tuning))
        self.pairs = bool(tuning.dot)
        """use vdpbf16ps for bf16, if it is faster than two FMAs; the bits are the same"""
        self._parallel, self._barrier = symbols("GOMP_parallel", "GOMP_barrier")

    def __str__(self) -> str:
        threads = "torch's threads" if self.threads is None else f"{self.threads} threads"
        return f"native attention ({self.isa}, {threads}{'' if self._parallel else ', no OpenMP found: 1 used'})"

    def step(
        self,
        data: torch.Tensor,
        query_starts: np.ndarray,
        context_lens: np.ndarray,
        block_table: np.ndarray,
        slots: np.ndarray | torch.Tensor,
        q_heads: int,
        shared: np.ndarray | None = None,
        widths: Widths | None = None,
        at: np.ndarray | None = None,
    ) -> NativeStep:
        """Check and keep the arrays of one step. Raises ValueError naming the argument that does not fit.

        Args:
            data: [blocks, layers, 2, kv_heads, block_size, head_dim] bf16 or fp32, contiguous, on the CPU; with `widths`
                [blocks, layers, kv_heads · block_size · (head_dim + value_dim)]; with `at` [blocks, numbers].
            query_starts: [R + 1].
            context_lens: [R], tokens visible to the last query of a row.
            block_table: [R, M].
            slots: [T], block · block_size + offset.
            shared: [G, 3] (first row, rows, leading blocks that they share), ordered by row; None = read nothing for several
                rows at once. Beyond these blocks, further shared blocks are found in block_table, so prefixes nest.
            widths: needed if values are not as wide as keys, and with `at`.
            at: [layers] int64: bytes from the beginning of a block to each layer, -1 for layers of other shapes.
        """
        here = data.is_cpu and data.is_contiguous()
        pool = _checked_pool(data.shape, data.dtype, here, q_heads, widths, at is not None)
        begins = pool.begins if at is None else np.ascontiguousarray(at, np.int64)
        starts, lens, table = (np.ascontiguousarray(a, np.int32) for a in (query_starts, context_lens, block_table))
        places = np.ascontiguousarray(slots.numpy() if isinstance(slots, torch.Tensor) else slots, np.int64)
        groups = NO_GROUPS if shared is None else np.ascontiguousarray(shared, np.int32)
        if len(starts) != len(lens) + 1 or table.ndim != 2 or len(table) != len(lens) or groups.shape[1:] != (3,) or starts[0]:
            raise ValueError(
                f"shapes: query_starts {starts.shape} from 0, context_lens {lens.shape}, block_table {table.shape}, "
                f"shared {groups.shape} should be [R + 1], [R], [R, M], [G, 3]"
            )
        if len(places) != starts[-1]:
            raise ValueError(f"slots: {len(places)} for {starts[-1]} tokens")
        chunks = np.empty((max(1, len(places)), 4), np.int32)
        threads = self.threads or torch.get_num_threads()
        struct = _Step(
            data=data.data_ptr(), blocks=len(data), block_bytes=pool.block_bytes, kv_heads=pool.widths.kv_heads,
            block_size=pool.widths.block_size, dim=pool.widths.head_dim, value_dim=pool.widths.value_dim, q_heads=q_heads,
            bf16=pool.is_bf16, layer_at=pool.begins_at if at is None else address(begins), rows=len(lens),
            tokens=len(places), table_row=table.shape[1], threads=threads, share=shared is not None, pairs=self.pairs,
            query_starts=address(starts), context_lens=address(lens), table=address(table), slots=address(places),
            chunks=address(chunks), parallel=self._parallel, barrier=self._barrier,
        )  # fmt: skip
        error = self._plan(ctypes.byref(struct), address(groups), len(groups))
        if error:
            raise ValueError(PLAN_ERRORS[error])
        return NativeStep(struct, begins, (struct, data, starts, lens, table, places, chunks))

    def run(
        self,
        step: NativeStep,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        scores: Scores,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Write key [≥ T, kv_heads, D] and value [≥ T, kv_heads, E] of the step's T tokens into the pool (None: they are in the
        pool), then attend query [≥ T, q_heads, D] to it. All have the pool's dtype and any strides, with D and E contiguous.

        Args:
            lse: [P, q_heads] fp32, receives the natural log of the sum of exp(scores), a sink's included.

        Returns:
            [P, q_heads, E] with P = len(query), zero from T on.
        """
        tokens, dtype = step.tokens, step.dtype
        if (
            query.shape[1:] != (step.q_heads, step.shape[1])
            or query.dtype != dtype
            or query.stride(2) != 1
            or len(query) < tokens
        ):
            raise ValueError(
                f"query {tuple(query.shape)} {query.dtype}: need [{tokens}, {step.q_heads}, {step.shape[1]}] {dtype}"
            )
        if not 0 <= layer < len(step.at) or step.at[layer] < 0 or scores.window < 0:
            raise ValueError(
                f"layer={layer} of {len(step.at)}, window={scores.window}: outside the pool, of another shape, or negative"
            )
        kv, made = _fresh(step, key, value), (*query.shape[:2], step.value_dim)
        if out is None:
            out = torch.empty(made, dtype=dtype)
        elif out.shape != made or out.dtype != dtype or not out.is_contiguous():
            raise ValueError(f"out {tuple(out.shape)} {out.dtype}: need contiguous {made} {dtype}")
        sinks = None if scores.sinks is None else scores.sinks.to("cpu", torch.float32).contiguous()
        if sinks is not None and sinks.shape != (step.q_heads,):
            raise ValueError(f"sinks {tuple(sinks.shape)}: need [{step.q_heads}], one per query head")
        if lse is not None and (lse.shape != query.shape[:2] or lse.dtype != torch.float32 or not lse.is_contiguous()):
            raise ValueError(f"lse {tuple(lse.shape)} {lse.dtype}: need contiguous {tuple(query.shape[:2])} float32")
        if len(query) > tokens:
            out[tokens:].zero_()
        self._attend(
            step.pointer, layer, scores.window, scores.scaling, scores.softcap, None if sinks is None else sinks.data_ptr(),
            query.data_ptr(), query.stride(0), query.stride(1), *kv, out.data_ptr(),
            None if lse is None else lse.data_ptr(),
        )  # fmt: skip
        return out

    def prepare(self, batch: Batch, kv: PagedKV) -> dict[tuple[int, ...], NativeStep]:
        """Return an empty cache: a step is built at first use, per shape of q, k and v, since layers may differ."""
        return {}

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
        """Implement `Backend.attend`. Reads prefixes once only if `batch.shared` names them."""
        return self.run(self._step_of(batch, kv, layer, query.shape[1]), layer, query, key, value, scores)

    def layer_calls(
        self,
        asked: LayerScores,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        out: torch.Tensor,
        batch: Batch,
        kv: PagedKV,
    ) -> LayerCalls:
        """Prepare `attend` for all layers. query and out [T, q_heads, D], key and value [T, kv_heads, D], of the pool's dtype
        and contiguous, are written and read by each layer; the heads of query may be further apart. They, the batch and the
        pool must outlive the calls, which run once."""
        layers = asked.in_order
        if batch.windowed is None and kv.data.dim() == 6:  # all layers have one shape and one block table
            steps = [self._step_of(batch, kv, 0, query.shape[1])]
            addresses = [steps[0].address] * asked.count
        else:
            places = [located(layer, batch, kv) for layer in range(asked.count)]
            steps = [self._step_of(of, pools, at, query.shape[1]) for at, of, pools in places]
            addresses = [step.address for step in steps]
            layers = (ctypes.c_int64 * asked.count)(*(at for at, _, _ in places))
        for step in {step.address: step for step in steps}.values():
            assert not np.count_nonzero(step.at < 0)
            assert query.shape == out.shape == (step.tokens, step.q_heads, step.shape[1])
            assert key.shape == value.shape == (step.tokens, *step.shape) and step.value_dim == step.shape[1]
            assert all(x.dtype == step.dtype for x in (query, key, value, out)) and query.stride(2) == 1
        assert all(x.is_contiguous() for x in (key, value, out)) and query.stride(0) == query.shape[1] * query.stride(1)
        calls = ctypes.create_string_buffer(self._call_bytes * asked.count)
        pointers = (ctypes.c_void_p * asked.count)(*addresses)
        others = query.data_ptr(), query.stride(1), *(x.data_ptr() for x in (key, value, out))
        self._calls(calls, pointers, layers, asked.count, asked.scaling, asked.window, *others)
        return LayerCalls(self._within, calls, self._call_bytes)

    def _step_of(self, batch: Batch, kv: PagedKV, layer: int, q_heads: int) -> NativeStep:
        even = kv.data.dim() == 6
        shape = (kv.data.shape[3], kv.data.shape[5]) if even else kv.geometry.shapes[layer]
        step: NativeStep | None = batch.attention.get((q_heads, *shape))
        if step is None:
            shared = batch.shared if len(batch.shared) else None
            widths = None if even else Widths(shape[0], kv.block_size, *shape[1:])
            at = layers_at(kv, shape) if kv.data.dim() == 2 else None
            arrays = batch.query_starts, batch.context_lens, batch.block_table, batch.slots
            step = self.step(kv.data, *arrays, q_heads, shared, widths, at)
            batch.attention[q_heads, *shape] = step
        return step


def layers_at(kv: PagedKV, shape: tuple[int, ...]) -> np.ndarray:
    """Return where each layer of this (kv_heads, head_dim, value_dim) begins in a block, in bytes; -1 for the others."""
    itemsize = kv.data.element_size()
    return np.array([kv.starts[i] * itemsize if each == shape else -1 for i, each in enumerate(kv.geometry.shapes)], np.int64)


@lru_cache(maxsize=64)  # a pool has the same shape in every step
def _checked_pool(
    shape: torch.Size, dtype: torch.dtype, here: bool, q_heads: int, widths: Widths | None, placed: bool
) -> _Pool:
    """Describe a pool of this shape. here: it is contiguous and on the CPU. placed: it is given where each layer begins in a
    block. Raises ValueError if the kernel does not support it, or query heads over it."""
    inner: tuple[int, ...]
    if widths is None:
        _, _, _, kv_heads, block_size, dim = shape
        value_dim, inner = dim, (2, kv_heads, block_size, dim)
    else:
        kv_heads, block_size, dim, value_dim = widths
        inner = (kv_heads * block_size * (dim + value_dim),)
    if dtype not in (torch.bfloat16, torch.float32) or not here or not (placed or shape[2:] == inner):
        raise ValueError(
            f"KV pool: need contiguous bf16 or fp32 [N, L, {', '.join(map(str, inner))}] on the CPU, got {dtype} {shape}"
        )
    if q_heads % kv_heads or q_heads // kv_heads > MAX_GROUP:
        raise ValueError(f"{q_heads} query heads over {kv_heads} KV heads: need a multiple, at most {MAX_GROUP} ×")
    sizes = [block_size, dim, value_dim]
    padded = [-(-n // LANES) * LANES for n in sizes]
    widest = max(dim, value_dim)
    if widest > MAX_DIM or block_size > MAX_BLOCK or (padded != sizes and padded[0] * max(padded[1:]) > MAX_PLAIN):
        raise ValueError(
            f"block_size={block_size}, head_dim={dim}, value_dim={value_dim}: at most {MAX_BLOCK} and {MAX_DIM}, multiples of "
            f"{LANES}"
        )
    begins = np.arange(0 if placed else shape[1]) * (prod(shape[2:]) * dtype.itemsize)
    begins.flags.writeable = False
    pool, block_bytes = Widths(kv_heads, block_size, dim, value_dim), prod(shape[1:]) * dtype.itemsize
    return _Pool(pool, block_bytes, dtype == torch.bfloat16, begins, begins.ctypes.data)


def address(array: np.ndarray) -> int:
    """Return the address of a contiguous array, in a third of the time of `array.ctypes.data` if it can be written."""
    if not array.size or not array.flags.writeable:
        return array.ctypes.data
    return ctypes.addressof(ctypes.c_char.from_buffer(array.data))


def _fresh(step: NativeStep, key: torch.Tensor | None, value: torch.Tensor | None) -> list[int | None]:
    """Return address and strides of the step's key and value, as kernel arguments. Raises ValueError."""
    if key is None and value is None:
        return [None, 0, 0, None, 0, 0]
    if key is None or value is None:
        raise ValueError("key and value: pass both, or neither if they are in the pool already")
    for x, shape in ((key, step.shape), (value, (step.shape[0], step.value_dim))):
        if x.shape[1:] != shape or x.dtype != step.dtype or x.stride(2) != 1 or len(x) < step.tokens:
            raise ValueError(
                f"key or value {tuple(x.shape)} {x.dtype}: need [{step.tokens}, {shape}] {step.dtype}, the last contiguous"
            )
    return [key.data_ptr(), key.stride(0), key.stride(1), value.data_ptr(), value.stride(0), value.stride(1)]


def _load(path: Path) -> ctypes.CDLL:
    lib = load(path)
    check_layout(lib, "rollout_layout_attention", Step=_Step)
    pointer: Any = ctypes.c_void_p
    i64: Any = ctypes.c_int64
    lib.rollout_plan.argtypes = [pointer, pointer, i64]
    lib.rollout_plan.restype = ctypes.c_int
    tensor = [pointer, i64, i64]
    lib.rollout_attend.argtypes = [
        pointer,
        i64,
        i64,
        ctypes.c_float,
        ctypes.c_float,
        pointer,
        *tensor,
        *tensor,
        *tensor,
        pointer,
        pointer,
    ]
    lib.rollout_attend.restype = None
    lib.rollout_calls.argtypes = [pointer, pointer, pointer, i64, pointer, pointer, pointer, i64, *[pointer] * 3]
    lib.rollout_calls.restype = None
    lib.rollout_call_bytes.restype = i64
    return lib
