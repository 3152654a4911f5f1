"""`rollout bench replay`: whether each step of recipes.grpo can be made again from its ledger and checkpoints.

The recipe runs twice as in `rollout bench cache`; the service of the first run writes a ledger, and the trainer the weights of
each version. Each step has groups that live through a refresh. Then all samples of all steps are made again on a new service,
and compared to the bit. `bytes_per_sample` counts the whole ledger: refreshes, groups and their prompts included."""

from __future__ import annotations

import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from rollout import ledger
from rollout.bench.cache import compared, run_of_grpo
from rollout.bench.harness import BenchSetup, Row
from rollout.bench.inputs import save_tiny
from rollout.bench.target import connected
from rollout.client.api import RolloutClient
from rollout.config import Config

STEPS = 50
GROUPS, N, MAX_TOKENS, HIDDEN, VOCABULARY = 3, 8, 64, 128, 512
AT_ONCE = 4
"""children that the first service runs at once: few, so that each refresh finds running ones"""


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
        runs = [
            run_of_grpo(recorded, folder / "cache", folder / "first", [*words, "--checkpoints", str(folder / "weights")]),
            run_of_grpo(msgspec.structs.replace(config, engine=slow), folder / "cache", folder / "second", words),
        ]
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
            **of_cache(compared(*runs)),
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


def of_cache(row: dict[str, Any]) -> Row:
    """Return what a second run through the cache takes."""
    return {"cache_seconds_ratio": row["cache_seconds_ratio"], "same_curve": row["equal"], "hits": row["hits"]}
