"""`rollout bench refresh`: the cost of a refresh of all weights while groups run, for each transport of tensors.

    ──────── steady ────────┤ 1 s around the refresh ├──────── steady ────────      tokens/s between two status replies,
                            push ─ stage ─ ‖pause‖                                  by the service's clock

The reference is a plain `copy_` of the same tensors in this process while the service is paused. Ratios: the pause, and the
whole call in the trainer, over that copy; tokens/s around the refresh over the steady rate before and after it."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from rollout.bench.harness import BenchSetup, Row
from rollout.bench.inputs import PromptSource, stored_weights
from rollout.bench.target import connected
from rollout.client.api import RolloutClient
from rollout.config import Config
from rollout.engine.config import EngineConfig
from rollout.engine.values import Sampling

WAYS = ("files", "gloo", "inline", "shm")
PROMPTS, PROMPT_TOKENS, N = 2, 256, 8
STEADY_S, WINDOW_S = 2.0, 1.0
MEDIANS = ("copy_seconds", "seconds", "staged_seconds", "paused_seconds", "pause_ratio", "total_ratio", "throughput_ratio")


def measure(setup: BenchSetup) -> Iterator[Row]:
    """Yield a row per refresh and a summary per transport. The first refresh by a transport warms up and is not in the
    summary."""
    weights = stored_weights(setup.folder)
    engine = setup.config(kv_tokens=65_536, cpu_offload_gib=0)
    with connected(Config(engine=engine)) as (_, client):
        groups = RunningGroups(client, setup.text)
        copy = PlainCopy(weights)
        for via in WAYS:
            runs = []
            for run in range(setup.repeat + 1):
                copy_s = copy.seconds(client)
                row = one_refresh(client, groups, weights, setup.folder, via)
                row |= {"pause_ratio": row["paused_seconds"] / copy_s, "total_ratio": row["seconds"] / copy_s}
                runs.append({"run": run, "warm": run > 0, "via": via, "copy_seconds": copy_s, **row})
                yield runs[-1]
            yield summarise(runs[1:], engine, client.status())


class RunningGroups:
    """Keeps PROMPTS × N samples running."""

    def __init__(self, client: RolloutClient, text: PromptSource) -> None:
        self._client = client
        self._prompts = text.slices(0, PROMPTS, PROMPT_TOKENS)
        self._tokens = min(client.info.context - PROMPT_TOKENS, 2048)
        self._handles: list[Any] = []

    def restart(self) -> None:
        """Start all groups again, so that every refresh finds sequences of the same lengths. Returns when they decode."""
        for handle in self._handles:
            handle.cancel()
            handle.result(60)
        made = self._client.status()["generated_tokens"]
        sampling = Sampling(n=N, max_tokens=self._tokens, ignore_eos=True, seed=0)
        self._handles = [self._client.submit(prompt, sampling) for prompt in self._prompts]
        while self._client.status()["generated_tokens"] < made + 4 * PROMPTS * N:
            time.sleep(0.01)


class PlainCopy:
    """The reference: copies all tensors in this process while the service is paused."""

    def __init__(self, weights: dict[str, Any]) -> None:
        import torch

        self._pairs = [(torch.empty_like(tensor), tensor) for tensor in weights.values()]

    def seconds(self, client: RolloutClient) -> float:
        """Return the median seconds of seven copies."""
        client.pause()
        seconds = []
        for _ in range(8):
            started = time.perf_counter()
            for target, source in self._pairs:
                target.copy_(source)
            seconds.append(time.perf_counter() - started)
        client.resume()
        return statistics.median(seconds[1:])


def one_refresh(client: RolloutClient, groups: RunningGroups, weights: Any, folder: Path, via: Any) -> Row:
    groups.restart()
    marks = [mark(client)]
    time.sleep(STEADY_S)
    marks.append(mark(client))
    started = time.perf_counter()
    refreshed = client.refresh({"files": folder}.get(via, weights), via=via)
    time.sleep(max(0.0, WINDOW_S - (time.perf_counter() - started)))
    marks.append(mark(client))
    time.sleep(STEADY_S)
    marks.append(mark(client))
    before, around, after = ((end[1] - start[1]) / (end[0] - start[0]) for start, end in zip(marks, marks[1:], strict=False))
    steady = (before + after) / 2
    row: Row = msgspec.to_builtins(refreshed)
    return row | {"tokens_per_second": steady, "around_tokens_per_second": around, "throughput_ratio": around / steady}


def mark(client: RolloutClient) -> tuple[float, int]:
    """Return (seconds of the service's clock, generated tokens), both between the same two steps."""
    status = client.status()
    return status["service"]["uptime_s"], status["generated_tokens"]


def summarise(runs: list[Row], engine: EngineConfig, status: dict[str, Any]) -> Row:
    return {
        "summary": True,
        "via": runs[0]["via"],
        **{name: statistics.median(run[name] for run in runs) for name in (*MEDIANS, "tokens_per_second")},
        "bytes": runs[0]["bytes"],
        "runs": len(runs),
        "samples": PROMPTS * N,
        **{name: getattr(engine, name) for name in ("model", "dtype", "threads")},
        **{name: status[name] for name in ("attention", "arithmetic")},
    }
