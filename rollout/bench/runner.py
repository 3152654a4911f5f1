"""Run a workload and measure it. A run's figures are differences of the engine's counters, its checks are on the samples."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from typing import Any

import msgspec

from engine.config import EngineConfig
from engine.request import Sample, Sampling
from rollout.bench.target import OpenTarget, Target
from rollout.bench.text import PromptText
from rollout.bench.workloads import Workload
from rollout.config import Config

COUNTERS = ("prefill_tokens", "recomputed_tokens", "offloaded_blocks", "restored_blocks", "soft_resets")


class BenchFailed(RuntimeError):
    """A run did not do the work it was given, so its speed means nothing."""


def measure(workload: Workload, text: PromptText, engine: EngineConfig, open_target: OpenTarget, repeat: int) -> Iterator[dict]:
    """Starts a target, warms it up and yields one object a run, then the summary. Raises BenchFailed, ValueError."""
    if repeat < 1:
        raise ValueError(f"repeat={repeat}: must be at least 1")
    engine = msgspec.structs.replace(engine, kv_tokens=workload.kv_tokens(engine.block_size))
    with open_target(Config(engine=engine)) as target:
        warm_up(target, text, min(64, workload.prompt_tokens))
        runs = []
        for run in range(repeat):
            runs.append(one_run(workload, text, target, run))
            yield runs[-1]
        yield summarise(workload, engine, target, runs)


def warm_up(target: Target, text: PromptText, length: int) -> None:
    """A small group, so that no run pays for first allocations and compilations. Its prompt is the text's end, which no run
    starts with."""
    prompts = text.slices(len(text.ids) - length, 1, length)
    for _ in target.generate(prompts, Sampling(n=2, max_tokens=8, ignore_eos=True)):
        pass


def one_run(workload: Workload, text: PromptText, target: Target, run: int) -> dict[str, Any]:
    start = run * workload.prompts * workload.prompt_tokens
    prompts = text.slices(start, workload.prompts, workload.prompt_tokens)
    sampling = Sampling(n=workload.n, max_tokens=workload.new_tokens, temperature=1.0, ignore_eos=True, seed=run)
    before, samples, first = target.status(), [], 0.0
    started = time.perf_counter()
    for sample in target.generate(prompts, sampling):
        first = first or time.perf_counter() - started
        samples.append(sample)
    seconds = time.perf_counter() - started
    after = target.status()
    check(workload, samples)
    generated = sum(len(sample.token_ids) for sample in samples)
    return {
        "workload": workload.name,
        "engine": target.name,
        "run": run,
        "seconds": round(seconds, 4),
        "generated_tokens": generated,
        "tokens_per_second": round(generated / seconds, 2),
        **{name: after[name] - before[name] for name in COUNTERS},
        "peak_rss_bytes": target.peak_rss_bytes(),
        "first_sample_seconds": round(first, 4),
        "steps": after["steps"] - before["steps"],
        "fork_saved_tokens": after["fork_saved_tokens"] - before["fork_saved_tokens"],
        "prefix_hit_tokens": after["prefix_hit_tokens"] - before["prefix_hit_tokens"],
    }


def check(workload: Workload, samples: list[Sample]) -> None:
    """Every child came, whole. Raises BenchFailed."""
    errors = {sample.error for sample in samples if sample.finish_reason == "error"}
    if errors:
        raise BenchFailed(f"{workload.name}: samples ended in an error: {errors.pop()}")
    children = {(sample.group_id, sample.index) for sample in samples}
    if len(samples) != workload.prompts * workload.n or len(children) != len(samples):
        raise BenchFailed(f"{workload.name}: {len(children)} different samples of {workload.prompts * workload.n} came")
    short = [sample for sample in samples if len(sample.token_ids) != workload.new_tokens]
    if short:
        raise BenchFailed(f"{workload.name}: a sample has {len(short[0].token_ids)} tokens instead of {workload.new_tokens}")
    if any(len(sample.logprobs) != len(sample.token_ids) for sample in samples):
        raise BenchFailed(f"{workload.name}: a sample lacks log-probs")


def summarise(workload: Workload, engine: EngineConfig, target: Target, runs: list[dict[str, Any]]) -> dict[str, Any]:
    speeds = [run["tokens_per_second"] for run in runs]
    return {
        "workload": workload.name,
        "summary": True,
        "engine": target.name,
        "tokens_per_second": statistics.median(speeds),
        "tokens_per_second_min": min(speeds),
        "tokens_per_second_max": max(speeds),
        "seconds": statistics.median(run["seconds"] for run in runs),
        "runs": len(runs),
        **{name: statistics.median(run[name] for run in runs) for name in COUNTERS},
        "peak_rss_bytes": max(run["peak_rss_bytes"] for run in runs),
        "prompts": workload.prompts,
        "prompt_tokens": workload.prompt_tokens,
        "n": workload.n,
        "new_tokens": workload.new_tokens,
        "kv_tokens": engine.kv_tokens,
        "kv_tokens_needed": workload.needed_kv_tokens(engine.block_size),
        "model": engine.model,
        "dtype": engine.dtype,
        "threads": engine.threads,
        "attention": target.status()["attention"],
    }
