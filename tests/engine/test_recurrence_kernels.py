"""Recurrent token mixers in C: transformers' functions, and bits that depend on a row's own tokens and state alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers.models.kimi_linear.modeling_kimi_linear import chunk_kimi_delta_attention
from transformers.models.qwen3_5.modeling_qwen3_5 import (
    torch_chunk_gated_delta_rule,
    torch_recurrent_gated_delta_rule,
)

from rollout.engine.cpu.isa import EMULATED, here
from rollout.engine.cpu.recurrence import MOST, RecurrenceKernels, recurrence_of
from tests.support.mixers import (
    BF16,
    FP32,
    KINDS,
    Kind,
    alone,
    channel_delta,
    convolution,
    delta,
    far,
    generator,
    pool,
    rows_of,
    together,
)

HERE = [isa for isa in here() if isa not in EMULATED]


@pytest.mark.parametrize("isa", HERE)
@pytest.mark.parametrize("kind", KINDS)
def test_as_transformers(kind: Kind, isa: str) -> None:
    it = recurrence_of(isa)
    for seed in range(12):
        case, random = kind(seed), np.random.default_rng(seed)
        lengths = random.integers(1, 40, 4).tolist()
        sequences = [case.draw(n) for n in lengths]
        states = pool(case, 6)
        rows = rows_of((lengths[0], -1, 4), (lengths[1], 0, 0), (lengths[2], 1, 2), (lengths[3], 1, -1))
        before, padding = states.clone(), case.draw(3)
        out = case.ours(it, together(*sequences, padding), states, rows)
        assert not out[rows.query_starts[-1] :].any()
        for i, (sequence, read, write) in enumerate(zip(sequences, rows.reads, rows.writes, strict=True)):
            want, last = case.theirs(sequence, None if read < 0 else before[read])
            assert far(out[rows.query_starts[i] : rows.query_starts[i + 1]], want) < 1e-5, (seed, i)
            if write >= 0 and last is not None:
                assert far(states[write], last) < 1e-5, (seed, i)
        untouched = [1, 3, 5]
        assert torch.equal(states[untouched], before[untouched])


@pytest.mark.parametrize("isa", HERE)
@pytest.mark.parametrize("kind", KINDS)
def test_as_transformers_in_bf16(kind: Kind, isa: str) -> None:
    """The convolution rounds where torch's does; scans compute in fp32, and round their outputs."""
    case = kind(7, BF16)
    sequence, state = case.draw(50), pool(case, 1)[0]
    want, last = case.theirs(sequence, state)
    got, kept = alone(recurrence_of(isa), case, sequence, state)
    assert got.dtype == want.dtype and last is not None
    assert far(got, want) < 2**-7 and far(kept, last) < 1e-5
    if kind is convolution:
        assert (got != want).float().mean() < 0.02


@pytest.mark.parametrize("isa", HERE)
@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize("kind", KINDS)
def test_bits_do_not_depend_on_the_rows(kind: Kind, dtype: torch.dtype, isa: str) -> None:
    """One sequence, cut anywhere, among others, from slot to slot."""
    it = recurrence_of(isa)
    for seed in range(6):
        case, random = kind(seed, dtype), np.random.default_rng(seed)
        sequence, others = case.draw(30), case.draw(20)
        begin = pool(case, 1)[0] if seed % 2 else None
        want, last = alone(it, case, sequence, begin)
        states, at, slot, parts = pool(case, 5), 0, -1, []
        if begin is not None:
            states[0], slot = begin, 0
        while at < 30:
            n, before, behind = random.integers(1, [31 - at if at else 12, 6, 6])
            to = slot if slot >= 0 and random.integers(2) else (slot + 1) % 2
            crowd = together(
                tuple(x[:before] for x in others), tuple(x[at : at + n] for x in sequence), tuple(x[:behind] for x in others)
            )
            out = case.ours(it, crowd, states, rows_of((before, 3, 3), (n, slot, to), (behind, 4, -1)))
            parts.append(out[before : before + n])
            at, slot = at + n, to
        assert len(parts) > 1 and torch.equal(torch.cat(parts), want) and torch.equal(states[slot], last)


def test_other_forms_have_other_bits() -> None:
    """What the test above sees: transformers' chunk forms depend on where a sequence is cut."""
    for case, chunked in ((delta(2), torch_chunk_gated_delta_rule), (channel_delta(2), chunk_kimi_delta_attention)):
        query, key, value, g, beta = (each[None] for each in case.draw(30))

        def part(at: slice, state: Tensor | None, f: Any = chunked, x: Any = (query, key, value, g, beta)) -> Any:
            q, k, v, g, beta = (each[:, at] for each in x)
            return f(q, k, v, g=g, beta=beta, initial_state=state, output_final_state=True, use_qk_l2norm_in_kernel=True)

        whole, state = part(slice(30), None)
        first, between = part(slice(13), None)
        second, cut = part(slice(13, 30), between)
        assert not torch.equal(cut, state) and far(cut, state) < 1e-5
        assert far(torch.cat([first, second], 1), whole) < 1e-5


@pytest.mark.parametrize("kind", KINDS)
def test_forks_and_states_advanced_twice(kind: Kind) -> None:
    """Two rows may read one slot and write others; a row that runs again from the state that it left has other numbers."""
    it, case = recurrence_of(), kind(4)
    first, second, states = case.draw(3), case.draw(9), pool(case, 3)
    want = [alone(it, case, each, states[0]) for each in (first, second)]
    out = case.ours(it, together(first, second), states, rows_of((3, 0, 1), (9, 0, 2)))
    assert torch.equal(out, torch.cat([want[0][0], want[1][0]]))
    assert torch.equal(states[1], want[0][1]) and torch.equal(states[2], want[1][1])
    again = case.ours(it, first, states, rows_of((3, 1, 1)))
    assert not torch.equal(again, want[0][0])


@pytest.mark.parametrize("kind", KINDS)
def test_bits_do_not_depend_on_threads_or_instruction_sets(kind: Kind) -> None:
    case = kind(5, BF16, 300 if kind is convolution else 3)
    sequence = case.draw(300)
    rows = rows_of((1, 0, 0), (200, 1, 2), (1, -1, 3), (98, 2, 4))
    rows = rows._replace(reads=np.array([0, 1, -1, 1], np.int32))
    want = None
    for isa in HERE:
        for threads in (1, 2, 5):
            states = pool(case, 5)
            got = case.ours(RecurrenceKernels(isa, threads), sequence, states, rows), states
            want = want or got
            assert all(map(torch.equal, got, want)), (isa, threads)


def test_views() -> None:
    """Inputs as a mixer has them: parts of a row, transposed."""
    it, case = recurrence_of(), delta(6, BF16)
    inputs = case.draw(5)
    wide = tuple(torch.cat([x, x, x], -1)[..., x.shape[-1] : 2 * x.shape[-1]] for x in inputs)
    strided = tuple(x.transpose(0, -1).contiguous().transpose(0, -1) for x in inputs)
    for given in (wide, strided):
        assert torch.equal(alone(it, case, given, None)[0], alone(it, case, inputs, None)[0])
    case = convolution(6, BF16)
    (x,) = case.draw(5)
    assert torch.equal(alone(it, case, (x.T.contiguous().T,), None)[0], alone(it, case, (x,), None)[0])


def test_widest() -> None:
    draw = generator(0)
    query, key, value = (torch.randn(3, 1, n, generator=draw) for n in (MOST, MOST, 17))
    g, beta, states = -torch.rand(3, 1, generator=draw), torch.rand(3, 1, generator=draw), torch.zeros(1, 1, MOST, 17)
    got = recurrence_of().delta_rule(query, key, value, g, beta, states, rows_of((3, -1, 0)), l2norm=True)
    x = (each[None] for each in (query, key, value))
    want, last = torch_recurrent_gated_delta_rule(
        *x, g=g[None], beta=beta[None], output_final_state=True, use_qk_l2norm_in_kernel=True
    )
    assert far(got, want[0]) < 1e-5 and last is not None and far(states, last) < 1e-5


def test_what_does_not_fit() -> None:
    x, weight, states = torch.randn(4, 8), torch.randn(8, 3), torch.zeros(2, 8, 2)
    rows = rows_of((4, 0, 0))
    for wrong, words in (
        (rows_of((5, 0, 0)), "query_starts"),
        (rows_of((2, 0, 0), (0, 1, 1)), "query_starts"),
        (rows_of((4, 2, 0)), "reads"),
        (rows_of((4, -2, 0)), "reads"),
        (rows_of((4, 0, 2)), "writes"),
        (rows._replace(reads=np.zeros(2, np.int32)), "R"),
        (rows._replace(reads=np.zeros(1, np.int64)), "int32"),
    ):
        with pytest.raises(ValueError, match=words):
            recurrence_of().convolve(x, weight, None, None, states, wrong)
    for arguments, words in (
        ((x, weight, None, "gelu", states), "gelu"),
        ((x.half(), weight, None, None, states), "float16"),
        ((x, weight[:7], None, None, states), "weight"),
        ((x, torch.randn(8, 9), None, None, torch.zeros(2, 8, 8)), "taps"),
        ((x, weight, None, None, torch.zeros(2, 2, 8).transpose(1, 2)), "contiguous"),
        ((x, weight, None, None, states.to(BF16)), "dtype|bfloat16"),
    ):
        with pytest.raises(ValueError, match=words):
            recurrence_of().convolve(*arguments, rows)
    recurrence_of().convolve(x, weight, None, None, states, rows)
    narrow = torch.randn(4, 3, 8)
    with pytest.raises(ValueError, match="multiple"):
        recurrence_of().delta_rule(
            narrow[:, :2], narrow[:, :2], narrow, torch.zeros(4, 3), torch.ones(4, 3), torch.zeros(1, 3, 8, 8), rows
        )
