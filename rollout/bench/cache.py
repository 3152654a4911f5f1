"""`rollout bench cache`: what a second run of recipes.grpo through `rollout cache` takes, and whether it has the same curve.

The recipe runs twice as a program, each time with a new service and through a cache on the same folder. Generation time is what
the trainer waits for samples; `equal` compares rewards and norms of gradients of all steps, to the bit."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from rollout.bench.harness import BenchFailed, BenchSetup, Row
from rollout.bench.inputs import save_tiny
from rollout.cache.proxy import CacheProxy
from rollout.cache.store import FolderStore
from rollout.cache.upstream import ServiceBehind
from rollout.config import Config
from rollout.engine.types import Limits
from rollout.process import service_process
from rollout.transport.sockets import ServiceEnd

STEPS = 50
GIB = 1 << 30
TIMEOUT_S = 3600.0
CURVE = ("train/step", "train/reward", "train/reward_std", "train/grad_norm", "train/tokens", "train/version")
"""metrics of a step that two equal runs have in common"""


def measure(setup: BenchSetup) -> Iterator[Row]:
    """Yield a row for each run, then the summary. Raises BenchFailed if the recipe fails."""
    with tempfile.TemporaryDirectory(prefix="rollout-bench-") as name:
        model = Path(name) / "model"
        save_tiny(model, 256, 512, setup.options.dtype)
        config = Config(engine=setup.config(model=str(model), kv_tokens=65_536, cpu_offload_gib=0))
        words = ["--steps", str(max(2, round(STEPS * setup.scale))), "--max-tokens", "256", "--held-out", "0"]
        runs = []
        for number in range(2):
            runs.append(run_of_grpo(config, Path(name) / "cache", Path(name) / f"run{number}", words))
            yield {"run": number + 1, **{key: value for key, value in runs[-1].items() if key != "curve"}}
        yield {"summary": True, "steps": len(runs[0]["curve"]), **compared(*runs)}


def compared(first: Row, second: Row) -> Row:
    """Compare two runs of `run_of_grpo`: the ratio of their generation times, and whether their curves are equal."""
    return {
        "cache_seconds_ratio": second["generation_seconds"] / first["generation_seconds"],
        "equal": first["curve"] == second["curve"],
        "hits": second["hits"],
        "misses": second["misses"],
    }


def run_of_grpo(config: Config, folder: Path, out: Path, words: list[str]) -> Row:
    """Run recipes.grpo on its task without a tokenizer, with a new service behind a cache on `folder`. words: further flags.
    Raises BenchFailed with the end of what it printed."""
    with service_process(config) as service, cache_at(folder, service.endpoint) as (address, proxy):
        command = [sys.executable, "-m", "rollout.recipes.grpo", "--model", config.engine.model, "--task", "even-ids"]
        command += ["--address", address, "--out", str(out), "--no-wandb", *words]
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
        if done.returncode:
            raise BenchFailed(f"recipes.grpo ended with exit status {done.returncode}: {done.stderr[-500:]}")
        rows = [json.loads(line) for line in (out / "rewards.jsonl").read_text().splitlines()]
        return {
            "generation_seconds": sum(row["train/wait_seconds"] for row in rows),
            "seconds": sum(row["train/seconds"] for row in rows),
            "hits": proxy.tally.hits,
            "misses": proxy.tally.misses,
            "curve": [[row[name] for name in CURVE] for row in rows],
        }


@contextmanager
def cache_at(folder: Path, service: str) -> Iterator[tuple[str, Any]]:
    """Run a cache in front of a service, in a thread. Yields its address and the proxy."""
    store = FolderStore(folder, GIB)
    end = ServiceEnd("tcp://127.0.0.1:*", Limits())
    try:
        proxy = CacheProxy(end, store, partial(ServiceBehind, service, Limits()), Limits())
        thread = threading.Thread(target=proxy.run)
        thread.start()
        try:
            yield end.endpoint, proxy
        finally:
            proxy.stop()
            thread.join()
    finally:
        end.close(0.5)
        store.close()
