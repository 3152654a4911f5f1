"""`rollout bench train_step`: seconds of forward and backward of a training step, under `use_exact`'s arithmetic and in plain
torch, with every instruction set that this machine can show.

An instruction set is shown by a process of its own in which the libraries below torch may use no more (`SHOWN`). There the
three ways take turns on the same weights and tokens:

    exact   our attention and our products in engine.dtype, as `use_exact` gives them for this instruction set
    bf16    plain transformers in bf16
    fp32    plain transformers in fp32

`ratio_to_…` are medians over the turns of the other's seconds over exact's: above 1 exact is faster. With one thread the
process's own CPU time counts, so that the ratios hold on a busy machine too. `gradient_distance` is |g - g_fp32| / |g_fp32|
over all parameters, beside that of plain bf16.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import AutoModelForCausalLM

from engine.config import EngineConfig
from engine.cpu.backward import fast_in_bf16
from engine.cpu.isa import best, here
from engine.cpu.products import plain_products, use_products
from rollout.bench.errors import BenchFailed
from rollout.bench.inputs import PromptText
from rollout.exact import token_logprobs, use_exact_attention
from rollout.models import hide_progress_bars

NAME = "train_step"
ROWS, TOKENS = 4, 64
"""of a step"""
LIMITS = ("ONEDNN_MAX_CPU_ISA", "ATEN_CPU_CAPABILITY", "MKL_ENABLE_INSTRUCTIONS")
"""of oneDNN's bf16 products, torch's own loops, MKL's fp32 products"""
SHOWN = {
    "avx512_bf16": ("AVX512_CORE_BF16", "avx512", "AVX512"),
    "avx512": ("AVX512_CORE", "avx512", "AVX512"),
    "avx2": ("AVX2", "avx2", "AVX2"),
}
"""values of LIMITS that leave a process what a CPU with this instruction set has"""
WAYS = ("exact", "bf16", "fp32")


def shown() -> dict[str, dict[str, str]]:
    """Return the instruction sets that this machine can show, best first, and the environment of each: the best without
    limits."""
    lesser = [isa for isa in SHOWN if isa in here() and isa != best()]
    return {best(): {}} | {isa: dict(zip(LIMITS, SHOWN[isa], strict=True)) for isa in lesser}


class Step(NamedTuple):
    """What a process measures, as JSON on its standard input."""

    folder: str
    isa: str
    dtype: str
    """of exact"""
    block_size: int
    threads: int | None
    turns: int
    ids: list[list[int]]
    """[rows][tokens]"""


def measure(folder: Path, engine: EngineConfig, text: PromptText, scale: float, repeat: int) -> Iterator[dict[str, Any]]:
    """Yield a row a turn of each instruction set, and its summary. scale: factor on the tokens of a row, at least 8. Raises
    BenchFailed where a process ends without its summary."""
    length = max(8, round(TOKENS * scale))
    ids = [row.tolist() for row in text.slices(0, ROWS, length)]
    for isa, limits in shown().items():
        step = Step(str(folder), isa, engine.dtype, engine.block_size, engine.threads, repeat, ids)
        for row in run_apart(step, limits):
            yield row | {"environment": limits} if "summary" in row else row


def run_apart(step: Step, limits: dict[str, str]) -> Iterator[dict[str, Any]]:
    """Yield the rows of a process that has these limits. Raises BenchFailed."""
    environment = {key: value for key, value in os.environ.items() if key not in LIMITS} | limits
    command = [sys.executable, "-c", "from rollout.bench.train_step import main; main()"]
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
        raise BenchFailed(f"{NAME}: the process with {step.isa} ended with status {child.returncode}; standard error has why")


class Models:
    """The same weights in each dtype, and what a step of each way does with them."""

    def __init__(self, step: Step) -> None:
        self.step = step
        self.ids = torch.tensor(step.ids)
        narrow = AutoModelForCausalLM.from_pretrained(step.folder, dtype=torch.bfloat16).eval()
        wide = AutoModelForCausalLM.from_pretrained(step.folder, dtype=torch.bfloat16).eval().float()
        self.of = {"bf16": narrow, "fp32": wide, "exact": narrow if step.dtype == "bfloat16" else wide}

    def run(self, way: str) -> float:
        """Run forward and backward once, whose gradients are left in the parameters. Returns the seconds."""
        model = self.of[way]
        model.zero_grad()
        if way == "exact":
            plain_attention = use_exact_attention(model, self.step.block_size, self.step.threads, self.step.isa)
            use_products(model, self.step.isa)
        clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
        began = clock()
        logits = model(input_ids=self.ids, use_cache=False).logits
        token_logprobs(logits[:, :-1], self.ids[:, 1:]).mean().neg().backward()
        seconds = clock() - began
        if way == "exact":
            plain_products(model)
            plain_attention()
        return seconds

    def gradients(self, way: str) -> list[torch.Tensor]:
        """Return the gradients of one more step in fp32."""
        self.run(way)
        return [each.grad.float() for each in self.of[way].parameters() if each.grad is not None]


def measure_here(step: Step) -> Iterator[dict[str, Any]]:
    """Yield the rows of this process's instruction set."""
    hide_progress_bars()
    if step.threads is not None:
        torch.set_num_threads(step.threads)
    models = Models(step)
    wanted = models.gradients("fp32")
    far = {way: distance(models.gradients(way), wanted) for way in ("exact", "bf16")}  # and each way is warm
    turns = []
    for turn in range(step.turns):
        seconds = {way: models.run(way) for way in WAYS}
        turns.append(seconds)
        yield {"workload": NAME, "isa": step.isa, "turn": turn} | {f"{way}_seconds": round(seconds[way], 4) for way in WAYS}
    yield {
        "workload": NAME, "summary": True, "isa": step.isa,
        **{f"{way}_seconds": round(statistics.median(each[way] for each in turns), 4) for way in WAYS},
        **{f"ratio_to_{way}": round(statistics.median(t[way] / t["exact"] for t in turns), 4) for way in WAYS[1:]},
        "gradient_distance": far["exact"], "gradient_distance_bf16": far["bf16"], "fast_in_bf16": fast_in_bf16(),
        "turns": step.turns, "rows": len(step.ids), "tokens": models.ids.numel(), "threads": torch.get_num_threads(),
        "dtype": step.dtype, "model": step.folder,
    }  # fmt: skip


def distance(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> float:
    """Return |found - wanted| / |wanted| over all tensors."""
    pairs = zip(found, wanted, strict=True)
    squares = torch.tensor([[(a - b).square().sum(), b.square().sum()] for a, b in pairs]).sum(0)
    return round(float((squares[0] / squares[1]).sqrt()), 6)


def main() -> None:
    rows, sys.stdout = sys.stdout, sys.stderr  # rows alone go to standard output, whatever a library prints
    for row in measure_here(Step(**json.load(sys.stdin))):
        print(json.dumps(row), file=rows, flush=True)
