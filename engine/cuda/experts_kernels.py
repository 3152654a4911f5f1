"""Products of experts that do not depend on the batch: choices sorted by expert, tiles of one expert each, and a token's sum.

    count     how many choices each expert has
    sort      choices by expert, each expert's in the order of tokens; and the tiles, with an expert id each
    grouped   rows of a tile · the matrix of its expert, in the order of sums of `exact_kernels.product`
    combine   a token's results times their weights, in order of expert id, in fp32, rounded once

The tiles are written by the device, and their number is read from memory: the host does not wait, and a CUDA graph serves
every distribution of tokens over experts. A tile never has rows of two experts, and has the same size for any number of rows,
so a row's bits depend on its own numbers alone. That tiles have an expert id each follows vLLM's `moe_align_block_size`.

Import only if Triton is installed. With TRITON_INTERPRET=1 it runs on the CPU, which has no bf16 products: WIDEN.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["choices"])
def count(chosen, counts, choices, N: tl.constexpr):
    """counts [experts] = the choices of each expert, by one program each. chosen [choices] int64."""
    expert = tl.program_id(0)
    found = tl.zeros((N,), tl.int32)
    for start in range(0, choices, N):
        at = start + tl.arange(0, N)
        found += tl.where(tl.load(chosen + at, mask=at < choices, other=-1) == expert, 1, 0)
    tl.store(counts + expert, tl.sum(found))


@triton.jit(do_not_specialize=["choices"])
def sort(
    chosen, counts, order, place, tile_expert, tile_begin, tile_end, totals, choices,
    EXPERTS: tl.constexpr, EXPERTS_PAD: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Runs one program per expert, and one for choices of no expert (EXPERTS and above). order [choices]: the choice of each
    row; place [choices]: the row of each choice, -1 for none; tile_expert, tile_begin, tile_end: expert and rows of each tile
    of at most M rows; totals: the number of tiles."""
    expert = tl.program_id(0)
    e = tl.arange(0, EXPERTS_PAD)
    each = tl.load(counts + e, mask=e < EXPERTS, other=0)
    first = tl.sum(tl.where(e < expert, each, 0))
    first_tile = tl.sum(tl.where(e < expert, (each + M - 1) // M, 0))
    mine = tl.sum(tl.where(e == expert, each, 0))
    end = first + mine
    tiles = (mine + M - 1) // M
    if expert == EXPERTS:
        tl.store(totals, first_tile)
    for tile in range(0, tiles):
        tl.store(tile_expert + first_tile + tile, expert)
        tl.store(tile_begin + first_tile + tile, first + tile * M)
        tl.store(tile_end + first_tile + tile, tl.minimum(first + (tile + 1) * M, end))
    taken = first
    for start in range(0, choices, N):
        at = start + tl.arange(0, N)
        one = tl.load(chosen + at, mask=at < choices, other=-1)
        if expert == EXPERTS:
            tl.store(place + at, tl.zeros((N,), tl.int32) - 1, mask=one >= EXPERTS)
        else:
            hit = tl.where(one == expert, 1, 0)
            row = taken + tl.cumsum(hit) - 1
            tl.store(order + row, at, mask=hit > 0)
            tl.store(place + at, row, mask=hit > 0)
            taken += tl.sum(hit)


@triton.jit
def grouped(
    x, weight, bias, out, order, tile_expert, tile_begin, tile_end, totals, rows, outs, size, x_row, w_expert, w_out, w_in,
    CHOICES: tl.constexpr, BIAS: tl.constexpr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, WIDEN: tl.constexpr,
    SLICES: tl.constexpr,
):  # fmt: skip
    """out [SLICES, rows, outs] = x · weight[expert]ᵀ + bias[expert] [outs], each slice of SLICES · size inputs by itself,
    rounded once. Row r of x is that of token order[r] // CHOICES; with CHOICES 0, x has the rows themselves. weight:
    [experts, outs, SLICES · size] with any strides, so that matrices which are stored transposed need no copy. Tiles of one
    expert and the same outputs are processed one after the other, so that their weight is read from memory once."""
    row_tiles = tl.load(totals)
    tiles = row_tiles * tl.cdiv(outs, N)
    for each in range(tl.program_id(0), tiles * SLICES, tl.num_programs(0)):
        part = (each // tiles).to(tl.int64)
        tile = each % tiles
        of = tile % row_tiles
        expert = tl.load(tile_expert + of).to(tl.int64)
        m = tl.load(tile_begin + of) + tl.arange(0, M)
        live = m < tl.load(tile_end + of)
        n = (tile // row_tiles * N + tl.arange(0, N)).to(tl.int64)
        if CHOICES > 0:
            from_row = (tl.load(order + m, mask=live, other=0) // CHOICES).to(tl.int64)
        else:
            from_row = m.to(tl.int64)
        matrix = weight + expert * w_expert + n[None] * w_out + part * size * w_in
        inputs = x + part * size
        acc = tl.zeros((M, N), tl.float32)
        for start in range(0, size, K):
            k = start + tl.arange(0, K)
            left = tl.load(inputs + from_row[:, None] * x_row + k[None], mask=live[:, None] & (k < size)[None], other=0.0)
            right = tl.load(matrix + k[:, None] * w_in, mask=(n < outs)[None] & (k < size)[:, None], other=0.0)
            if WIDEN:
                acc = tl.dot(left.to(tl.float32), right.to(tl.float32), acc, input_precision="ieee")
            else:
                acc = tl.dot(left, right, acc, input_precision="ieee")
        if BIAS:
            acc += tl.load(bias + expert * outs + n, mask=n < outs, other=0.0).to(tl.float32)[None]
        made = out + (part * rows + m)[:, None] * outs + n[None]
        tl.store(made, acc.to(out.dtype.element_ty), mask=live[:, None] & (n < outs)[None])


@triton.jit
def combine(
    x, weights, order, place, out, width, CHOICES: tl.constexpr, CHOICES_PAD: tl.constexpr, WIDTH: tl.constexpr
):  # fmt: skip
    """out [tokens, width] = Σ x[row] · weights[choice] over a token's choices, in order of rows, which is that of expert ids.
    weights [tokens · CHOICES] fp32."""
    token = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    c = tl.arange(0, CHOICES_PAD)
    none: tl.constexpr = 0x7FFFFFFF
    rows = tl.load(place + token * CHOICES + c, mask=c < CHOICES, other=-1)
    total = tl.zeros((WIDTH,), tl.float32)
    last = -1
    for _ in tl.static_range(CHOICES):
        row = tl.min(tl.where(rows > last, rows, none))
        some = row < none
        choice = tl.load(order + row, mask=some, other=0)
        made = tl.load(x + row.to(tl.int64) * width + n, mask=n < tl.where(some, width, 0), other=0.0).to(tl.float32)
        total = tl.where(some, total + made * tl.load(weights + choice), total)
        last = row
    tl.store(out + token * width + n, total.to(out.dtype.element_ty), mask=n < width)
