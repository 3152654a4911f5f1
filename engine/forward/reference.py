"""Attention in plain torch on any device: the reference for the other backends.

Queries are split into tiles of a fixed size (the last tile of a row is padded). Each tile processes the blocks of its row in
order, with online softmax in fp32 (Milakov & Gimelshein 2018; Dao et al. 2022):

    for block b of the row:    scores  = q · Kᵀ        [tiles, kv_heads, TILE · group, block_size]
                               m', l', acc' from m, l, acc, scores, V

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

from rollout.engine.forward.batch import Batch
from rollout.engine.kv.pages import Cells, PagedKV, keys_and_values

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
    """[N]: number of blocks that the tile attends to"""
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
        scaling: float,
        window: int,
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
        out = attend_tiles(padded, keys, values, tiles, group, scaling, window)
        result = query.new_zeros(*query.shape[:2], values.numbers.shape[3])
        real = tiles.positions >= 0
        result[tiles.queries[real]] = out[real].to(query.dtype)
        return result


def attend_tiles(
    query: torch.Tensor, keys: Cells, values: Cells, tiles: QueryTiles, group: int, scaling: float, window: int
) -> torch.Tensor:
    """query [T + 1, q_heads, D] fp32 (the last one zero), keys of width D, values of width E → [N, tile, q_heads, E] fp32."""
    n, tile = tiles.queries.shape
    heads, size, dim = keys.numbers.shape[1:]
    q = query[tiles.queries] * scaling  # [N, tile, q_heads, D]
    q = q.view(n, tile, heads, group, dim).permute(0, 2, 1, 3, 4).reshape(n, heads, tile * group, dim)
    position = tiles.positions.repeat_interleave(group, 1)[:, None, :, None]  # [N, 1, tile · group, 1]
    m = torch.full((n, heads, tile * group, 1), MASKED, device=q.device)
    total = torch.zeros_like(m)
    acc = q.new_zeros(*q.shape[:3], values.numbers.shape[3])
    last = tiles.positions.amax(1)
    for b in range(int(tiles.blocks.max())):
        at = torch.from_numpy(np.flatnonzero(tiles.blocks > b)).to(q.device)
        k, v = keys.read(tiles.table[at, b]), values.read(tiles.table[at, b])
        where = torch.arange(b * size, (b + 1) * size, device=q.device)
        # slots after the last visible token may contain anything, including NaN
        unwritten = (where[None] > last[at, None])[:, None, :, None]
        k, v = k.masked_fill(unwritten, 0), v.masked_fill(unwritten, 0)
        seen = where <= position[at]
        if window:
            seen &= where > position[at] - window
        scores = torch.matmul(q[at], k.transpose(-1, -2)).masked_fill(~seen, MASKED)
        top = torch.maximum(m[at], scores.amax(-1, keepdim=True))
        weights = (scores - top).exp().masked_fill(~seen, 0)
        shrink = (m[at] - top).exp()
        total[at] = total[at] * shrink + weights.sum(-1, keepdim=True)
        acc[at] = acc[at] * shrink + torch.matmul(weights, v)
        m[at] = top
    out = acc / total.clamp(min=torch.finfo(torch.float32).tiny)
    return out.view(n, heads, tile, group, -1).permute(0, 2, 1, 3, 4).reshape(n, tile, heads * group, -1)


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
        slots=batch.slots.to(device),
    )
