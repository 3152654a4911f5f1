"""The native CPU kernel: right against double precision, the same to the bit in every company, and deaf to unwritten memory.

Every pool here starts full of NaN, so a read of a token that is not visible shows in every test.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rollout.engine.build import choose_backend
from rollout.engine.config import EngineConfig
from rollout.engine.cpu import build
from rollout.engine.cpu.attention import NativeAttention, Widths, address
from rollout.engine.cpu.build import NativeUnavailable
from rollout.engine.cpu.device import CpuDevice
from rollout.engine.cpu.isa import EMULATED, here, isa_of
from rollout.engine.cpu.isa import best as best_isa
from rollout.engine.cuda.device import CudaDevice
from rollout.engine.forward.attention import CannotAttend, Scores, StepCapacity
from rollout.engine.forward.reference import ReferenceAttention, tanh
from tests.support import paged
from tests.support.isas import best_first
from tests.support.paged import (
    BF16,
    FP32,
    Row,
    Shape,
    Tokens,
    assert_close,
    chunked,
    decode_after,
    family,
    oracle,
    pool,
    same_bits,
    scores_of,
    step_arrays,
    text,
    tokens,
    whole,
)  # fmt: skip

ANY = StepCapacity(16, 1, 1, 1, 1, 16, 2)
HERE = [isa for isa in here() if isa not in EMULATED]
"""attention has no tile instructions: what is emulated is avx512_bf16"""


def widths(shape: Shape) -> Widths | None:
    return None if shape.value_dim is None else Widths(shape.kv_heads, shape.block_size, shape.dim, shape.value_dim)


def attend(
    backend: NativeAttention, shape: Shape, made: Tokens, steps: list[list[Row]], share: bool = True
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Run steps of rows over a fresh pool: (outputs [T, q_heads, D], lse [T, q_heads]) of each sequence. Tokens that were
    computed before (a prefix in common) need no row of their own; they stay NaN in the result."""
    data = pool(shape, made.blocks)
    outputs = [torch.full((*q.shape[:2], shape.width), torch.nan, dtype=q.dtype) for q in made.q]
    sums = [torch.full(q.shape[:2], torch.nan) for q in made.q]
    for rows in steps:
        arrays = step_arrays(shape, made, rows)
        if not share:
            arrays["shared"] = None
        step = backend.step(data, q_heads=shape.q_heads, **arrays, widths=widths(shape))
        q, k, v = (torch.cat([x[i][a : a + n] for i, a, n in rows]) for x in (made.q, made.k, made.v))
        lse = torch.empty(q.shape[:2])
        out = backend.run(step, 1, q, k, v, scores_of(shape), lse=lse)
        for (i, a, n), at in zip(rows, arrays["query_starts"].tolist(), strict=False):
            outputs[i][a : a + n], sums[i][a : a + n] = out[at : at + n], lse[at : at + n]
    return outputs, sums


@pytest.fixture(scope="module", params=best_first(HERE))
def backend(request: pytest.FixtureRequest) -> NativeAttention:
    return NativeAttention(threads=2, isa=request.param)


@pytest.fixture(scope="module")
def best() -> NativeAttention:
    return NativeAttention(threads=2)


# ── right ─────────────────────────────────────────────────────────────────────────────────────────────────────────────
SHAPES = [
    Shape(),
    Shape(q_heads=9, kv_heads=3, block_size=32),
    Shape(q_heads=4, kv_heads=4, dim=96, block_size=48),
    Shape(q_heads=8, kv_heads=1, dim=128, block_size=32),
    Shape(q_heads=7, kv_heads=1, dim=80),
    Shape(q_heads=40, kv_heads=1, dim=16),
    Shape(q_heads=2, kv_heads=1, dim=256, block_size=64),
    Shape(q_heads=8, kv_heads=1, dim=512, block_size=32),
    Shape(q_heads=32, kv_heads=4, dim=512),
    Shape(q_heads=4, kv_heads=2, dim=24, block_size=8),
    Shape(q_heads=3, kv_heads=1, dim=8, block_size=4),
    Shape(q_heads=5, kv_heads=5, dim=20, block_size=1),
    Shape(window=1),
    Shape(window=16),
    Shape(window=23),
    Shape(window=500),
    Shape(dim=24, block_size=8, window=11),
    Shape(sinks=True),
    Shape(softcap=2.0),
    Shape(softcap=50.0, q_heads=9, kv_heads=3, block_size=32),
    Shape(q_heads=4, kv_heads=4, dim=96, value_dim=64),
    Shape(q_heads=2, kv_heads=1, dim=48, value_dim=112, window=23, sinks=True),
    Shape(q_heads=4, kv_heads=2, dim=24, value_dim=12, block_size=8),
    Shape(q_heads=3, kv_heads=1, dim=32, value_dim=20, block_size=4, window=11, softcap=2.0, sinks=True),
]


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("shape", SHAPES, ids=text)
def test_against_double_precision(shape: Shape, dtype: torch.dtype, backend: NativeAttention) -> None:
    shape = shape._replace(dtype=dtype)
    made = tokens(shape, [(None, 0)] * 4, [1, shape.block_size, 77, 150])
    outputs, sums = attend(backend, shape, made, whole(made))
    for i in range(4):
        want, lse = oracle(shape, made, i)
        assert_close(shape, outputs[i], want)
        torch.testing.assert_close(sums[i].double(), lse, atol=2e-5 if dtype == FP32 else 4e-3, rtol=0)


def test_scores_that_differ_by_thousands(best: NativeAttention) -> None:
    """Online softmax rescales: the largest score comes last, first, and in between; the others vanish without a trace."""
    for dtype in (FP32, BF16):
        shape = Shape(dtype=dtype)
        for loud in (0, 40, 89):
            made = tokens(shape, [(None, 0)], [90])
            made.q[0][:] = 8
            made.k[0][:] = -8
            made.k[0][loud] = 8
            outputs, sums = attend(best, shape, made, whole(made))
            group = shape.q_heads // shape.kv_heads
            torch.testing.assert_close(outputs[0][89], made.v[0][loud].repeat_interleave(group, 0), atol=0, rtol=0)
            torch.testing.assert_close(sums[0][89], torch.full((shape.q_heads,), 64 * 64 * 64**-0.5), atol=1e-3, rtol=0)


OTHER_MKL = "MKL_CBWR" in os.environ
"""the batched products of torch's reference depend on the batch there: it is right up to rounding"""
SEAM = [Shape(), *SHAPES[15:]]


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("shape", SEAM, ids=text)
def test_both_backends_agree_through_the_seam(shape: Shape, dtype: torch.dtype, best: NativeAttention) -> None:
    """In steps that mix prefill and decode, with padding: right, and each has the bits of a sequence alone."""
    shape = shape._replace(dtype=dtype)
    shared = 32 // shape.block_size
    made = tokens(shape, [(None, 0), (0, shared), (0, shared), (None, 0)], [60, 45, 70, 9])
    schedule = [[(0, 0, 60), (3, 0, 8)], [(1, 32, 13), (2, 32, 38), (3, 8, 1)]]
    for each in (best, ReferenceAttention()):
        alone, stepped = paged.attend(each, shape, made, whole(made)), paged.attend(each, shape, made, schedule)
        assert same_bits(alone, stepped) or (each is not best and OTHER_MKL)
        for i in range(4):
            assert_close(shape, alone[i], oracle(shape, made, i)[0])
            assert_close(shape, stepped[i].where(~stepped[i].isnan(), alone[i]), oracle(shape, made, i)[0])


def drawn(seed: int) -> tuple[Shape, Tokens, list[list[Row]]]:
    """Draw a shape, four sequences with prefixes in common, and steps of random rows that compute them."""
    r = np.random.default_rng(seed)
    kv_heads, size, value_dim = int(r.integers(1, 4)), int(r.choice([4, 8, 16, 32])), int(r.integers(1, 6)) * 8
    shape = Shape(
        int(r.integers(1, 6)) * kv_heads, kv_heads, int(r.integers(1, 6)) * 8, size, int(r.choice([0, 1, 9, 33])),
        (FP32, BF16)[int(r.integers(2))], (None, value_dim)[int(r.integers(2))], float(r.choice([0, 1.5, 30])),
        bool(r.integers(2)),
    )  # fmt: skip
    shared = int(r.integers(1, 1 + 32 // size))
    prefixes: list[tuple[int | None, int]] = [(None, 0), (0, shared), (1, shared), (None, 0)]
    lengths = [int(shared * size + r.integers(1, 50)) for _ in range(4)]
    done, steps = [0] * 4, []
    while pending := [i for i in range(4) if done[i] < lengths[i]]:
        rows: list[Row] = []
        for i in r.permutation(pending).tolist():
            if r.integers(3):
                rows.append((i, done[i], min(int(r.integers(1, 20)), lengths[i] - done[i])))
                done[i] += rows[-1][2]
        steps += [rows] * bool(rows)
    return shape, tokens(shape, prefixes, lengths, seed), steps


@pytest.mark.parametrize("number", [*range(12), *(pytest.param(each, marks=pytest.mark.long) for each in range(12, 200))])
def test_any_shape_and_any_steps(number: int, best: NativeAttention, new_seed: int) -> None:
    """Right against double precision, and the bits of each sequence alone in one row; tokens in common are computed by each.
    From the twelfth on the seeds are new each time."""
    shape, made, steps = drawn(number if number < 12 else new_seed)
    for each in (best, ReferenceAttention()):
        alone, stepped = paged.attend(each, shape, made, whole(made)), paged.attend(each, shape, made, steps)
        assert same_bits(alone, stepped) or (each is not best and OTHER_MKL), text(shape)
        for i in range(4):
            assert_close(shape, alone[i], oracle(shape, made, i)[0], 2**-7)
            assert_close(shape, stepped[i].where(~stepped[i].isnan(), alone[i]), oracle(shape, made, i)[0], 2**-7)


def test_tanh() -> None:
    """Of all sizes, to a few units in the last place; odd, and NaN stays NaN."""
    x = torch.cat([torch.logspace(-30, 30, 4001), torch.linspace(0, 11, 4001), torch.tensor([0.0, torch.inf])])
    error = (tanh(x).double() - x.double().tanh()).abs() / x.double().tanh().clamp(min=1e-300)
    assert error.nan_to_num(0).max() < 4 * 2**-24 and tanh(x[-2:]).tolist() == [0, 1]
    assert torch.equal(tanh(-x), -tanh(x)) and tanh(torch.tensor([torch.nan])).isnan().all()


def test_scores_without_what_was_asked_for_are_seen(best: NativeAttention) -> None:
    """The negative control of sinks and soft caps: a backend that forgets one, or gives a sink to another head."""
    shape = Shape(softcap=2.0, sinks=True)
    made = tokens(shape, [(None, 0)], [40])
    want, asked = oracle(shape, made, 0)[0], scores_of(shape)
    assert asked.sinks is not None
    for each in (best, ReferenceAttention()):
        assert_close(shape, paged.attend(each, shape, made, whole(made))[0], want)
        for other in (asked._replace(sinks=None), asked._replace(softcap=0.0), asked._replace(sinks=asked.sinks.flip(0))):
            with pytest.raises(AssertionError):
                assert_close(shape, paged.attend(each, shape, made, whole(made), scores=other)[0], want)


def test_a_sink_takes_all_or_nothing(best: NativeAttention) -> None:
    """One far above every score leaves zero, one far below the bits without sinks. Scores beyond a soft cap are equal."""
    for dtype in (FP32, BF16):
        shape = Shape(dtype=dtype)
        made = tokens(shape, [(None, 0)], [90])
        asked, sinks = scores_of(shape), torch.full((shape.q_heads,), 1e4)
        for each in (best, ReferenceAttention()):
            plain = paged.attend(each, shape, made, whole(made))[0]
            above, below = (
                paged.attend(each, shape, made, whole(made), scores=asked._replace(sinks=x)) for x in (sinks, -sinks)
            )
            assert (above[0] == 0).all() and torch.equal(below[0], plain)
            loud = made._replace(q=[torch.full_like(made.q[0], 100.0)], k=[torch.full_like(made.k[0], 100.0)])
            even = paged.attend(each, shape, loud, whole(made), scores=asked._replace(softcap=3.0))[0]
            group = shape.q_heads // shape.kv_heads
            means = made.v[0].double().cumsum(0) / torch.arange(1, 91)[:, None, None]
            assert_close(shape, even, means.repeat_interleave(group, 1))


def test_strides(best: NativeAttention) -> None:
    """q, k and v arrive as transposed views of a projection's output, some wider than their heads."""
    shape = Shape()
    made = tokens(shape, [(None, 0)], [50])
    want, _ = attend(best, shape, made, whole(made))
    step = best.step(pool(shape, made.blocks), q_heads=shape.q_heads, **step_arrays(shape, made, [(0, 0, 50)]))
    fused = torch.cat([made.q[0].flatten(1), made.k[0].flatten(1), made.v[0].flatten(1)], 1)
    q, k, v = fused.split([shape.q_heads * shape.dim, *[shape.kv_heads * shape.dim] * 2], 1)
    views = [x.view(50, -1, shape.dim) for x in (q, k, v)]
    heads_first = [x.transpose(0, 1).contiguous().transpose(0, 1) for x in views]
    for each in (views, heads_first):
        assert torch.equal(best.run(step, 0, *each, scores_of(shape)), want[0])


# ── the same to the bit ───────────────────────────────────────────────────────────────────────────────────────────────
SAME = [
    Shape(),
    Shape(dtype=FP32),
    Shape(q_heads=9, kv_heads=3, block_size=32, dtype=BF16),
    Shape(q_heads=8, kv_heads=1, block_size=48, dim=96),
    Shape(q_heads=4, kv_heads=4, dim=24, block_size=8),
    Shape(window=21),
    Shape(window=40, dtype=FP32),
    Shape(softcap=2.0, sinks=True),
    Shape(softcap=2.0, sinks=True, window=40, dtype=FP32),
    Shape(dim=48, value_dim=32, sinks=True),
    Shape(dim=24, value_dim=40, block_size=8, dtype=FP32),
]


@pytest.mark.some(4)
@pytest.mark.parametrize("shape", SAME, ids=text)
def test_the_same_bits_in_any_company(shape: Shape, backend: NativeAttention) -> None:
    made = family(shape)
    want = attend(backend, shape, made, whole(made))
    assert not any(x.isnan().any() for x in want[0])
    schedules = {f"chunks of {n}": chunked(made, n) for n in (3, 7, shape.block_size, 2 * shape.block_size + 1)}
    schedules["decode"] = decode_after(shape, made, [0, 1, 3, 4, 2, 6, 5, 7])
    schedules["decode in another order"] = decode_after(shape, made, [5, 7, 4, 3, 1, 0, 6, 2])
    schedules["decode of strangers"] = decode_after(shape, made, [0, 5, 1, 7, 2, 3, 6, 4])
    for name, schedule in schedules.items():
        for share in (True, False):
            got = attend(backend, shape, made, schedule, share)
            assert same_bits(want[0], got[0]) and same_bits(want[1], got[1]), f"{name}, shared: {share}"


def test_the_same_bits_from_any_number_of_threads(best: NativeAttention) -> None:
    shape = Shape(q_heads=9, kv_heads=3, block_size=32)
    made = family(shape)
    for schedule in (chunked(made, 40), decode_after(shape, made, list(range(8)))):
        want = attend(best, shape, made, schedule)
        for threads in (1, 3, None):
            got = attend(NativeAttention(threads), shape, made, schedule)
            assert same_bits(want[0], got[0]) and same_bits(want[1], got[1])


@pytest.mark.parametrize(
    "shape", [Shape(), Shape(dtype=FP32), Shape(block_size=48, dim=96), Shape(block_size=8, window=200)], ids=text
)
def test_prefixes_that_end_inside_a_unit(shape: Shape, backend: NativeAttention) -> None:
    """Small blocks are met in units of 128 tokens. Here prefixes in common are 1.5, 2.5 and 1 of them, one inside the other."""
    if backend.isa == "plain" and shape.dtype == FP32:
        pytest.skip("an FMA is a call there; test_one_arithmetic_on_every_instruction_set_of_its_name compares its bits")
    unit = max(1, 128 // shape.block_size)
    prefixes = [(None, 0), (0, unit * 3 // 2), (0, unit * 3 // 2), (1, unit * 5 // 2), (1, unit * 5 // 2), (3, unit), (4, unit)]
    lengths = [extra + blocks * shape.block_size for blocks, extra in zip([3 * unit] * 7, [5, 9, 1, 40, 7, 2, 3], strict=True)]
    made = tokens(shape, prefixes, lengths)
    want = attend(backend, shape, made, whole(made))
    prefill, begin = [], [shared * shape.block_size for _, shared in prefixes]
    for i in range(7):
        prefill.append([(i, begin[i], lengths[i] - 2 - begin[i])])
    for order in ([0, 1, 3, 4, 2, 5, 6], [6, 4, 3, 1, 2, 0, 5], [5, 0, 2, 4, 6, 3, 1]):
        decode = [[(i, lengths[i] - back, 1) for i in order] for back in (2, 1)]
        for share in (True, False):
            got = attend(backend, shape, made, [*prefill, *decode], share)
            assert same_bits(want[0], got[0]) and same_bits(want[1], got[1]), f"{order}, shared: {share}"


SLOW = [shape._replace(dtype=FP32) for shape in SHAPES if shape.dim > 80]
"""seconds each in plain C, where an FMA of fp32 is a call"""
EVERYWHERE = [shape._replace(dtype=dtype) for shape in [*SHAPES[:9], Shape(window=23), *SHAPES[15:]] for dtype in (FP32, BF16)]


@pytest.mark.some(8)
@pytest.mark.parametrize(
    "shape", [pytest.param(each, marks=[pytest.mark.long] * (each in SLOW), id=text(each)) for each in EVERYWHERE]
)
def test_one_arithmetic_on_every_instruction_set_of_its_name(shape: Shape) -> None:
    """On 16, 8 and 4 lanes, with vdpbf16ps and with the two FMA that it stands for. Negative control: one value."""
    made = family(shape)
    results = {}
    for isa in HERE:
        backend = NativeAttention(2, isa)
        for pairs in (False, True) if isa == "avx512_bf16" else (False,):
            backend.pairs = pairs
            results[isa, pairs] = attend(backend, shape, made, chunked(made, 40))
    assert {isa_of(isa).arithmetic for isa in HERE} - {"amx/1"} == {"fma/1"}
    want = results["plain", False]
    for name, got in results.items():
        assert same_bits(want[0], got[0]) and same_bits(want[1], got[1]), name
    for v in made.v:
        v[-1, 0, 0] *= 1.25
    assert not same_bits(want[0], attend(NativeAttention(2, "plain"), shape, made, chunked(made, 40))[0])


def test_many_children_of_one_prompt(best: NativeAttention) -> None:
    """More queries than one tile, one chunk or one item holds."""
    shape = Shape(q_heads=9, kv_heads=3, block_size=32)
    n = 70
    made = tokens(shape, [(None, 0)] + [(0, 4)] * n, [4 * 32] + [4 * 32 + 1 + i % 50 for i in range(n)])
    prefill = [[(0, 0, 128)], [(1 + i, 128, i % 50) for i in range(n) if i % 50]]
    last = [(1 + i, 128 + i % 50, 1) for i in range(n)]
    alone = attend(best, shape, made, [*prefill, *([row] for row in last)])
    for share in (True, False):
        assert same_bits(alone[0], attend(best, shape, made, [*prefill, last], share)[0])


def test_where_blocks_lie_makes_no_difference(best: NativeAttention) -> None:
    shape = Shape()
    made = family(shape)
    moved = made._replace(tables=[made.blocks - 1 - table for table in made.tables])
    assert same_bits(attend(best, shape, made, whole(made))[0], attend(best, shape, moved, whole(moved))[0])


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=["fp32", "bf16"])
def test_blocks_that_left_the_window_are_not_read(dtype: torch.dtype, backend: NativeAttention) -> None:
    shape = Shape(window=40, dtype=dtype)
    made = tokens(shape, [(None, 0)], [300])
    want = attend(backend, shape, made, whole(made))[0][0]
    for length in (300, 290, 260, 170):
        data = pool(shape, made.blocks)
        for first, count in ((0, length - 1), (length - 1, 1)):
            data[torch.from_numpy(made.tables[0][: max(0, first - 39) // 16])] = torch.nan
            step = backend.step(data, q_heads=shape.q_heads, **step_arrays(shape, made, [(0, first, count)]))
            q, k, v = (x[0][first : first + count] for x in (made.q, made.k, made.v))
            out = backend.run(step, 1, q, k, v, scores_of(shape))
        assert torch.equal(out[0], want[length - 1])


def test_a_wrong_block_is_seen(best: NativeAttention) -> None:
    """The negative control of this file: one block id, one slot, one position, or one bit of one value changes the output."""
    shape = Shape()
    made = tokens(shape, [(None, 0), (None, 0)], [64, 64])
    prefill, row = [[(0, 0, 63)], [(1, 0, 63)]], (0, 63, 1)
    want = attend(best, shape, made, [*prefill, [row]])[0][0][63]
    swapped = [made.tables[0].copy(), made.tables[1]]
    data = pool(shape, made.blocks)
    for rows in prefill:
        step = best.step(data, q_heads=shape.q_heads, **step_arrays(shape, made, rows))
        best.run(step, 1, *(x[rows[0][0]][:63] for x in (made.q, made.k, made.v)), scores_of(shape))

    def last(tables: list[np.ndarray], values: torch.Tensor, lens: int = 64) -> torch.Tensor:
        arrays = step_arrays(shape, made._replace(tables=tables), [row])
        arrays["context_lens"][:] = lens
        arrays["shared"] = None
        step = best.step(data, q_heads=shape.q_heads, **arrays)
        return best.run(step, 1, made.q[0][63:], made.k[0][63:], values, scores_of(shape))[0]

    assert torch.equal(last(made.tables, made.v[0][63:]), want)
    swapped[0][1] = made.tables[1][1]
    assert not torch.equal(last(swapped, made.v[0][63:]), want)
    assert not torch.equal(last(made.tables, made.v[0][63:], lens=63), want)
    assert not torch.equal(last(made.tables, -made.v[0][63:]), want)
    assert torch.equal(last(made.tables, made.v[0][63:]), want)


# ── errors ────────────────────────────────────────────────────────────────────────────────────────────────────────────
GOOD = {
    "query_starts": np.array([0, 1, 3], np.int32),
    "context_lens": np.array([20, 18], np.int32),
    "block_table": np.array([[0, 1], [0, 2]], np.int32),
    "slots": np.array([19, 32, 33], np.int64),
    "shared": np.array([[0, 2, 1]], np.int32),
}


def test_a_pool_of_another_shape_is_another_pool(best: NativeAttention) -> None:
    """What was found out about one pool does not hold for the next one."""
    step = best.step(torch.zeros(4, 1, 2, 2, 16, 64), q_heads=4, **GOOD)
    other = best.step(torch.zeros(4, 3, 2, 2, 16, 32, dtype=torch.bfloat16), q_heads=4, **GOOD)
    assert (step.at.tolist(), step.shape, step.dtype) == ([0], (2, 64), torch.float32)
    assert (other.at.tolist(), other.shape, other.dtype) == ([0, 4096, 8192], (2, 32), torch.bfloat16)
    with pytest.raises(ValueError, match="contiguous"):
        best.step(torch.zeros(8, 1, 2, 2, 16, 64)[::2], q_heads=4, **GOOD)


def test_addresses_of_arrays() -> None:
    array = np.arange(12, dtype=np.int32)
    kept = array.copy()
    kept.flags.writeable = False
    for each in (array, array[3:], kept, np.zeros((3, 4))):
        assert address(each) == each.ctypes.data
    assert address(array[3:]) == address(array) + 12


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"query_starts": np.array([0, 0, 3])}, "no tokens"),
        ({"query_starts": np.array([1, 2, 3])}, "query_starts"),
        ({"query_starts": np.array([0, 3])}, "query_starts"),
        ({"context_lens": np.array([20, 1])}, "more tokens than context_lens"),
        ({"context_lens": np.array([20, 33])}, "fewer columns"),
        ({"block_table": np.array([[0, 1], [0, 9]])}, "outside the pool"),
        ({"block_table": np.array([[-1, 1], [0, 2]])}, "outside the pool"),
        ({"block_table": np.array([[0, 1]])}, "block_table"),
        ({"slots": np.array([19, 32, 64])}, "slot is outside"),
        ({"slots": np.array([19, -1, 33])}, "slot is outside"),
        ({"slots": np.array([19, 32])}, "slots: 2 for 3"),
        ({"shared": np.array([[0, 3, 1]])}, "inside the batch"),
        ({"shared": np.array([[0, 1, 1], [0, 1, 1]])}, "apart"),
        ({"shared": np.array([[0, 2, 2]])}, "do not have the same"),
        ({"shared": np.array([0, 2, 1])}, "shared"),
        ({"q_heads": 5}, "multiple"),
        ({"q_heads": 2 * 65}, "multiple"),
        ({"data": torch.zeros(4, 1, 2, 2, 16, 64, dtype=torch.float16)}, "bf16 or fp32"),
        ({"data": torch.zeros(4, 1, 2, 2, 64, 16).transpose(4, 5)}, "contiguous"),
        ({"data": torch.zeros(4, 1, 2, 2, 16, 592)}, "at most"),
    ],
)
def test_wrong_arrays_are_refused(wrong: dict[str, object], message: str, best: NativeAttention) -> None:
    good = {"data": torch.zeros(4, 1, 2, 2, 16, 64), "q_heads": 4, **GOOD}
    best.step(**good)
    with pytest.raises(ValueError, match=message):
        best.step(**{**good, **wrong})


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"layer": 1}, "layer=1 of 1"),
        ({"scores": Scores(1.0, window=-1)}, "window=-1"),
        ({"scores": Scores(1.0, sinks=torch.zeros(3))}, "sinks"),
        ({"query": torch.zeros(3, 4, 64).bfloat16()}, "query"),
        ({"query": torch.zeros(2, 4, 64)}, "query"),
        ({"query": torch.zeros(3, 64, 4).transpose(1, 2)}, "query"),
        ({"key": torch.zeros(3, 3, 64)}, "key or value"),
        ({"value": torch.zeros(3, 2, 64).bfloat16()}, "key or value"),
        ({"value": None}, "both"),
        ({"out": torch.zeros(3, 4, 32)}, "out"),
        ({"lse": torch.zeros(3, 4).double()}, "lse"),
    ],
)
def test_wrong_tensors_are_refused(wrong: dict[str, object], message: str, best: NativeAttention) -> None:
    step = best.step(torch.zeros(4, 1, 2, 2, 16, 64), q_heads=4, **GOOD)
    good = {"layer": 0, "query": torch.zeros(3, 4, 64), "key": torch.zeros(3, 2, 64), "value": torch.zeros(3, 2, 64),
            "scores": Scores(1.0)}  # fmt: skip
    best.run(step, **good)
    with pytest.raises(ValueError, match=message):
        best.run(step, **{**good, **wrong})


# ── construction ──────────────────────────────────────────────────────────────────────────────────────────────────────
def test_a_broken_library_and_no_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = build.build(best_isa()).name
    device = CpuDevice(EngineConfig())
    monkeypatch.setenv("ROLLOUT_CACHE", str(tmp_path))
    (tmp_path / "native").mkdir()
    (tmp_path / "native" / name).write_bytes(b"\x7fELF")
    with pytest.raises(NativeUnavailable, match="cannot load"):
        NativeAttention(1)
    monkeypatch.setenv("ROLLOUT_CACHE", str(tmp_path / "other"))
    monkeypatch.setenv("CC", "/bin/false")
    with pytest.raises(ValueError, match='attention="native".*bin/false'):
        choose_backend("native", device, ANY)
    assert choose_backend("auto", device, ANY).name == "reference"


def test_a_gpu_never_falls_back_to_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    """There it would be a hundred times slower, and look well."""
    device = CpuDevice(EngineConfig())

    def none(name: str, capacity: Any) -> Any:
        raise CannotAttend("no C compiler for Triton's launchers")

    monkeypatch.setattr(device, "backend", none)
    assert choose_backend("auto", device, ANY).name == "reference"
    monkeypatch.setattr(device, "falls_back", CudaDevice.falls_back, raising=False)
    with pytest.raises(ValueError, match='attention="auto": no C compiler .*"reference" runs everywhere'):
        choose_backend("auto", device, ANY)
    assert choose_backend("reference", device, ANY).name == "reference"


def test_unknown_names_and_numbers() -> None:
    with pytest.raises(ValueError, match="isa='neon'"):
        NativeAttention(1, isa="neon")
    with pytest.raises(ValueError, match="threads=0"):
        NativeAttention(0)


def test_one_openmp(best: NativeAttention) -> None:
    """The kernel brings no OpenMP of its own: it runs on torch's."""
    assert best._parallel and best._barrier
    linked = subprocess.run(["ldd", str(best.library)], capture_output=True, text=True, timeout=20).stdout
    assert "omp" not in linked
