"""The native CPU kernel: right against double precision, the same to the bit in every company, and deaf to unwritten memory.

Every pool here starts full of NaN, so a read of a token that is not visible shows in every test.
"""

from __future__ import annotations

import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import pytest
import torch

from engine.attention import choose_backend, native
from engine.attention.native import NativeAttention
from engine.attention.reference import ReferenceAttention
from engine.native import build
from engine.native.build import ISAS, NativeUnavailable

FP32, BF16 = torch.float32, torch.bfloat16
HERE = [isa for isa, (need, _) in ISAS.items() if need <= build.cpu_flags()]


class Shape(NamedTuple):
    q_heads: int = 6
    kv_heads: int = 2
    dim: int = 64
    block_size: int = 16
    window: int = 0
    dtype: torch.dtype = BF16


class Tokens(NamedTuple):
    """Sequence i of N: [T, heads, D] of each, and its [M] blocks. Tokens in common have blocks in common."""

    q: list[torch.Tensor]
    k: list[torch.Tensor]
    v: list[torch.Tensor]
    tables: list[np.ndarray]
    blocks: int


Row = tuple[int, int, int]
"""(sequence, first token, tokens)"""


def tokens(shape: Shape, prefixes: list[tuple[int | None, int]], lengths: list[int], seed: int = 0) -> Tokens:
    """Sequence i continues `prefixes[i]` = (an earlier sequence, how many of its first blocks) and is lengths[i] long."""
    generator = torch.Generator().manual_seed(seed)

    def normal(n: int, heads: int) -> torch.Tensor:
        return torch.randn(n, heads, shape.dim, generator=generator).to(shape.dtype)

    made = Tokens([], [], [], [], sum(-(-length // shape.block_size) for length in lengths) + 3)
    order = np.random.default_rng(seed).permutation(made.blocks).astype(np.int32).tolist()
    for (parent, shared), length in zip(prefixes, lengths, strict=True):
        common = shared * shape.block_size
        for kept, heads in ((made.q, shape.q_heads), (made.k, shape.kv_heads), (made.v, shape.kv_heads)):
            head = kept[parent][:common] if parent is not None else normal(0, heads)
            kept.append(torch.cat([head, normal(length - common, heads)]))
        table = list(made.tables[parent][:shared]) if parent is not None else []
        made.tables.append(np.array(table + [order.pop() for _ in range(-(-length // shape.block_size) - shared)], np.int32))
    return made


def pool(shape: Shape, blocks: int) -> torch.Tensor:
    return torch.full((blocks, 3, 2, shape.kv_heads, shape.block_size, shape.dim), torch.nan, dtype=shape.dtype)


def step_arrays(shape: Shape, made: Tokens, rows: list[Row]) -> dict[str, np.ndarray]:
    """Index arrays of one step; `shared` holds the leading full blocks that neighbouring rows have in common."""
    size = shape.block_size
    starts = np.cumsum([0, *(count for _, _, count in rows)]).astype(np.int32)
    lens = np.array([first + count for _, first, count in rows], np.int32)
    table = np.full((len(rows), max(len(made.tables[i]) for i, _, _ in rows)), 10**6, np.int32)
    slots = []
    for r, (i, first, count) in enumerate(rows):
        used = -(-(first + count) // size)
        table[r, :used] = made.tables[i][:used]
        at = np.arange(first, first + count)
        slots.append(made.tables[i][at // size].astype(np.int64) * size + at % size)
    shared, r = [], 0
    while r < len(rows):
        end, common = r + 1, rows[r][1] // size
        while end < len(rows):
            same = min(common, rows[end][1] // size)
            while same and (table[end, :same] != table[r, :same]).any():
                same -= 1
            if not same:
                break
            end, common = end + 1, same
        if end > r + 1:
            shared.append((r, end - r, common))
        r = end
    return {
        "query_starts": starts,
        "context_lens": lens,
        "block_table": table,
        "slots": np.concatenate(slots),
        "shared": np.array(shared, np.int32).reshape(-1, 3),
    }


def attend(
    backend: NativeAttention, shape: Shape, made: Tokens, steps: list[list[Row]], share: bool = True
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Run steps of rows over a fresh pool: (outputs [T, q_heads, D], lse [T, q_heads]) of each sequence. Tokens that were
    computed before (a prefix in common) need no row of their own; they stay NaN in the result."""
    data = pool(shape, made.blocks)
    outputs = [torch.full_like(q, torch.nan) for q in made.q]
    sums = [torch.full(q.shape[:2], torch.nan) for q in made.q]
    for rows in steps:
        arrays = step_arrays(shape, made, rows)
        if not share:
            arrays["shared"] = None
        step = backend.step(data, q_heads=shape.q_heads, **arrays)
        q, k, v = (torch.cat([x[i][a : a + n] for i, a, n in rows]) for x in (made.q, made.k, made.v))
        lse = torch.empty(q.shape[:2])
        out = backend.run(step, 1, q, k, v, shape.dim**-0.5, shape.window, lse=lse)
        for (i, a, n), at in zip(rows, arrays["query_starts"].tolist(), strict=False):
            outputs[i][a : a + n], sums[i][a : a + n] = out[at : at + n], lse[at : at + n]
    return outputs, sums


def whole(made: Tokens) -> list[list[Row]]:
    """Every sequence in a step of its own, in one row: the canonical schedule."""
    return [[(i, 0, len(q))] for i, q in enumerate(made.q)]


def oracle(shape: Shape, made: Tokens, i: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Sequence i in double precision: out [T, q_heads, D], lse [T, q_heads]."""
    group = shape.q_heads // shape.kv_heads
    q, k, v = (x[i].double() for x in (made.q, made.k, made.v))
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = torch.einsum("qhd,khd->hqk", q, k) * shape.dim**-0.5
    where = torch.arange(len(q))
    seen = where[None] <= where[:, None]
    if shape.window:
        seen &= where[None] > where[:, None] - shape.window
    scores = scores.masked_fill(~seen, -torch.inf)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), v), scores.logsumexp(-1).T


def assert_close(shape: Shape, got: torch.Tensor, want: torch.Tensor) -> None:
    """fp32: 2e-6 of the largest value. bf16: one rounding of the output (2⁻⁸ of it) and one of each weight, whose errors add
    up to at most 2⁻⁸ of the largest value and to far less than a third of it in practice."""
    error = (got.double() - want).abs()
    if shape.dtype == FP32:
        assert error.max() <= 2e-6 * want.abs().max()
    else:
        assert (error <= want.abs() * 2**-8 + want.abs().max() * 2**-8 / 3).all()


def same_bits(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    """NaN where nothing was computed is no difference."""
    return all(
        torch.equal(a[~a.isnan() & ~b.isnan()], b[~a.isnan() & ~b.isnan()]) and not b.isnan().all()
        for a, b in zip(one, other, strict=True)
    )


@pytest.fixture(scope="module", params=HERE)
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
    Shape(q_heads=4, kv_heads=2, dim=24, block_size=8),
    Shape(q_heads=3, kv_heads=1, dim=8, block_size=4),
    Shape(q_heads=5, kv_heads=5, dim=20, block_size=1),
    Shape(window=1),
    Shape(window=16),
    Shape(window=23),
    Shape(window=500),
    Shape(dim=24, block_size=8, window=11),
]


def text(shape: Shape) -> str:
    return "-".join(str(x).removeprefix("torch.") for x in shape)


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


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=["fp32", "bf16"])
def test_the_reference_backend_agrees(dtype: torch.dtype, best: NativeAttention) -> None:
    """Both through the seam's contract, in steps that mix prefill and decode; what stands behind the tokens is padding."""
    shape = Shape(dtype=dtype)
    made = tokens(shape, [(None, 0), (0, 2), (0, 2), (None, 0)], [60, 45, 70, 9])
    schedule = [[(0, 0, 60), (3, 0, 8)], [(1, 32, 13), (2, 32, 38), (3, 8, 1)]]
    outputs: dict[str, list[torch.Tensor]] = {}
    for each in (best, ReferenceAttention()):
        kv = SimpleNamespace(data=pool(shape, made.blocks), block_size=shape.block_size)
        outputs[each.name] = []
        for rows in schedule:
            arrays = step_arrays(shape, made, rows)
            arrays["block_table"][arrays["block_table"] == 10**6] = 0
            arrays["slots"] = torch.from_numpy(arrays["slots"])
            batch = SimpleNamespace(**arrays, num_tokens=int(arrays["query_starts"][-1]), attention={})
            q, k, v = (torch.cat([x[i][a : a + n] for i, a, n in rows] + [x[0][:3]]) for x in (made.q, made.k, made.v))
            out = each.attend(1, q, k, v, batch, kv, shape.dim**-0.5, 0)
            assert (out[batch.num_tokens :] == 0).all()
            outputs[each.name].append(out[: batch.num_tokens])
    for one, other in zip(*outputs.values(), strict=True):
        if dtype == FP32:
            assert_close(shape, one, other.double())
        else:  # both are rounded: one unit in the last place, and what `assert_close` allows
            torch.testing.assert_close(one, other, rtol=2**-7, atol=2**-8)


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
        assert torch.equal(best.run(step, 0, *each, shape.dim**-0.5), want[0])


# ── the same to the bit ───────────────────────────────────────────────────────────────────────────────────────────────
FAMILY = [(None, 0), (0, 3), (0, 3), (1, 5), (1, 5), (None, 0), (0, 3), (5, 2)]
"""two trees: 0 ← {1, 2, 6} share 3 blocks, 1 ← {3, 4} two more; 5 ← 7"""
SAME = [
    Shape(),
    Shape(dtype=FP32),
    Shape(q_heads=9, kv_heads=3, block_size=32, dtype=BF16),
    Shape(q_heads=8, kv_heads=1, block_size=48, dim=96),
    Shape(q_heads=4, kv_heads=4, dim=24, block_size=8),
    Shape(window=21),
    Shape(window=40, dtype=FP32),
]


def family(shape: Shape) -> Tokens:
    size = shape.block_size
    blocks, extra = [5, 7, 4, 9, 8, 6, 3, 2], [3, 1, 0, 9, 2, 5, 1, 8]
    return tokens(shape, FAMILY, [n * size + more for n, more in zip(blocks, extra, strict=True)])


def chunked(made: Tokens, chunk: int) -> list[list[Row]]:
    """All sequences side by side, `chunk` tokens of each a step; the prefixes in common are computed by each of them."""
    longest = max(len(q) for q in made.q)
    return [[(i, a, min(chunk, len(q) - a)) for i, q in enumerate(made.q) if a < len(q)] for a in range(0, longest, chunk)]


def decode_after(shape: Shape, made: Tokens, order: list[int]) -> list[list[Row]]:
    """Prefixes in common once, in whole rows; then every sequence its other tokens one by one, beside each other."""
    begin = {i: shared * shape.block_size for i, (_, shared) in enumerate(FAMILY)}
    begin |= {0: 3 * shape.block_size, 1: 5 * shape.block_size, 5: 2 * shape.block_size}
    prefill = [(0, 0, begin[0]), (5, 0, begin[5])]
    more = [(1, begin[0], begin[1] - begin[0])]
    longest = max(len(made.q[i]) - begin[i] for i in order)
    decode = [[(i, begin[i] + s, 1) for i in order if begin[i] + s < len(made.q[i])] for s in range(longest)]
    return [prefill, more, *decode]


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
            out = backend.run(step, 1, q, k, v, shape.dim**-0.5, shape.window)
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
        best.run(step, 1, *(x[rows[0][0]][:63] for x in (made.q, made.k, made.v)), shape.dim**-0.5)

    def last(tables: list[np.ndarray], values: torch.Tensor, lens: int = 64) -> torch.Tensor:
        arrays = step_arrays(shape, made._replace(tables=tables), [row])
        arrays["context_lens"][:] = lens
        arrays["shared"] = None
        step = best.step(data, q_heads=shape.q_heads, **arrays)
        return best.run(step, 1, made.q[0][63:], made.k[0][63:], values, shape.dim**-0.5)[0]

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
        ({"data": torch.zeros(4, 1, 2, 2, 16, 512)}, "at most"),
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
        ({"window": -1}, "window=-1"),
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
    good = {"layer": 0, "query": torch.zeros(3, 4, 64), "key": torch.zeros(3, 2, 64), "value": torch.zeros(3, 2, 64)}
    best.run(step, **good, scaling=1.0)
    with pytest.raises(ValueError, match=message):
        best.run(step, **{**good, **wrong}, scaling=1.0)


# ── construction ──────────────────────────────────────────────────────────────────────────────────────────────────────
def test_a_broken_library_and_no_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROLLOUT_CACHE", str(tmp_path))
    build.build(native.SOURCE, build.best_isa()).write_bytes(b"\x7fELF")
    with pytest.raises(NativeUnavailable, match="cannot load"):
        NativeAttention(1)
    monkeypatch.setenv("ROLLOUT_CACHE", str(tmp_path / "other"))
    monkeypatch.setenv("CC", "/bin/false")
    with pytest.raises(ValueError, match='attention="native".*bin/false'):
        choose_backend("native", torch.device("cpu"), None)
    assert choose_backend("auto", torch.device("cpu"), None).name == "reference"


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
