"""`rollout bench fleet`: what a front costs, and how long a death lasts.

ratio_to_one         tokens/s of `fanout` on N replicas, over those of one service with the threads of all; taken in turn
front_core_fraction  of a core that the front takes at 1,000 samples/s of a tiny model: its CPU seconds for each 1,000 samples
takeover_seconds     from SIGKILL of a replica until all that ran there runs elsewhere
"""

from __future__ import annotations

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
from rich.console import Console

from engine.config import EngineConfig
from engine.types import Sampling
from rollout.bench.runner import BenchFailed
from rollout.bench.workloads import Workload, find
from rollout.client.api import RolloutClient
from rollout.config import Config, FleetConfig
from rollout.process import RunningService, service_process

NAME = "fleet"
WAIT_S = 600.0
SHORT = Sampling(n=32, max_tokens=4, ignore_eos=True)
SHORT_GROUPS = 200
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
        fraction = front_core_fraction(tiny_model(Path(temporary)), replicas, max(8, int(SHORT_GROUPS * scale)))
    yield {
        "workload": NAME,
        "summary": True,
        "replicas": replicas,
        "threads": threads,
        "cores": cores,
        "repeat": repeat,
        "tokens_per_second": round(statistics.median(speeds), 1),
        "ratio_to_one": round(statistics.median(ratios), 3),
        "front_core_fraction": round(fraction, 4),
        "takeover_seconds": round(max(takeovers), 3),
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


def takeover(client: RolloutClient, workload: Workload, run: int) -> float:
    """Kill a replica that has work. Returns seconds until nothing waits and nothing is said to run there any more."""
    wait_for(client, lambda status: status["fleet"]["serving"] == status["fleet"]["replicas"])
    sampling = Sampling(n=workload.n, max_tokens=workload.new_tokens, ignore_eos=True, seed=run)
    prompts = prompts_of(workload, 1000 + run, client.info.vocab_size)
    handles = [client.submit(prompt, sampling) for prompt in prompts]
    status = wait_for(client, lambda status: all(one["parts"] for one in status["replicas"]))
    moved, victim = status["fleet"]["moved"], status["replicas"][0]
    started = time.perf_counter()
    os.kill(victim["pid"], signal.SIGKILL)
    wait_for(client, lambda status: status["fleet"]["moved"] > moved and not status["fleet"]["waiting"])
    seconds = time.perf_counter() - started
    for handle in handles:
        if any(sample.finish_reason != "length" for sample in handle.result(WAIT_S)):
            raise BenchFailed("a child was lost with its replica")
    return seconds


def front_core_fraction(model: Path, replicas: int, groups: int) -> float:
    """Return the CPU seconds of the front for each 1,000 samples of a tiny model."""
    engine = EngineConfig(model=str(model), dtype="float32", kv_tokens=65_536, cpu_offload_gib=0, threads=1)
    rng = np.random.default_rng(0)
    with connected(fleet_of(engine, replicas)) as (front, client):
        prompts = [rng.integers(3, TINY_VOCAB, 16).astype(np.int32) for _ in range(groups)]
        list(client.generate(prompts[:8], SHORT, timeout=WAIT_S))
        process = psutil.Process(front.pid)
        before = process.cpu_times()
        count = len(list(client.generate(prompts, SHORT, timeout=WAIT_S)))
        after = process.cpu_times()
    seconds = after.user + after.system - before.user - before.system
    return float(seconds) * 1000 / count


def tiny_model(folder: Path) -> Path:
    """Save a Llama of 2 layers with random weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=TINY_VOCAB, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=2048, bos_token_id=1, eos_token_id=2, dtype="float32",
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def wait_for(client: RolloutClient, condition: Any) -> dict[str, Any]:
    """Look at the status until it is so. Raises BenchFailed after WAIT_S."""
    deadline = time.monotonic() + WAIT_S
    while not condition(status := client.status(timeout=WAIT_S)):
        if time.monotonic() > deadline:
            raise BenchFailed("the fleet did not come to where it was expected")
        time.sleep(LOOK_S)
    return status


def print_row(console: Console, row: dict[str, Any]) -> None:
    """Print the row for people."""
    console.print(
        f"fleet: {row['replicas']} replicas × {row['threads']} threads, {row['tokens_per_second']:.0f} tokens/s, "
        f"{row['ratio_to_one']:.2f} × one service; front {100 * row['front_core_fraction']:.1f} % of a core at 1,000 samples/s;"
        f" a dead replica's groups run elsewhere after {row['takeover_seconds']:.2f} s"
    )
