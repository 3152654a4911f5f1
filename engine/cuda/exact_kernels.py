"""Triton kernel of a matrix product in which a row does not depend on the number of rows. Tiles have one size, and each sums
over the inputs in order, from the first to the last. Libraries choose tiles, and whether to split the sum, by the number of
rows, so the same row has other bits in another batch (He et al. 2025, Thinking Machines, "Defeating nondeterminism in LLM
inference").

Import only if Triton is installed. With TRITON_INTERPRET=1 it runs on the CPU, which has no bf16 products: WIDEN.
"""

from __future__ import annotations

import triton
import triton.language as tl

from rollout.engine.cuda.recurrence_kernels import neighbours


@triton.jit
def product(
    x, weight, bias, out, rows, outs, size, x_row, weight_row,
    BIAS: tl.constexpr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """out [rows, outs] = x [rows, size] · weight [outs, size]ᵀ + bias [outs], rounded once. Tiles of the same outputs are
    processed one after the other, so that a weight is read from memory once."""
    row_tiles = tl.cdiv(rows, M)
    for tile in range(tl.program_id(0), row_tiles * tl.cdiv(outs, N), tl.num_programs(0)):
        m = (tile % row_tiles * M + tl.arange(0, M)).to(tl.int64)
        n = (tile // row_tiles * N + tl.arange(0, N)).to(tl.int64)
        acc = tl.zeros((M, N), tl.float32)
        for start in range(0, size, K):
            k = start + tl.arange(0, K)
            left = tl.load(x + m[:, None] * x_row + k[None], mask=(m < rows)[:, None] & (k < size)[None], other=0.0)
            right = tl.load(weight + n[None] * weight_row + k[:, None], mask=(n < outs)[None] & (k < size)[:, None], other=0.0)
            if WIDEN:
                acc = tl.dot(left.to(tl.float32), right.to(tl.float32), acc, input_precision="ieee")
            else:
                acc = tl.dot(left, right, acc, input_precision="ieee")
        if BIAS:
            acc += tl.load(bias + n, mask=n < outs, other=0.0).to(tl.float32)[None]
        made = out + m[:, None] * outs + n[None]
        tl.store(made, acc.to(out.dtype.element_ty), mask=(m < rows)[:, None] & (n < outs)[None])


@triton.jit
def row_means(x, out, size, WIDTH: tl.constexpr):
    """out [rows] fp32 = the mean of each row of x [rows, size], summed by neighbours. Runs one program per row."""
    row = tl.program_id(0).to(tl.int64)
    n = tl.arange(0, WIDTH)
    wide = tl.load(x + row * size + n, mask=n < size, other=0.0).to(tl.float32)
    total = tl.sum(neighbours(tl.reshape(wide, (1, WIDTH)), 1, WIDTH), 0)
    tl.store(out + row, tl.div_rn(total, size.to(tl.float32)))
