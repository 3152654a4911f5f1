"""Token mixers with a state of fixed size, in Triton: causal depthwise convolution, gated delta rule, Mamba-2.

A row is a run of tokens of one sequence. It starts from the state in the slot that it reads (-1: zeros), and writes the state
after its last token to a slot (-1: none), which may be the same one. `rows` is [3, R + 1] integers
in the device's memory: the first tokens of rows and the end of the last one, slots that are read, slots that are written. A row
without tokens writes no slot; so one CUDA graph serves every step of up to R rows.

One program has a part of the state of one row in its registers: it reads it once, takes the row's tokens one by one, and writes
it once. The inputs of the next token are loaded before the current one is computed. A token takes the same operations in the
same order wherever its row begins and ends. Sums are written as additions of two numbers each, since `tl.sum` over more adds in
the order of the threads that hold them: halves for the rows of a state, which are in the registers of one thread, neighbours
for its columns, which are adjacent in one thread. The launches round every product and every sum separately.

Programs of one warp with 2,048 numbers of a state follow flash-linear-attention's `fused_recurrent_gated_delta_rule`.
Import only if Triton is installed.
"""

from __future__ import annotations

import triton
import triton.language as tl

VARYING = {"do_not_specialize": ["row_stride"], "do_not_specialize_on_alignment": ["rows"]}
"""arguments that differ from step to step: they must not compile another variant"""


@triton.jit
def halves(x, K: tl.constexpr, V: tl.constexpr):
    """Return [V] sums over [K, V], the second half of the rows being added to the first until one is left."""
    if K == 1:
        return tl.reshape(x, (V,))
    else:
        return halves(tl.sum(tl.reshape(x, (2, K // 2, V)), 0), K // 2, V)


@triton.jit
def neighbours(x, M: tl.constexpr, N: tl.constexpr):
    """Return [M] sums over [M, N], every second column being added to the one before until one is left."""
    if N == 1:
        return tl.reshape(x, (M,))
    else:
        return neighbours(tl.sum(tl.reshape(x, (M, N // 2, 2)), 2), M, N // 2)


@triton.jit
def row_of(rows, row_stride, row):
    """Return first token, end, slot that is read and slot that is written of a row."""
    first, end = tl.load(rows + row).to(tl.int64), tl.load(rows + row + 1).to(tl.int64)
    return first, end, tl.load(rows + row_stride + row).to(tl.int64), tl.load(rows + 2 * row_stride + row).to(tl.int64)


@triton.jit
def kept_numbers(write, first, end, count):
    """Return how many of `count` numbers a row stores: none if it writes no slot or has no tokens."""
    return tl.where((write >= 0) & (first < end), count, 0)


@triton.jit
def silu(x):
    return x / (1.0 + tl.exp(-x))


@triton.jit
def softplus(x):
    """Return log(1 + e^x); x itself above 20, as torch does. 1 + e^x = m · 2^k with m in [0.75, 1.5), and log m is 2 atanh((m -
    1) / (m + 1)); what 1 + e^x lost is added as the derivative of the logarithm. The device's own logarithm is wrong near 1."""
    e = tl.exp(tl.minimum(x, 20.0))
    u = 1.0 + e
    k = ((u * 1.3333333333333333).to(tl.int32, bitcast=True) >> 23) - 127
    m = (u.to(tl.int32, bitcast=True) - (k << 23)).to(tl.float32, bitcast=True)
    t = tl.div_rn(m - 1.0, m + 1.0)
    t2 = t * t
    series = 2.0 * t + (2.0 * t * t2) * (0.3333333333333333 + t2 * (0.2 + t2 * (0.14285714285714285 + t2 * 0.1111111111111111)))
    found = k.to(tl.float32) * 0.6931471805599453 + (series + tl.div_rn(e - (u - 1.0), u))
    return tl.where(x > 20.0, x, found)


@triton.jit
def taps_at(x, states, at, first, live, c, real, read, slot, x_token, KEPT: tl.constexpr):
    """Return the inputs [tokens, channels] of the places `at`: of the row, or of the slot for places before its first token."""
    column = at - first + KEPT
    inside, before = column >= KEPT, column < tl.where(read >= 0, KEPT, 0)
    own = tl.load(x + at[:, None] * x_token + c[None], mask=(inside & live)[:, None] & real[None], other=0.0)
    kept = states + read * slot + c[None] * KEPT + column[:, None]
    return tl.where(inside[:, None], own, tl.load(kept, mask=(before & live)[:, None] & real[None], other=0.0))


@triton.jit(**VARYING)
def convolve(
    x, weight, bias, states, out, rows, row_stride, slot, x_token, channels,
    TAPS: tl.constexpr, KEPT_PAD: tl.constexpr, BIAS: tl.constexpr, SILU: tl.constexpr, TOKENS: tl.constexpr,
    WIDTH: tl.constexpr,
):  # fmt: skip
    """out [P, channels] = act(Σ_j weight[:, j] · x[t - TAPS + 1 + j] + bias), j ascending. Runs one program per WIDTH channels
    of a row. states [slots, channels, TAPS - 1], `slot` apart; x `x_token` apart."""
    KEPT: tl.constexpr = TAPS - 1
    c = tl.program_id(0).to(tl.int64) * WIDTH + tl.arange(0, WIDTH)
    first, end, read, write = row_of(rows, row_stride, tl.program_id(1))
    real = c < channels
    dtype = out.dtype.element_ty
    for begin in range(first, end, TOKENS):
        t = begin + tl.arange(0, TOKENS)
        total = tl.zeros((TOKENS, WIDTH), tl.float32)
        for j in tl.static_range(TAPS):
            w = tl.load(weight + c * TAPS + j, mask=real, other=0.0).to(tl.float32)
            tap = taps_at(x, states, t - KEPT + j, first, t < end, c, real, read, slot, x_token, KEPT)
            total += w[None] * tap.to(tl.float32)
        if BIAS:
            total += tl.load(bias + c, mask=real, other=0.0).to(tl.float32)[None]
        if SILU:
            total = silu(total.to(dtype).to(tl.float32))
        tl.store(out + t[:, None] * channels + c[None], total.to(dtype), mask=(t < end)[:, None] & real[None])
    if KEPT > 0:
        i = tl.arange(0, KEPT_PAD)
        last = taps_at(x, states, end - KEPT + i, first, i < KEPT, c, real, read, slot, x_token, KEPT)
        tl.debug_barrier()  # other threads have read the columns that this one overwrites
        kept = states + write * slot + c[None] * KEPT + i[:, None]
        tl.store(kept, last, mask=(i < kept_numbers(write, first, end, KEPT))[:, None] & real[None])


@triton.jit
def normalized(x, eps, K: tl.constexpr):
    """Return x / |x| of [K] numbers."""
    length = tl.sqrt_rn(tl.sum(neighbours(tl.reshape(x * x, (1, K)), 1, K), 0) + eps)
    return x * tl.div_rn(1.0, length)


@triton.jit
def delta_inputs(query, key, value, beta, g, live, k, v, KEYS, COLUMNS, BY_CHANNEL: tl.constexpr):
    """Load what a token has for one head, zeros if it is not `live`; pointers are those of the token and head."""
    real_k, real_v = k < tl.where(live, KEYS, 0), v < tl.where(live, COLUMNS, 0)
    if BY_CHANNEL:
        decay = tl.load(g + k, mask=real_k, other=0.0)
    else:
        decay = tl.load(g, mask=live, other=0.0)
    q, its_key = tl.load(query + k, mask=real_k, other=0.0), tl.load(key + k, mask=real_k, other=0.0)
    return q, its_key, tl.load(value + v, mask=real_v, other=0.0), tl.load(beta, mask=live, other=0.0), decay


@triton.jit(**VARYING)
def delta_rule(
    query, key, value, beta, g, states, out, rows, row_stride, slot, q_token, q_head, k_token, k_head, v_token, v_head,
    beta_token, beta_head, g_token, g_head, scale, eps,
    HEADS: tl.constexpr, REPEAT: tl.constexpr, KEYS: tl.constexpr, KEYS_PAD: tl.constexpr, COLUMNS: tl.constexpr,
    WIDTH: tl.constexpr, BY_CHANNEL: tl.constexpr, NORMALIZED: tl.constexpr,
):  # fmt: skip
    """S = exp(g) · S; S += key ⊗ (value - Sᵀ · key) · beta; out [P, HEADS, COLUMNS] = Sᵀ · query. Runs one program per WIDTH
    columns of a head of a row; REPEAT heads share a key. states [slots, HEADS, KEYS, COLUMNS], `slot` apart."""
    head = tl.program_id(1).to(tl.int64)
    first, end, read, write = row_of(rows, row_stride, tl.program_id(2))
    k, v = tl.arange(0, KEYS_PAD), tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    real_v = v < COLUMNS
    at = head * (KEYS * COLUMNS) + k[:, None] * COLUMNS + v[None]
    known = (k < tl.where(read >= 0, KEYS, 0))[:, None] & real_v[None]
    state = tl.load(states + read * slot + at, mask=known, other=0.0)
    query += head // REPEAT * q_head
    key += head // REPEAT * k_head
    value += head * v_head
    beta += head * beta_head
    g += head * g_head
    q, its_key, its_value, its_beta, decay = delta_inputs(
        query + first * q_token, key + first * k_token, value + first * v_token, beta + first * beta_token,
        g + first * g_token, first < end, k, v, KEYS, COLUMNS, BY_CHANNEL,
    )  # fmt: skip
    for t in range(first, end):
        n = t + 1
        next_q, next_key, next_value, next_beta, next_decay = delta_inputs(
            query + n * q_token, key + n * k_token, value + n * v_token, beta + n * beta_token, g + n * g_token, n < end,
            k, v, KEYS, COLUMNS, BY_CHANNEL,
        )  # fmt: skip
        wide_q, wide_key = q.to(tl.float32), its_key.to(tl.float32)
        if NORMALIZED:
            wide_q, wide_key = normalized(wide_q, eps, KEYS_PAD), normalized(wide_key, eps, KEYS_PAD)
        if BY_CHANNEL:
            state = state * tl.exp(decay)[:, None]
        else:
            state = state * tl.exp(decay)
        recalled = halves(state * wide_key[:, None], KEYS_PAD, WIDTH)
        delta = (its_value.to(tl.float32) - recalled) * its_beta.to(tl.float32)
        state = state + wide_key[:, None] * delta[None]
        made = halves(state * (wide_q * scale)[:, None], KEYS_PAD, WIDTH)
        tl.store(out + (t * HEADS + head) * COLUMNS + v, made.to(out.dtype.element_ty), mask=real_v)
        q, its_key, its_value, its_beta, decay = next_q, next_key, next_value, next_beta, next_decay
    kept = (k < kept_numbers(write, first, end, KEYS))[:, None] & real_v[None]
    tl.store(states + write * slot + at, state, mask=kept)


@triton.jit
def mamba_inputs(x, dt, b, c, live, p, n, CHANNELS, NUMBERS):
    """Load what a token has for one head, zeros if it is not `live`; pointers are those of the token, head and group."""
    real_p, real_n = p < tl.where(live, CHANNELS, 0), n < tl.where(live, NUMBERS, 0)
    its_x, its_dt = tl.load(x + p, mask=real_p, other=0.0), tl.load(dt, mask=live, other=0.0)
    return its_x, its_dt, tl.load(b + n, mask=real_n, other=0.0), tl.load(c + n, mask=real_n, other=0.0)


@triton.jit(**VARYING)
def mamba2(
    x, dt, b, c, a, skip, dt_bias, states, out, rows, row_stride, slot, x_token, x_head, dt_token, dt_head, b_token, b_group,
    c_token, c_group, dt_least, dt_most,
    HEADS: tl.constexpr, REPEAT: tl.constexpr, CHANNELS: tl.constexpr, WIDTH: tl.constexpr, NUMBERS: tl.constexpr,
    NUMBERS_PAD: tl.constexpr, SKIP: tl.constexpr, DT_BIAS: tl.constexpr, SOFTPLUS: tl.constexpr,
):  # fmt: skip
    """S = e^(dt · a) · S + (dt · x) ⊗ b; out [P, HEADS, CHANNELS] = S · c + skip · x, fp32. Runs one program per WIDTH channels
    of a head of a row; REPEAT heads share b and c. states [slots, HEADS, CHANNELS, NUMBERS], `slot` apart. dt + dt_bias and its
    softplus are rounded to dt's dtype."""
    head = tl.program_id(1).to(tl.int64)
    first, end, read, write = row_of(rows, row_stride, tl.program_id(2))
    p, n = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH), tl.arange(0, NUMBERS_PAD)
    real_p = p < CHANNELS
    at = (head * CHANNELS + p[:, None]) * NUMBERS + n[None]
    known = real_p[:, None] & (n < tl.where(read >= 0, NUMBERS, 0))[None]
    state = tl.load(states + read * slot + at, mask=known, other=0.0)
    x += head * x_head
    dt += head * dt_head
    b += head // REPEAT * b_group
    c += head // REPEAT * c_group
    log_decay = tl.load(a + head)
    its_x, its_dt, its_b, its_c = mamba_inputs(
        x + first * x_token, dt + first * dt_token, b + first * b_token, c + first * c_token, first < end, p, n,
        CHANNELS, NUMBERS,
    )  # fmt: skip
    for t in range(first, end):
        u = t + 1
        next_x, next_dt, next_b, next_c = mamba_inputs(
            x + u * x_token, dt + u * dt_token, b + u * b_token, c + u * c_token, u < end, p, n, CHANNELS, NUMBERS
        )
        step = its_dt.to(tl.float32)
        if DT_BIAS:
            step = (step + tl.load(dt_bias + head)).to(dt.dtype.element_ty).to(tl.float32)
        if SOFTPLUS:
            step = softplus(step).to(dt.dtype.element_ty).to(tl.float32)
        step = tl.where(step < dt_least, dt_least, tl.where(step > dt_most, dt_most, step))
        wide_x = its_x.to(tl.float32)
        state = state * tl.exp(step * log_decay) + (wide_x * step)[:, None] * its_b.to(tl.float32)[None]
        made = neighbours(state * its_c.to(tl.float32)[None], WIDTH, NUMBERS_PAD)
        if SKIP:
            made += tl.load(skip + head) * wide_x
        tl.store(out + (t * HEADS + head) * CHANNELS + p, made, mask=real_p)
        its_x, its_dt, its_b, its_c = next_x, next_dt, next_b, next_c
    kept = real_p[:, None] & (n < kept_numbers(write, first, end, NUMBERS))[None]
    tl.store(states + write * slot + at, state, mask=kept)
