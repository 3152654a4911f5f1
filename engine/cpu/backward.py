"""Products of a backward pass on the CPU: torch's, in bf16 if this CPU multiplies bf16 fast, else in fp32 on pieces converted
to fp32.

No log-prob depends on them, so their bits are not promised and the faster way may be chosen. Without bf16 instructions, torch
is 4 times (AVX-512) to 170 times (AVX2, grad · w of an output layer) slower in bf16 than in fp32. Both ways sum in fp32 and
round to bf16 once.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cache

import torch

from rollout.engine.cpu.isa import cpu_flags

PIECE = 2048
"""rows and columns converted at a time: 16 MB of fp32 for 2,048 inputs, for any vocabulary"""
WORTH = 0.8
"""bf16 is used if it takes less than this fraction of fp32's time. Measured, with oneDNN limited by hand: AMX 0.27, AVX-512
with vdpbf16ps at half rate (an Intel Xeon) 1.8, AVX-512 without it 5; by its peak rates Zen 4 has 0.5. Noise does not change
the choice from run to run."""
ROUNDS = 5


@cache
def fast_in_bf16() -> bool:
    """Return whether torch multiplies bf16 faster than fp32 on this CPU. No x86 CPU without AVX-512 does, nor a torch that is
    restricted to less (ATEN_CPU_CAPABILITY). Others are measured once per process, in a few milliseconds: torch's use of an
    instruction set depends on its version and on ONEDNN_MAX_CPU_ISA, which no CPU flag shows."""
    if cpu_flags() and not torch.backends.cpu.get_cpu_capability().startswith("AVX512"):
        return False
    generator = torch.Generator().manual_seed(0)
    wide = [torch.randn(size, generator=generator) for size in ((128, 512), (512, 512))]
    narrow = [each.bfloat16() for each in wide]
    return _seconds(narrow) < WORTH * _seconds(wide)


@torch.no_grad()
def _seconds(factors: list[torch.Tensor]) -> float:
    """Time the two products of a backward, the minimum of ROUNDS: grad [T, N], weight [N, K]."""
    grad, weight = factors
    works: tuple[Callable[[], torch.Tensor], ...] = (lambda: grad @ weight, lambda: grad.T @ grad)
    seconds = 0.0
    for work in works:
        work()
        rounds = []
        for _ in range(ROUNDS):
            began = time.perf_counter()
            work()
            rounds.append(time.perf_counter() - began)
        seconds += min(rounds)
    return seconds


def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return a [M, K] · b [K, N] → [M, N], of one dtype, on the CPU, without autograd."""
    if a.dtype != torch.bfloat16 or fast_in_bf16():
        return a @ b
    return widened(a, b)


def widened(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return a [M, K] · b [K, N] → [M, N] in their dtype, computed in fp32, PIECE rows and PIECE terms of a sum at a time."""
    out = a.new_empty(a.shape[0], b.shape[1])
    for rows, into in zip(a.split(PIECE), out.split(PIECE), strict=True):
        total = torch.zeros(into.shape)
        for terms, of in zip(rows.split(PIECE, 1), b.split(PIECE), strict=True):
            total.addmm_(terms.float(), of.float())
        into.copy_(total)
    return out
