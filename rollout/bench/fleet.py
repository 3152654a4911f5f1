"""`rollout bench fleet`: what a front costs, and how long a death lasts.

ratio_to_one           tokens/s of `fanout` on N replicas, over those of one service with the threads of all; taken in turn
front_core_fraction    of a core that the front takes at 1,000 samples/s of a tiny model: its CPU seconds for each 1,000 samples
                       of 4 tokens, in groups of 32; front_core_fractions has it for groups of 8 and 16 as well
takeover_seconds       from SIGKILL of a replica until all that ran there was given to others
takeover_token_seconds until each child has a token that is new, or has ended
"""

from __future__ import annotations

import math
import os
import signal
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import psutil

from engine.config import EngineConfig
from engine.types import Sampling
from rollout.bench.errors import BenchFailed
from rollout.bench.inputs import save_tiny
from rollout.bench.workloads import Workload, find
from rollout.client.api import RolloutClient
from rollout.config import Config, FleetConfig
from rollout.process import RunningService, service_process

NAME = "fleet"
WAIT_S = 600.0
SHORT_SIZES = (8, 16, 32)
"""children of a group, of few tokens each"""
SHORT_TOKENS = 4
SHORT_SAMPLES = 12_800
"""of each size, not scaled: the kernel counts CPU time in steps of 10 ms"""
LONG = Sampling(n=4, max_tokens=512, ignore_eos=True, stream_every=1)
"""of groups that lose their replica, and are ended when they run elsewhere"""
LOOK_S = 0.005
TINY_VOCAB = 259


def measure(folder: Path, engine: EngineConfig, scale: float, repeat: int, replicas: int) -> Iterator[dict[str, Any]]:
    """Yield one row: a summary. Raises BenchFailed where a part did not do its work."""
    workload = find("fanout").scaled(scale, engine.block_size)
    cores = len(os.sched_getaffinity(0))
    threads = engine.threads or max(1, cores // replicas)
    served = msgspec.structs.replace(
        engine, model=str(folder), kv_tokens=workload.kv_tokens(engine.block_size), threads=threads
    )
    with ExitStack() as stack:
        whole = msgspec.structs.replace(served, threads=threads * replicas)
        one = stack.enter_context(connected(Config(engine=whole)))[1]
        front, many = stack.enter_context(connected(fleet_of(served, replicas)))
        ratios, speeds = [], []
        for run in range(repeat + 1):  # the first one warms up
            alone, together = (tokens_per_second(client, workload, run) for client in (one, many))
            if run:
                ratios.append(together / alone)
                speeds.append(together)
        takeovers = [takeover(many, workload, run) for run in range(repeat)]
    with tempfile.TemporaryDirectory(prefix="rollout-bench-") as temporary:
        fractions = front_core_fractions(save_tiny(Path(temporary), 32, TINY_VOCAB, "float32"), replicas)
    yield {
        "workload": NAME,
        "summary": True,
        "replicas": replicas,
        "threads": threads,
        "cores": cores,
        "repeat": repeat,
        "tokens_per_second": round(statistics.median(speeds), 1),
        "ratio_to_one": round(statistics.median(ratios), 3),
        "front_core_fraction": round(fractions[max(SHORT_SIZES)], 4),
        "front_core_fractions": {str(n): round(fraction, 4) for n, fraction in fractions.items()},
        "takeover_seconds": round(max(moved for moved, _ in takeovers), 3),
        "takeover_token_seconds": round(max(token for _, token in takeovers), 3),
    }


@contextmanager
def connected(config: Config) -> Iterator[tuple[RunningService, RolloutClient]]:
    """Run a service, or a front, as a process."""
    with service_process(config) as service, RolloutClient(service.endpoint, connect_timeout_s=60.0) as client:
        yield service, client


def fleet_of(engine: EngineConfig, replicas: int) -> Config:
    return Config(engine=engine, fleet=FleetConfig(replicas=replicas))


def prompts_of(workload: Workload, seed: int, vocab_size: int) -> list[np.ndarray]:
    """Draw prompts that no run has had: the prefix cache must not help one of the two."""
    rng = np.random.default_rng(seed)
    return [rng.integers(3, vocab_size, workload.prompt_tokens).astype(np.int32) for _ in range(workload.prompts)]


def tokens_per_second(client: RolloutClient, workload: Workload, run: int) -> float:
    """Sample all groups of a workload. Raises BenchFailed for children that are not whole."""
    sampling = Sampling(n=workload.n, max_tokens=workload.new_tokens, ignore_eos=True, seed=run)
    started = time.perf_counter()
    samples = list(client.generate(prompts_of(workload, run, client.info.vocab_size), sampling, timeout=WAIT_S))
    seconds = time.perf_counter() - started
    if any(sample.finish_reason != "length" for sample in samples):
        raise BenchFailed(f"children ended as {sorted({sample.finish_reason for sample in samples})}")
    return len(samples) * workload.new_tokens / seconds


def takeover(client: RolloutClient, workload: Workload, run: int) -> tuple[float, float]:
    """Kill a replica that has work. Returns seconds until all that ran there is somebody else's, and until each child has a new
    token or has ended. Raises BenchFailed for a child that is lost."""
    wait_for(client, lambda status: status["fleet"]["serving"] == status["fleet"]["replicas"])
    sampling = msgspec.structs.replace(LONG, seed=run)
    prompts = prompts_of(workload, 1000 + run, client.info.vocab_size)
    handles = [client.submit(prompt, sampling) for prompt in prompts]
    heard: dict[tuple[str, int], float] = {}
    for handle in handles:
        handle.on_tokens(lambda handle, chunk: heard.__setitem__((handle.group_id, chunk.index), time.perf_counter()))
        handle.listen(lambda handle, sample: heard.__setitem__((handle.group_id, sample.index if sample else -1), math.inf))
    everybody = len(handles) * sampling.n
    status = wait_for(client, lambda status: all(one["parts"] for one in status["replicas"]) and len(heard) >= everybody)
    moved, victim = status["fleet"]["moved"], status["replicas"][0]
    started = time.perf_counter()
    os.kill(victim["pid"], signal.SIGKILL)
    wait_for(client, lambda status: status["fleet"]["moved"] > moved and not status["fleet"]["waiting"])
    given = time.perf_counter()  # what comes from here on does not come of the one that was killed
    wait_for(client, lambda _: min(heard.values()) > given)
    token = time.perf_counter()
    for handle in handles:
        handle.cancel()
    if any(sample.finish_reason == "error" for handle in handles for sample in handle.result(WAIT_S)):
        raise BenchFailed("a child was lost with its replica")
    return given - started, token - started


def front_core_fractions(model: Path, replicas: int) -> dict[int, float]:
    """Return the CPU seconds of the front for each 1,000 samples of a tiny model, by the size of the groups."""
    engine = EngineConfig(model=str(model), dtype="float32", kv_tokens=65_536, cpu_offload_gib=0, threads=1)
    fractions = {}
    with connected(fleet_of(engine, replicas)) as (front, client):
        process = psutil.Process(front.pid)
        for n in SHORT_SIZES:
            sampling = Sampling(n=n, max_tokens=SHORT_TOKENS, ignore_eos=True)
            rng = np.random.default_rng(n)
            prompts = [rng.integers(3, TINY_VOCAB, 16).astype(np.int32) for _ in range(SHORT_SAMPLES // n)]
            list(client.generate(prompts[:8], sampling, timeout=WAIT_S))
            before = process.cpu_times()
            count = len(list(client.generate(prompts, sampling, timeout=WAIT_S)))
            after = process.cpu_times()
            fractions[n] = float(after.user + after.system - before.user - before.system) * 1000 / count
    return fractions


def wait_for(client: RolloutClient, condition: Any) -> dict[str, Any]:
    """Look at the status until it is so. Raises BenchFailed after WAIT_S."""
    deadline = time.monotonic() + WAIT_S
    while not condition(status := client.status(timeout=WAIT_S)):
        if time.monotonic() > deadline:
            raise BenchFailed("the fleet did not come to where it was expected")
        time.sleep(LOOK_S)
    return status
