"""`python -m tests.bench replay`: whether each step of recipes.grpo can be made again from its ledger and checkpoints.

The service writes a ledger, and the trainer the weights of each version. Each step has groups that live through a refresh. Then
all samples of all steps are made again on a new service, and compared to the bit. `bytes_per_sample` counts the whole ledger:
refreshes, groups and their prompts included."""

from __future__ import annotations

import json
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import msgspec

from rollout import ledger
from rollout.bench.harness import BenchFailed, BenchSetup, Row
from rollout.bench.inputs import save_tiny
from rollout.bench.target import connected
from rollout.client.api import RolloutClient
from rollout.config import Config
from rollout.engine.processes import run_module
from rollout.process import service_process

STEPS = 50
GROUPS, N, MAX_TOKENS, HIDDEN, VOCABULARY = 3, 8, 64, 128, 512
AT_ONCE = 4
"""children that the first service runs at once: few, so that each refresh finds running ones"""
TIMEOUT_S = 3600.0


def measure(setup: BenchSetup) -> Iterator[Row]:
    """Yield a row for each run and for each step, then the summary. Raises BenchFailed if the recipe fails."""
    with tempfile.TemporaryDirectory(prefix="rollout-bench-") as name:
        folder, steps = Path(name), max(2, round(STEPS * setup.scale))
        model = save_tiny(folder / "model", HIDDEN, VOCABULARY, setup.options.dtype)
        config = Config(engine=setup.config(model=str(model), kv_tokens=65_536, cpu_offload_gib=0))
        words = [
            "--steps",
            str(steps),
            "--groups",
            str(GROUPS),
            "--n",
            str(N),
            "--max-tokens",
            str(MAX_TOKENS),
            "--held-out",
            "0",
        ]
        recording = msgspec.structs.replace(config.service, ledger=str(folder / "run.ledger"), ledger_prompts=True)
        slow = msgspec.structs.replace(config.engine, max_num_seqs=AT_ONCE)
        recorded = msgspec.structs.replace(config, engine=slow, service=recording)
        run_of_grpo(recorded, folder / "run", [*words, "--checkpoints", str(folder / "weights")])
        run = ledger.read(folder / "run.ledger")
        counts: Counter[bool | None] = Counter()
        weights = {0: str(model)} | {version: str(folder / "weights" / str(version)) for version in range(1, steps + 1)}
        with connected(config) as (_, client):
            for row in replayed(client, run, weights):
                counts += Counter({True: row["equal"], False: row["different"], None: row["not_made"]})
                yield row
        trained = max(refresh.version for refresh in run.refreshes)
        yield {
            "summary": True,
            "steps": trained,
            "versions": len(run.steps()),
            **counted(run, counts),
        }


def replayed(client: RolloutClient, run: ledger.RecordedRun, weights: dict[int, str]) -> Iterator[Row]:
    """Make the samples of each step again, and yield the counts."""
    for step in run.steps():
        picked = [(group, sample) for group in run.step(step) for sample in group.samples.values()]
        began = time.perf_counter()
        results = client.replay(
            [run.receipt(group, sample) for group, sample in picked],
            [ids.tolist() for ids in run.prompts.values()],
            weights=weights,
            ends=[(sample.tokens, sample.finish_reason) for _, sample in picked],
        )
        equal = Counter(result.equal for result in results)
        through = sum(len(sample.weight_versions) > 1 for _, sample in picked)
        yield {
            "step": step, "samples": len(picked), "through_a_refresh": through, "equal": equal[True],
            "different": equal[False], "not_made": equal[None], "seconds": time.perf_counter() - began,
        }  # fmt: skip


def counted(run: ledger.RecordedRun, counts: Counter[bool | None]) -> Row:
    """Return what the ledger has, and how many samples are equal."""
    samples = [sample for _, sample in run.samples()]
    return {
        "samples": len(samples),
        "through_a_refresh": sum(len(sample.weight_versions) > 1 for sample in samples),
        "equal": counts[True] == len(samples) > 0,
        "different": counts[False],
        "not_made": counts[None],
        "bytes_per_sample": run.bytes / max(1, len(samples)),
    }


def run_of_grpo(config: Config, out: Path, words: list[str]) -> list[Row]:
    """Run recipes.grpo on its task without a tokenizer, with a new service, and return the metrics of its steps. words: further
    flags. Raises BenchFailed with the end of what it printed."""
    with service_process(config) as service:
        options = ("--model", config.engine.model, "--task", "even-ids", "--address", service.endpoint, "--out", str(out))
        command = run_module("rollout.recipes.grpo", *options, "--no-wandb", *words)
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
        if done.returncode:
            raise BenchFailed(f"recipes.grpo ended with exit status {done.returncode}: {done.stderr[-500:]}")
        return [json.loads(line) for line in (out / "rewards.jsonl").read_text().splitlines()]
