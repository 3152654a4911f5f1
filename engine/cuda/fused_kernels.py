"""What a decoder layer of Llama's kind computes between its products, in three kernels instead of some twenty operators.

    add_norm     residual += x; the RMSNorm of it             (Zhang and Sennrich 2019)
    rope_store   norms of each head of q and k, rotary positions; q for attention, K and V into their slots of the pool
    silu_mul     silu(gate) · up

Rounded where torch's operators round: a sum, a norm before its weight, each product of a rotation. The sum of a norm is in an
order of its own, which does not depend on the number of rows.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def add_norm(x, residual, weight, out, size, eps, ADD: tl.constexpr, WIDTH: tl.constexpr):
    """One program a row. x, residual, out [P, size]; ADD: the residual becomes residual + x; else x is the residual."""
    row = tl.program_id(0).to(tl.int64) * size
    n = tl.arange(0, WIDTH)
    real = n < size
    dtype = x.dtype.element_ty
    value = tl.load(x + row + n, mask=real, other=0.0).to(tl.float32)
    if ADD:
        value += tl.load(residual + row + n, mask=real, other=0.0).to(tl.float32)
        value = value.to(dtype).to(tl.float32)
        tl.store(residual + row + n, value.to(dtype), mask=real)
    scale = tl.rsqrt(tl.sum(value * value) / size + eps)
    normed = (value * scale).to(dtype).to(tl.float32)
    made = normed * tl.load(weight + n, mask=real, other=0.0).to(tl.float32)
    tl.store(out + row + n, made.to(dtype), mask=real)


@triton.jit
def rope_store(
    qkv, cos, sin, q_weight, k_weight, query, data, slots, layer_at, block_stride, q_eps, k_eps,
    Q_HEADS: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr, HALF_PAD: tl.constexpr, HEADS_PAD: tl.constexpr,
    BLOCK: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """One program a token for its q, one for its K, one for its V. qkv [P, (Q_HEADS + 2 · HEADS) · DIM], cos and sin [P, DIM],
    query [P, Q_HEADS, DIM]; data: the pool, whose slot of a token is below zero for padding."""
    token = tl.program_id(0).to(tl.int64)
    kind = tl.program_id(1)  # 0 q, 1 K, 2 V
    HALF: tl.constexpr = DIM // 2
    dtype = qkv.dtype.element_ty
    heads = tl.where(kind == 0, Q_HEADS, HEADS)
    head = tl.arange(0, HEADS_PAD)[:, None]
    d = tl.arange(0, HALF_PAD)[None]
    ok = (head < heads) & (d < HALF)
    first = tl.where(kind == 0, 0, Q_HEADS + (kind - 1) * HEADS)
    source = qkv + token * ((Q_HEADS + 2 * HEADS) * DIM) + (first + head) * DIM + d
    low = tl.load(source, mask=ok, other=0.0).to(tl.float32)
    high = tl.load(source + HALF, mask=ok, other=0.0).to(tl.float32)
    if kind < 2:
        if NORM:
            scale = tl.rsqrt(tl.sum(low * low + high * high, 1) / DIM + tl.where(kind == 0, q_eps, k_eps))[:, None]
            at = tl.where(kind == 0, 0, 1)
            low_of = tl.where(at == 0, tl.load(q_weight + d, mask=d < HALF), tl.load(k_weight + d, mask=d < HALF))
            high_of = tl.where(
                at == 0, tl.load(q_weight + d + HALF, mask=d < HALF), tl.load(k_weight + d + HALF, mask=d < HALF)
            )
            low = ((low * scale).to(dtype).to(tl.float32) * low_of.to(tl.float32)).to(dtype).to(tl.float32)
            high = ((high * scale).to(dtype).to(tl.float32) * high_of.to(tl.float32)).to(dtype).to(tl.float32)
        turn = token * DIM + d
        cos_low = tl.load(cos + turn, mask=d < HALF, other=0.0).to(tl.float32)
        cos_high = tl.load(cos + turn + HALF, mask=d < HALF, other=0.0).to(tl.float32)
        sin_low = tl.load(sin + turn, mask=d < HALF, other=0.0).to(tl.float32)
        sin_high = tl.load(sin + turn + HALF, mask=d < HALF, other=0.0).to(tl.float32)
        turned = (low * cos_low).to(dtype).to(tl.float32) + (-high * sin_low).to(dtype).to(tl.float32)
        high = (high * cos_high).to(dtype).to(tl.float32) + (low * sin_high).to(dtype).to(tl.float32)
        low = turned
    slot = tl.load(slots + token)
    place = (slot // BLOCK).to(tl.int64) * block_stride + layer_at + (head * BLOCK + slot % BLOCK) * DIM + d
    place += tl.where(kind == 2, HEADS * BLOCK * DIM, 0)
    kept = ok & (kind + 0 * head > 0) & (slot + 0 * head >= 0)
    tl.store(data + place, low.to(data.dtype.element_ty), mask=kept)
    tl.store(data + place + HALF, high.to(data.dtype.element_ty), mask=kept)
    made = query + token * (Q_HEADS * DIM) + head * DIM + d
    tl.store(made, low.to(dtype), mask=ok & (kind + 0 * head == 0))
    tl.store(made + HALF, high.to(dtype), mask=ok & (kind + 0 * head == 0))


@triton.jit
def silu_mul(both, out, inner, WIDTH: tl.constexpr):
    """One program for WIDTH numbers of a row. both [P, 2 · inner]: gate and up; out [P, inner]."""
    row = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    real = n < inner
    dtype = both.dtype.element_ty
    gate = tl.load(both + row * 2 * inner + n, mask=real, other=0.0).to(tl.float32)
    up = tl.load(both + row * 2 * inner + inner + n, mask=real, other=0.0).to(tl.float32)
    active = (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32)
    tl.store(out + row * inner + n, (active * up).to(dtype), mask=real)
