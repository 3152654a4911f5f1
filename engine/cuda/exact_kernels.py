"""Triton kernels of a matrix product in which a row does not depend on the number of rows, and of sums of such products.

Tiles have one size, and each sums over the inputs in order, from the first to the last. Libraries choose tiles, and whether to
split the sum, by the number of rows, so the same row has other bits in another batch (He et al. 2025, Thinking Machines,
"Defeating nondeterminism in LLM inference").

Import only if Triton is installed. With TRITON_INTERPRET=1 it runs on the CPU, which has no bf16 products: WIDEN.
"""

from __future__ import annotations

import triton
import triton.language as tl

from rollout.engine.cuda.recurrence_kernels import neighbours


@triton.jit
def product(
    x, weight, bias, out, rows, outs, size, x_row, weight_row,
    BIAS: tl.constexpr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, WIDEN: tl.constexpr, SLICES: tl.constexpr,
):  # fmt: skip
    """out [SLICES, rows, outs] = x [rows, SLICES · size] · weight [outs, SLICES · size]ᵀ + bias [outs], for each slice of the
    inputs by itself, rounded once. Tiles of the same outputs are processed one after the other, so that a weight is read from
    memory once."""
    row_tiles = tl.cdiv(rows, M)
    tiles = row_tiles * tl.cdiv(outs, N)
    for each in range(tl.program_id(0), tiles * SLICES, tl.num_programs(0)):
        part = (each // tiles).to(tl.int64)
        tile = each % tiles
        m = (tile % row_tiles * M + tl.arange(0, M)).to(tl.int64)
        n = (tile // row_tiles * N + tl.arange(0, N)).to(tl.int64)
        rows_of, weights_of = x + part * size, weight + part * size
        acc = tl.zeros((M, N), tl.float32)
        for start in range(0, size, K):
            k = start + tl.arange(0, K)
            left = tl.load(rows_of + m[:, None] * x_row + k[None], mask=(m < rows)[:, None] & (k < size)[None], other=0.0)
            right = tl.load(
                weights_of + n[None] * weight_row + k[:, None], mask=(n < outs)[None] & (k < size)[:, None], other=0.0
            )
            if WIDEN:
                acc = tl.dot(left.to(tl.float32), right.to(tl.float32), acc, input_precision="ieee")
            else:
                acc = tl.dot(left, right, acc, input_precision="ieee")
        if BIAS:
            acc += tl.load(bias + n, mask=n < outs, other=0.0).to(tl.float32)[None]
        made = out + (part * rows + m[:, None]) * outs + n[None]
        tl.store(made, acc.to(out.dtype.element_ty), mask=(m < rows)[:, None] & (n < outs)[None])


@triton.jit
def part_of(parts, number, size, at):
    """Return one of several parts [size], in fp32."""
    return tl.load(parts + number * size + at, mask=at < size, other=0.0).to(tl.float32)


@triton.jit
def add_up(parts, bias, out, size, outs, PARTS: tl.constexpr, BIAS: tl.constexpr, WIDTH: tl.constexpr):
    """out [rows, outs] of `size` numbers = the sum of parts [PARTS, rows, outs] in a binary tree, in their order, in fp32,
    + bias [outs], rounded once."""
    at = tl.program_id(0).to(tl.int64) * WIDTH + tl.arange(0, WIDTH)
    total = part_of(parts, 0, size, at)
    if PARTS > 1:
        total += part_of(parts, 1, size, at)
    if PARTS > 2:
        total += part_of(parts, 2, size, at) + part_of(parts, 3, size, at)
    if PARTS > 4:
        left = part_of(parts, 4, size, at) + part_of(parts, 5, size, at)
        total += left + (part_of(parts, 6, size, at) + part_of(parts, 7, size, at))
    if BIAS:
        total += tl.load(bias + at % outs, mask=at < size, other=0.0).to(tl.float32)
    tl.store(out + at, total.to(out.dtype.element_ty), mask=at < size)


@triton.jit
def row_means(x, out, size, WIDTH: tl.constexpr):
    """out [rows] fp32 = the mean of each row of x [rows, size], summed by neighbours. Runs one program per row."""
    row = tl.program_id(0).to(tl.int64)
    n = tl.arange(0, WIDTH)
    wide = tl.load(x + row * size + n, mask=n < size, other=0.0).to(tl.float32)
    total = tl.sum(neighbours(tl.reshape(wide, (1, WIDTH)), 1, WIDTH), 0)
    tl.store(out + row, tl.div_rn(total, size.to(tl.float32)))
