"""`python -m tests.bench experts`: our products of experts beside transformers' `grouped_mm` and the limits of the machine.

One layer's experts of each published shape, random weights, tokens that choose experts at random; in turn:

    ratio_to_grouped_mm   median time of `grouped_mm` over ours
    of_floor              least time that the machine allows over our best: reading the experts that were chosen at the measured
                          memory rate, or multiplying at the register peak, whichever takes longer
    max_abs_alone         largest difference between a token's result alone and in the crowd

With one thread, CPU time counts. Then routes and log-probs of small models of seven families, which take no `--scale` above 1:
`tests.bench.routes`.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator
from statistics import geometric_mean, median
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import AutoModelForCausalLM

from rollout.bench.harness import BenchSetup, Row
from rollout.bench.peaks import fastest, timed
from rollout.config import InputError
from rollout.engine.cpu.exact_modules import use_products
from rollout.engine.cpu.kernels import choose
from rollout.engine.forward.shapes import configuration
from rollout.engine.memory import host_buffer
from tests.bench.products import WEIGHT_BYTES, ProductRates
from tests.bench.routes import measure_routes

MODELS = ("olmoe", "qwen3-30b-a3b", "gpt-oss-20b")
DECODE, PREFILL = (1, 8, 64), (512,)
"""rows"""
SETS = 4
"""inputs that are used in turn, each with its own routes, so that no cache has the experts of a single row"""
ALONE = 8
"""rows of a crowd that are computed alone, too"""
SECONDS = 2.0
"""per row of the table"""


class Experts(NamedTuple):
    """One layer's experts, twice on the same parameters."""

    ours: nn.Module
    grouped_mm: nn.Module
    hidden: int
    experts: int
    chosen: int
    """by a token"""
    numbers: int
    """of an expert's matrices"""


def measure(setup: BenchSetup) -> Iterator[Row]:
    """Yield a row per shape and number of rows, then a summary of each shape. `--scale` multiplies the seconds per row. Raises
    InputError without kernels."""
    kernels = choose(setup.options.isa).kernels
    if kernels is None:
        raise InputError(f"isa {setup.options.isa}: the products of experts need a native instruction set")
    kernels.threads = setup.threads
    dtype, threads = getattr(torch, setup.options.dtype), kernels.team().threads
    weights = host_buffer(WEIGHT_BYTES, pin=False)
    weights.view(torch.bfloat16).fill_(0.01)
    machine = ProductRates(kernels, weights, WEIGHT_BYTES)  # all of it, or a part comes from a large cache
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for model in MODELS:
            experts = build(model, dtype, kernels.isa)
            rows = [measure_rows(machine, experts, count, SECONDS * setup.scale) for count in (*DECODE, *PREFILL)]
            yield from ({"model": model, "isa": kernels.isa, **row} for row in rows)
            yield {
                "summary": True, "model": model, "isa": kernels.isa, "arithmetic": kernels.arithmetic, "dtype": str(dtype)[6:],
                "threads": threads, "load": os.getloadavg()[0],
                "ratio_to_grouped_mm": geometric_mean(row["ratio_to_grouped_mm"] for row in rows),
                "of_floor": min(row["of_floor"] for row in rows if row["rows"] in DECODE),
                "of_floor_prefill": min(row["of_floor"] for row in rows if row["rows"] in PREFILL),
                "max_abs_alone": max(row["max_abs_alone"] for row in rows),
            }  # fmt: skip
            del experts
    finally:
        torch.set_num_threads(before)
    yield from measure_routes(setup)


def build(model: str, dtype: torch.dtype, isa: str) -> Experts:
    """Make the experts of the first layer of a shape that has any."""
    with torch.device("meta"):
        whole = AutoModelForCausalLM.from_config(configuration(f"shape:{model}"), dtype=dtype)
    plain: Any = next(each for each in whole.modules() if hasattr(each, "is_transposed")).requires_grad_(False)
    ours = copy.deepcopy(plain).to_empty(device="cpu")
    generator = torch.Generator().manual_seed(0)
    for parameter in ours.parameters():
        one = (torch.randn(parameter.shape[1:], generator=generator) * 0.02).to(dtype)
        for expert, weight in enumerate(parameter):
            weight.copy_(one.roll(expert, -1))
    plain.load_state_dict(ours.state_dict(), assign=True)
    plain.config._experts_implementation = "grouped_mm"
    use_products(ours, isa)
    config, numbers = plain.config, sum(each[0].numel() for each in ours.parameters())
    return Experts(ours, plain, config.hidden_size, plain.num_experts, config.num_experts_per_tok, numbers)


@torch.no_grad()
def measure_rows(machine: ProductRates, experts: Experts, rows: int, seconds: float) -> Row:
    """Time both for `rows` tokens, in turn."""
    generator = torch.Generator().manual_seed(rows)
    dtype, threads = next(experts.ours.parameters()).dtype, machine.kernels.team().threads
    inputs = []
    for _ in range(SETS):
        hidden = torch.randn(rows, experts.hidden, generator=generator).to(dtype)
        scores, chosen = torch.rand(rows, experts.experts, generator=generator).topk(experts.chosen)
        inputs.append((hidden, chosen, scores.softmax(-1).to(dtype)))
    ours, theirs = list[float](), list[float]()
    end = perf_counter() + seconds
    while len(ours) < 2 * SETS or perf_counter() < end:
        given = inputs[len(ours) % SETS]
        ours.append(timed(threads, experts.ours, *given))
        theirs.append(timed(threads, experts.grouped_mm, *given))
        if len(ours) % SETS == 0:
            machine.measure()
    hit = sum(len(chosen.unique()) for _, chosen, _ in inputs) / SETS
    size = hit * experts.numbers * dtype.itemsize
    flops = 2.0 * rows * experts.chosen * experts.numbers
    floor = max(size / machine.bytes_per_second, flops / fastest(machine.peaks, dtype))
    return {
        "rows": rows, "experts_hit": hit, "milliseconds": median(ours) * 1e3, "best_milliseconds": min(ours) * 1e3,
        "grouped_mm_milliseconds": median(theirs) * 1e3, "gbytes": size / min(ours) / 1e9, "gflops": flops / min(ours) / 1e9,
        "peak_gbytes": machine.bytes_per_second / 1e9, "peak_gflops": fastest(machine.peaks, dtype) / 1e9,
        "ratio_to_grouped_mm": median(theirs) / median(ours), "of_floor": floor / min(ours),
        "max_abs_alone": largest_difference(experts.ours, *inputs[0]),
    }  # fmt: skip


def largest_difference(module: nn.Module, hidden: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> float:
    """Return the largest difference between rows computed together and alone."""
    crowd = module(hidden, chosen, weights).double()
    rows = torch.linspace(0, len(hidden) - 1, min(ALONE, len(hidden))).long().tolist()
    alone = [module(hidden[r : r + 1], chosen[r : r + 1], weights[r : r + 1]).double() for r in rows]
    return max(float((each[0] - crowd[r]).abs().max()) for r, each in zip(rows, alone, strict=True))
