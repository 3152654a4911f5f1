"""Recurrent token mixers on CUDA: `rollout.engine.forward.recurrence.TokenMixers` by the kernels of `recurrence_kernels.py`.

The bits of a row's outputs and of its state depend on its own inputs and state alone: not on other rows, on padding, on the
size of a graph, or on where the tokens of a sequence are cut into rows. Nothing here waits for the device, so a step can be
captured.
"""

from __future__ import annotations

from functools import cache
from math import inf
from typing import Any

import numpy as np
import torch

from rollout.engine.cuda.launches import power_of_two
from rollout.engine.forward.batch import StateRows, rows_as_table

ARITHMETIC = "scan/1"
"""of the mixers; every change of their sums or roundings increases the version"""
TILE = 2048
"""numbers of a state that a program has in the registers of its one warp"""
NARROW, WIDEST = 32, 512
"""most columns of a delta rule in a program; keys of a delta rule, and numbers of a Mamba-2 state for each channel"""
TOKENS, CHANNELS = 8, 128
"""tokens and channels of a convolution that a program computes at once"""
DTYPES = (torch.bfloat16, torch.float32)
EPS = 1e-6
"""of transformers' l2norm"""
PLAIN = {"enable_fp_fusion": False}
"""round every product and every sum separately, and contract none"""


class TritonMixers:
    """The kernels. Raises ImportError without Triton."""

    arithmetic = ARITHMETIC

    def __init__(self) -> None:
        from rollout.engine.cuda import recurrence_kernels

        self._kernels: Any = recurrence_kernels

    def convolve(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        activation: str | None,
        states: torch.Tensor,
        rows: StateRows | torch.Tensor,
    ) -> torch.Tensor:
        """Return act(Σ_j weight[:, j] · x[t - k + 1 + j] + bias) for each token t: [P, channels], zero for padding.

        The sum is in fp32, j ascending, and rounded to x's dtype before the activation.

        Args:
            x: [P, C] bf16 or fp32.
            weight: [C, k] of x's dtype, like bias [C].
            activation: "silu", "swish" or None.
            states: [slots, C, k - 1] of x's dtype, contiguous but for the stride of slots.
            rows: `StateRows`, or [3, R + 1] integers on the device (`rollout.engine.forward.batch.Batch.state_rows`).

        Raises ValueError for tensors that do not fit."""
        if activation not in ("silu", "swish", None):
            raise ValueError(f"activation={activation!r} of a convolution: must be silu, swish or None")
        (tokens, channels), taps = x.shape, weight.shape[-1]
        _check_dtypes(x=x, weight=weight, bias=bias, states=states)
        _check(weight=(weight, (channels, taps)), bias=(bias, (channels,)), states=(states, (len(states), channels, taps - 1)))
        x, weight, table = _by_rows(x), weight.contiguous(), table_of(rows, x.device)
        out = x.new_zeros(tokens, channels)
        self._kernels.convolve[(-(-channels // CHANNELS), table.shape[1] - 1)](
            x, weight, weight if bias is None else bias.contiguous(), states, out, table, table.stride(0), states.stride(0),
            x.stride(0), channels, TAPS=taps, KEPT_PAD=power_of_two(max(1, taps - 1)), BIAS=bias is not None,
            SILU=activation is not None, TOKENS=TOKENS, WIDTH=CHANNELS, num_warps=4, **PLAIN,
        )  # fmt: skip
        return out

    def delta_rule(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        g: torch.Tensor,
        beta: torch.Tensor,
        states: torch.Tensor,
        rows: StateRows | torch.Tensor,
        *,
        scale: float | None = None,
        l2norm: bool = False,
    ) -> torch.Tensor:
        """Advance S = exp(g) · S; S += key ⊗ (value - Sᵀ · key) · beta and return Sᵀ · query for each token, in fp32.

        Args:
            query, key: [P, Hk, K], K ≤ 512; each head serves Hv / Hk heads of value in turn.
            value: [P, Hv, V], of query's and key's dtype, bf16 or fp32.
            g: [P, Hv] or [P, Hv, K], log of the decay of a head or of its channels.
            beta: [P, Hv], bf16 or fp32.
            states: [slots, Hv, K, V] fp32, contiguous but for the stride of slots.
            rows: see `convolve`.
            scale: of query; None: K ** -0.5.
            l2norm: divide query and key by their length first.

        Returns [P, Hv, V] of value's dtype, zero for padding. Raises ValueError for tensors that do not fit."""
        (tokens, key_heads, keys), (heads, columns), by_channel = key.shape, value.shape[1:], g.ndim == 3
        _check_dtypes(query=query, key=key, value=value)
        _check_dtypes(beta=beta)
        _check(
            query=(query, (tokens, key_heads, keys)), value=(value, (tokens, heads, columns)), beta=(beta, (tokens, heads)),
            g=(g, (tokens, heads, keys) if by_channel else (tokens, heads)),
            states=(states, (len(states), heads, keys, columns)),
        )  # fmt: skip
        if heads % key_heads or not 1 <= keys <= WIDEST or states.dtype != torch.float32:
            raise ValueError(
                f"{heads} heads over {key_heads} key heads of {keys}: need a multiple, and at most {WIDEST}, in fp32"
            )
        query, key, value, g = (_by_rows(each) for each in (query, key, value, g.float()))
        table, out = table_of(rows, key.device), torch.zeros_like(value, memory_format=torch.contiguous_format)
        padded, width = tile_of(keys, columns)
        self._kernels.delta_rule[(-(-columns // width), heads, table.shape[1] - 1)](
            query, key, value, beta, g, states, out, table, table.stride(0), states.stride(0), *query.stride()[:2],
            *key.stride()[:2], *value.stride()[:2], *beta.stride(), *g.stride()[:2],
            keys**-0.5 if scale is None else scale, EPS, HEADS=heads, REPEAT=heads // key_heads, KEYS=keys, KEYS_PAD=padded,
            COLUMNS=columns, WIDTH=width, BY_CHANNEL=by_channel, NORMALIZED=l2norm, num_warps=1, **PLAIN,
        )  # fmt: skip
        return out

    def mamba2(
        self,
        hidden: torch.Tensor,
        dt: torch.Tensor,
        A: torch.Tensor,
        B: torch.Tensor,
        C: torch.Tensor,
        states: torch.Tensor,
        rows: StateRows | torch.Tensor,
        *,
        D: torch.Tensor | None = None,
        dt_bias: torch.Tensor | None = None,
        dt_softplus: bool = False,
        dt_limit: tuple[float, float] = (0.0, inf),
    ) -> torch.Tensor:
        """Advance S = exp(dt · A) · S + (dt · hidden) ⊗ B and return S · C + D · hidden for each token, in fp32. dt + dt_bias,
        its softplus and the limits are rounded to dt's dtype, as in transformers.

        Args:
            hidden: [P, H, channels] bf16 or fp32.
            dt: [P, H] bf16 or fp32.
            A, D, dt_bias: [H].
            B, C: [P, G, N] bf16 or fp32, N ≤ 512; each group serves H / G heads in turn.
            states: [slots, H, channels, N] fp32, contiguous but for the stride of slots.
            rows: see `convolve`.

        Returns [P, H, channels] fp32, zero for padding. Raises ValueError for tensors that do not fit."""
        (tokens, heads, channels), (groups, numbers) = hidden.shape, B.shape[1:]
        for each in ({"hidden": hidden}, {"dt": dt}, {"B": B, "C": C}):
            _check_dtypes(**each)
        _check(
            dt=(dt, (tokens, heads)), A=(A, (heads,)), B=(B, (tokens, groups, numbers)), C=(C, (tokens, groups, numbers)),
            D=(D, (heads,)), dt_bias=(dt_bias, (heads,)), states=(states, (len(states), heads, channels, numbers)),
        )  # fmt: skip
        if heads % groups or not 1 <= numbers <= WIDEST or states.dtype != torch.float32:
            raise ValueError(f"{heads} heads over {groups} groups of {numbers}: need a multiple, and at most {WIDEST}, in fp32")
        hidden, B, C = (_by_rows(each) for each in (hidden, B, C))
        decay = A.float().contiguous()
        skip, bias = (decay if each is None else each.float().contiguous() for each in (D, _as(dt_bias, dt.dtype)))
        table, out = table_of(rows, hidden.device), hidden.new_zeros((tokens, heads, channels), dtype=torch.float32)
        padded, width = tile_of(numbers, channels)
        self._kernels.mamba2[(-(-channels // width), heads, table.shape[1] - 1)](
            hidden, dt, B, C, decay, skip, bias, states, out, table, table.stride(0), states.stride(0), *hidden.stride()[:2],
            *dt.stride(), *B.stride()[:2], *C.stride()[:2], *_rounded(tuple(dt_limit), dt.dtype), HEADS=heads,
            REPEAT=heads // groups, CHANNELS=channels, WIDTH=width, NUMBERS=numbers, NUMBERS_PAD=padded, SKIP=D is not None,
            DT_BIAS=dt_bias is not None, SOFTPLUS=dt_softplus, num_warps=1, **PLAIN,
        )  # fmt: skip
        return out


def tile_of(summed: int, others: int) -> tuple[int, int]:
    """Return the sizes of a program's part of a state: all numbers that are summed, padded, and as many others as fit."""
    padded = power_of_two(summed)
    return padded, min(max(1, TILE // padded), NARROW, power_of_two(others))


def table_of(rows: StateRows | torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return [3, R + 1] integers on the device: first tokens of rows and their end, slots read, slots written."""
    if isinstance(rows, torch.Tensor):
        return rows
    return torch.from_numpy(rows_as_table(rows)).to(device)


def bytes_of_decode(scans: list[tuple[int, ...]], convs: list[tuple[int, int]], itemsize: int) -> int:
    """Return the bytes that one token's mixers move: each state is read once and written once. scans: shapes in fp32; convs:
    channels and columns, in numbers of `itemsize` bytes."""
    return 2 * sum(4 * int(np.prod(each)) for each in scans) + 2 * sum(itemsize * int(np.prod(each)) for each in convs)


def _check_dtypes(**tensors: torch.Tensor | None) -> None:
    """Raise ValueError unless all are bf16 or all are fp32."""
    dtypes = {each.dtype for each in tensors.values() if each is not None}
    if len(dtypes) != 1 or not dtypes <= {*DTYPES}:
        got = {name: each.dtype for name, each in tensors.items() if each is not None}
        raise ValueError(f"{got}: need all bfloat16 or all float32")


def _check(**tensors: tuple[torch.Tensor | None, tuple[int, ...]]) -> None:
    """Raise ValueError naming the first tensor that has another shape, or a state that is not contiguous within a slot."""
    for name, (tensor, shape) in tensors.items():
        if tensor is not None and tensor.shape != shape:
            raise ValueError(f"{name} {tuple(tensor.shape)}: need {shape}")
        if name == "states" and tensor is not None and len(tensor) and not tensor[0].is_contiguous():
            raise ValueError(f"states with strides {tensor.stride()}: need contiguous numbers within a slot")


def _by_rows(x: torch.Tensor) -> torch.Tensor:
    """Return x, or a copy whose last dimension is contiguous."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _as(x: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
    return None if x is None else x.to(dtype)


@cache
def _rounded(numbers: tuple[float, ...], dtype: torch.dtype) -> list[float]:
    return torch.tensor(numbers).to(dtype).tolist()
