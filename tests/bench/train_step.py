"""`python -m tests.bench train_step`: seconds of forward and backward of a training step, with `use_exact` and in plain torch,
for every instruction set that this machine can emulate.

Each instruction set runs in a process of its own, whose environment restricts the libraries that torch uses (`EMULATED`). Three
variants run in turn on the same weights and tokens:

    exact   the service's attention and products in engine.dtype, as `use_exact` installs them for this instruction set
    bf16    plain transformers in bf16
    fp32    plain transformers in fp32

`ratio_to_…` are medians over the turns of that variant's seconds over those of exact: above 1, exact is faster. With one
thread, CPU time counts. `gradient_distance` is |g - g_fp32| / |g_fp32| over all parameters."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import NamedTuple

import torch

from rollout.bench.harness import BenchFailed, BenchSetup, Row
from rollout.engine.cpu.backward import fast_in_bf16
from rollout.engine.cpu.exact_modules import plain_products, use_products
from rollout.engine.cpu.isa import best, here
from rollout.engine.forward.random_weights import load_module
from rollout.engine.processes import interpreter
from rollout.exact import token_logprobs, use_exact_attention
from rollout.models import hide_progress_bars

ROWS, TOKENS = 4, 64
"""shape of a batch"""
LIMITS = ("ONEDNN_MAX_CPU_ISA", "ATEN_CPU_CAPABILITY", "MKL_ENABLE_INSTRUCTIONS")
"""variables that restrict oneDNN's bf16 products, torch's own loops, and MKL's fp32 products"""
EMULATED = {
    "avx512_bf16": ("AVX512_CORE_BF16", "avx512", "AVX512"),
    "avx512": ("AVX512_CORE", "avx512", "AVX512"),
    "avx2": ("AVX2", "avx2", "AVX2"),
}
"""values of LIMITS, by instruction set"""
VARIANTS = ("exact", "bf16", "fp32")


def emulated() -> dict[str, dict[str, str]]:
    """Return the instruction sets that this machine has, best first, with the environment that restricts a process to each."""
    lesser = [isa for isa in EMULATED if isa in here() and isa != best()]
    return {best(): {}} | {isa: dict(zip(LIMITS, EMULATED[isa], strict=True)) for isa in lesser}


class TrainingStep(NamedTuple):
    """Input of a measuring process, as JSON on its standard input."""

    folder: str
    isa: str
    dtype: str
    """of the variant exact"""
    block_size: int
    threads: int | None
    turns: int
    ids: list[list[int]]
    """[rows][tokens]"""


def measure(setup: BenchSetup) -> Iterator[Row]:
    """Yield a row per turn of each instruction set, and its summary. `--scale` multiplies the tokens of a row, at least 8.
    Raises BenchFailed if a process fails."""
    ids = [row.tolist() for row in setup.text.slices(0, ROWS, setup.scaled(TOKENS, 8))]
    engine = setup.config()
    for isa, limits in emulated().items():
        step = TrainingStep(engine.model, isa, engine.dtype, engine.block_tokens, engine.threads, setup.repeat, ids)
        for row in run_apart(step, limits):
            yield row | {"environment": limits} if "summary" in row else row


def run_apart(step: TrainingStep, limits: dict[str, str]) -> Iterator[Row]:
    """Yield the rows of a process with these variables. Raises BenchFailed."""
    environment = {key: value for key, value in os.environ.items() if key not in LIMITS} | limits
    command = [*interpreter(), "-c", "from tests.bench.train_step import main; main()"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment) as child:
        assert child.stdin is not None and child.stdout is not None
        try:
            with child.stdin:
                child.stdin.write(json.dumps(step._asdict()))
            yield from map(json.loads, child.stdout)
        except BaseException:
            child.kill()
            raise
    if child.returncode:
        raise BenchFailed(
            f"train_step: the process with {step.isa} ended with status {child.returncode}; standard error has why"
        )


class TrainedModels:
    """The same weights in each dtype."""

    def __init__(self, step: TrainingStep) -> None:
        self.step = step
        self.ids = torch.tensor(step.ids)
        narrow = load_module(step.folder, dtype=torch.bfloat16).eval()
        wide = load_module(step.folder, dtype=torch.bfloat16).eval().float()
        self.of = {"bf16": narrow, "fp32": wide, "exact": narrow if step.dtype == "bfloat16" else wide}

    def run(self, variant: str) -> float:
        """Run forward and backward once. The parameters have the gradients then. Returns the seconds."""
        model = self.of[variant]
        model.zero_grad()
        if variant == "exact":
            plain_attention = use_exact_attention(model, self.step.block_size, self.step.threads, self.step.isa)
            use_products(model, self.step.isa)
        clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
        began = clock()
        logits = model(input_ids=self.ids, use_cache=False).logits
        token_logprobs(logits[:, :-1], self.ids[:, 1:]).mean().neg().backward()
        seconds = clock() - began
        if variant == "exact":
            plain_products(model)
            plain_attention()
        return seconds

    def gradients(self, variant: str) -> list[torch.Tensor]:
        """Run once more and return the gradients in fp32."""
        self.run(variant)
        return [each.grad.float() for each in self.of[variant].parameters() if each.grad is not None]


def measure_here(step: TrainingStep) -> Iterator[Row]:
    """Yield the rows of this process's instruction set."""
    hide_progress_bars()
    if step.threads is not None:
        torch.set_num_threads(step.threads)
    models = TrainedModels(step)
    wanted = models.gradients("fp32")
    far = {each: distance(models.gradients(each), wanted) for each in ("exact", "bf16")}  # this also warms up
    turns = []
    for turn in range(step.turns):
        seconds = {each: models.run(each) for each in VARIANTS}
        turns.append(seconds)
        yield {"isa": step.isa, "turn": turn} | {f"{each}_seconds": seconds[each] for each in VARIANTS}
    yield {
        "summary": True, "isa": step.isa,
        **{f"{each}_seconds": statistics.median(seconds[each] for seconds in turns) for each in VARIANTS},
        **{f"ratio_to_{each}": statistics.median(t[each] / t["exact"] for t in turns) for each in VARIANTS[1:]},
        "gradient_distance": far["exact"], "gradient_distance_bf16": far["bf16"], "fast_in_bf16": fast_in_bf16(),
        "turns": step.turns, "rows": len(step.ids), "tokens": models.ids.numel(), "threads": torch.get_num_threads(),
        "dtype": step.dtype, "model": step.folder,
    }  # fmt: skip


def distance(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> float:
    """Return |found - wanted| / |wanted| over all tensors."""
    pairs = zip(found, wanted, strict=True)
    squares = torch.tensor([[(a - b).square().sum(), b.square().sum()] for a, b in pairs]).sum(0)
    return float((squares[0] / squares[1]).sqrt())


def main() -> None:
    rows, sys.stdout = sys.stdout, sys.stderr  # libraries may print; standard output has rows only
    for row in measure_here(TrainingStep(**json.load(sys.stdin))):
        print(json.dumps(row), file=rows, flush=True)
