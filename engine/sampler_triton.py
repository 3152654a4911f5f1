"""Draws on a GPU: one program a draw, three passes over its row of logits, which the cache holds after the first.

    1   the largest logit, and whether all are finite
    2   the sum of exp(logit / temperature - largest), block by block in double precision
    3   the same sum again, up to the block where it passes uniform · total; the token is found inside

Imported only where Triton is there. All that a draw hangs on goes to the device in one copy, all that it gives comes back in
one: the host waits for the step where it reads that.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
import triton
import triton.language as tl

from engine.transfers import to_device, to_host

Read = tuple[np.ndarray, np.ndarray, np.ndarray | None, np.ndarray]
"""tokens, log-probs, log-probs at temperature 1, finite: the fields of `engine.plan.Drawn`"""

BLOCK = 2048
"""logits of a row that are looked at together"""


@triton.jit(do_not_specialize=["draws"])
def draw_kernel(logits, asked, drawn, draws, vocabulary, row_stride, N: tl.constexpr):
    """logits [S, vocabulary] · asked [3, draws] fp64: row, temperature (0 = greedy), uniform · drawn [4, draws] fp32: token (as
    bits), log-prob, log-prob at temperature 1, 1 if the row is finite."""
    i = tl.program_id(0)
    row = logits + tl.load(asked + i).to(tl.int64) * row_stride
    temperature = tl.load(asked + draws + i).to(tl.float32)
    uniform = tl.load(asked + 2 * draws + i)
    scale = tl.where(temperature == 0, 1.0, temperature)
    n = tl.arange(0, N)
    top = tl.full((N,), float("-inf"), tl.float32)
    best = tl.zeros((N,), tl.int32)
    bad = tl.zeros((N,), tl.int32)
    for start in range(0, vocabulary, N):
        x = tl.load(row + start + n, mask=start + n < vocabulary, other=float("-inf")).to(tl.float32)
        bad += tl.where((start + n < vocabulary) & ((x != x) | (tl.abs(x) == float("inf"))), 1, 0)
        best = tl.where(x > top, start + n, best)
        top = tl.maximum(top, x)
    highest = tl.max(top)
    first = tl.min(tl.where(top == highest, best, vocabulary - 1))
    finite = tl.sum(bad) == 0
    highest = tl.where(finite, highest, 0.0)
    end = tl.where(finite, vocabulary, 0)  # nothing is drawn from what is not finite
    total = tl.full((), 0.0, tl.float64)
    plain = tl.full((), 0.0, tl.float64)
    last = tl.zeros((N,), tl.int32)
    for start in range(0, end, N):
        x = tl.load(row + start + n, mask=start + n < vocabulary, other=float("-inf")).to(tl.float32)
        weight = tl.exp((x - highest) / scale)
        total += tl.sum(weight.to(tl.float64))
        plain += tl.sum(tl.exp(x - highest).to(tl.float64))
        last = tl.where(weight > 0, start + n, last)
    total = tl.where(finite, total, 1.0)
    plain = tl.where(finite, plain, 1.0)
    target = uniform * total
    below = tl.full((), 0.0, tl.float64)
    start = 0
    token = vocabulary
    while (start < end) & (token == vocabulary):
        x = tl.load(row + start + n, mask=start + n < vocabulary, other=float("-inf")).to(tl.float32)
        weight = tl.exp((x - highest) / scale).to(tl.float64)
        block = tl.sum(weight)
        if below + block > target:
            passed = (below + tl.cumsum(weight) > target) & (weight > 0)
            token = tl.min(tl.where(passed, start + n, vocabulary))
        below += block
        start += N
    token = tl.where(token == vocabulary, tl.max(last), token)
    token = tl.where((temperature == 0) | (finite == 0), first, token)
    x = tl.load(row + token).to(tl.float32)
    tl.store(drawn + i, token.to(tl.float32, bitcast=True))
    tl.store(drawn + draws + i, (x - highest) / scale - tl.log(total.to(tl.float32)))
    tl.store(drawn + 2 * draws + i, x - highest - tl.log(plain.to(tl.float32)))
    tl.store(drawn + 3 * draws + i, finite.to(tl.float32))


def draw(logits: torch.Tensor, row: np.ndarray, temperature: np.ndarray, uniform: np.ndarray, raw: bool) -> Read:
    """D draws by inverse CDF from [S, V] logits on a device: as `Kernels.draw`, but log-probs are those of `log_softmax`
    up to rounding."""
    return launch(logits, row, temperature, uniform, raw)[1]()


def launch(
    logits: torch.Tensor, row: np.ndarray, temperature: np.ndarray, uniform: np.ndarray, raw: bool
) -> tuple[torch.Tensor, Callable[[], Read]]:
    """The same, not waited for: the [D] int32 tokens on the device, and what reads all of it."""
    draws = len(row)
    (asked,) = to_device([np.concatenate([row, temperature, uniform], dtype=np.float64)], logits.device)
    out = torch.empty((4, draws), device=logits.device)
    logits = logits.contiguous()
    draw_kernel[(draws,)](
        logits, asked, out, draws, logits.shape[1], logits.stride(0), N=BLOCK, num_warps=8, enable_fp_fusion=False
    )
    wait = to_host(out)

    def read() -> Read:
        tokens, logprobs, plain, finite = wait()
        return tokens.view(np.int32), logprobs, plain if raw else None, finite > 0

    return out[0].view(torch.int32), read
