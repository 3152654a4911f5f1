"""Python interface of `c/recurrence.c`: causal depthwise convolution, gated delta rule, Mamba-2.

Each function takes P tokens of R rows side by side, reads each row's state from a slot of a pool and writes the state after the
row's last token to a slot. The bits of a row's outputs and of its state depend on its own inputs and state alone: not on other
rows, padding, the number of threads, or where the tokens of a sequence are cut into rows. Instruction sets with the same
arithmetic give the same bits.
"""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int64, c_void_p
from functools import cache
from math import inf
from typing import Any

import numpy as np
import torch

from rollout.engine.cpu.build import build, check_layout, load
from rollout.engine.cpu.functions import plain_calls
from rollout.engine.cpu.isa import best, isa_of
from rollout.engine.cpu.kernels import Team
from rollout.engine.cpu.openmp import symbols
from rollout.engine.forward.batch import StateRows

DTYPES = (torch.bfloat16, torch.float32)
MOST_TAPS, MOST = 8, 512
"""taps of a convolution; keys of a delta rule, and numbers of a Mamba-2 state for each channel"""
EPS = 1e-6
"""of transformers' l2norm"""
ROW_ERRORS = {
    1: "query_starts must begin with 0, ascend, and end within the tokens",
    2: "reads has a slot outside the pool (-1: the state is zero)",
    3: "writes has a slot outside the pool (-1: the state is not kept)",
}


class RowsStruct(ctypes.Structure):
    """`Rows` of c/recurrence.h."""

    _fields_ = [
        *((name, c_void_p) for name in ("starts", "reads", "writes")),
        *((name, c_int64) for name in ("count", "tokens", "slots")),
    ]  # fmt: skip


class _Convolve(ctypes.Structure):
    _fields_ = [
        ("rows", RowsStruct),
        *((name, c_void_p) for name in ("x", "weight", "bias", "before", "after", "states", "out")),
        *((name, c_int64) for name in ("x_token", "slot", "channels", "taps", "silu", "is_bf16")),
    ]  # fmt: skip


class _Delta(ctypes.Structure):
    _fields_ = [
        ("rows", RowsStruct),
        *((name, c_void_p) for name in ("query", "key", "value", "beta", "g", "states", "out")),
        *((name, c_int64) for name in (
            "query_token", "query_head", "key_token", "key_head", "value_token", "value_head", "beta_token", "beta_head",
            "g_token", "g_head", "slot", "heads", "key_heads", "keys", "columns", "is_bf16", "beta_is_bf16", "by_channel",
            "normalized",
        )),
        ("scale", c_float), ("eps", c_float),
    ]  # fmt: skip


class _Mamba(ctypes.Structure):
    _fields_ = [
        ("rows", RowsStruct),
        *((name, c_void_p) for name in ("x", "dt", "b", "c", "a", "skip", "dt_bias", "states", "out")),
        *((name, c_int64) for name in (
            "x_token", "x_head", "dt_token", "dt_head", "b_token", "b_group", "c_token", "c_group", "slot", "heads", "groups",
            "channels", "numbers", "x_is_bf16", "b_is_bf16", "dt_is_bf16", "softplus",
        )),
        ("dt_least", c_float), ("dt_most", c_float),
    ]  # fmt: skip


class RecurrenceKernels:
    """The kernels of an instruction set of `ISAS` or `EMULATED`. threads: None = torch's number at each call.

    Raises NativeUnavailable if the CPU lacks the instructions or there is neither a library nor a compiler, ValueError for an
    unknown isa, LayoutMismatch."""

    def __init__(self, isa: str, threads: int | None = None) -> None:
        self.isa, self.threads, self.arithmetic = isa, threads, isa_of(isa).arithmetic
        self.library = load(build(isa))
        check_layout(
            self.library, "rollout_layout_recurrence", Rows=RowsStruct, Convolve=_Convolve, Delta=_Delta, Mamba=_Mamba
        )  # fmt: skip
        for function in (self.library.rollout_convolve, self.library.rollout_delta, self.library.rollout_mamba):
            function.restype = c_int64
        self._openmp = symbols("GOMP_parallel", "omp_get_num_threads")

    @plain_calls
    def convolve(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        activation: str | None,
        states: torch.Tensor,
        rows: StateRows,
    ) -> torch.Tensor:
        """Return act(Σ_j weight[:, j] · x[t - k + 1 + j] + bias) for each token t, as transformers' `causal_conv1d_fn`.

        The sum is in fp32, j ascending, and rounded to x's dtype before the activation.

        Args:
            x: [P, C] bf16 or fp32.
            weight: [C, k], k ≤ 8, of x's dtype, like bias [C].
            activation: "silu", "swish" or None.
            states: [slots, C, k - 1] of x's dtype, the last k - 1 inputs; contiguous but for the stride of slots.

        Returns:
            [P, C], zero for padding. Raises ValueError for tensors or rows that do not fit."""
        taps = weight.shape[-1]
        if activation not in ("silu", "swish", None):
            raise ValueError(f"activation={activation!r} of a convolution: must be silu, swish or None")
        channels = x.shape[-1]
        _check_dtypes(x=x, weight=weight, bias=bias, states=states)
        _check(x=(x, (len(x), channels)), weight=(weight, (channels, taps)), bias=(bias, (channels,)))
        if not 1 <= taps <= MOST_TAPS:
            raise ValueError(f"a convolution of {taps} taps: at most {MOST_TAPS}")
        _check_states(states, (channels, taps - 1))
        x, weight = _rows_contiguous(x), weight.contiguous()
        bias = None if bias is None else bias.contiguous()
        out = torch.empty((len(x), channels), dtype=x.dtype)
        work = _Convolve(
            rows_struct(rows, len(x), states), x.data_ptr(), weight.data_ptr(), _address(bias), None, None,
            states.data_ptr(), out.data_ptr(), x.stride(0), states.stride(0), channels, taps, activation is not None,
            x.dtype == torch.bfloat16,
        )  # fmt: skip
        return self._run(self.library.rollout_convolve, work, rows, out)

    @plain_calls
    def delta_rule(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        g: torch.Tensor,
        beta: torch.Tensor,
        states: torch.Tensor,
        rows: StateRows,
        *,
        scale: float | None = None,
        l2norm: bool = False,
    ) -> torch.Tensor:
        """Advance S = exp(g) · S; S += key ⊗ (value - Sᵀ · key) · beta and return Sᵀ · query for each token, in fp32, as
        transformers' `torch_recurrent_gated_delta_rule` and `recurrent_kimi_delta_attention`.

        Args:
            query, key: [P, Hk, K], K ≤ 512; each head serves Hv / Hk heads of value in turn.
            value: [P, Hv, V], of query's and key's dtype, bf16 or fp32.
            g: [P, Hv] or [P, Hv, K], log of the decay of a head or of its channels.
            beta: [P, Hv], bf16 or fp32.
            states: [slots, Hv, K, V] fp32, contiguous but for the stride of slots.
            scale: of query; None: K ** -0.5.
            l2norm: divide query and key by their length first.

        Returns:
            [P, Hv, V] of value's dtype, zero for padding. Raises ValueError for tensors or rows that do not fit."""
        tokens, key_heads, keys = key.shape
        heads, columns = value.shape[1:]
        by_channel = g.ndim == 3
        _check_dtypes(query=query, key=key, value=value)
        _check_dtypes(beta=beta)
        _check(
            query=(query, (tokens, key_heads, keys)), value=(value, (tokens, heads, columns)), beta=(beta, (tokens, heads)),
            g=(g, (tokens, heads, keys) if by_channel else (tokens, heads)),
        )  # fmt: skip
        if heads % key_heads or not 1 <= keys <= MOST:
            raise ValueError(f"{heads} heads over {key_heads} key heads of {keys}: need a multiple, and at most {MOST}")
        _check_states(states, (heads, keys, columns), torch.float32)
        query, key, value, g = (_rows_contiguous(each) for each in (query, key, value, g.float()))
        out = torch.empty((tokens, heads, columns), dtype=value.dtype)
        work = _Delta(
            rows_struct(rows, tokens, states), query.data_ptr(), key.data_ptr(), value.data_ptr(), beta.data_ptr(),
            g.data_ptr(), states.data_ptr(), out.data_ptr(), *query.stride()[:2], *key.stride()[:2], *value.stride()[:2],
            *beta.stride(),
            *g.stride()[:2], states.stride(0), heads, key_heads, keys, columns, value.dtype == torch.bfloat16,
            beta.dtype == torch.bfloat16, by_channel, l2norm, keys**-0.5 if scale is None else scale, EPS,
        )  # fmt: skip
        return self._run(self.library.rollout_delta, work, rows, out)

    @plain_calls
    def mamba2(
        self,
        hidden: torch.Tensor,
        dt: torch.Tensor,
        A: torch.Tensor,
        B: torch.Tensor,
        C: torch.Tensor,
        states: torch.Tensor,
        rows: StateRows,
        *,
        D: torch.Tensor | None = None,
        dt_bias: torch.Tensor | None = None,
        dt_softplus: bool = False,
        dt_limit: tuple[float, float] = (0.0, inf),
    ) -> torch.Tensor:
        """Advance S = exp(dt · A) · S + (dt · hidden) ⊗ B and return S · C + D · hidden for each token, in fp32, as
        transformers' `mamba2_chunk_scan`. dt + dt_bias, its softplus and the limits are rounded to dt's dtype, as there.

        Args:
            hidden: [P, H, Pd] bf16 or fp32.
            dt: [P, H] bf16 or fp32.
            A, D, dt_bias: [H].
            B, C: [P, G, N] bf16 or fp32, N ≤ 512; each group serves H / G heads in turn.
            states: [slots, H, Pd, N] fp32, contiguous but for the stride of slots.

        Returns:
            [P, H, Pd] fp32, zero for padding. Raises ValueError for tensors or rows that do not fit."""
        tokens, heads, channels = hidden.shape
        groups, numbers = B.shape[1:]
        for each in ({"hidden": hidden}, {"dt": dt}, {"B": B, "C": C}):
            _check_dtypes(**each)
        _check(
            dt=(dt, (tokens, heads)), A=(A, (heads,)), B=(B, (tokens, groups, numbers)), C=(C, (tokens, groups, numbers)),
            D=(D, (heads,)), dt_bias=(dt_bias, (heads,)),
        )  # fmt: skip
        if heads % groups or not 1 <= numbers <= MOST:
            raise ValueError(f"{heads} heads over {groups} groups of {numbers}: need a multiple, and at most {MOST}")
        _check_states(states, (heads, channels, numbers), torch.float32)
        hidden, B, C = (_rows_contiguous(each) for each in (hidden, B, C))
        of_heads = A, D, None if dt_bias is None else dt_bias.to(dt.dtype)
        decay, skip, bias = (None if each is None else each.float().contiguous() for each in of_heads)
        out = torch.empty((tokens, heads, channels), dtype=torch.float32)
        work = _Mamba(
            rows_struct(rows, tokens, states), hidden.data_ptr(), dt.data_ptr(), B.data_ptr(), C.data_ptr(), _address(decay),
            _address(skip), _address(bias), states.data_ptr(), out.data_ptr(), *hidden.stride()[:2], *dt.stride(),
            *B.stride()[:2], *C.stride()[:2], states.stride(0), heads, groups, channels, numbers,
            hidden.dtype == torch.bfloat16, B.dtype == torch.bfloat16, dt.dtype == torch.bfloat16, dt_softplus,
            *_rounded(dt_limit, dt.dtype),
        )  # fmt: skip
        return self._run(self.library.rollout_mamba, work, rows, out)

    def _run(self, function: Any, work: ctypes.Structure, rows: StateRows, out: torch.Tensor) -> torch.Tensor:
        team = Team(*self._openmp, self.threads or torch.get_num_threads(), None)
        if error := function(ctypes.byref(team), ctypes.byref(work)):
            raise ValueError(f"{ROW_ERRORS[error]}: {rows}")
        if len(out) > (end := rows.query_starts[-1]):
            out[end:].zero_()
        return out


@cache
def recurrence_of(isa: str | None = None) -> RecurrenceKernels:
    """Return the kernels of an instruction set; None: the best one of this CPU. Raises NativeUnavailable."""
    return RecurrenceKernels(isa or best())


def _check_dtypes(**tensors: torch.Tensor | None) -> None:
    """Raise ValueError unless all are bf16 or all are fp32."""
    dtypes = {each.dtype for each in tensors.values() if each is not None}
    if len(dtypes) != 1 or not dtypes <= {*DTYPES}:
        got = {name: each.dtype for name, each in tensors.items() if each is not None}
        raise ValueError(f"{got}: need all bfloat16 or all float32")


def _check(**tensors: tuple[torch.Tensor | None, tuple[int, ...]]) -> None:
    """Raise ValueError naming the first tensor that has another shape, or is not on the CPU."""
    for name, (tensor, shape) in tensors.items():
        if tensor is not None and (tensor.shape != shape or not tensor.is_cpu):
            raise ValueError(f"{name} {tuple(tensor.shape)} on {tensor.device}: need {shape} on the CPU")


def _check_states(states: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> None:
    """Raise ValueError unless states is [slots, *shape] on the CPU, contiguous within a slot."""
    _check(states=(states, (len(states), *shape)))
    if dtype is not None and states.dtype != dtype:
        raise ValueError(f"states in {states.dtype}: need {dtype}")
    inner = states.select(0, 0) if len(states) else states
    if not inner.is_contiguous():
        raise ValueError(f"states with strides {states.stride()}: need contiguous numbers within a slot")


def _rows_contiguous(x: torch.Tensor) -> torch.Tensor:
    """Return x, or a copy whose last dimension is contiguous."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


@cache
def _rounded(numbers: tuple[float, ...], dtype: torch.dtype) -> list[float]:
    return torch.tensor(numbers).to(dtype).tolist()


def _address(x: torch.Tensor | None) -> int | None:
    return None if x is None else x.data_ptr()


def rows_struct(rows: StateRows, tokens: int, states: torch.Tensor | None) -> RowsStruct:
    """Describe rows of `tokens` tokens, and a pool [slots, …] if there is one. The arrays must outlive the struct. Raises
    ValueError."""
    starts, reads, writes = rows
    if any(each.dtype != np.int32 or not each.flags.c_contiguous for each in rows) or not len(starts) - 1 == len(reads) == len(
        writes
    ):
        raise ValueError(f"rows must be contiguous int32 arrays of [R + 1], [R] and [R] numbers: {rows}")
    return RowsStruct(
        starts.ctypes.data, reads.ctypes.data, writes.ctypes.data, len(reads), tokens, 0 if states is None else len(states)
    )
