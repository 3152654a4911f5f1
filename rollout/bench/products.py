"""`rollout bench products`: what each product kernel of this CPU reaches, beside what the machine can do.

For SmolLM2-135M's and Qwen3-0.6B's shapes and some numbers of rows, in bf16 and fp32, weights out of memory:

    gflops, gbytes   of the kernel, all threads together
    peak_gflops      the same multiplications on registers alone; gbytes_peak: reading memory and nothing else
    ratio            gflops to the lower of peak_gflops and what gbytes_peak allows

Kernel and machine are measured in turn and the best of each counts: beside other work a mean says more about that than about
the kernel. With one thread it is the thread's own time that counts, so that the figures hold on a busy machine, too.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import torch

from engine.cpu.isa import ISAS, here
from engine.cpu.kernels import Kernels
from rollout.bench.peaks import KINDS, MIB, fastest, reading, register_peak, timed

NAME = "products"
ROWS = (1, 8, 32, 128, 512)
SHAPES = {
    "SmolLM2-135M": ((576, 576), (192, 576), (1536, 576), (576, 1536)),
    "Qwen3-0.6B": ((2048, 1024), (1024, 2048), (3072, 1024), (1024, 3072)),
}
"""(outputs, inputs) of a layer's products"""
WALKED_BYTES = 192 << 20
"""weights that are walked through, more than a core's caches hold"""
SECONDS = 0.4
"""for each row of the table"""


class ProductRates:
    """Best rates seen so far, with the threads of `kernels`."""

    def __init__(self, kernels: Kernels, weights: torch.Tensor) -> None:
        self.kernels, self.weights = kernels, weights
        self.peaks = dict.fromkeys(KINDS, 0.0)
        self.bytes_per_second = 0.0
        for _ in range(3):
            self.look()

    def look(self) -> None:
        for kind in self.peaks:
            self.peaks[kind] = max(self.peaks[kind], register_peak(self.kernels, kind))
        size, at = 4 * MIB, self.weights.data_ptr()
        for first in range(0, 48 * MIB, size):
            self.bytes_per_second = max(self.bytes_per_second, reading(self.kernels, at + first, size))

    def peak(self, dtype: torch.dtype) -> float:
        """FLOP/s in registers of the fastest multiplication that has the kernel's bits."""
        return fastest(self.peaks, dtype)


def measure(scale: float = 1.0, threads: int | None = None, isas: tuple[str, ...] | None = None) -> Iterator[dict[str, Any]]:
    """Yield a row for each kernel, dtype, shape and number of rows, and last the worst ratio of each kernel. `scale`: factor on
    the seconds of each. `isas`: None = those of this CPU but for the plain one."""
    weights = torch.empty(WALKED_BYTES // 2, dtype=torch.bfloat16).fill_(0.01)
    for isa in isas or tuple(isa for isa in ISAS if isa in here() and isa != "plain"):
        kernels = Kernels(isa, threads)
        machine = ProductRates(kernels, weights)
        worst: dict[tuple[str, int], float] = {}
        for dtype in (torch.bfloat16, torch.float32):
            for model, shapes in SHAPES.items():
                for outputs, inputs in shapes:
                    for rows in ROWS:
                        row: dict[str, Any] = {
                            "workload": NAME,
                            "isa": isa,
                            "dtype": str(dtype).removeprefix("torch."),
                            "model": model,
                        }
                        row |= _one(machine, weights.view(dtype), rows, outputs, inputs, SECONDS * scale)
                        key = (row["dtype"], rows)
                        worst[key] = min(worst.get(key, row["ratio"]), row["ratio"])
                        yield row
        for (name, rows), ratio in worst.items():
            yield {
                "workload": NAME, "summary": True, "isa": isa, "arithmetic": kernels.arithmetic, "dtype": name, "rows": rows,
                "worst_ratio": ratio, "threads": kernels.team().threads,
            }  # fmt: skip


def _one(machine: ProductRates, weights: torch.Tensor, rows: int, outputs: int, inputs: int, seconds: float) -> dict[str, Any]:
    count = max(1, weights.numel() // (outputs * inputs))
    matrices = weights[: count * outputs * inputs].view(count, outputs, inputs)
    x = torch.randn(rows, inputs).to(weights.dtype)
    threads = machine.kernels.team().threads
    best, turn, end = float("inf"), 0, time.perf_counter() + seconds
    while turn < 8 or time.perf_counter() < end:
        best = min(best, timed(threads, machine.kernels.linear, x, matrices[turn % count]))
        turn += 1
        if turn % 32 == 0:
            machine.look()
    flops, size = 2.0 * rows * outputs * inputs, outputs * inputs * weights.itemsize
    allowed = min(machine.peak(weights.dtype), machine.bytes_per_second * flops / size)
    return {
        "rows": rows, "outputs": outputs, "inputs": inputs, "microseconds": round(best * 1e6, 1),
        "gflops": round(flops / best / 1e9, 2), "gbytes": round(size / best / 1e9, 2),
        "peak_gflops": round(machine.peak(weights.dtype) / 1e9, 2), "peak_gbytes": round(machine.bytes_per_second / 1e9, 2),
        "ratio": round(flops / best / allowed, 3),
    }  # fmt: skip
