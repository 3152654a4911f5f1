"""Instruction sets that the C files are compiled for, and the arithmetic of each. No torch: the wheel is built with it too.

An arithmetic is the order of every sum and the place of every rounding in products, attention, norms and draws, under a name
with a version. Sets that share a name give the same bits. `fma/1` is chains of fp32 FMAs, for a pair of bf16 two of them, the
odd product first, which is what vdpbf16ps computes in one instruction: so it runs with AVX-512 with and without bf16, with
AVX2 and in plain C, whatever the width of a vector.
"""

from __future__ import annotations

import platform
from functools import cache
from pathlib import Path
from typing import NamedTuple


class Isa(NamedTuple):
    needs: frozenset[str]
    """CPU flags, as /proc/cpuinfo names them"""
    flags: tuple[str, ...]
    """of the compiler"""
    arithmetic: str


_AVX2 = ("-mavx2", "-mfma")
_AVX512 = (*_AVX2, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl")
_BF16 = (*_AVX512, "-mavx512bf16")


def _isa(arithmetic: str, *flags: str, more: tuple[str, ...] = ()) -> Isa:
    """An instruction set whose CPU flags are those of the compiler: -mamx-bf16 needs amx_bf16. `more`: flags of the compiler
    alone."""
    names = (flag.removeprefix("-m").replace("-", "_").replace("avx512bf16", "avx512_bf16") for flag in flags)
    return Isa(frozenset(names), (*flags, *more), arithmetic)


ISAS: dict[str, Isa] = {
    "amx": _isa("amx/1", *_BF16, "-mamx-tile", "-mamx-bf16"),
    "avx512_bf16": _isa("fma/1", *_BF16),
    "avx512": _isa("fma/1", *_AVX512),
    "avx2": _isa("fma/1", *_AVX2),
    "plain": _isa("fma/1"),
}
"""best first; "auto" takes the first that the CPU has"""
EMULATED: dict[str, Isa] = {"amx_portable": _isa("amx/1", *_BF16, more=("-DPORTABLE",))}
"""tile instructions in C, to test the rest of a kernel on CPUs without them; never chosen by itself"""


def isa_of(name: str) -> Isa:
    """Raises ValueError for an unknown name."""
    if name not in ISAS and name not in EMULATED:
        raise ValueError(f"isa={name!r}: one of {', '.join([*ISAS, *EMULATED])}")
    return ISAS.get(name) or EMULATED[name]


def lacking(name: str) -> list[str]:
    """CPU flags that `name` needs and this CPU has not, sorted. Raises ValueError for an unknown name."""
    return sorted(isa_of(name).needs - cpu_flags())


def here() -> list[str]:
    """Instruction sets of this CPU, best first, and those that are emulated on it."""
    return [name for name in [*ISAS, *EMULATED] if not lacking(name)]


def best() -> str:
    """The first of `ISAS` of which this CPU has every flag."""
    return next(name for name in ISAS if not lacking(name))


@cache
def cpu_flags() -> frozenset[str]:
    """Flags of the first CPU in /proc/cpuinfo; empty where there is no such file or the machine is no x86-64."""
    info = Path("/proc/cpuinfo")
    if platform.machine() not in ("x86_64", "AMD64") or not info.exists():
        return frozenset()
    line = next((line for line in info.read_text().splitlines() if line.startswith("flags")), ":")
    return frozenset(line.split(":", 1)[1].split())
