"""Attention at production sizes against double precision: sequences in a pool that is full of NaN wherever nothing was written,
and one step of the Triton backend over them, its partial results full of NaN as well, computed again and again."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch

from rollout.engine.config import EngineConfig
from rollout.engine.cuda.attention import TritonAttention
from rollout.engine.forward.attention import Scores, StepCapacity
from rollout.engine.kv import fp8

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BLOCK = EngineConfig(device="cuda").block_tokens
REPEATS = int(os.environ.get("REPEATS", 50 if DEVICE == "cuda" else 2))
"""times that a step is computed; under compute-sanitizer each takes seconds"""


class Heads(NamedTuple):
    kv: int = 8
    group: int = 4
    dim: int = 128
    dtype: torch.dtype = torch.bfloat16
    fp8: bool = False


class Pages(NamedTuple):
    """Sequences with their K and V in a pool."""

    heads: Heads
    data: torch.Tensor
    """[blocks, 1, 2, kv_heads, block, head_dim]"""
    pool: torch.Tensor
    """what the kernels read: the same, or its codes and scales [blocks, 1, bytes]"""
    tables: list[np.ndarray]
    lengths: list[int]
    block: int
    """tokens of a block"""


def pages(heads: Heads, lengths: list[int], shared: int = 0, block: int = BLOCK) -> Pages:
    """Make pages of sequences; the first `shared` blocks are the same for all."""
    generator = torch.Generator().manual_seed(0)
    needed = [-(-length // block) for length in lengths]
    ids = np.random.default_rng(0).permutation(shared + sum(n - shared for n in needed) + 3).astype(np.int32)
    prefix, rest = ids[:shared], ids[shared:].tolist()
    tables = [np.concatenate([prefix, np.array([rest.pop() for _ in range(n - shared)], np.int32)]) for n in needed]
    data = torch.full((len(ids), 1, 2, heads.kv, block, heads.dim), torch.nan, dtype=heads.dtype)
    for table, length in zip(tables, lengths, strict=True):
        for i, number in enumerate(table.tolist()):
            if data[number].isnan().all():
                mine = data[number, 0, :, :, : length - i * block]
                mine[...] = torch.randn(mine.shape, generator=generator)
    data, pool = kept_in_fp8(data, generator) if heads.fp8 else (data, data)
    data = data.to(DEVICE)
    return Pages(heads, data, pool.to(DEVICE) if heads.fp8 else data, tables, lengths, block)


def kept_in_fp8(data: torch.Tensor, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Numbers of many sizes, in fp32, as they come out of a pool in fp8, and that pool, laid out by hand: NaN where nothing was
    put."""
    unwritten = data.isnan().any(-1)
    codes, scales = fp8.encode(data * 2.0 ** torch.randint(-6, 1, (*data.shape[:-1], 1), generator=generator))
    codes[unwritten], scales[unwritten] = 0xFF, torch.nan
    both = scales[:, 0].movedim(1, -1).contiguous()  # [blocks, kv_heads, block, 2]
    pool = torch.cat([codes.flatten(1), both.view(torch.uint8).flatten(1)], 1)[:, None]
    return fp8.decode(codes, scales), pool


def recut(made: Pages, block: int) -> Pages:
    """Return the same sequences in smaller blocks."""
    of_one = made.block // block
    tables = [(table[:, None] * of_one + np.arange(of_one, dtype=np.int32)).ravel() for table in made.tables]
    tables = [table[: -(-length // block)] for table, length in zip(tables, made.lengths, strict=True)]
    shape = (-1, 1, 2, made.heads.kv, block, made.heads.dim)
    data = made.data.unflatten(4, (of_one, block)).movedim(4, 1).reshape(shape)
    pool = data if made.pool is made.data else _recut_in_fp8(made, of_one)
    return Pages(made.heads, data, pool, tables, made.lengths, block)


def _recut_in_fp8(made: Pages, of_one: int) -> torch.Tensor:
    blocks, heads, block = len(made.pool), made.heads.kv, made.block // of_one
    codes, scales = made.pool[:, 0].split([2 * heads * made.block * made.heads.dim, 4 * heads * made.block], 1)
    cut = [
        codes.reshape(blocks, 2, heads, of_one, block, -1).movedim(3, 1),
        scales.reshape(blocks, heads, of_one, block, 4).movedim(2, 1),
    ]
    return torch.cat([each.reshape(blocks * of_one, -1) for each in cut], 1)[:, None]


def attend(made: Pages, counts: list[int], share: bool, processors: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the last `counts` tokens of every sequence in one step: queries and outputs [T, q_heads, dim]."""
    heads, rows = made.heads, len(counts)
    q_heads, columns = heads.kv * heads.group, max(map(len, made.tables))
    total = sum(counts)
    generator = torch.Generator().manual_seed(1)
    query = torch.randn(total, q_heads, heads.dim, generator=generator).to(DEVICE, heads.dtype)
    table = np.zeros((rows, columns), np.int32)
    for row, blocks in zip(table, made.tables, strict=True):
        row[: len(blocks)] = blocks
    capacity = StepCapacity(max(total, 16), max(rows, 16), columns, q_heads, heads.kv, heads.dim, heads.dtype.itemsize)
    backend = TritonAttention(torch.device(DEVICE), capacity, processors)
    batch: Any = SimpleNamespace(
        query_starts=np.cumsum([0, *counts]).astype(np.int32), context_lens=np.array(made.lengths, np.int32), block_table=table,
        shared=np.ones((int(share), 3), np.int32), num_tokens=total, slots=torch.zeros(total, dtype=torch.int64),
    )  # fmt: skip
    kv: Any = SimpleNamespace(data=made.pool, block_size=made.block, geometry=SimpleNamespace(kv_heads=heads.kv))
    backend.partial.fill_(torch.nan)
    backend.sums.fill_(torch.nan)
    batch.attention = backend.prepare(batch, kv)
    outputs = [backend.attend_stored(0, query, batch, kv, Scores(heads.dim**-0.5)) for _ in range(REPEATS)]
    for other in outputs[1:]:
        assert torch.equal(outputs[0], other), "the same step has other bits when it is repeated"
    return query, outputs[0]


def assert_right(made: Pages, counts: list[int], query: torch.Tensor, out: torch.Tensor) -> None:
    """Compare each query with double precision, up to the rounding of its output and of its weights."""
    of_bf16 = 2**-8 if DEVICE == "cuda" else 2**-7  # the interpreter cuts bits off
    rounding = of_bf16 if made.heads.dtype == torch.bfloat16 else 2**-19
    at = 0
    for table, length, count in zip(made.tables, made.lengths, counts, strict=True):
        kept = made.data[torch.from_numpy(table).long().to(DEVICE), 0].double()
        key, value = (kept[:, i].transpose(1, 2).flatten(0, 1)[:length] for i in (0, 1))  # [length, kv_heads, dim]
        for first in range(0, count, 128):
            rows = slice(at + first, at + min(first + 128, count))
            q = query[rows].double().unflatten(1, (made.heads.kv, made.heads.group))
            scores = torch.einsum("thgd,khd->thgk", q, key) * made.heads.dim**-0.5
            position = length - count + torch.arange(first, min(first + 128, count), device=DEVICE)
            scores = scores.masked_fill(torch.arange(length, device=DEVICE) > position[:, None, None, None], -torch.inf)
            want = torch.einsum("thgk,khd->thgd", scores.softmax(-1), value).flatten(1, 2)
            error = (out[rows].double() - want).abs()
            assert bool((error <= want.abs() * rounding + want.abs().max() * rounding / 2).all()), f"{length} tokens"
        at += count
