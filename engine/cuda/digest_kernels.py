"""Triton kernels of xxh3-128 digests; `rollout.engine.cuda.digests` explains why there are two, and what the host computes.

Import only if Triton is installed. Everything is int64: products and sums keep the low 64 bits with any sign, and shifted
values are masked. Each lane of a stripe adds the words of its neighbour, which a second load reads from the cache.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def sum_blocks(data_words, secret, block_sums, blocks, BLOCKS: tl.constexpr):
    """block_sums [blocks, 8] int64: amount that each block of data_words [blocks, 16 stripes, 8] int64 adds to the lanes."""
    block = tl.program_id(0) * BLOCKS + tl.arange(0, BLOCKS)
    stripe, lane = tl.arange(0, 16)[None, :, None], tl.arange(0, 8)[None, None, :]
    there = (block < blocks)[:, None, None]
    at = block.to(tl.int64)[:, None, None] * 128 + stripe * 8 + lane
    keyed = tl.load(data_words + at, mask=there, other=0) ^ tl.load(secret + stripe + lane)
    made = (keyed & 0xFFFFFFFF) * ((keyed >> 32) & 0xFFFFFFFF) + tl.load(data_words + (at ^ 1), mask=there, other=0)
    place = block_sums + block.to(tl.int64)[:, None] * 8 + tl.arange(0, 8)[None]
    tl.store(place, tl.sum(made, 1), mask=(block < blocks)[:, None])


@triton.jit
def scrambled(lanes, sums, key):
    made = lanes + tl.load(sums)
    return (made ^ ((made >> 47) & 0x1FFFF) ^ key) * 0x9E3779B1


@triton.jit
def chain(block_sums, secret, pieces, states, UNROLL: tl.constexpr):
    """states [rows, 8] int64: each piece (first of its sums, blocks, row) adds its sums to its row, block after block, and
    scrambles the lanes after each block. UNROLL loads are issued together; the arithmetic is sequential."""
    piece = pieces + tl.program_id(0) * 3
    first, blocks, row = tl.load(piece), tl.load(piece + 1), tl.load(piece + 2)
    lane = tl.arange(0, 8)
    key = tl.load(secret + 16 + lane)
    lanes = tl.load(states + row * 8 + lane)
    sums = block_sums + first * 8 + lane
    for _ in range(0, blocks // UNROLL):
        for step in tl.static_range(UNROLL):
            lanes = scrambled(lanes, sums + step * 8, key)
        sums += UNROLL * 8
    for _ in range(0, blocks % UNROLL):
        lanes = scrambled(lanes, sums, key)
        sums += 8
    tl.store(states + row * 8 + lane, lanes)
