"""Attention over paged KV in Triton: three kernels; `rollout.engine.cuda.tiles` divides their work.

    store    K and V of a step's tokens into their slots
    attend   tiles: queries × chunks of a block table; writes the output, or one partial result per chunk
    merge    partial results of a token, in the order of chunks

Layout in a block: K as [kv_heads, block_size, DIM] and V as [kv_heads, block_size, VALUE], as in the reference. A tile has rows
token · group + head: the query heads of one KV head together, so that each K and V is read once for all of them. With FP8,
these are codes, followed by the scales of K and of V, two per word (`rollout.engine.kv.fp8`): scores are multiplied by the
scales of K, weights by those of V.

`attend` runs as many programs as fill the device; each processes tile after tile with one KV head, in the order of
`tiles.deal`. The number of tiles is read from memory, so one CUDA graph serves every step of its batch size.

Import only if Triton is installed. With TRITON_INTERPRET=1 it runs (slowly) on the CPU, which has no bf16 products: WIDEN.
"""

from __future__ import annotations

import triton
import triton.language as tl

MASKED = tl.constexpr(-1e30)
"""below every score and finite, so that exp2(MASKED - MASKED) is 1, not NaN"""


@triton.jit
def scale_of(largest):
    """Return the bf16 bits of the scale of numbers whose largest magnitude has these 31 bits in fp32, and the factor 1 /
    scale."""
    share = largest.to(tl.float32, bitcast=True) * 0.002232142857142857  # 1 / 448
    bits = tl.maximum(share.to(tl.int32, bitcast=True), 0x00800000)  # 2^-126
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    rounded = tl.where(largest < 0x7F800000, rounded, 0x7F80)
    return rounded.to(tl.int16), tl.div_rn(1.0, (rounded << 16).to(tl.float32, bitcast=True))


@triton.jit
def coded(x, factor):
    """Return e4m3 codes (uint8) of x · factor, below 464; 0 if factor is 0, which marks numbers that are not finite. Computed
    with integer operations, so that all devices give the same result."""
    scaled = tl.where(factor > 0, x * factor, 0.0)
    bits = scaled.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - (120 << 3)  # three bits of mantissa, exponents from 2^-6 on
    small = (tl.abs(scaled) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000  # 2^14 leaves multiples of 2^-9
    return (tl.where(size < 0x3C800000, small, normal) | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def magnitude(x):
    """Return the bits of |x| in fp32; they sort like the numbers, with infinity and NaN last."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def decoded(codes, NATIVE: tl.constexpr):
    """Return fp16 of e4m3 codes (uint8), which is exact. NATIVE: with the conversion of compute capability 8.9 and later."""
    if NATIVE:
        return codes.to(tl.float8e4nv, bitcast=True).to(tl.float16)
    else:
        bits = codes.to(tl.int16)
        moved = ((bits & 0x7F) << 7) | ((bits & 0x80) << 8)
        return moved.to(tl.float16, bitcast=True) * 256.0  # between the two biases of exponents


PAIRS = tl.constexpr(
    "{.reg .b32 s, t; shl.b32 s, $2, 4; shl.b32 t, $2, 8; and.b32 t, t, 0x80008000; lop3.b32 $0, s, 0x07F007F0, t, 0xEA; "
    "shr.u32 s, $2, 4; and.b32 t, $2, 0x80008000; lop3.b32 $1, s, 0x07F007F0, t, 0xEA;}"
)
"""PTX of `decoded_pairs`, for two pairs: their first codes, and their second codes"""


@triton.jit
def decoded_pairs(codes, WIDEN: tl.constexpr):
    """Return [N, 2 · W] of [N, W] int16, each of which is two e4m3 codes: times 2^-120, in bf16, or in fp32 if WIDEN. A code is
    moved to where the bits of bf16 are; between the biases of their exponents is 2^120. As bytes, V would be read from shared
    memory one by one, since tensor cores take it by columns. Their order (`columns`) is that in which two pairs are moved."""
    if WIDEN:
        bits = codes.to(tl.int32)
        first, second = ((bits & 0x7F) << 4) | ((bits & 0x80) << 8), ((bits >> 4) & 0x7F0) | (bits & 0x8000)
        first, second = (first << 16).to(tl.float32, bitcast=True), (second << 16).to(tl.float32, bitcast=True)
    else:
        first, second = tl.inline_asm_elementwise(
            PAIRS, "=r,=r,r", [codes], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=2
        )
    N: tl.constexpr = codes.shape[0]
    W: tl.constexpr = codes.shape[1]
    both = tl.join(tl.reshape(first, (N, W // 2, 2)), tl.reshape(second, (N, W // 2, 2)))
    return tl.reshape(tl.permute(both, (0, 1, 3, 2)), (N, 2 * W))


@triton.jit
def columns(VALUE_PAD: tl.constexpr, FP8: tl.constexpr):
    """Return which number of a head is in each column of a tile of V."""
    e = tl.arange(0, VALUE_PAD)
    return e // 4 * 4 + e % 2 * 2 + e % 4 // 2 if FP8 else e


@triton.jit
def halved(q, FP8: tl.constexpr):
    """Return rows [M, D] in fp16, each divided by a power of two, and these powers [M], for products with e4m3 codes. Numbers
    below 2^-32 of a row's largest lose bits. Without FP8, and in fp32, rows stay as they are."""
    if not FP8 or q.dtype == tl.float32:
        return q, tl.full((q.shape[0],), 1.0, tl.float32)
    else:
        bits = tl.max(magnitude(q.to(tl.float32)), 1) & 0x7F800000
        bits = tl.minimum(tl.maximum(bits, 0x08000000), 0x7E800000) - 0x07800000  # the largest is at least 2^15, below 2^16
        return (q.to(tl.float32) * (0x7F000000 - bits).to(tl.float32, bitcast=True)[:, None]).to(tl.float16), bits.to(
            tl.float32, bitcast=True
        )


@triton.jit
def scales_at(block, layer_at, block_stride, CODES: tl.constexpr):
    """Return the word of the pool where the scales [HEADS, BLOCK] of a block begin, after the CODES codes of K and V."""
    return block.to(tl.int64) * (block_stride // 4) + (layer_at + CODES) // 4


@triton.jit
def store_scales(
    halves, scales, which, slot, layer_at, block_stride,
    HEADS: tl.constexpr, HEADS_PAD: tl.constexpr, BLOCK: tl.constexpr, CODES: tl.constexpr,
):  # fmt: skip
    """Store the scales of a token's K (which = 0) or V (1), [HEADS_PAD]. Slots below zero are padding."""
    head = tl.arange(0, HEADS_PAD)
    word = scales_at(slot // BLOCK, layer_at, block_stride, CODES) + head * BLOCK + slot % BLOCK
    tl.store(halves + 2 * word + which, scales, mask=(head < HEADS) & (slot + 0 * head >= 0))


@triton.jit
def store(
    key, value, data, halves, slots, layer_at, block_stride, k_token, k_head, v_token, v_head,
    HEADS: tl.constexpr, HEADS_PAD: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr, VALUE: tl.constexpr,
    BLOCK: tl.constexpr, FP8: tl.constexpr,
):  # fmt: skip
    """Runs one program per token. Slots below zero are padding. halves: the pool as int16, for scales. DIM_PAD ≥ DIM, VALUE."""
    CODES: tl.constexpr = HEADS * BLOCK * (DIM + VALUE)
    token = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, HEADS_PAD)[:, None]
    slot = tl.load(slots + token) + 0 * head
    d = tl.arange(0, DIM_PAD)[None]
    ok = (head < HEADS) & (slot >= 0)
    k_ok, v_ok = ok & (d < DIM), ok & (d < VALUE)
    begin = (slot // BLOCK).to(tl.int64) * block_stride + layer_at
    k_at = begin + (head * BLOCK + slot % BLOCK) * DIM + d
    v_at = begin + HEADS * BLOCK * DIM + (head * BLOCK + slot % BLOCK) * VALUE + d
    k = tl.load(key + token * k_token + head * k_head + d, mask=k_ok, other=0.0)
    v = tl.load(value + token * v_token + head * v_head + d, mask=v_ok, other=0.0)
    if FP8:
        k, v = k.to(tl.float32), v.to(tl.float32)
        k_scale, k_factor = scale_of(tl.max(magnitude(k), 1))
        v_scale, v_factor = scale_of(tl.max(magnitude(v), 1))
        tl.store(data + k_at, coded(k, k_factor[:, None]), mask=k_ok)
        tl.store(data + v_at, coded(v, v_factor[:, None]), mask=v_ok)
        store_scales(halves, k_scale, 0, tl.load(slots + token), layer_at, block_stride, HEADS, HEADS_PAD, BLOCK, CODES)
        store_scales(halves, v_scale, 1, tl.load(slots + token), layer_at, block_stride, HEADS, HEADS_PAD, BLOCK, CODES)
    else:
        tl.store(data + k_at, k.to(data.dtype.element_ty), mask=k_ok)
        tl.store(data + v_at, v.to(data.dtype.element_ty), mask=v_ok)


@triton.jit
def row_sum(x, M: tl.constexpr, N: tl.constexpr):
    """Return [M] sums over [M, N], by halving: additions of two numbers each, in a fixed order. `tl.sum` over a whole row adds
    in the order of the threads that hold it, which depends on M."""
    if N == 1:
        return tl.reshape(x, (M,))
    else:
        return row_sum(tl.sum(tl.reshape(x, (M, 2, N // 2)), 1), M, N // 2)


@triton.jit
def merged(top, total, acc, m, s, a):
    """Merge the weighted sum (acc, total) with maximum `top` and another one, (a, s) with maximum m. If one side is empty
    (MASKED, 0, 0), the other one is unchanged, to the bit."""
    higher = tl.maximum(top, m)
    old, new = tl.exp2(top - higher), tl.exp2(m - higher)
    return higher, total * old + s * new, acc * old[:, None] + a * new[:, None]


@triton.jit
def write(partial, sums, place, m, s, a, live, e, VALUE: tl.constexpr):
    """Write a partial result of each row: maximum m, sum s of its weights, weighted sum a of the numbers e."""
    at = place[:, None] * VALUE + e[None]
    tl.store(partial + at, a, mask=live[:, None] & (e < VALUE)[None])
    tl.store(sums + place * 2, m, mask=live)
    tl.store(sums + place * 2 + 1, s, mask=live)


@triton.jit
def times(one, other, WIDEN: tl.constexpr):
    if WIDEN:
        return tl.dot(one.to(tl.float32), other.to(tl.float32), input_precision="ieee")
    else:
        return tl.dot(one, other, input_precision="ieee")


@triton.jit
def nothing(M: tl.constexpr, VALUE_PAD: tl.constexpr):
    return tl.full((M,), MASKED, tl.float32), tl.zeros((M,), tl.float32), tl.zeros((M, VALUE_PAD), tl.float32)


@triton.jit
def bent(x):
    """Return tanh x, as `rollout.engine.forward.reference.tanh` does: no function of a device."""
    size = tl.minimum(tl.abs(x), 10.0)
    turns = tl.floor(size * 2.8853900817779268 + 0.5)  # 2 / log 2
    s = (2.0 * size - turns * 0.693145751953125) - turns * 1.428606765330187045e-06
    u = 0.000198527617612853646278381 * s + 0.00139304355252534151077271
    u = u * s + 0.00833336077630519866943359
    u = u * s + 0.0416664853692054748535156
    u = u * s + 0.166666671633720397949219
    u = u * s + 0.5
    rest = s * s * u + s  # e^2|x| = 2^turns · (1 + rest)
    scale = ((turns.to(tl.int32) + 127) << 23).to(tl.float32, bitcast=True)
    less_one = scale * rest + (scale - 1.0)
    made = less_one / (less_one + 2.0)
    return tl.where(x < 0, -made, tl.where(x == x, made, x))


@triton.jit
def finished(top, total, acc, sinks, q_head, live, SINKS: tl.constexpr):
    """Return the weighted sums acc of each row with maximum `top` over their sum `total`, to which a sink adds its part."""
    if SINKS:
        sink = tl.load(sinks + q_head, mask=live, other=0.0).to(tl.float32) * 1.4426950408889634
        higher = tl.maximum(top, sink)
        kept = tl.exp2(top - higher)
        total = total * kept + tl.exp2(sink - higher)
        acc = acc * kept[:, None]
    return acc / tl.where(total > 0, total, 1.0)[:, None]  # empty rows are zero


@triton.jit
def met(
    m, s, a, scores, seen, v, v_scale, query, M: tl.constexpr, N: tl.constexpr, WIDEN: tl.constexpr, FP8: tl.constexpr,
):  # fmt: skip
    """Add N keys to the maximum, sum of weights and weighted sum of each row: online softmax. v_scale: scales of fp8 codes.
    query: weights are rounded to its dtype."""
    scores = tl.where(seen, scores, MASKED)
    higher = tl.maximum(m, tl.max(scores, 1))
    weights = tl.where(seen, tl.exp2(scores - higher[:, None]), 0.0)
    shrink = tl.exp2(m - higher)
    total = s * shrink + row_sum(weights, M, N)
    if FP8:
        weights = weights * v_scale[None]
    return higher, total, a * shrink[:, None] + times(weights.to(query.dtype.element_ty), v, WIDEN)


@triton.jit
def fields(tile, table):
    """Return first token, tokens, block table, begin, end and split of a tile, as stored by `tiles.deal`."""
    blocks = table + tl.load(tile + 2)
    return tl.load(tile), tl.load(tile + 1), blocks, tl.load(tile + 3), tl.load(tile + 4), tl.load(tile + 5)


@triton.jit
def oldest_key(position, live, last, window):
    """Return the lowest position that a query of the tile attends to. Blocks before it may be those of other sequences."""
    oldest = tl.maximum(tl.min(tl.where(live, position, last)) - window + 1, 0)
    return tl.where(window > 0, oldest, 0)


@triton.jit
def keys(k_at, at, there, DIM: tl.constexpr, DIM_PAD: tl.constexpr, PAGED: tl.constexpr):
    """Load K [DIM_PAD, N] of the tokens `at`. PAGED: from one block, whose other numbers give scores that are not seen, even if
    they are NaN."""
    d = tl.arange(0, DIM_PAD)[:, None]
    place = (k_at + at * DIM)[None, :] + d
    if not PAGED:
        return tl.load(place, mask=there[None, :] & (d < DIM), other=0)
    elif DIM == DIM_PAD:
        return tl.load(place)
    else:
        return tl.load(place, mask=d < DIM, other=0)


@triton.jit
def coded_values(v_at, at, there, VALUE: tl.constexpr, VALUE_PAD: tl.constexpr, PAGED: tl.constexpr, WIDEN: tl.constexpr):
    """Load V in fp8, as `decoded_pairs` returns it. Codes are finite, and their scales are zero where they are not seen."""
    pair = tl.arange(0, VALUE_PAD // 2)
    place = (v_at + at * (VALUE // 2))[:, None] + pair[None]
    if PAGED and VALUE == VALUE_PAD:
        return decoded_pairs(tl.load(place), WIDEN)
    else:
        return decoded_pairs(tl.load(place, mask=there[:, None] & (pair < VALUE // 2)[None], other=0), WIDEN)


@triton.jit
def scored(products, share, k_scale, scaling, before, CAP: tl.constexpr, FP8: tl.constexpr):
    """Return the scores of products of queries, divided by `share`, with keys, divided by `k_scale`."""
    if CAP:
        return bent(products * (before * share)[:, None] * k_scale if FP8 else products * before) * scaling
    else:
        return products * (scaling * share)[:, None] * k_scale if FP8 else products * scaling


@triton.jit
def turned(
    m, s, a, query, q, share, position, behind, turn, oldest, last, data, words, blocks, head, layer_at, block_stride, scaling,
    before, HEADS: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr, VALUE: tl.constexpr, VALUE_PAD: tl.constexpr,
    BLOCK: tl.constexpr, CHUNK: tl.constexpr, M: tl.constexpr, N: tl.constexpr, WIDEN: tl.constexpr, FP8: tl.constexpr,
    NATIVE: tl.constexpr, CAP: tl.constexpr,
):  # fmt: skip
    """Call `met` with N keys read from the pool; a query at `position` attends to those after `behind`. CAP: products times
    `before` go through tanh. PAGED: the N keys are in one block, so the entry of the table and the addresses are scalars, which
    takes little more than half the instructions."""
    PER: tl.constexpr = (CHUNK + N - 1) // N
    PAGED: tl.constexpr = BLOCK % N == 0
    key = tl.arange(0, N)
    inside = turn % PER * N + key
    n = turn // PER * CHUNK + inside
    there = (n >= oldest) & (n <= last)
    if PAGED:
        begin = turn // PER * CHUNK + turn % PER * N
        block = tl.load(blocks + begin // BLOCK).to(tl.int64)
        at, first = key, head * BLOCK + begin % BLOCK
    else:
        there = there & (inside < CHUNK)
        block = tl.load(blocks + n // BLOCK, mask=there, other=0).to(tl.int64)
        at, first = n % BLOCK, head * BLOCK
    layer = block * block_stride + layer_at
    k_at, v_at = layer + first * DIM, layer + HEADS * BLOCK * DIM + first * VALUE
    k = keys(data + k_at, at, there, DIM, DIM_PAD, PAGED)
    k_scale, v_scale = 1.0, 1.0
    if FP8:
        v = coded_values(data.to(tl.pointer_type(tl.int16)) + v_at // 2, at, there, VALUE, VALUE_PAD, PAGED, WIDEN)
        scales = scales_at(block, layer_at, block_stride, HEADS * BLOCK * (DIM + VALUE)) + first + at
        word = tl.load(words + scales, mask=there, other=0)
        v_scale = ((word >> 16) << 16).to(tl.float32, bitcast=True) * 1.2379400392853803e27  # 2^90 of V's 2^120
        k_scale = (word << 16).to(tl.float32, bitcast=True)[None]
        k = decoded(k, NATIVE)
        if q.dtype == tl.float32:
            k, v = k.to(tl.float32), v.to(tl.float32)
    else:
        e = tl.arange(0, VALUE_PAD)
        v = tl.load((data + v_at + at * VALUE)[:, None] + e[None], mask=there[:, None] & (e < VALUE)[None], other=0)
    scores = scored(times(q, k, WIDEN), share, k_scale, scaling, before, CAP, FP8)
    seen = (n[None] <= position[:, None]) & (n[None] > behind[:, None])
    if not PAGED:
        seen = seen & (inside < CHUNK)[None]
    return met(m, s, a, scores, seen, v, v_scale, query, M, N, WIDEN, FP8)


@triton.jit
def leave(
    partial, sums, places, since, until, seen_from, whole, m, s, a, live, e, M: tl.constexpr, ROWS: tl.constexpr,
    VALUE: tl.constexpr,
):  # fmt: skip
    """Write the result of a span as one partial result if it is complete; write zeros for its chunks without their own partial
    result: those before the window or included in the span's."""
    for chunk in range(since + whole.to(tl.int32), tl.where(whole, until, tl.minimum(until, seen_from))):
        place = places + chunk * ROWS
        tl.store(sums + place * 2 + 1, tl.zeros((M,), tl.float32), mask=live)
    if whole:
        write(partial, sums, places + since * ROWS, m, s, a, live, e, VALUE)


@triton.jit
def attend(
    query, out, data, words, table, positions, parts, partial, sums, tiles, num_tiles,
    layer_at, block_stride, q_token, q_head, out_token, scaling, window, before, sinks,
    CAP: tl.constexpr, SINKS: tl.constexpr, HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr,
    VALUE: tl.constexpr, VALUE_PAD: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr, SPAN: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, COLUMNS: tl.constexpr, WIDEN: tl.constexpr, FP8: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """Process tile after tile, span by span: one loop over the keys of a span, so that copies continue across its chunks.
    Chunks are merged into spans, spans into the tile. words: the pool as int32, for scales. scaling: of scores, times log2(e).
    window: 0 = all. CAP: a soft cap: products times `before` go through tanh, and `scaling` is the cap, times log2(e). SINKS:
    sinks [q_heads]."""
    PER: tl.constexpr = (CHUNK + N - 1) // N  # turns of a chunk
    row, d, e = tl.arange(0, M), tl.arange(0, DIM_PAD), columns(VALUE_PAD, FP8)
    for work in range(tl.program_id(0), tl.load(num_tiles) * HEADS, tl.num_programs(0)):
        head = work % HEADS
        first, tokens, blocks, begin, end, split = fields(tiles + (work // HEADS) * COLUMNS, table)
        live = row < tokens * GROUP
        token = (first + row // GROUP).to(tl.int64)
        q_of = head * GROUP + row % GROUP
        position = tl.load(positions + token, mask=live, other=-1)
        mask = live[:, None] & (d < DIM)[None]
        q = tl.load(query + token[:, None] * q_token + q_of[:, None] * q_head + d[None], mask=mask, other=0.0)
        q, share = halved(q, FP8)
        places = tl.load(parts + token, mask=live, other=0).to(tl.int64) * (HEADS * GROUP) + q_of
        last = tl.max(position)
        oldest = oldest_key(position, live, last, window)
        seen_from, behind = oldest // CHUNK, tl.where(window > 0, position - window, -1)
        top, total, acc = nothing(M, VALUE_PAD)
        for span in range(begin // SPAN, tl.cdiv(end, SPAN)):
            since, until = tl.maximum(begin, span * SPAN), tl.minimum(end, span * SPAN + SPAN)
            whole = (since == span * SPAN) & ((until == span * SPAN + SPAN) | (until > last // CHUNK))
            span_top, span_total, span_acc = nothing(M, VALUE_PAD)
            m, s, a = nothing(M, VALUE_PAD)
            turns = tl.minimum(until * PER, last // CHUNK * PER + last % CHUNK // N + 1)
            for turn in range(tl.maximum(since, seen_from) * PER, turns):
                m, s, a = turned(
                    m, s, a, query, q, share, position, behind, turn, oldest, last, data, words, blocks, head, layer_at,
                    block_stride, scaling, before, HEADS, DIM, DIM_PAD, VALUE, VALUE_PAD, BLOCK, CHUNK, M, N, WIDEN, FP8,
                    NATIVE, CAP,
                )  # fmt: skip
                if (turn % PER == PER - 1) | (turn == turns - 1):
                    if FP8:
                        a = a * 1073741824.0  # the rest of V's 2^120
                    if (split != 0) & (whole == 0):
                        write(partial, sums, places + turn // PER * (HEADS * GROUP), m, s, a, live, e, VALUE)
                    span_top, span_total, span_acc = merged(span_top, span_total, span_acc, m, s, a)
                    m, s, a = nothing(M, VALUE_PAD)
            if split != 0:
                leave(partial, sums, places, since, until, seen_from, whole, span_top, span_total, span_acc, live, e,
                      M, HEADS * GROUP, VALUE)  # fmt: skip
            top, total, acc = merged(top, total, acc, span_top, span_total, span_acc)
        result = finished(top, total, acc, sinks, q_of, live, SINKS)
        where = out + token[:, None] * out_token + q_of[:, None] * VALUE + e[None]
        tl.store(where, result, mask=live[:, None] & (e < VALUE)[None] & (split + 0 * row == 0)[:, None])


@triton.jit
def merge(
    out, positions, parts, partial, sums, out_token, window, sinks,
    SINKS: tl.constexpr, HEADS: tl.constexpr, GROUP: tl.constexpr, GROUP_PAD: tl.constexpr, VALUE: tl.constexpr,
    VALUE_PAD: tl.constexpr, CHUNK: tl.constexpr, SPAN: tl.constexpr,
):  # fmt: skip
    """Runs one program per token and KV head: sums the partial results of `attend` in the same order as a tile does."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    part = tl.load(parts + token)
    g = tl.arange(0, GROUP_PAD)
    e = tl.arange(0, VALUE_PAD)
    both = (g < GROUP)[:, None] & (e < VALUE)[None]
    position = tl.load(positions + token)
    begin = tl.where(window > 0, tl.maximum(0, position - window + 1) // CHUNK, 0)
    chunks = tl.where(part >= 0, position // CHUNK + 1, 0)
    top = tl.full((GROUP_PAD,), MASKED, tl.float32)
    total = tl.zeros((GROUP_PAD,), tl.float32)
    acc = tl.zeros((GROUP_PAD, VALUE_PAD), tl.float32)
    for span in range(begin // SPAN, tl.cdiv(chunks, SPAN)):
        span_top = tl.full((GROUP_PAD,), MASKED, tl.float32)
        span_total = tl.zeros((GROUP_PAD,), tl.float32)
        span_acc = tl.zeros((GROUP_PAD, VALUE_PAD), tl.float32)
        for chunk in range(span * SPAN, tl.minimum(span * SPAN + SPAN, chunks)):
            place = (part + chunk).to(tl.int64) * (HEADS * GROUP) + head * GROUP + g
            s = tl.load(sums + place * 2 + 1, mask=g < GROUP, other=0.0)
            m = tl.load(sums + place * 2, mask=s != 0, other=MASKED)
            a = tl.load(partial + place[:, None] * VALUE + e[None], mask=both & (s != 0)[:, None], other=0.0)
            span_top, span_total, span_acc = merged(span_top, span_total, span_acc, m, s, a)
        top, total, acc = merged(top, total, acc, span_top, span_total, span_acc)
    result = finished(top, total, acc, sinks, head * GROUP + g, g < GROUP, SINKS)  # padding's is zero
    mine = both & (part + 0 * g != -1)[:, None]
    tl.store(out + token * out_token + (head * GROUP + g)[:, None] * VALUE + e[None], result, mask=mine)
