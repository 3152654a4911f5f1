"""`python -m tests.bench batch_invariance`: whether a group samples the same in batches of any size, and what that costs.

    batch of  1   [needle]
              4   [ .  .  needle  . ]          the other prompts have lengths, texts and seeds of their own
             32   [ .  .  .  …  needle  …  . ]

A needle group runs alone and in larger batches, at a place drawn at random, without the prefix cache. `differences` counts the
batches in which one of its tokens or a bit of its log-probs differs from those alone.

On CUDA the batches run with `exact`, then without: `ratio` is the speed with it to that without it. A CPU has only one
mode, in which samples never depend on the batch (docs/decisions/same-numbers.md); nothing could be switched off to be faster.
Idea: vLLM's benchmark_batch_invariance.py (vllm-project/vllm, change 28161).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from rollout.bench.harness import BenchFailed, BenchSetup, Row
from rollout.bench.inputs import PromptSource, lognormal
from rollout.bench.target import Target
from rollout.config import Config
from rollout.engine.values import Sample, Sampling
from rollout.engine.values.arithmetic import Arithmetic

SIZES = (1, 2, 4, 8, 32, 128)
"""groups of a batch, the needle included"""
N, NEEDLE_TOKENS, LONGEST, NEW_TOKENS = 2, 256, 512, 64
SEED = 0
"""of the needle; the others have larger ones"""


class Batches(NamedTuple):
    """Lengths and text of the prompts."""

    needle: int
    longest: int
    new: int
    text: PromptSource

    def prompts(self, size: int, number: int) -> tuple[list[np.ndarray], list[Sampling]]:
        """Return the groups of a batch. number: of the batch; each has other texts beside the needle's, and another place of
        the needle."""
        lengths = lognormal(size - 1, max(1, self.longest // 2), self.longest, number)
        others = self.text.slices((number + 1) * 1000 * self.longest, size - 1, self.longest)
        prompts = [prompt[:length] for prompt, length in zip(others, lengths.tolist(), strict=True)]
        at = int(np.random.default_rng(number).integers(size))
        prompts.insert(at, self.text.slices(0, 1, self.needle)[0])
        seeds = [*range(SEED + 1, SEED + size)]
        seeds.insert(at, SEED)
        return prompts, [Sampling(n=N, max_tokens=self.new, ignore_eos=True, seed=seed) for seed in seeds]


def measure(setup: BenchSetup) -> Iterator[Row]:
    """Yield a row per batch and mode, then the summary. Raises BenchFailed if the needle differs between batches although the
    arithmetic promises that it does not."""
    needle, longest, new = (setup.scaled(tokens, 8) for tokens in (NEEDLE_TOKENS, LONGEST, NEW_TOKENS))
    batches = Batches(needle, longest, new, setup.text)
    modes = [True, False] if setup.options.device != "cpu" else [False]  # `EngineConfig.exact`, which is for CUDA
    results = {exact: list[Row]() for exact in modes}
    status: dict[bool, dict[str, Any]] = {}
    room = max(SIZES) * (max(batches.needle, batches.longest) + N * (batches.new + 64))
    for exact in modes:
        engine = setup.config(exact=exact, kv_tokens=room, cpu_offload_gib=0, prefix_cache=False)
        with setup.open_target(Config(engine=engine)) as target:
            for row in run_batches(target, batches, setup.repeat):
                results[exact].append({"exact": exact or len(modes) == 1, **row})
                yield results[exact][-1]
            status[exact] = target.status()
    yield summarise(results, status)


def run_batches(target: Target, batches: Batches, repeat: int) -> Iterator[Row]:
    """Run the batches of all sizes, `repeat` times, after a run of the largest that is not counted."""
    count = repeat * len(SIZES)
    list(target.generate(*batches.prompts(max(SIZES), count)))
    alone: list[bytes] | None = None
    for number in range(count):
        size = SIZES[number % len(SIZES)]
        prompts, samplings = batches.prompts(size, number)
        started = time.perf_counter()
        samples = list(target.generate(prompts, samplings))
        seconds = time.perf_counter() - started
        tokens = sum(len(sample.token_ids) for sample in samples)
        if tokens != size * N * batches.new:
            raise BenchFailed(f"{tokens} of {size * N * batches.new} tokens arrived, so the time means nothing")
        found = bits_of(samples)
        alone = found if alone is None else alone
        yield {
            "groups": size,
            "tokens": tokens,
            "seconds": seconds,
            "tokens_per_second": tokens / seconds,
            "differs": found != alone,
        }


def bits_of(samples: list[Sample]) -> list[bytes]:
    """Return tokens and log-probs of the needle's children, by index."""
    needle = sorted((sample for sample in samples if sample.seed == SEED), key=lambda sample: sample.index)
    assert len(needle) == N
    return [sample.token_ids.tobytes() + sample.logprobs.tobytes() for sample in needle]


def summarise(results: dict[bool, list[Row]], status: dict[bool, dict[str, Any]]) -> Row:
    """Raises BenchFailed as `measure` does."""
    exact = max(results)  # True where both modes ran
    speed = {mode: sum(row["tokens"] for row in rows) / sum(row["seconds"] for row in rows) for mode, rows in results.items()}
    differ = {mode: sum(row["differs"] for row in rows) for mode, rows in results.items()}
    arithmetic = status[exact]["arithmetic"]
    if differ[exact] and not Arithmetic.parse(arithmetic).by_batch:
        raise BenchFailed(f"the needle differs in {differ[exact]} of {len(results[exact])} batches with {arithmetic}")
    largest = [row["tokens_per_second"] for row in results[exact] if row["groups"] == max(SIZES)]
    plain = {
        "not_exact_tokens_per_second": speed[False],
        "not_exact_differences": differ[False],
        "not_exact_arithmetic": status[False]["arithmetic"],
        "ratio": speed[True] / speed[False],
    } if exact else {}  # fmt: skip
    return {
        "summary": True,
        "tokens_per_second": speed[exact],
        "largest_batch_tokens_per_second": statistics.median(largest),
        "differences": differ[exact],
        "batches": len(results[exact]),
        **plain,
        **{name: status[exact][name] for name in ("model", "arithmetic", "attention", "dtype", "batch_invariant")},
    }
