"""Python interface of the C kernels of one instruction set: sampling (`c/sampling.c`), products and the rest of a decoder
between two attentions (`c/layers.c`).

`choose` selects the instruction set and says why not a better one. A `Kernels` is a value without global state: two engines in
a process may use different ones.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable
from ctypes import c_int64, c_void_p
from typing import NamedTuple

import numpy as np
import torch

from rollout.engine.cpu.build import NativeUnavailable, build, check_layout, load
from rollout.engine.cpu.functions import plain_calls
from rollout.engine.cpu.isa import ISAS, isa_of
from rollout.engine.cpu.openmp import symbols
from rollout.engine.scheduling.plan import MaskedTokens, SampledTokens, TopLogprobs
from rollout.engine.values.sampling import DRAW_COLUMNS, TRUNCATIONS

MAX_VOCABULARY = 1 << 20


class Team(ctypes.Structure):
    """Threads for a kernel. `tuning`: address of a `Tuning`."""

    _fields_ = [("parallel", c_void_p), ("team", c_void_p), ("threads", c_int64), ("tuning", c_void_p)]


class Tuning(ctypes.Structure):
    """`Tuning` of c/threads.h: choices of products that change no bit."""

    _fields_ = [(name, c_int64) for name in ("dot", "piece", "few", "bytes")]


class _Draw(ctypes.Structure):
    _fields_ = [
        ("logits", c_void_p), ("is_bf16", c_int64), ("vocabulary", c_int64), ("draws", c_int64),
        *((name, c_void_p) for name in ("row", "temperature", "uniform", "token", "logprob", "raw", "finite")),
        ("lanes", c_int64),
        *((name, c_void_p) for name in ("cuts", *TRUNCATIONS, "first", "forbidden", "scratch")),
        ("scratch_row", c_int64), ("seats", c_void_p),
        ("top", c_void_p), ("most", c_int64), ("top_id", c_void_p), ("top_logprob", c_void_p),
    ]  # fmt: skip


class Linear(ctypes.Structure):
    """`Linear` of c/products.h: addresses of a weight [outputs, inputs] (or [inputs, outputs] if `by_input`) and its bias."""

    _fields_ = [
        ("w", c_void_p), ("bias", c_void_p),
        *((name, c_int64) for name in ("outputs", "inputs", "is_bf16", "by_input", "int8", "row")),
    ]  # fmt: skip


def linear_struct(weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
    """Describe contiguous tensors, which must outlive the struct."""
    addresses = weight.data_ptr(), None if bias is None else bias.data_ptr()
    return Linear(*addresses, *weight.shape, weight.dtype == torch.bfloat16, False, 0, weight.shape[1])


def _room_for(work: _Draw, top: np.ndarray) -> TopLogprobs:
    """Allocate the most probable tokens that each draw returns. top: [draws] int64, contiguous; it must outlive the call."""
    assert top.dtype == np.int64 and top.flags.c_contiguous and len(top) == work.draws and top.min() >= 0
    room = np.full((len(top), int(top.max())), -1, np.int32), np.full((len(top), int(top.max())), -np.inf, np.float32)
    work.top, work.most, work.top_id, work.top_logprob = top.ctypes.data, room[0].shape[1], *(r.ctypes.data for r in room)
    return TopLogprobs(*room)


class Kernels:
    """The kernels of an instruction set of `ISAS` or `EMULATED`. threads: None = torch's number at each call.

    Raises NativeUnavailable if the CPU lacks the instructions or there is neither a library nor a compiler, ValueError for an
    unknown isa, LayoutMismatch."""

    def __init__(self, isa: str, threads: int | None = None) -> None:
        self.isa, self.threads = isa, threads
        self.arithmetic = isa_of(isa).arithmetic
        self.path = build(isa)
        self.library = load(self.path)
        check_layout(self.library, "rollout_layout_sampling", Draw=_Draw, Team=Team)
        check_layout(self.library, "rollout_layout_products", Linear=Linear, Tuning=Tuning)
        self.library.rollout_packed_bytes.restype = self.library.rollout_int8_packed_bytes.restype = c_int64
        if self.library.rollout_prepare():
            raise NativeUnavailable(f"the operating system does not allow this process to use {isa} (arch_prctl)")
        self.tuning = Tuning()
        self.library.rollout_tune(ctypes.byref(self.tuning))
        self._openmp = symbols("GOMP_parallel", "omp_get_num_threads")
        self._scratch = np.empty(0, np.float32)
        self.lanes = 16
        """lanes of the sum in a log-prob"""
        self.torch_logprobs = self._find_torch_lanes()
        """whether log-probs have the bits of this torch's log_softmax on this CPU"""

    def __str__(self) -> str:
        own = "the bits of torch's log_softmax" if self.torch_logprobs else "other bits than torch's"
        return f"{self.isa} (arithmetic {self.arithmetic}, log-probs with {own})"

    def team(self) -> Team:
        return Team(*self._openmp, self.threads or torch.get_num_threads(), ctypes.addressof(self.tuning))

    def _find_torch_lanes(self) -> bool:
        """Find the number of lanes in which torch sums: that of its vectors, 16 with AVX-512 and 8 with AVX2
        (`ATEN_CPU_CAPABILITY` restricts them). Other orders are not copied: then sums use 16 lanes and `torch_logprobs` is
        False."""
        logits = torch.randn(64, 1000, generator=torch.Generator().manual_seed(0)) * 4
        want = logits.log_softmax(-1).amax(-1).numpy()
        none = np.zeros(len(logits))
        for lanes in (16, 8):
            self.lanes = lanes
            if self.draw(logits, np.arange(len(logits)), none, none, False).logprobs.tobytes() == want.tobytes():
                return True
        self.lanes = 16
        return False

    def fits(self, logits: torch.Tensor) -> bool:
        """Return whether `draw` supports logits of this dtype and vocabulary."""
        return logits.dtype in (torch.bfloat16, torch.float32) and logits.shape[1] <= MAX_VOCABULARY

    def launch(
        self,
        logits: torch.Tensor,
        row: np.ndarray,
        temperature: np.ndarray,
        uniform: np.ndarray,
        raw: bool,
        cuts: MaskedTokens | None = None,
        top: np.ndarray | None = None,
    ) -> tuple[torch.Tensor, Callable[[], SampledTokens]]:
        """Sample as `rollout.engine.forward.sampling.DrawKernel` defines; on a CPU the result is available at once."""
        drawn = self.draw(logits, row, temperature, uniform, raw, cuts, top)
        return torch.from_numpy(drawn.tokens), lambda: drawn

    def draw(
        self,
        logits: torch.Tensor,
        row: np.ndarray,
        temperature: np.ndarray,
        uniform: np.ndarray,
        raw: bool,
        cuts: MaskedTokens | None = None,
        top: np.ndarray | None = None,
    ) -> SampledTokens:
        """Sample D tokens by inverse CDF from [S, V] bf16 or fp32 logits.

        Args:
            row: [D] int64.
            temperature: [D] float32, 0 = greedy.
            uniform: [D] float64.
            raw: also return log-probs at temperature 1.
            top: [D] int64, number of most probable tokens to return.

        Returns:
            Tokens [D] int32; log-probs [D] float32, those of `log_softmax(logits / temperature)`, to the bit if
                `torch_logprobs` and V ≥ 16; [D] bool whether all logits of the row were finite.
        """
        assert logits.ndim == 2 and logits.dtype in (torch.bfloat16, torch.float32) and logits.shape[1] <= MAX_VOCABULARY
        logits, n = logits.contiguous(), len(row)
        row, temperature = np.ascontiguousarray(row, np.int64), np.ascontiguousarray(temperature, np.float32)
        uniform = np.ascontiguousarray(uniform, np.float64)
        assert n == len(temperature) == len(uniform) and (not n or (row.min() >= 0 and row.max() < len(logits)))
        tokens, logprobs, finite = np.empty(n, np.int32), np.empty(n, np.float32), np.empty(n, np.uint8)
        raws = np.empty(n, np.float32) if raw else None
        work = _Draw(
            logits.data_ptr(), logits.dtype == torch.bfloat16, logits.shape[1], n, row.ctypes.data, temperature.ctypes.data,
            uniform.ctypes.data, tokens.ctypes.data, logprobs.ctypes.data, None if raws is None else raws.ctypes.data,
            finite.ctypes.data, self.lanes,
        )  # fmt: skip
        team = self.team()
        arrays = [] if cuts is None else self._cut(work, cuts, team.threads)
        best = None if top is None else _room_for(work, top)
        self.library.rollout_draw(ctypes.byref(team), ctypes.byref(work))
        del arrays  # the kernel read them
        return SampledTokens(tokens, logprobs, raws, finite.astype(bool), best)

    def _cut(self, work: _Draw, cuts: MaskedTokens, threads: int) -> list[np.ndarray]:
        """Pass the truncation to the kernel. Returns the arrays that it reads."""
        counts = np.zeros(work.draws + 1, np.int64)
        for draw, tokens in cuts.forbidden:
            counts[draw + 1] = len(tokens)
        forbidden = np.array([token for _, tokens in cuts.forbidden for token in tokens], np.int32)
        assert not len(forbidden) or (forbidden.min() >= 0 and forbidden.max() < work.vocabulary)
        arrays = {name: np.ascontiguousarray(values, DRAW_COLUMNS[name]) for name, values in cuts.cuts.items()}
        arrays["cuts"] = np.ascontiguousarray(cuts.any, np.uint8)
        assert all(len(values) == work.draws for values in arrays.values()) and len(arrays) == len(TRUNCATIONS) + 1
        arrays |= {"first": counts.cumsum(), "forbidden": forbidden, "seats": np.zeros(1, np.int64)}
        work.scratch_row = -(-work.vocabulary // 16) * 16 + 16
        if len(self._scratch) < 2 * threads * work.scratch_row:
            self._scratch = np.empty(2 * threads * work.scratch_row, np.float32)
        work.scratch = self._scratch.ctypes.data
        for name, values in arrays.items():
            setattr(work, name, values.ctypes.data)
        return list(arrays.values())

    @plain_calls
    def linear(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Return [T, inputs] · [outputs, inputs]ᵀ (+ [outputs]) → [T, outputs], all bf16 or all fp32, on the CPU, of any sizes
        ≥ 1.

        The bits of a row depend only on that row, the weight and the bias. Raises ValueError if shapes or dtypes do not fit."""
        dtypes = {each.dtype for each in (x, weight, bias) if each is not None}
        if (
            len(dtypes) != 1
            or not dtypes <= {torch.bfloat16, torch.float32}
            or (x.ndim, weight.ndim) != (2, 2)
            or x.shape[1] != weight.shape[1]
            or (bias is not None and bias.shape != weight.shape[:1])
        ):
            shapes = [None if each is None else (tuple(each.shape), each.dtype) for each in (x, weight, bias)]
            raise ValueError(f"x, weight, bias {shapes}: need [T, K], [N, K] and [N] or None, all bfloat16 or all float32")
        x, weight, out = x.contiguous(), weight.contiguous(), x.new_empty(len(x), len(weight))
        bias = None if bias is None else bias.contiguous()
        if not out.numel():
            return out
        packed = self.packed(len(x), (weight.shape[1],), x.dtype)
        self.library.rollout_linear(
            ctypes.byref(self.team()), ctypes.byref(linear_struct(weight, bias)), c_void_p(x.data_ptr()), c_int64(len(x)),
            c_void_p(packed.data_ptr()), c_void_p(out.data_ptr()),
        )  # fmt: skip
        return out

    @plain_calls
    def silu(self, x: torch.Tensor) -> torch.Tensor:
        """Return x · sigmoid(x), bf16 or fp32, on the CPU, of any shape, as in the native decoder: the bits of an element
        depend on it alone. Torch computes the last elements of each thread's share with another exp. Raises ValueError for
        other dtypes."""
        if x.dtype not in (torch.bfloat16, torch.float32):
            raise ValueError(f"silu of {x.dtype}: need bfloat16 or float32")
        x = x.contiguous()
        out = torch.empty_like(x)
        self.library.rollout_silu(
            ctypes.byref(self.team()), c_void_p(x.data_ptr()), c_int64(x.numel()), c_int64(x.dtype == torch.bfloat16),
            c_void_p(out.data_ptr()),
        )  # fmt: skip
        return out

    def packed(self, rows: int, inputs: Iterable[int], dtype: torch.dtype, int8: bool = False) -> torch.Tensor:
        """Allocate a buffer for `rows` rows of the widest of `inputs`, in the layout that products read. int8: of those in
        eight bits."""
        if int8:
            sizes = [self.library.rollout_int8_packed_bytes(c_int64(rows), c_int64(n)) for n in inputs]
            return torch.empty(max(sizes), dtype=torch.uint8)
        team, is_bf16 = self.team(), dtype == torch.bfloat16
        sizes = [
            self.library.rollout_packed_bytes(ctypes.byref(team), c_int64(rows), c_int64(n), c_int64(is_bf16)) for n in inputs
        ]
        return torch.empty(max(sizes), dtype=torch.uint8)


class Chosen(NamedTuple):
    """Kernels for a CPU, and why no better ones."""

    kernels: Kernels | None
    """None: plain torch does the same work"""
    isa: str
    """a name of `ISAS`, or "torch\""""
    why: str
    """reasons against each better set; empty for the best one"""

    def __str__(self) -> str:
        return " - ".join(filter(None, [self.isa if self.kernels is None else str(self.kernels), self.why]))


def choose(asked: str = "auto") -> Chosen:
    """Return the kernels for `EngineConfig.isa`. "auto" selects the first of `ISAS` that is available, and torch if none is.

    Raises ValueError with the reason if the named one is not available; LayoutMismatch."""
    if asked == "torch":
        return Chosen(None, "torch", "isa=torch was asked for")
    if asked != "auto":
        try:
            return Chosen(Kernels(asked), asked, f"isa={asked} was asked for")
        except NativeUnavailable as error:
            raise ValueError(f'isa="{asked}": {error}; "auto" selects the best available one') from error
    reasons: list[str] = []
    for isa in ISAS:
        try:
            return Chosen(Kernels(isa), isa, "; ".join(reasons))
        except NativeUnavailable as error:
            reasons.append(str(error))
    return Chosen(None, "torch", "; ".join(reasons))
