"""`python -m tests.bench products`: speed of each product kernel of this CPU, compared with the peak rates of the machine.

For shapes of SmolLM2-135M and Qwen3-0.6B and several numbers of rows, in bf16 and fp32, with weights in memory:

    gflops, gbytes   of the kernel, with all threads, without the allocation of its result in Python
    peak_gflops      the same multiplications on registers alone; peak_gbytes: reading memory alone
    ratio            gflops over the lower of peak_gflops and the limit that peak_gbytes sets

Kernel and machine are measured in turn, and the best of each counts. The weights lie in huge pages, as those of an engine do,
and both read them in one order: nothing is read again before everything else was, so no cache holds it. A call multiplies
several matrices one after the other, as layers do, and fetches the beginning of each during the one before.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from ctypes import byref, c_int64, c_void_p

import torch

from rollout.bench.harness import BenchSetup, BoundBroken, Row
from rollout.bench.peaks import KINDS, MIB, Best, fastest, register_peak
from rollout.engine.cpu.isa import ISAS, here
from rollout.engine.cpu.kernels import Kernels, Linear, linear_struct
from rollout.engine.memory import host_buffer

ROWS = (1, 2, 4, 8, 16, 32, 128, 512)
SHAPES = {
    "SmolLM2-135M": ((576, 576), (192, 576), (1536, 576), (576, 1536)),
    "Qwen3-0.6B": ((2048, 1024), (1024, 2048), (3072, 1024), (1024, 3072)),
}
"""(outputs, inputs) of a layer's products"""
WEIGHT_BYTES = 192 * MIB
"""weights that are read in turn, more than caches hold"""
PIECE = 4 * MIB
"""bytes of weights that a call reads at most, but for one matrix"""
CALL_FLOPS = 4e8
"""operations of a call at most, but for one matrix: few calls are interrupted, and the start of the threads, one in a step of a
model, takes little of them"""
LOOKS = 100
"""measurements of the machine before a product above its rates is an error"""
SECONDS = 0.25
"""per row of the table"""


class ProductRates:
    """The best rates measured so far, with the threads of `kernels`. weights: [bytes] uint8; read: bytes of them that are read
    each time."""

    def __init__(self, kernels: Kernels, weights: torch.Tensor, read: int = 2 * PIECE) -> None:
        self.kernels, self.weights, self.read = kernels, weights, read
        self.peaks = dict.fromkeys(KINDS, 0.0)
        self.bytes_per_second = 0.0
        self._reading = Best(kernels.team().threads)
        self._next = 0
        for _ in range(12):
            self.measure()

    def take(self, size: int) -> torch.Tensor:
        """Return the `size` bytes of the weights that were read longest ago."""
        if self._next + size > len(self.weights):
            self._next = 0
        self._next += size
        return self.weights[self._next - size : self._next]

    def measure(self) -> None:
        for kind in self.peaks:
            self.peaks[kind] = max(self.peaks[kind], register_peak(self.kernels, kind))
        for _ in range(self.read // PIECE):
            address, team = self.take(PIECE).data_ptr(), self.kernels.team()
            self._reading.time(self.kernels.library.rollout_read, byref(team), c_void_p(address), c_int64(PIECE))
        self.bytes_per_second = PIECE / self._reading.seconds


def measure(setup: BenchSetup) -> Iterator[Row]:
    """Yield a row per kernel, dtype, shape and number of rows, then the lowest ratios of each kernel. `--scale` multiplies the
    seconds per row. The plain kernel, without vector instructions, is left out."""
    weights = host_buffer(WEIGHT_BYTES, pin=False)
    weights.view(torch.bfloat16).fill_(0.01)
    for isa in (isa for isa in ISAS if isa in here() and isa != "plain"):
        kernels = Kernels(isa, setup.threads)
        machine = ProductRates(kernels, weights)
        worst: dict[tuple[str, int], float] = {}
        shapes = [(model, outputs, inputs) for model, each in SHAPES.items() for outputs, inputs in each]
        for dtype in (torch.bfloat16, torch.float32):
            name = str(dtype).removeprefix("torch.")
            for model, outputs, inputs in shapes:
                for rows in ROWS:
                    row = measure_product(machine, dtype, rows, outputs, inputs, SECONDS * setup.scale)
                    worst[name, rows] = min(worst.get((name, rows), row["ratio"]), row["ratio"])
                    yield {"isa": isa, "dtype": name, "model": model, **row}
        for (name, rows), ratio in worst.items():
            yield {
                "summary": True, "isa": isa, "arithmetic": kernels.arithmetic, "dtype": name, "rows": rows,
                "worst_ratio": ratio, "threads": kernels.team().threads,
            }  # fmt: skip


def measure_product(machine: ProductRates, dtype: torch.dtype, rows: int, outputs: int, inputs: int, seconds: float) -> Row:
    """Time x [rows, inputs] times a weight [outputs, inputs]. Raises BoundBroken if it is faster than the machine."""
    x = torch.randn(rows, inputs).to(dtype)
    out, packed = x.new_empty(rows, outputs), machine.kernels.packed(rows, (inputs,), dtype)
    size, team = outputs * inputs * dtype.itemsize, machine.kernels.team()
    flops = 2.0 * rows * outputs * inputs
    count = max(1, min(PIECE // size, int(CALL_FLOPS / flops)))
    fastest_call, turn, end = Best(team.threads), 0, time.perf_counter() + seconds
    while turn < 8 or time.perf_counter() < end:
        matrices = machine.take(count * size).view(dtype).view(count, outputs, inputs)
        structs = (Linear * count)(*(linear_struct(each, None) for each in matrices))
        call = byref(team), structs, c_int64(count), c_void_p(x.data_ptr()), c_int64(rows), c_void_p(packed.data_ptr())
        fastest_call.time(machine.kernels.library.rollout_linears, *call, c_void_p(out.data_ptr()))
        turn += 1
        if turn % 8 == 0:
            machine.measure()
    best = fastest_call.seconds / count
    peak, allowed = fastest(machine.peaks, dtype), 0.0
    for _ in range(LOOKS):
        allowed = min(peak, machine.bytes_per_second * flops / size)
        if flops / best <= allowed:
            break
        machine.measure()  # the rates were measured too seldom, on a busy machine
    else:
        raise BoundBroken(f"{rows} rows × {outputs} × {inputs}: {flops / best / 1e9:.1f} GFLOP/s, above {allowed / 1e9:.1f}")
    return {
        "rows": rows, "outputs": outputs, "inputs": inputs, "microseconds": best * 1e6, "gflops": flops / best / 1e9,
        "gbytes": size / best / 1e9, "peak_gflops": peak / 1e9, "peak_gbytes": machine.bytes_per_second / 1e9,
        "ratio": flops / best / allowed,
    }  # fmt: skip
