"""Attention in plain torch on any device: the reference for the other backends.

Queries are split into tiles of a fixed size (the last tile of a row is padded). Each tile processes the blocks of its row in
order, with online softmax in fp32 (Milakov & Gimelshein 2018; Dao et al. 2022):

    for block b of the row:    scores  = q · Kᵀ        [tiles, kv_heads, TILE · group, block_size]
                               m', l', acc' from m, l, acc, scores, V
    after the last one:        l + exp(sink - m)

A soft cap (Bello et al. 2016) is applied to the scores before they are masked. A sink is one more score without a value, added
to the sum of weights after the last block (Xiao et al. 2023; gpt-oss).

All products have the same shape for every batch, and masked positions add exactly zero. So the result of a query depends
neither on other queries of its tile or batch nor on the chunking of its prompt. Shared prefixes are read like other blocks;
`Batch.shared` is not used.

Layout in a block: K and V as [kv_heads, block_size, width], each with its own width; with fp8, codes and scales
(`rollout.engine.kv.pages`), decoded to fp32 before the products.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from rollout.engine.forward.attention import Scores
from rollout.engine.forward.batch import Batch
from rollout.engine.kv.cells import Cells, keys_and_values
from rollout.engine.kv.pages import PagedKV

MASKED = -1e30


class QueryTiles(NamedTuple):
    """N tiles of at most `tile` queries each, the same for all layers."""

    queries: torch.Tensor
    """[N, tile] int64: token of the batch; T for padding"""
    positions: torch.Tensor
    """[N, tile] int64: position of each query; -1 for padding"""
    table: torch.Tensor
    """[N, M] int64: device slots of the blocks of the row"""
    blocks: np.ndarray
    """[N]: number of blocks up to the last one that the tile attends to"""
    begins: np.ndarray
    """[N]: lowest position of its queries; blocks before its window may be those of other sequences"""
    slots: torch.Tensor
    """[T]: slots for K and V"""


class ReferenceAttention:
    name = "reference"

    def prepare(self, batch: Batch, kv: PagedKV) -> dict[int, QueryTiles]:
        """Return an empty cache: tiles are built at first use, per head group size, since layers may differ in query heads."""
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
        keys, values = keys_and_values(kv, layer)
        group = query.shape[1] // keys.numbers.shape[1]
        if group not in batch.attention:
            batch.attention[group] = _tiles(batch, -(-16 // group), kv.block_size, query.device)
        tiles, n = batch.attention[group], batch.num_tokens
        if key is not None and value is not None:
            keys.write(tiles.slots, key[:n])
            values.write(tiles.slots, value[:n])
        padded = torch.cat([query[:n].float(), query.new_zeros(1, *query.shape[1:], dtype=torch.float32)])
        out = attend_tiles(padded, keys, values, tiles, group, scores)
        result = query.new_zeros(*query.shape[:2], values.numbers.shape[3])
        real = tiles.positions >= 0
        result[tiles.queries[real]] = out[real].to(query.dtype)
        return result


def attend_tiles(query: torch.Tensor, keys: Cells, values: Cells, tiles: QueryTiles, group: int, asked: Scores) -> torch.Tensor:
    """query [T + 1, q_heads, D] fp32 (the last one zero), keys of width D, values of width E → [N, tile, q_heads, E] fp32."""
    n, tile = tiles.queries.shape
    heads, size, dim = keys.numbers.shape[1:]
    q = query[tiles.queries] * asked.scaling  # [N, tile, q_heads, D]
    q = q.view(n, tile, heads, group, dim).permute(0, 2, 1, 3, 4).reshape(n, heads, tile * group, dim)
    position = tiles.positions.repeat_interleave(group, 1)[:, None, :, None]  # [N, 1, tile · group, 1]
    m = torch.full((n, heads, tile * group, 1), MASKED, device=q.device)
    total = torch.zeros_like(m)
    acc = q.new_zeros(*q.shape[:3], values.numbers.shape[3])
    last = tiles.positions.amax(1)
    first = np.maximum(tiles.begins - asked.window + 1, 0) // size if asked.window else np.zeros_like(tiles.begins)
    for b in range(int(first.min()), int(tiles.blocks.max())):
        at = torch.from_numpy(np.flatnonzero((first <= b) & (tiles.blocks > b))).to(q.device)
        k, v = keys.read(tiles.table[at, b]), values.read(tiles.table[at, b])
        where = torch.arange(b * size, (b + 1) * size, device=q.device)
        # slots after the last visible token may contain anything, including NaN
        unwritten = (where[None] > last[at, None])[:, None, :, None]
        k, v = k.masked_fill(unwritten, 0), v.masked_fill(unwritten, 0)
        seen = where <= position[at]
        if asked.window:
            seen &= where > position[at] - asked.window
        scores = torch.matmul(q[at], k.transpose(-1, -2))
        if asked.softcap:
            scores = tanh(scores / asked.softcap) * asked.softcap
        scores = scores.masked_fill(~seen, MASKED)
        top = torch.maximum(m[at], scores.amax(-1, keepdim=True))
        weights = (scores - top).exp().masked_fill(~seen, 0)
        shrink = (m[at] - top).exp()
        total[at] = total[at] * shrink + weights.sum(-1, keepdim=True)
        acc[at] = acc[at] * shrink + torch.matmul(weights, v)
        m[at] = top
    if asked.sinks is not None:
        sink = asked.sinks.float().view(1, heads, 1, group).expand(1, heads, tile, group).reshape(1, heads, tile * group, 1)
        top = torch.maximum(m, sink)
        shrink = (m - top).exp()
        total, acc = total * shrink + (sink - top).exp(), acc * shrink
    out = acc / total.clamp(min=torch.finfo(torch.float32).tiny)
    return out.view(n, heads, tile, group, -1).permute(0, 2, 1, 3, 4).reshape(n, tile, heads * group, -1)


def tanh(x: torch.Tensor) -> torch.Tensor:
    """Return tanh of fp32 numbers, up to a few roundings, as e / (e + 2) with e = e^2|x| - 1 and the sign of x. Made of sums,
    products and quotients: torch's own has other bits at the end of a tensor."""
    size = x.abs().clamp(max=10)
    n = (size * 2.8853900817779268).round()  # e^2|x| = 2^n · (1 + rest)
    s = (size * 2 - n * 0.693145751953125) - n * 1.428606765330187045e-06  # log 2 in two parts
    series = torch.full_like(s, 0.000198527617612853646278381)
    for coefficient in (0.00139304355252534151, 0.00833336077630519867, 0.0416664853692054749, 0.166666671633720398, 0.5):
        series = series * s + coefficient
    rest, scale = s * s * series + s, ((n.int() + 127) << 23).view(torch.float32)
    e = scale * rest + (scale - 1)
    return (e / (e + 2)).copysign(x)


def _tiles(batch: Batch, tile: int, block_size: int, device: torch.device) -> QueryTiles:
    queries, positions, rows = [], [], []
    for row in range(len(batch.context_lens)):
        start, end = int(batch.query_starts[row]), int(batch.query_starts[row + 1])
        offset = int(batch.context_lens[row]) - end
        for first in range(start, end, tile):
            count = min(tile, end - first)
            queries.append([*range(first, first + count), *[batch.num_tokens] * (tile - count)])
            positions.append([*range(first + offset, first + offset + count), *[-1] * (tile - count)])
            rows.append(row)
    where = torch.tensor(positions, device=device)
    return QueryTiles(
        queries=torch.tensor(queries, device=device),
        positions=where,
        table=torch.from_numpy(batch.block_table[rows].astype(np.int64)).to(device),
        blocks=np.array(positions).max(1) // block_size + 1,
        begins=np.array(positions)[:, 0],
        slots=batch.slots.to(device),
    )
