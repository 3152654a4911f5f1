"""Instruction sets for which the C files are compiled, and the arithmetic of each. No torch: the wheel build imports it too.

An arithmetic defines the order of every sum and the place of every rounding in products, attention, norms and sampling, under a
versioned name. Instruction sets with the same name give the same bits. `fma/1` uses chains of fp32 FMAs; a pair of bf16 numbers
takes two of them, the odd product first, as vdpbf16ps computes in one instruction. So it runs on AVX-512 with and without bf16,
on AVX2 and in plain C, at any vector width.
"""

from __future__ import annotations

import platform
from functools import cache
from pathlib import Path
from typing import NamedTuple


class Isa(NamedTuple):
    needs: frozenset[str]
    """CPU flags, named as in /proc/cpuinfo"""
    flags: tuple[str, ...]
    """compiler flags"""
    arithmetic: str


_AVX2 = ("-mavx2", "-mfma")
_AVX512 = (*_AVX2, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl")
_BF16 = (*_AVX512, "-mavx512bf16")


def _isa(arithmetic: str, *flags: str, more: tuple[str, ...] = ()) -> Isa:
    """Make an instruction set whose CPU flags follow from compiler flags: -mamx-bf16 needs amx_bf16. more: other compiler
    flags."""
    names = (flag.removeprefix("-m").replace("-", "_").replace("avx512bf16", "avx512_bf16") for flag in flags)
    return Isa(frozenset(names), (*flags, *more), arithmetic)


ISAS: dict[str, Isa] = {
    "amx": _isa("amx/1", *_BF16, "-mamx-tile", "-mamx-bf16"),
    "avx512_bf16": _isa("fma/1", *_BF16),
    "avx512": _isa("fma/1", *_AVX512),
    "avx2": _isa("fma/1", *_AVX2),
    "plain": _isa("fma/1"),
}
"""best first; "auto" selects the first one that the CPU supports"""
EMULATED: dict[str, Isa] = {"amx_portable": _isa("amx/1", *_BF16, more=("-DPORTABLE",))}
"""tile instructions emulated in C, to test a kernel on CPUs without them; never selected by "auto" """


def isa_of(name: str) -> Isa:
    """Return the instruction set of a name. Raises ValueError for an unknown name."""
    if name not in ISAS and name not in EMULATED:
        raise ValueError(f"isa={name!r}: must be one of {', '.join([*ISAS, *EMULATED])}")
    return ISAS.get(name) or EMULATED[name]


def lacking(name: str) -> list[str]:
    """Return the CPU flags that `name` needs and this CPU lacks, sorted. Raises ValueError for an unknown name."""
    return sorted(isa_of(name).needs - cpu_flags())


def here() -> list[str]:
    """Return the instruction sets that this CPU supports, best first, and those emulated on it."""
    return [name for name in [*ISAS, *EMULATED] if not lacking(name)]


def best() -> str:
    """Return the first of `ISAS` that this CPU supports."""
    return next(name for name in ISAS if not lacking(name))


@cache
def cpu_flags() -> frozenset[str]:
    """Return the flags of the first CPU in /proc/cpuinfo; empty without that file or on a machine other than x86-64."""
    info = Path("/proc/cpuinfo")
    if platform.machine() not in ("x86_64", "AMD64") or not info.exists():
        return frozenset()
    line = next((line for line in info.read_text().splitlines() if line.startswith("flags")), ":")
    return frozenset(line.split(":", 1)[1].split())
