"""Peak rates of this machine: arithmetic on registers alone (c/peaks.c), and reading memory.

Callers take the best of many measurements: on a busy machine, the mean measures the other processes.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Callable
from ctypes import byref, c_double, c_int64, c_void_p
from typing import Any

import torch

from rollout.engine.cpu.kernels import Kernels

FMA, DOT, TILES = range(3)
"""kinds of multiplication in c/peaks.c"""
KINDS = (FMA, DOT, TILES)
MIB = 1 << 20


def register_peak(kernels: Kernels, kind: int) -> float:
    """Measure once: FLOP/s on registers with all threads; 0 if `kernels` has no such instruction."""
    kernels.library.rollout_peak.restype = c_double
    return float(kernels.library.rollout_peak(byref(kernels.team()), c_int64(kind)))


def fastest(peaks: dict[int, float], dtype: torch.dtype) -> float:
    """Return the peak of the fastest multiplication that gives a kernel's bits in this dtype. peaks: by kind."""
    if dtype == torch.float32:
        return peaks[FMA]
    return peaks[TILES] or max(peaks[FMA], peaks[DOT])


def reading(kernels: Kernels, address: int, size: int) -> float:
    """Measure once: bytes/s at which all threads read `size` bytes, a multiple of one MiB, from an address."""
    return size / timed(
        kernels.team().threads, kernels.library.rollout_read, byref(kernels.team()), c_void_p(address), c_int64(size)
    )


def timed(threads: int, work: Callable[..., Any], *arguments: Any) -> float:
    """Return the seconds of a call; with one thread its CPU time, which holds on a busy machine."""
    clock = time.thread_time if threads == 1 else time.perf_counter
    began = clock()
    work(*arguments)
    return clock() - began


class Best:
    """The seconds of the fastest of several calls. With one thread only those count that kept their core, by the wall clock: in
    a virtual machine the CPU time of a few calls is a quarter too short, since stolen time is subtracted in lumps."""

    def __init__(self, threads: int) -> None:
        self._alone = threads == 1
        self._kept = float("inf")
        self._lost: list[float] = []

    @property
    def seconds(self) -> float:
        """Return the shortest; if no call kept its core, the tenth percentile of their CPU times."""
        return self._kept if self._kept < float("inf") or not self._lost else sorted(self._lost)[len(self._lost) // 10]

    def time(self, work: Callable[..., Any], *arguments: Any) -> None:
        interrupted, cpu, began = _interruptions(), time.thread_time(), time.perf_counter()
        work(*arguments)
        seconds, cpu = time.perf_counter() - began, time.thread_time() - cpu
        if self._alone and _interruptions() > interrupted:
            self._lost.append(cpu)
        else:
            self._kept = min(self._kept, seconds)


def _interruptions() -> int:
    """Count how often another thread took this one's core."""
    return resource.getrusage(resource.RUSAGE_THREAD).ru_nivcsw
