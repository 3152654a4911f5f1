"""`rollout bench products`: speed of each product kernel of this CPU, compared with the peak rates of the machine.

For shapes of SmolLM2-135M and Qwen3-0.6B and several numbers of rows, in bf16 and fp32, with weights in memory:

    gflops, gbytes   of the kernel, with all threads, without the allocation of its result in Python
    peak_gflops      the same multiplications on registers alone; peak_gbytes: reading memory alone
    ratio            gflops over the lower of peak_gflops and the limit that peak_gbytes sets

Kernel and machine are measured in turn, and the best of each counts. With one thread, CPU time counts.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from ctypes import byref, c_int64, c_void_p

import torch

from rollout.bench.harness import BenchSetup, Row
from rollout.bench.peaks import KINDS, MIB, fastest, reading, register_peak, timed
from rollout.engine.cpu.isa import ISAS, here
from rollout.engine.cpu.kernels import Kernels, linear_struct

ROWS = (1, 2, 4, 8, 16, 32, 128, 512)
SHAPES = {
    "SmolLM2-135M": ((576, 576), (192, 576), (1536, 576), (576, 1536)),
    "Qwen3-0.6B": ((2048, 1024), (1024, 2048), (3072, 1024), (1024, 3072)),
}
"""(outputs, inputs) of a layer's products"""
WEIGHT_BYTES = 192 << 20
"""weights that are read in turn, more than the caches of a core hold"""
SECONDS = 0.25
"""per row of the table"""


class ProductRates:
    """The best rates measured so far, with the threads of `kernels`. read: bytes of `weights` that are read each time."""

    def __init__(self, kernels: Kernels, weights: torch.Tensor, read: int = 48 * MIB) -> None:
        self.kernels, self.weights, self.read = kernels, weights, read
        self.peaks = dict.fromkeys(KINDS, 0.0)
        self.bytes_per_second = 0.0
        self._next = 0
        """where to read next: all of the weights in turn, so that no cache holds what is read again"""
        for _ in range(3):
            self.measure()

    def measure(self) -> None:
        for kind in self.peaks:
            self.peaks[kind] = max(self.peaks[kind], register_peak(self.kernels, kind))
        size, whole, at = 4 * MIB, self.weights.nbytes, self.weights.data_ptr()
        for _ in range(self.read // size):
            self.bytes_per_second = max(self.bytes_per_second, reading(self.kernels, at + self._next, size))
            self._next = (self._next + size) % (whole - whole % size)


def measure(setup: BenchSetup) -> Iterator[Row]:
    """Yield a row per kernel, dtype, shape and number of rows, then the lowest ratios of each kernel. `--scale` multiplies the
    seconds per row. The plain kernel, without vector instructions, is left out."""
    weights = torch.empty(WEIGHT_BYTES // 2, dtype=torch.bfloat16).fill_(0.01)
    for isa in (isa for isa in ISAS if isa in here() and isa != "plain"):
        kernels = Kernels(isa, setup.threads)
        machine = ProductRates(kernels, weights)
        worst: dict[tuple[str, int], float] = {}
        shapes = [(model, outputs, inputs) for model, each in SHAPES.items() for outputs, inputs in each]
        for dtype in (torch.bfloat16, torch.float32):
            name = str(dtype).removeprefix("torch.")
            for model, outputs, inputs in shapes:
                for rows in ROWS:
                    row = measure_product(machine, weights.view(dtype), rows, outputs, inputs, SECONDS * setup.scale)
                    worst[name, rows] = min(worst.get((name, rows), row["ratio"]), row["ratio"])
                    yield {"isa": isa, "dtype": name, "model": model, **row}
        for (name, rows), ratio in worst.items():
            yield {
                "summary": True, "isa": isa, "arithmetic": kernels.arithmetic, "dtype": name, "rows": rows,
                "worst_ratio": ratio, "threads": kernels.team().threads,
            }  # fmt: skip


def measure_product(machine: ProductRates, weights: torch.Tensor, rows: int, outputs: int, inputs: int, seconds: float) -> Row:
    """Time x [rows, inputs] times a weight [outputs, inputs]."""
    count = max(1, weights.numel() // (outputs * inputs))
    matrices = [linear_struct(each, None) for each in weights[: count * outputs * inputs].view(count, outputs, inputs)]
    x = torch.randn(rows, inputs).to(weights.dtype)
    out, packed = x.new_empty(rows, outputs), machine.kernels.packed(rows, (inputs,), x.dtype)
    team = machine.kernels.team()
    addresses = c_void_p(x.data_ptr()), c_int64(rows), c_void_p(packed.data_ptr()), c_void_p(out.data_ptr())
    best, turn, end = float("inf"), 0, time.perf_counter() + seconds
    while turn < 8 or time.perf_counter() < end:
        call = byref(team), byref(matrices[turn % count]), *addresses
        best = min(best, timed(team.threads, machine.kernels.library.rollout_linear, *call))
        turn += 1
        if turn % 32 == 0:
            machine.measure()
    flops, size, peak = (
        2.0 * rows * outputs * inputs,
        outputs * inputs * weights.itemsize,
        fastest(machine.peaks, weights.dtype),
    )
    allowed = min(peak, machine.bytes_per_second * flops / size)
    return {
        "rows": rows, "outputs": outputs, "inputs": inputs, "microseconds": best * 1e6, "gflops": flops / best / 1e9,
        "gbytes": size / best / 1e9, "peak_gflops": peak / 1e9, "peak_gbytes": machine.bytes_per_second / 1e9,
        "ratio": flops / best / allowed,
    }  # fmt: skip
