"""Runs a workload. Figures are differences of the engine's counters; every run's samples are checked."""

from __future__ import annotations

import os
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import msgspec
import numpy as np

from rollout.bench.against import Peer, peer
from rollout.bench.harness import BenchFailed, Row
from rollout.bench.inputs import PromptSource
from rollout.bench.target import OpenTarget, Target
from rollout.bench.workloads import Workload
from rollout.config import Config
from rollout.engine.config import EngineConfig
from rollout.engine.forward.shapes import is_random
from rollout.engine.values import Sample, Sampling

COUNTERS = (
    "prefill_tokens", "recomputed_tokens", "prefix_hit_tokens", "fork_saved_tokens", "offloads", "offloaded_blocks",
    "restored_blocks", "drafted_tokens", "accepted_tokens", "bytes_to_host", "bytes_to_device", "move_seconds",
    "recompute_preemptions", "steps",
)  # fmt: skip


def measure(
    workload: Workload,
    text: PromptSource,
    engine: EngineConfig,
    open_target: OpenTarget,
    repeat: int,
    *,
    compare: bool = False,
    unshared: bool = False,
    undrafted: bool = False,
    against: dict[str, str] | None = None,
    floor: Callable[[Workload, Row], Row] | None = None,
) -> Iterator[Row]:
    """Start a target, warm it up, and yield a row per run, then the summary. Raises BenchFailed, ValueError.

    compare, unshared, undrafted: variants of the engine that run in turn with it (`variants`). The summary has the median of
        the ratios of each turn.
    against: other engines (name -> interpreter) that also run in turn. Their ratios are in `ratios` of the summary.
    floor: adds the bound of this machine to the summary (`MachineRates.bounded`)."""
    if repeat < 1:
        raise ValueError(f"repeat={repeat}: must be at least 1")
    configs = variants(workload, engine, compare, unshared, undrafted)
    runs: dict[str, list[Row]] = {variant: [] for variant in configs}
    with ExitStack() as stack:
        targets = {variant: stack.enter_context(open_target(Config(engine=config))) for variant, config in configs.items()}
        for target in targets.values():
            warm_up(target, text, min(64, workload.prompt_tokens))
        setup = peer_setup(workload, configs[""])
        peers = [stack.enter_context(peer(name, python, setup)) for name, python in (against or {}).items()]
        for one in peers:
            one.run(*peer_run_arguments(workload, text, 0, new_tokens=min(8, workload.new_tokens)))
        theirs: dict[str, list[Row]] = {one.name: [] for one in peers}
        for run in range(repeat):
            for variant, target in targets.items():
                named = msgspec.structs.replace(workload, name=workload.name + variant)
                runs[variant].append(one_run(named, text, target, run))
                yield runs[variant][-1]
            for one in peers:
                theirs[one.name].append(peer_run(workload, text, one, run))
                yield theirs[one.name][-1]
        summary = summarise(workload, configs[""], targets[""], runs[""]) | ratios(runs)
    if theirs:
        summary["ratios"] = {name: ratio(runs[""], rows) for name, rows in theirs.items()}
        summary["peers"] = {one.name: one.version for one in peers}
    yield summary if floor is None else floor(workload, summary)


def tight_engine(workload: Workload, engine: EngineConfig) -> EngineConfig:
    return msgspec.structs.replace(engine, kv_tokens=workload.kv_tokens(engine.block_tokens))


def variants(
    workload: Workload, engine: EngineConfig, compare: bool, unshared: bool, undrafted: bool = False
) -> dict[str, EngineConfig]:
    """Return the configuration of a workload under "", and those of its variants by the suffix of their name.

    compare: a workload with a small KV pool also runs with a large one, and without offload. unshared: attention reads a shared
    prefix once per child. undrafted: no drafts. An engine of several ranks also runs as one, with all their threads."""
    own = tight_engine(workload, engine)
    configs = {"": own}
    if compare and workload.tight:
        configs["/roomy"] = tight_engine(workload.roomy(), engine)
        configs["/no_offload"] = msgspec.structs.replace(own, cpu_offload_gib=0)
    if unshared:
        unshared_prefix = msgspec.structs.replace(own.advanced, share_prefix=False)
        configs["/unshared"] = msgspec.structs.replace(own, advanced=unshared_prefix)
    if own.tp > 1:
        threads = None if own.threads is None else own.threads * own.tp
        configs["/one"] = msgspec.structs.replace(own, tp=1, threads=threads)
    if undrafted:
        configs["/undrafted"] = msgspec.structs.replace(own, drafts=0)
    return configs


def peer_setup(workload: Workload, engine: EngineConfig) -> dict[str, Any]:
    """Return the setup of a peer: the same model, precision, device and memory."""
    return {
        "model": engine.model,
        "random_weights": is_random(engine.model),
        "dtype": engine.dtype,
        "device": engine.device,
        "threads": engine.threads or len(os.sched_getaffinity(0)),
        "kv_tokens": engine.kv_tokens if workload.tight else None,
        "block_size": engine.block_tokens,
        "max_num_seqs": engine.most_seqs,
        "context": workload.tokens + engine.block_tokens,
        "prompts": workload.prompts,
        "prompt_tokens": workload.prompt_tokens,
        "n": workload.n,
    }


def prompts_of(workload: Workload, text: PromptSource, run: int) -> list[np.ndarray]:
    """Return the prompts of a run, each [tokens] int32."""
    start = run * workload.prompts * workload.prompt_tokens
    slices = text.slices(start, workload.prompts, workload.prompt_tokens)
    return [ids[:length] for ids, length in zip(slices, workload.lengths()[0].tolist(), strict=True)]


def peer_run_arguments(
    workload: Workload, text: PromptSource, run: int, new_tokens: int | list[int]
) -> tuple[list[np.ndarray], int, int | list[int], int]:
    """Return the arguments of `Peer.run`. new_tokens: of every child, or of the children of each prompt."""
    return prompts_of(workload, text, run), workload.n, new_tokens, run


def peer_run(workload: Workload, text: PromptSource, one: Peer, run: int, limit_s: float | None = None) -> Row:
    """Run a workload in a peer. Raises PeerFailed, or BenchFailed if the peer generated fewer tokens than requested."""
    new_tokens = workload.lengths()[1].tolist() if workload.mixed else workload.new_tokens
    row = one.run(*peer_run_arguments(workload, text, run, new_tokens), limit_s=limit_s)
    if row["generated_tokens"] != workload.total_new_tokens:
        raise BenchFailed(f"{one.name} made {row['generated_tokens']} tokens of {workload.name}")
    speed = row["generated_tokens"] / row["seconds"]
    return {"workload": workload.name, "engine": one.name, "run": run, **row, "tokens_per_second": speed}


def ratio(ours: list[Row], others: list[Row], name: str = "tokens_per_second") -> float:
    """Return the median over the turns of a figure of ours over that of the other."""
    return float(statistics.median(a[name] / b[name] for a, b in zip(ours, others, strict=True)))


def ratios(runs: dict[str, list[Row]]) -> dict[str, float]:
    """Return, for each variant, its speed and the ratio of the engine's own speed to it."""
    figures = {}
    for variant in runs.keys() - {""}:
        name, theirs = variant.removeprefix("/"), runs[variant]
        figures[f"{name}_tokens_per_second"] = statistics.median(run["tokens_per_second"] for run in theirs)
        figures[f"ratio_to_{name}"] = ratio(runs[""], theirs)
        if all(run["decode_tokens_per_second"] for run in theirs):
            figures[f"decode_ratio_to_{name}"] = ratio(runs[""], theirs, "decode_tokens_per_second")
    return figures


def warm_up(target: Target, text: PromptSource, length: int) -> None:
    """Run a small group, so that no run includes first allocations and compilations. Its prompt comes before that
    of the first run."""
    prompts = text.slices(-length, 1, length)
    for _ in target.generate(prompts, Sampling(n=2, max_tokens=8, ignore_eos=True)):
        pass


def one_run(workload: Workload, text: PromptSource, target: Target, run: int) -> Row:
    """Run a workload once, with prompts of its own, and return the figures. Raises BenchFailed."""
    prompts, sampling = prompts_of(workload, text, run), sampling_of(workload, run)
    before = target.status()
    started = time.perf_counter()
    samples = list(target.generate(prompts, sampling))
    seconds = time.perf_counter() - started
    after = target.status()
    check(workload, samples)
    generated = sum(len(sample.token_ids) for sample in samples)
    return {
        "workload": workload.name,
        "engine": target.name,
        "run": run,
        "seconds": seconds,
        "generated_tokens": generated,
        "tokens_per_second": generated / seconds,
        **{name: after[name] - before[name] for name in COUNTERS},
        "peak_rss_bytes": target.peak_rss_bytes(),
        "decode_tokens_per_second": decode_speed(before, after),
    }


def sampling_of(workload: Workload, run: int) -> Sampling | list[Sampling]:
    """Return the sampling of a run: one for all prompts, or one for each if their outputs have different lengths."""
    each = Sampling(n=workload.n, max_tokens=workload.new_tokens, temperature=workload.temperature, ignore_eos=True, seed=run)
    if not workload.mixed:
        return each
    return [msgspec.structs.replace(each, max_tokens=length) for length in workload.lengths()[1].tolist()]


def decode_speed(before: dict[str, Any], after: dict[str, Any]) -> float:
    """Return the tokens/s of steps that only decoded; 0 without any."""
    seconds = after["decode_seconds"] - before["decode_seconds"]
    return float(after["decode_tokens"] - before["decode_tokens"]) / seconds if seconds > 0 else 0.0


def check(workload: Workload, samples: list[Sample]) -> None:
    """Check that every child has arrived, complete. Raises BenchFailed."""
    errors = {sample.error for sample in samples if sample.finish_reason == "error"}
    if errors:
        raise BenchFailed(f"{workload.name}: samples ended in an error: {errors.pop()}")
    children = {(sample.group_id, sample.index) for sample in samples}
    if len(samples) != workload.prompts * workload.n or len(children) != len(samples):
        raise BenchFailed(f"{workload.name}: {len(children)} different samples of {workload.prompts * workload.n} arrived")
    made = Counter(len(sample.token_ids) for sample in samples)
    wanted = Counter(np.repeat(workload.lengths()[1], workload.n).tolist())
    if made != wanted:
        got, meant = (next(iter(each.keys())) for each in (made - wanted, wanted - made))
        raise BenchFailed(f"{workload.name}: a sample has {got} tokens instead of {meant}")
    if any(len(sample.logprobs) != len(sample.token_ids) for sample in samples):
        raise BenchFailed(f"{workload.name}: a sample lacks log-probs")


def summarise(workload: Workload, engine: EngineConfig, target: Target, runs: list[Row]) -> Row:
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
        **{name: getattr(workload, name) for name in ("prompts", "prompt_tokens", "n", "new_tokens")},
        "kv_tokens": engine.kv_tokens,
        "kv_tokens_needed": workload.needed_kv_tokens(engine.block_tokens),
        **{name: getattr(engine, name) for name in ("model", "dtype", "threads")},
        **{name: target.status()[name] for name in ("attention", "arithmetic", "isa", "ranks")},
    }
