"""All operations of a Llama-like decoder layer between its products, in three kernels instead of about twenty operators.

    add_norm     residual += x; RMSNorm of the residual       (Zhang and Sennrich 2019)
    rope_store   norms of each head of q and k, rotary positions; q for attention, K and V into their slots of the pool
    silu_mul     silu(gate) · up

Results are rounded where torch's operators round: sums, a norm before its weight, each product of a rotation. The sum of a norm
has its own order, which does not depend on the number of rows.
"""

from __future__ import annotations

import triton
import triton.language as tl

from rollout.engine.cuda.attention_kernels import coded, magnitude, scale_of, store_scales


@triton.jit
def add_norm(x, residual, weight, out, size, eps, ADD: tl.constexpr, WIDTH: tl.constexpr):
    """Runs one program per row. x, residual, out [P, size]; ADD: the residual becomes residual + x; otherwise x is the
    residual."""
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
def weight_of(kind, q_weight, k_weight, real):
    """Return the fp32 weights of the norm of q's heads (kind 0), or of k's."""
    both = tl.load(q_weight, mask=real, other=0.0), tl.load(k_weight, mask=real, other=0.0)
    return tl.where(kind == 0, both[0], both[1]).to(tl.float32)


@triton.jit
def rope_store(
    qkv, cos, sin, q_weight, k_weight, query, data, halves, slots, layer_at, block_stride, q_eps, k_eps,
    Q_HEADS: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr, HALF_PAD: tl.constexpr, HEADS_PAD: tl.constexpr,
    BLOCK: tl.constexpr, NORM: tl.constexpr, FP8: tl.constexpr,
):  # fmt: skip
    """Runs one program per token for its q, one for its K and one for its V. qkv [P, (Q_HEADS + 2 · HEADS) · DIM], cos and sin
    [P, DIM], query [P, Q_HEADS, DIM]; data: the pool; slots below zero are padding; halves: as in `store`."""
    token = tl.program_id(0).to(tl.int64)
    kind = tl.program_id(1)  # 0 q, 1 K, 2 V
    HALF: tl.constexpr = DIM // 2
    dtype = qkv.dtype.element_ty
    head = tl.arange(0, HEADS_PAD)[:, None]
    d = tl.arange(0, HALF_PAD)[None]
    ok = (head < tl.where(kind == 0, Q_HEADS, HEADS)) & (d < HALF)
    first = tl.where(kind == 0, 0, Q_HEADS + (kind - 1) * HEADS)
    source = qkv + token * ((Q_HEADS + 2 * HEADS) * DIM) + (first + head) * DIM + d
    low = tl.load(source, mask=ok, other=0.0).to(tl.float32)
    high = tl.load(source + HALF, mask=ok, other=0.0).to(tl.float32)
    if kind < 2:
        if NORM:
            scale = tl.rsqrt(tl.sum(low * low + high * high, 1) / DIM + tl.where(kind == 0, q_eps, k_eps))[:, None]
            low_of = weight_of(kind, q_weight + d, k_weight + d, d < HALF)
            high_of = weight_of(kind, q_weight + d + HALF, k_weight + d + HALF, d < HALF)
            low = ((low * scale).to(dtype).to(tl.float32) * low_of).to(dtype).to(tl.float32)
            high = ((high * scale).to(dtype).to(tl.float32) * high_of).to(dtype).to(tl.float32)
        turn = token * DIM + d
        cos_low = tl.load(cos + turn, mask=d < HALF, other=0.0).to(tl.float32)
        cos_high = tl.load(cos + turn + HALF, mask=d < HALF, other=0.0).to(tl.float32)
        sin_low = tl.load(sin + turn, mask=d < HALF, other=0.0).to(tl.float32)
        sin_high = tl.load(sin + turn + HALF, mask=d < HALF, other=0.0).to(tl.float32)
        turned = (low * cos_low).to(dtype).to(tl.float32) + (-high * sin_low).to(dtype).to(tl.float32)
        high = (high * cos_high).to(dtype).to(tl.float32) + (low * sin_high).to(dtype).to(tl.float32)
        low = turned
    slot = tl.where(kind == 0, -1, tl.load(slots + token))  # q is not stored
    place = (slot // BLOCK).to(tl.int64) * block_stride + layer_at + (head * BLOCK + slot % BLOCK) * DIM + d
    place += tl.where(kind == 2, HEADS * BLOCK * DIM, 0)
    kept = ok & (slot + 0 * head >= 0)
    if FP8:
        low, high = low.to(dtype).to(tl.float32), high.to(dtype).to(tl.float32)
        scales, factor = scale_of(tl.maximum(tl.max(magnitude(low), 1), tl.max(magnitude(high), 1)))
        tl.store(data + place, coded(low, factor[:, None]), mask=kept)
        tl.store(data + place + HALF, coded(high, factor[:, None]), mask=kept)
        store_scales(halves, scales, kind - 1, slot, layer_at, block_stride, HEADS, HEADS_PAD, BLOCK, 2 * HEADS * BLOCK * DIM)
    else:
        tl.store(data + place, low.to(data.dtype.element_ty), mask=kept)
        tl.store(data + place + HALF, high.to(data.dtype.element_ty), mask=kept)
    made = query + token * (Q_HEADS * DIM) + head * DIM + d
    tl.store(made, low.to(dtype), mask=ok & (kind + 0 * head == 0))
    tl.store(made + HALF, high.to(dtype), mask=ok & (kind + 0 * head == 0))


@triton.jit
def silu_mul(both, out, inner, WIDTH: tl.constexpr):
    """Runs one program per WIDTH numbers of a row. both [P, 2 · inner]: gate and up; out [P, inner]."""
    row = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    real = n < inner
    dtype = both.dtype.element_ty
    gate = tl.load(both + row * 2 * inner + n, mask=real, other=0.0).to(tl.float32)
    up = tl.load(both + row * 2 * inner + inner + n, mask=real, other=0.0).to(tl.float32)
    active = (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32)
    tl.store(out + row * inner + n, (active * up).to(dtype), mask=real)
