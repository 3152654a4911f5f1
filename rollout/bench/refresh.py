"""`rollout bench refresh`: what a refresh of all weights costs while groups run, for each way that tensors can travel.

    ──────── steady ────────┤ 1 s around the refresh ├──────── steady ────────      tokens/s between two status replies,
                            push ─ stage ─ ‖pause‖                                  by the service's own clock

The yardstick is a plain `copy_` of the same tensors inside one process, on an otherwise idle machine: the service is paused
while it is timed. Ratios: pause, and the whole call in the trainer, over that copy; tokens/s around the refresh over the steady
rate before and after it.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from engine.config import EngineConfig
from engine.types import Sampling
from rollout.bench.inputs import PromptText
from rollout.client.api import RolloutClient
from rollout.config import Config
from rollout.process import service_process

NAME = "refresh"
WAYS = ("files", "gloo", "inline", "shm")
PROMPTS, PROMPT_TOKENS, N = 2, 256, 8
STEADY_S, WINDOW_S = 2.0, 1.0
MEDIANS = ("copy_seconds", "seconds", "staged_seconds", "paused_seconds", "pause_ratio", "total_ratio", "throughput_ratio")


def measure(folder: Path, dtype: str, threads: int | None, repeat: int, text: PromptText) -> Iterator[dict[str, Any]]:
    """Yield one object for each refresh and a summary for each way. The first refresh of a way warms up and is no part of the
    summary."""
    from safetensors.torch import load_file

    weights = {name: tensor for path in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(path).items()}
    engine = EngineConfig(model=str(folder), dtype=dtype, threads=threads, kv_tokens=65_536, cpu_offload_gib=0)  # type: ignore[arg-type]
    with service_process(Config(engine=engine)) as service, RolloutClient(service.endpoint, name="rollout bench") as client:
        groups = RunningGroups(client, text)
        copy = PlainCopy(weights)
        for via in WAYS:
            runs = []
            for run in range(repeat + 1):
                copy_s = copy.seconds(client)
                row = one_refresh(client, groups, weights, folder, via)
                row |= {"pause_ratio": row["paused_seconds"] / copy_s, "total_ratio": row["seconds"] / copy_s}
                row = {"workload": NAME, "run": run, "warm": run > 0, "via": via, "copy_seconds": copy_s, **row}
                runs.append(row)
                yield {name: round(value, 5) if isinstance(value, float) else value for name, value in row.items()}
            yield summarise(runs[1:], engine, client.status())


class RunningGroups:
    """Keeps PROMPTS × N samples running."""

    def __init__(self, client: RolloutClient, text: PromptText) -> None:
        self._client = client
        self._prompts = text.slices(0, PROMPTS, PROMPT_TOKENS)
        self._tokens = min(client.info.context - PROMPT_TOKENS, 2048)
        self._handles: list[Any] = []

    def restart(self) -> None:
        """Start all groups from their prompts, so that every refresh meets sequences of the same lengths. Returns when they
        decode."""
        for handle in self._handles:
            handle.cancel()
            handle.result(60)
        made = self._client.status()["generated_tokens"]
        sampling = Sampling(n=N, max_tokens=self._tokens, ignore_eos=True, seed=0)
        self._handles = [self._client.submit(prompt, sampling) for prompt in self._prompts]
        while self._client.status()["generated_tokens"] < made + 4 * PROMPTS * N:
            time.sleep(0.01)


class PlainCopy:
    """The yardstick: all tensors copied into others of the same kind, in this process, while the service is paused."""

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


def one_refresh(client: RolloutClient, groups: RunningGroups, weights: Any, folder: Path, via: Any) -> dict[str, Any]:
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
    row: dict[str, Any] = msgspec.to_builtins(refreshed)
    return row | {"tokens_per_second": steady, "around_tokens_per_second": around, "throughput_ratio": around / steady}


def mark(client: RolloutClient) -> tuple[float, int]:
    """Return (the service's clock in seconds, tokens generated), both of one moment between two steps."""
    status = client.status()
    return status["service"]["uptime_s"], status["generated_tokens"]


def summarise(runs: list[dict[str, Any]], engine: EngineConfig, status: dict[str, Any]) -> dict[str, Any]:
    return {
        "workload": NAME,
        "summary": True,
        "via": runs[0]["via"],
        **{name: round(statistics.median(run[name] for run in runs), 4) for name in MEDIANS},
        "bytes": runs[0]["bytes"],
        "runs": len(runs),
        "tokens_per_second": round(statistics.median(run["tokens_per_second"] for run in runs), 1),
        "samples": PROMPTS * N,
        "model": engine.model,
        "dtype": engine.dtype,
        "threads": engine.threads,
        "attention": status["attention"],
        "arithmetic": status["arithmetic"],
    }
