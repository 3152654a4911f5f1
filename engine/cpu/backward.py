"""Products of a backward pass: torch's, in bf16 where it multiplies bf16 fast on this CPU, else in fp32 on numbers widened a
piece at a time.

A log-prob does not depend on them, so their bits are nobody's promise and the fast way is free to choose. Without bf16
instructions torch is 4 (AVX-512) to 170 times (AVX2, grad · w of an output layer) slower in bf16 than in fp32. Both ways add up
in fp32 and round to bf16 once.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cache

import torch

from engine.cpu.isa import cpu_flags

PIECE = 2048
"""rows and columns that are widened at once: 16 MB of fp32 for 2,048 inputs, whatever the size of the vocabulary"""
WORTH = 0.8
"""share of fp32's time below which bf16 is taken. Measured, oneDNN limited by hand: AMX 0.27, AVX-512 with vdpbf16ps at half
rate (an Intel Xeon) 1.8, AVX-512 without 5; by its peaks Zen 4 has 0.5. Noise does not change that choice from run to run."""
ROUNDS = 5


@cache
def fast_in_bf16() -> bool:
    """Tell whether torch multiplies bf16 faster than fp32 on this CPU. On x86 no CPU without AVX-512 does, nor a torch that was
    told to run without it (ATEN_CPU_CAPABILITY). Others are measured, once a process and in some milliseconds: what torch makes
    of an instruction set depends on its version and on ONEDNN_MAX_CPU_ISA, and no flag of the CPU says that."""
    if cpu_flags() and not torch.backends.cpu.get_cpu_capability().startswith("AVX512"):
        return False
    generator = torch.Generator().manual_seed(0)
    wide = [torch.randn(size, generator=generator) for size in ((128, 512), (512, 512))]
    narrow = [each.bfloat16() for each in wide]
    return _seconds(narrow) < WORTH * _seconds(wide)


@torch.no_grad()
def _seconds(factors: list[torch.Tensor]) -> float:
    """Time the two products of a backward, least of ROUNDS: grad [T, N], weight [N, K]."""
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
    """a [M, K] · b [K, N] → [M, N], of one dtype, on the CPU, without a gradient of its own."""
    if a.dtype != torch.bfloat16 or fast_in_bf16():
        return a @ b
    return widened(a, b)


def widened(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a [M, K] · b [K, N] → [M, N] in their dtype, computed in fp32, PIECE rows and PIECE terms of a sum at a time."""
    out = a.new_empty(a.shape[0], b.shape[1])
    for rows, into in zip(a.split(PIECE), out.split(PIECE), strict=True):
        total = torch.zeros(into.shape)
        for terms, of in zip(rows.split(PIECE, 1), b.split(PIECE), strict=True):
            total.addmm_(terms.float(), of.float())
        into.copy_(total)
    return out
