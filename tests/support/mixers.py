"""Recurrent token mixers with weights and sizes by seed, and transformers' functions for them: for kernels of the CPU and of
CUDA."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid
from transformers.models.kimi_linear.modeling_kimi_linear import recurrent_kimi_delta_attention
from transformers.models.nemotron_h.modeling_nemotron_h import mamba2_chunk_scan
from transformers.models.qwen3_5.modeling_qwen3_5 import causal_conv1d_fn, torch_recurrent_gated_delta_rule

from rollout.engine.forward.batch import StateRows
from rollout.engine.forward.recurrence import TokenMixers

Inputs = tuple[Tensor, ...]
BF16, FP32 = torch.bfloat16, torch.float32


class Case(NamedTuple):
    """A mixer with weights and sizes."""

    draw: Callable[[int], Inputs]
    """inputs of a number of tokens"""
    state: tuple[int, ...]
    dtype: torch.dtype
    """of the state"""
    ours: Callable[[TokenMixers, Inputs, Tensor, StateRows], Tensor]
    theirs: Callable[[Inputs, Tensor | None], tuple[Tensor, Tensor | None]]
    """[T, …] outputs of one sequence, and its state"""


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def convolution(seed: int, dtype: torch.dtype = FP32, channels: int | None = None) -> Case:
    random = np.random.default_rng(seed)
    taps, channels = int(random.integers(1 if seed == 3 else 2, 5)), channels or int(random.integers(1, 200))
    draw, activation = generator(seed), [None, "silu", "swish"][seed % 3]
    weight, bias = torch.randn(channels, taps, generator=draw).to(dtype), torch.randn(channels, generator=draw).to(dtype)
    offset = bias if seed % 2 else None

    def theirs(inputs: Inputs, state: Tensor | None) -> tuple[Tensor, Tensor]:
        before = torch.zeros(channels, taps - 1, dtype=dtype) if state is None else state
        whole = torch.cat([before, inputs[0].T], 1)
        out = causal_conv1d_fn(whole[None], weight, offset, activation=activation)
        return out[0, :, taps - 1 :].T, whole[:, whole.shape[1] - taps + 1 :]

    return Case(
        lambda n: (torch.randn(n, channels, generator=draw).to(dtype),),
        (channels, taps - 1),
        dtype,
        lambda it, inputs, states, rows: it.convolve(inputs[0], weight, offset, activation, states, rows),
        theirs,
    )


def delta(seed: int, dtype: torch.dtype = FP32, heads: int | None = None, kimi: bool = False) -> Case:
    random = np.random.default_rng(seed)
    repeat, key_heads = 1 if kimi else int(random.integers(1, 4)), heads or int(random.integers(1, 4))
    keys, columns = (64, 80) if heads else random.integers(1, 100, 2).tolist()
    draw, l2norm = generator(seed), seed % 2 == 0
    heads = repeat * key_heads

    def inputs(n: int) -> Inputs:
        shapes = (n, key_heads, keys), (n, key_heads, keys), (n, heads, columns)
        query, key, value = (torch.randn(shape, generator=draw).to(dtype) for shape in shapes)
        key = key if l2norm else key / keys
        g = logsigmoid(torch.randn(n, heads, *[keys] * kimi, generator=draw) + 1)
        return query, key, value, g, torch.rand(n, heads, generator=draw).to(dtype)

    def theirs(inputs: Inputs, state: Tensor | None) -> tuple[Tensor, Tensor]:
        query, key, value, g, beta = (each[None] for each in inputs)
        first = None if state is None else state[None]
        query, key = (
            each.repeat_interleave(repeat, 2) for each in (query, key)
        )  # which transformers 5.17 leaves to its callers
        function = recurrent_kimi_delta_attention if kimi else torch_recurrent_gated_delta_rule
        out, last = function(
            query, key, value, g=g, beta=beta, initial_state=first, output_final_state=True, use_qk_l2norm_in_kernel=l2norm
        )
        return out[0], last[0]

    return Case(
        inputs,
        (heads, keys, columns),
        FP32,
        lambda it, inputs, states, rows: it.delta_rule(*inputs, states, rows, l2norm=l2norm),
        theirs,
    )


def channel_delta(seed: int, dtype: torch.dtype = FP32, heads: int | None = None) -> Case:
    return delta(seed, dtype, heads, kimi=True)


def mamba(seed: int, dtype: torch.dtype = FP32, heads: int | None = None) -> Case:
    random = np.random.default_rng(seed)
    groups, repeat = int(random.integers(1, 4)), int(random.integers(1, 4))
    channels, numbers = (40, 64) if heads else random.integers(1, 80, 2).tolist()
    groups = heads or groups
    heads, draw = groups * repeat, generator(seed)
    a = -torch.rand(heads, generator=draw) * 4
    d = torch.randn(heads, generator=draw).to(dtype) if seed % 2 else None
    bias = torch.randn(heads, generator=draw) if seed % 3 else None
    options: dict[str, Any] = {
        "D": d,
        "dt_bias": bias,
        "dt_softplus": seed % 4 > 0,
        "dt_limit": (0.01, 1.0 if seed % 2 else torch.inf),
    }

    def inputs(n: int) -> Inputs:
        shapes = (n, heads, channels), (n, heads), (n, groups, numbers), (n, groups, numbers)
        return tuple(torch.randn(shape, generator=draw).to(dtype) for shape in shapes)

    def theirs(inputs: Inputs, state: Tensor | None) -> tuple[Tensor, Tensor]:
        hidden, dt, b, c = (each[None] for each in inputs)
        first = None if state is None else state[None]
        out, last = mamba2_chunk_scan(
            hidden, dt, a, b, c, chunk_size=16, initial_states=first, return_final_states=True, **options
        )
        return out[0], last[0]

    def ours(it: TokenMixers, inputs: Inputs, states: Tensor, rows: StateRows) -> Tensor:
        hidden, dt, b, c = inputs
        return it.mamba2(hidden, dt, a, b, c, states, rows, **options)

    return Case(inputs, (heads, channels, numbers), FP32, ours, theirs)


KINDS = [convolution, delta, channel_delta, mamba]
Kind = Callable[..., Case]


def rows_of(*rows: tuple[int, int, int]) -> StateRows:
    """(tokens, read, written) of each row."""
    lengths, reads, writes = np.array(rows, np.int32).reshape(-1, 3).T
    starts = np.concatenate([[0], lengths.cumsum()]).astype(np.int32)
    return StateRows(starts, np.ascontiguousarray(reads), np.ascontiguousarray(writes))


def pool(case: Case, slots: int, seed: int = 0) -> Tensor:
    """Return a view of random states, whose slots are further apart than a state is long."""
    size = int(np.prod(case.state)) + 7
    flat = torch.randn(slots, size, generator=generator(seed)).to(case.dtype)
    return flat[:, 3 : size - 4].unflatten(1, case.state)


def alone(it: TokenMixers, case: Case, inputs: Inputs, state: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return outputs and state of one sequence in one row."""
    states = pool(case, 2, 9)
    if state is not None:
        states[0] = state
    out = case.ours(it, inputs, states, rows_of((len(inputs[0]), -1 if state is None else 0, 1)))
    return out, states[1].clone()


def together(*inputs: Inputs) -> Inputs:
    return tuple(torch.cat(each) for each in zip(*inputs, strict=True))


def far(got: Tensor, want: Tensor) -> float:
    """Return the largest difference, relative to the largest number."""
    return float((got.double() - want.double()).abs().max() / want.double().abs().max().clamp_min(1e-3)) if got.numel() else 0.0
