"""`python -m tests.bench fleet`: the cost of the router, and the time to recover from the loss of a replica.

ratio_to_one           tokens/s of `fanout` on N replicas, over those of one service with as many threads; in turn
router_core_fraction   fraction of a core that the router uses at 1,000 samples/s of a tiny model: CPU seconds per 1,000 samples
                       of 4 tokens in groups of 32; `router_core_fractions` also has groups of 8 and 16
takeover_seconds       from SIGKILL of a replica until its samples run on other replicas
takeover_token_seconds from SIGKILL until each of them has a new token or has finished
"""

from __future__ import annotations

import math
import os
import signal
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import psutil

from rollout.bench.harness import BenchFailed, BenchSetup, Row
from rollout.bench.inputs import RandomText, save_tiny
from rollout.bench.target import connected
from rollout.bench.workloads import Workload, find
from rollout.client.api import RolloutClient
from rollout.config import Config, FleetConfig
from rollout.engine.config import EngineConfig
from rollout.engine.values import Sampling
from tests.bench.options import options_of

WAIT_S = 600.0
SHORT_SIZES = (8, 16, 32)
"""children of the groups that measure the router"""
SHORT_TOKENS = 4
SHORT_SAMPLES = 12_800
"""per size, not scaled: the kernel counts CPU time in steps of 10 ms"""
LONG = Sampling(n=4, max_tokens=512, ignore_eos=True, stream_every=1)
"""groups that lose their replica; cancelled once they run on another one"""
LOOK_S = 0.005
TINY_VOCAB = 259


def measure(setup: BenchSetup) -> Iterator[Row]:
    """Yield the summary. Raises BenchFailed if a sample is lost."""
    engine, replicas = setup.config(), options_of(setup).replicas
    workload = find("fanout").scaled(setup.scale, engine.block_tokens)
    cores = len(os.sched_getaffinity(0))
    threads = engine.threads or max(1, cores // replicas)
    served = msgspec.structs.replace(engine, kv_tokens=workload.kv_tokens(engine.block_tokens), threads=threads)
    with ExitStack() as stack:
        whole = msgspec.structs.replace(served, threads=threads * replicas)
        one = stack.enter_context(connected(Config(engine=whole)))[1]
        many = stack.enter_context(connected(fleet_of(served, replicas)))[1]
        ratios, speeds = [], []
        for run in range(setup.repeat + 1):  # the first run warms up
            alone, together = (tokens_per_second(client, workload, run) for client in (one, many))
            if run:
                ratios.append(together / alone)
                speeds.append(together)
        takeovers = [takeover(many, workload, run) for run in range(setup.repeat)]
    with tempfile.TemporaryDirectory(prefix="rollout-bench-") as temporary:
        fractions = router_core_fractions(save_tiny(Path(temporary), 32, TINY_VOCAB, "float32"), replicas)
    yield {
        "summary": True,
        "replicas": replicas,
        "threads": threads,
        "cores": cores,
        "repeat": setup.repeat,
        "tokens_per_second": statistics.median(speeds),
        "ratio_to_one": statistics.median(ratios),
        "router_core_fraction": fractions[max(SHORT_SIZES)],
        "router_core_fractions": {str(n): round(fraction, 4) for n, fraction in fractions.items()},
        "takeover_seconds": max(moved for moved, _ in takeovers),
        "takeover_token_seconds": max(token for _, token in takeovers),
    }


def fleet_of(engine: EngineConfig, replicas: int) -> Config:
    return Config(engine=engine, fleet=FleetConfig(replicas=replicas))


def prompts_of(client: RolloutClient, workload: Workload, seed: int) -> list[np.ndarray]:
    """Draw prompts that no run has had, so that no prefix cache has them."""
    return RandomText(client.info.vocab_size).slices(seed, workload.prompts, workload.prompt_tokens)


def tokens_per_second(client: RolloutClient, workload: Workload, run: int) -> float:
    """Run all groups of a workload. Raises BenchFailed for incomplete samples."""
    sampling = Sampling(n=workload.n, max_tokens=workload.new_tokens, ignore_eos=True, seed=run)
    started = time.perf_counter()
    samples = list(client.generate(prompts_of(client, workload, run), sampling, timeout=WAIT_S))
    seconds = time.perf_counter() - started
    if any(sample.finish_reason != "length" for sample in samples):
        raise BenchFailed(f"samples ended as {sorted({sample.finish_reason for sample in samples})}")
    return len(samples) * workload.new_tokens / seconds


def takeover(client: RolloutClient, workload: Workload, run: int) -> tuple[float, float]:
    """Kill a replica that runs groups. Returns the seconds until its samples run elsewhere, and until each sample has a new
    token or has finished. Raises BenchFailed for a lost sample."""
    wait_for(client, lambda status: status["fleet"]["serving"] == status["fleet"]["replicas"])
    sampling = msgspec.structs.replace(LONG, seed=run)
    handles = [client.submit(prompt, sampling) for prompt in prompts_of(client, workload, 1000 + run)]
    progress: dict[tuple[str, int], float] = {}
    for handle in handles:
        handle.on_tokens(lambda handle, chunk: progress.__setitem__((handle.group_id, chunk.index), time.perf_counter()))
        handle.listen(lambda handle, sample: progress.__setitem__((handle.group_id, sample.index if sample else -1), math.inf))
    count = len(handles) * sampling.n
    status = wait_for(client, lambda status: all(one["parts"] for one in status["replicas"]) and len(progress) >= count)
    moved, victim = status["fleet"]["moved"], status["replicas"][0]
    started = time.perf_counter()
    os.kill(victim["pid"], signal.SIGKILL)
    wait_for(client, lambda status: status["fleet"]["moved"] > moved and not status["fleet"]["waiting"])
    given = time.perf_counter()  # no later token comes from the killed replica
    wait_for(client, lambda _: min(progress.values()) > given)
    token = time.perf_counter()
    for handle in handles:
        handle.cancel()
    if any(sample.finish_reason == "error" for handle in handles for sample in handle.result(WAIT_S)):
        raise BenchFailed("a sample was lost with its replica")
    return given - started, token - started


def router_core_fractions(model: Path, replicas: int) -> dict[int, float]:
    """Return the router's CPU seconds per 1,000 samples of a tiny model, by the size of the groups."""
    engine = EngineConfig(model=str(model), dtype="float32", kv_tokens=65_536, cpu_offload_gib=0, threads=1)
    fractions = {}
    with connected(fleet_of(engine, replicas)) as (router, client):
        process = psutil.Process(router.pid)
        for n in SHORT_SIZES:
            sampling = Sampling(n=n, max_tokens=SHORT_TOKENS, ignore_eos=True)
            prompts = RandomText(TINY_VOCAB).slices(n, SHORT_SAMPLES // n, 16)
            list(client.generate(prompts[:8], sampling, timeout=WAIT_S))
            before = process.cpu_times()
            count = len(list(client.generate(prompts, sampling, timeout=WAIT_S)))
            after = process.cpu_times()
            fractions[n] = float(after.user + after.system - before.user - before.system) * 1000 / count
    return fractions


def wait_for(client: RolloutClient, condition: Any) -> dict[str, Any]:
    """Poll the status until the condition holds. Raises BenchFailed after WAIT_S."""
    deadline = time.monotonic() + WAIT_S
    while not condition(status := client.status(timeout=WAIT_S)):
        if time.monotonic() > deadline:
            raise BenchFailed(f"the fleet did not reach the expected state within {WAIT_S:.0f} s")
        time.sleep(LOOK_S)
    return status
