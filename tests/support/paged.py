"""Rows of tokens over a paged pool, for tests of attention backends: schedules of a few sequences, and double precision.

Every pool starts full of NaN, so a read of a token that is not visible shows in every test.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch

from rollout.engine.forward.attention import Scores
from rollout.engine.kv.pages import KVGeometry

FP32, BF16 = torch.float32, torch.bfloat16


class Shape(NamedTuple):
    q_heads: int = 6
    kv_heads: int = 2
    dim: int = 64
    block_size: int = 16
    window: int = 0
    dtype: torch.dtype = BF16
    value_dim: int | None = None
    """None: as wide as keys"""
    softcap: float = 0.0
    sinks: bool = False

    @property
    def width(self) -> int:
        """Of values."""
        return self.dim if self.value_dim is None else self.value_dim


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
    """Draw sequences: i continues `prefixes[i]` = (an earlier sequence, how many of its first blocks) and is lengths[i]
    long."""
    generator = torch.Generator().manual_seed(seed)

    def normal(n: int, heads: int, width: int) -> torch.Tensor:
        return torch.randn(n, heads, width, generator=generator).to(shape.dtype)

    made = Tokens([], [], [], [], sum(-(-length // shape.block_size) for length in lengths) + 3)
    order = np.random.default_rng(seed).permutation(made.blocks).astype(np.int32).tolist()
    for (parent, shared), length in zip(prefixes, lengths, strict=True):
        common = shared * shape.block_size
        sizes = (shape.q_heads, shape.dim), (shape.kv_heads, shape.dim), (shape.kv_heads, shape.width)
        for kept, size in zip((made.q, made.k, made.v), sizes, strict=True):
            head = kept[parent][:common] if parent is not None else normal(0, *size)
            kept.append(torch.cat([head, normal(length - common, *size)]))
        table = list(made.tables[parent][:shared]) if parent is not None else []
        made.tables.append(np.array(table + [order.pop() for _ in range(-(-length // shape.block_size) - shared)], np.int32))
    return made


def pool(shape: Shape, blocks: int) -> torch.Tensor:
    return torch.full((blocks, *geometry(shape).block_shape(shape.block_size)), torch.nan, dtype=shape.dtype)


def scores_of(shape: Shape) -> Scores:
    """Return what the layer asks for. Sinks from far below to far above the scores, whose standard deviation is 1."""
    sinks = torch.linspace(-6, 6, shape.q_heads) if shape.sinks else None
    return Scores(shape.dim**-0.5, shape.window, shape.softcap, sinks)


def geometry(shape: Shape, fp8: bool = False) -> KVGeometry:
    return KVGeometry(3, shape.kv_heads, shape.dim, shape.dtype, shape.value_dim, fp8)


def attend(
    one: Any,
    shape: Shape,
    made: Tokens,
    steps: list[list[Row]],
    share: bool = True,
    pad: int = 3,
    data: torch.Tensor | None = None,
    device: torch.device | None = None,
    scores: Scores | None = None,
) -> list[torch.Tensor]:
    """Run steps of rows over a fresh pool, or `data`, through the seam: [T, q_heads, width] of each sequence, NaN where nothing
    ran. scores: other ones than the shape's."""
    data = (pool(shape, made.blocks) if data is None else data).to(device)
    kv = SimpleNamespace(data=data, block_size=shape.block_size, geometry=geometry(shape, data.dtype == torch.uint8))
    outputs = [torch.full((*q.shape[:2], shape.width), torch.nan, dtype=q.dtype) for q in made.q]
    asked = scores_of(shape) if scores is None else scores
    asked = asked._replace(sinks=None if asked.sinks is None else asked.sinks.to(device))
    for rows in steps:
        arrays = step_arrays(shape, made, rows)
        arrays["block_table"][arrays["block_table"] == 10**6] = 0
        arrays["slots"] = torch.from_numpy(arrays["slots"])
        if not share:
            arrays["shared"] = arrays["shared"][:0]
        batch = SimpleNamespace(**arrays, num_tokens=int(arrays["query_starts"][-1]))
        batch.attention = one.prepare(batch, kv)
        q, k, v = (
            torch.cat([x[i][a : a + n] for i, a, n in rows] + [x[0][:1]] * pad).to(device) for x in (made.q, made.k, made.v)
        )
        out = one.attend(1, q, k, v, batch, kv, asked).cpu()
        assert (out[batch.num_tokens :] == 0).all(), "padding is not zero"
        for (i, a, n), at in zip(rows, arrays["query_starts"].tolist(), strict=False):
            outputs[i][a : a + n] = out[at : at + n]
    return outputs


def step_arrays(shape: Shape, made: Tokens, rows: list[Row]) -> dict[str, np.ndarray]:
    """Make the index arrays of one step; `shared` holds the leading full blocks that neighbouring rows have in common."""
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


def whole(made: Tokens) -> list[list[Row]]:
    """Put every sequence in a step of its own, in one row: the canonical schedule."""
    return [[(i, 0, len(q))] for i, q in enumerate(made.q)]


def oracle(shape: Shape, made: Tokens, i: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute sequence i in double precision: out [T, q_heads, D], lse [T, q_heads]."""
    group = shape.q_heads // shape.kv_heads
    q, k, v = (x[i].double() for x in (made.q, made.k, made.v))
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    asked = scores_of(shape)
    scores = torch.einsum("qhd,khd->hqk", q, k) * asked.scaling
    if asked.softcap:
        scores = torch.tanh(scores / asked.softcap) * asked.softcap
    where = torch.arange(len(q))
    seen = where[None] <= where[:, None]
    if shape.window:
        seen &= where[None] > where[:, None] - shape.window
    scores = scores.masked_fill(~seen, -torch.inf)
    if asked.sinks is not None:
        scores = torch.cat([scores, asked.sinks.double()[:, None, None].expand(-1, len(q), 1)], 2)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1)[..., : len(q)], v), scores.logsumexp(-1).T


def assert_close(shape: Shape, got: torch.Tensor, want: torch.Tensor, rounding: float = 2**-8) -> None:
    """Assert that errors are small. fp32: 2e-6 of the largest value. bf16: one rounding of the output (2⁻⁸ of it) and one of
    each weight, whose errors add up to at most 2⁻⁸ of the largest value and to far less than a third of it in practice.
    `rounding`: 2⁻⁷ if bits are cut."""
    error = (got.double() - want).abs()
    if shape.dtype == FP32:
        assert error.max() <= 2e-6 * want.abs().max()
    else:
        assert (error <= want.abs() * rounding + want.abs().max() * rounding / 3).all()


def same_bits(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    """Whether all tensors are equal to the bit; NaN where nothing was computed is no difference."""
    return all(
        torch.equal(a[~a.isnan() & ~b.isnan()], b[~a.isnan() & ~b.isnan()]) and not b.isnan().all()
        for a, b in zip(one, other, strict=True)
    )


def text(shape: Shape) -> str:
    plain = shape[:6]
    more = [f"values{shape.width}"] * (shape.value_dim is not None) + [f"cap{shape.softcap}"] * (shape.softcap > 0)
    return "-".join([*(str(x).removeprefix("torch.") for x in plain), *more, *["sinks"] * shape.sinks])


FAMILY = [(None, 0), (0, 3), (0, 3), (1, 5), (1, 5), (None, 0), (0, 3), (5, 2)]
"""two trees: 0 ← {1, 2, 6} share 3 blocks, 1 ← {3, 4} two more; 5 ← 7"""


def family(shape: Shape) -> Tokens:
    size = shape.block_size
    blocks, extra = [5, 7, 4, 9, 8, 6, 3, 2], [3, 1, 0, 9, 2, 5, 1, 8]
    return tokens(shape, FAMILY, [n * size + more for n, more in zip(blocks, extra, strict=True)])


def chunked(made: Tokens, chunk: int) -> list[list[Row]]:
    """Put all sequences side by side, `chunk` tokens of each a step; the prefixes in common are computed by each of them."""
    longest = max(len(q) for q in made.q)
    return [[(i, a, min(chunk, len(q) - a)) for i, q in enumerate(made.q) if a < len(q)] for a in range(0, longest, chunk)]


def decode_after(shape: Shape, made: Tokens, order: list[int]) -> list[list[Row]]:
    """Prefill common prefixes once, in whole rows; then decode the other tokens of every sequence one by one, beside each
    other."""
    begin = {i: shared * shape.block_size for i, (_, shared) in enumerate(FAMILY)}
    begin |= {0: 3 * shape.block_size, 1: 5 * shape.block_size, 5: 2 * shape.block_size}
    prefill = [(0, 0, begin[0]), (5, 0, begin[5])]
    more = [(1, begin[0], begin[1] - begin[0])]
    longest = max(len(made.q[i]) - begin[i] for i in order)
    decode = [[(i, begin[i] + s, 1) for i in order if begin[i] + s < len(made.q[i])] for s in range(longest)]
    return [prefill, more, *decode]
