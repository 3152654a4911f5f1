"""Sampling on a GPU: one program per draw, three passes over its row of logits, which is in the cache after the first.

    1   the largest logit, and whether all are finite
    2   the sum of exp(logit / temperature - largest) in double precision, of every N-th token first
    3   the same sum again: of a segment of blocks at a time, up to the one where it exceeds uniform · total, and there block by
        block; the token is in this block

A draw with truncation or forbidden tokens finds the smallest weight to keep between 1 and 2: by bisection over the bits of a
number in [0, 1], one pass each. `engine/cpu/c/sampling.c` does the same, but drops settled tokens.

Import only if Triton is installed.
"""

from __future__ import annotations

import triton
import triton.language as tl

SEGMENT = tl.constexpr(16)
"""blocks whose weights are added up before the sum is compared: a program waits for its threads as often as it compares"""


@triton.jit
def logits_left(row, n, vocabulary, forbidden, first, last):
    """Return the logits of tokens n; -inf beyond the vocabulary and for entries `first` to `last` (exclusive) of
    `forbidden`."""
    x = tl.load(row + n, mask=n < vocabulary, other=float("-inf")).to(tl.float32)
    for f in range(first, last):
        x = tl.where(n == tl.load(forbidden + f).to(tl.int32), float("-inf"), x)
    return x


@triton.jit
def reaching(row, vocabulary, forbidden, first, last, top, scale, least, COUNTED: tl.constexpr, N: tl.constexpr):
    """Return the number of weights ≥ `least`, or their sum."""
    total_of = tl.zeros((N,), tl.float64)
    for start in range(0, vocabulary, N):
        x = logits_left(row, start + tl.arange(0, N), vocabulary, forbidden, first, last)
        weight = tl.exp((x - top) / scale)
        amount = tl.where(weight >= least, 1.0, 0.0) if COUNTED else tl.where(weight >= least, weight, 0.0)
        total_of += amount.to(tl.float64)
    return tl.sum(total_of)


@triton.jit
def edge(row, vocabulary, forbidden, first, last, top, scale, low, target, COUNTED: tl.constexpr, N: tl.constexpr):
    """Return the bits of the largest number that enough weights reach: `target` of them, or weights that sum to it."""
    high = 0x3F800001  # 1.0 and a bit
    while high - low > 1:
        middle = low + (high - low) // 2
        least = middle.to(tl.float32, bitcast=True)
        enough = reaching(row, vocabulary, forbidden, first, last, top, scale, least, COUNTED, N) >= target
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle)
    return low


@triton.jit
def least_kept(asked, stride, row, vocabulary, forbidden, first, last, top, scale, bits, N: tl.constexpr):
    """Return the bits of the smallest weight that top_k, min_p and top_p keep. asked: top_k, `stride` further top_p, then
    min_p."""
    k, top_p, min_p = tl.load(asked), tl.load(asked + stride), tl.load(asked + 2 * stride).to(tl.float32)
    if k > 0:
        bits = edge(row, vocabulary, forbidden, first, last, top, scale, bits, k, True, N)
    bits = tl.maximum(bits, min_p.to(tl.int32, bitcast=True))
    if top_p < 1:
        least = bits.to(tl.float32, bitcast=True)
        kept = reaching(row, vocabulary, forbidden, first, last, top, scale, least, False, N)
        bits = edge(row, vocabulary, forbidden, first, last, top, scale, bits, top_p * kept, False, N)
    return bits


@triton.jit
def kept_weights(row, n, vocabulary, forbidden, first, last, top, scale, least, CUT: tl.constexpr):
    """Return the weights of tokens n in double precision, 0 for those that are left out."""
    weight = tl.exp((logits_left(row, n, vocabulary, forbidden, first, last) - top) / scale)
    if CUT:
        weight = tl.where(weight >= least, weight, 0.0)
    return weight.to(tl.float64)


@triton.jit
def passing(row, end, vocabulary, forbidden, first, last, top, scale, least, target, CUT: tl.constexpr, N: tl.constexpr):
    """Return the first token at which the sum of the weights exceeds `target`; `vocabulary` if there is none. A number that is
    within rounding of an edge may take the neighbour."""
    n = tl.arange(0, N)
    below = tl.full((), 0.0, tl.float64)
    start = 0
    token = vocabulary
    while (start < end) & (token == vocabulary):
        stop = tl.minimum(start + SEGMENT * N, end)
        total_of = tl.zeros((N,), tl.float64)
        for at in range(start, stop, N):
            total_of += kept_weights(row, at + n, vocabulary, forbidden, first, last, top, scale, least, CUT)
        segment = tl.sum(total_of)
        if below + segment > target:
            before = below
            at = start
            while (at < stop) & (token == vocabulary):
                weight = kept_weights(row, at + n, vocabulary, forbidden, first, last, top, scale, least, CUT)
                block = tl.sum(weight)
                if before + block > target:
                    passed = (before + tl.cumsum(weight) > target) & (weight > 0)
                    token = tl.min(tl.where(passed, at + n, vocabulary))
                before += block
                at += N
        below += segment
        start = stop
    return token


@triton.jit
def looked_at(row, vocabulary, forbidden, first, last, CUT: tl.constexpr, N: tl.constexpr):
    """Return the largest logit of a row, the largest one that may be sampled, its first token, and whether all are finite."""
    n = tl.arange(0, N)
    highest_of = tl.full((N,), float("-inf"), tl.float32)
    top_of = tl.full((N,), float("-inf"), tl.float32)
    best = tl.zeros((N,), tl.int32)
    bad = tl.zeros((N,), tl.int32)
    for start in range(0, vocabulary, N):
        x = tl.load(row + start + n, mask=start + n < vocabulary, other=float("-inf")).to(tl.float32)
        bad += tl.where((start + n < vocabulary) & ((x != x) | (tl.abs(x) == float("inf"))), 1, 0)
        highest_of = tl.maximum(highest_of, x)
        if CUT:
            x = logits_left(row, start + n, vocabulary, forbidden, first, last)
        best = tl.where(x > top_of, start + n, best)
        top_of = tl.maximum(top_of, x)
    highest, top = tl.max(highest_of), tl.max(top_of)
    greedy = tl.min(tl.where(top_of == top, best, vocabulary - 1))
    return highest, top, greedy, tl.sum(bad) == 0


@triton.jit
def sums(row, end, vocabulary, forbidden, first, last, top, highest, scale, least, CUT: tl.constexpr, N: tl.constexpr):
    """Return the sum of the weights kept, the sum of all at temperature 1, and the last token with a weight."""
    n = tl.arange(0, N)
    total_of = tl.zeros((N,), tl.float64)
    plain_of = tl.zeros((N,), tl.float64)
    furthest = tl.zeros((N,), tl.int32)
    for start in range(0, end, N):
        x = logits_left(row, start + n, vocabulary, forbidden, first, last)
        weight = tl.exp((x - top) / scale)
        if CUT:
            weight = tl.where(weight >= least, weight, 0.0)
            x = tl.load(row + start + n, mask=start + n < vocabulary, other=float("-inf")).to(tl.float32)
        total_of += weight.to(tl.float64)
        plain_of += tl.exp(x - highest).to(tl.float64)
        furthest = tl.where(weight > 0, start + n, furthest)
    return tl.sum(total_of), tl.sum(plain_of), tl.max(furthest)


@triton.jit
def most_probable(
    row,
    end,
    vocabulary,
    forbidden,
    first,
    last,
    top,
    scale,
    least,
    log_total,
    to,
    draws,
    wanted,
    CUT: tl.constexpr,
    N: tl.constexpr,
):
    """Write the `wanted` largest scaled logits, of equal ones the lower id first, with one pass over the row for each. `to`
    receives the id (as bits; -1: none left), `draws` further its log-prob, and so on."""
    n = tl.arange(0, N)
    before = tl.full((), float("inf"), tl.float32)
    behind = tl.full((), -1, tl.int32)
    for _ in range(0, wanted):
        best_of = tl.full((N,), float("-inf"), tl.float32)
        at_of = tl.full((N,), 0, tl.int32) + vocabulary
        for start in range(0, end, N):
            x = logits_left(row, start + n, vocabulary, forbidden, first, last)
            if CUT:
                x = tl.where(tl.exp((x - top) / scale) >= least, x, float("-inf"))
            x = x / scale
            x = tl.where((x < before) | ((x == before) & (start + n > behind)), x, float("-inf"))
            at_of = tl.where(x > best_of, start + n, at_of)
            best_of = tl.maximum(best_of, x)
        before = tl.max(best_of)
        behind = tl.min(tl.where(best_of == before, at_of, vocabulary))
        some = before > float("-inf")
        x = tl.load(row + behind, mask=some, other=float("-inf")).to(tl.float32)
        tl.store(to, tl.where(some, behind, -1).to(tl.float32, bitcast=True))
        tl.store(to + draws, tl.where(some, (x - top) / scale - log_total, float("-inf")))
        to += 2 * draws


@triton.jit(do_not_specialize=["mine", "draws", "best"], do_not_specialize_on_alignment=["asked"])
def draw_kernel(
    logits, asked, drawn, mine, draws, vocabulary, row_stride, best, CUT: tl.constexpr, TOP: tl.constexpr, N: tl.constexpr
):
    """logits [S, vocabulary] · asked fp64: [4, mine] draw, row, temperature (0 = greedy), uniform (-1 - t: token t is given);
    with CUT the truncations [CUT, mine] in the order of TRUNCATIONS, then [mine + 1] offsets of forbidden tokens, and these ·
    drawn [4, draws] fp32: token (as bits), log-prob, log-prob at temperature 1, 1 if the row is valid; with TOP
    [2 · best, draws] ids (as bits) and log-probs of the most probable tokens, alternating."""
    i = tl.program_id(0)
    at = tl.load(asked + i).to(tl.int64)
    row = logits + tl.load(asked + mine + i).to(tl.int64) * row_stride
    temperature = tl.load(asked + 2 * mine + i).to(tl.float32)
    uniform = tl.load(asked + 3 * mine + i)
    scale = tl.where(temperature == 0, 1.0, temperature)
    forbidden = asked + (5 + CUT) * mine + 1
    first = tl.load(asked + (4 + CUT) * mine + i).to(tl.int32) if CUT else 0
    last = tl.load(asked + (4 + CUT) * mine + i + 1).to(tl.int32) if CUT else 0
    highest, top, greedy, good = looked_at(row, vocabulary, forbidden, first, last, CUT, N)
    finite = good & (top > float("-inf"))
    highest, top = tl.where(finite, highest, 0.0), tl.where(finite, top, 0.0)
    end = tl.where(finite, vocabulary, 0)  # rows that are not finite are skipped
    least = tl.full((), 0.0, tl.float32)
    if CUT:
        bits = tl.full((), 0, tl.int32)  # keeps all tokens, also those whose weight underflows
        if temperature > 0:
            bits = least_kept(asked + 4 * mine + i, mine, row, end, forbidden, first, last, top, scale, bits, N)
        least = bits.to(tl.float32, bitcast=True)
    total, plain, furthest = sums(row, end, vocabulary, forbidden, first, last, top, highest, scale, least, CUT, N)
    total = tl.where(finite, total, 1.0)
    plain = tl.where(finite, plain, 1.0)
    token = passing(row, end, vocabulary, forbidden, first, last, top, scale, least, uniform * total, CUT, N)
    token = tl.where(token == vocabulary, furthest, token)
    token = tl.where((temperature == 0) | (finite == 0), greedy, token)
    token = tl.where(uniform < 0, (-1 - uniform).to(tl.int32), token)
    x = tl.load(row + token).to(tl.float32)
    tl.store(drawn + at, token.to(tl.float32, bitcast=True))
    left = logits_left(row, token, vocabulary, forbidden, first, last) if CUT else x
    left = tl.where(tl.exp((left - top) / scale) >= least, left, float("-inf"))  # a given token may be truncated
    tl.store(drawn + draws + at, (left - top) / scale - tl.log(total.to(tl.float32)))
    tl.store(drawn + 2 * draws + at, x - highest - tl.log(plain.to(tl.float32)))
    tl.store(drawn + 3 * draws + at, finite.to(tl.float32))
    if TOP:
        log_total, to = tl.log(total.to(tl.float32)), drawn + 4 * draws + at
        most_probable(row, end, vocabulary, forbidden, first, last, top, scale, least, log_total, to, draws, best, CUT, N)
