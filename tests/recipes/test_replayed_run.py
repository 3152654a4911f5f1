"""Every step of a run of recipes.grpo, with refreshes under way, is made again from its ledger and checkpoints, to the bit."""

from __future__ import annotations

import copy
import dataclasses
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from rollout import RolloutClient, ledger
from rollout.config import InputError
from rollout.engine.engine import Engine
from rollout.engine.values import Sample, Sampling
from rollout.exact import use_exact
from rollout.ledger.bisect import bisect
from rollout.ledger.writer import LedgerWriter
from rollout.recipes import grpo
from tests.bench import replay
from tests.support.bench import bench_rows
from tests.support.tiny import tiny, tiny_engine
from tests.support.wire import serving

WAIT = 120.0
OPTIONS = grpo.Options(steps=3, groups=2, n=4, max_tokens=40, learning_rate=3e-3)


class Even:
    """Reward: the share of even tokens."""

    held_out = range(0)

    def prompt(self, index: int) -> list[int]:
        return [3, 5, 7 + index]

    def reward(self, index: int, sample: Sample) -> float:
        return float((sample.token_ids % 2 == 0).mean())


def slow_engine(model: Any) -> Engine:
    """Return an engine whose steps take long enough that a refresh finds running children."""
    engine = tiny_engine(model=model)
    step = engine.step

    def slowly() -> list[Sample]:
        time.sleep(0.003)
        return step()

    engine.step = slowly  # type: ignore[method-assign]
    return engine


def run_of(path: Path, checkpoints: Path, **options: Any) -> ledger.RecordedRun:
    """Train with a service that writes a ledger."""
    model = tiny("llama")
    writer = LedgerWriter(str(path), 1 << 30, prompts=True)
    with serving(slow_engine(copy.deepcopy(model)), ledger=writer) as service, RolloutClient(service.endpoint) as client:
        mine = dataclasses.replace(OPTIONS, checkpoints=checkpoints, **options)
        rows = list(grpo.train(mine, client, Even(), model))  # type: ignore[arg-type]
    assert len(rows) == OPTIONS.steps
    return ledger.read(path)


@pytest.mark.parametrize("partial", [False, True])
def test_each_step_is_equal_to_the_bit(partial: bool, tmp_path: Path) -> None:
    """partial: children are cut, and others continue them under the next weights."""
    run = run_of(tmp_path / "run.ledger", tmp_path / "weights", partial=partial)
    tiny("llama").save_pretrained(tmp_path / "weights" / "0")
    picked = list(run.samples())
    assert len(picked) >= OPTIONS.steps * OPTIONS.groups * OPTIONS.n
    through = sum(len(sample.weight_versions) > 1 for _, sample in picked)
    print(f"{len(picked)} samples, {through} through a refresh, {run.bytes / len(picked):.1f} bytes a sample")
    assert through > 0
    with serving(tiny_engine()) as service, RolloutClient(service.endpoint) as client:
        for step in run.steps():
            mine = [(group, sample) for group, sample in picked if group.version == step]
            results = client.replay(
                [run.receipt(group, sample) for group, sample in mine],
                [ids.tolist() for ids in run.prompts.values()],
                weights={version: str(tmp_path / "weights" / str(version)) for version in range(OPTIONS.steps + 1)},
                ends=[(sample.tokens, sample.finish_reason) for _, sample in mine],
                timeout=WAIT,
            )
            assert {result.equal for result in results} == {True}, [result.why for result in results]


def test_two_runs_have_equal_arguments_until_time_differs(tmp_path: Path) -> None:
    """When a refresh meets running children is a matter of time, and nothing else is: bisect says so, or that all is equal."""
    runs = [run_of(tmp_path / f"{name}.ledger", tmp_path / name) for name in "ab"]
    difference = bisect(*runs)
    assert difference is None or difference.kind in ("refresh at another token", "order of refreshes"), difference


def test_checkpoints_of_adapters_are_refused(tmp_path: Path) -> None:

    with pytest.raises(InputError, match="--checkpoints with --lora"):
        grpo.main(dataclasses.replace(OPTIONS, wandb=False, lora=True, checkpoints=tmp_path, out=tmp_path))


def test_a_sample_that_differs_or_was_not_made_is_counted() -> None:
    group = ledger.RecordedGroup(
        service=0, number=1, group_id="g", client=1, version=0, prompt="", prompt_tokens=1, sampling=Sampling(n=2),
        indices=(0, 1), after=None, given={},
    )  # fmt: skip
    for index in range(2):
        group.samples[index] = ledger.RecordedSample(
            index=index, finish_reason="length", tokens=1, result="", token_digest="", marks=(), weight_versions=((0, 0),),
            kv_versions=(), seed=1, token_ids=None, logprobs=None, place=index,
        )  # fmt: skip
    run = ledger.RecordedRun()
    run.groups, run.bytes = [group], 200
    assert replay.counted(run, Counter({True: 2}))["equal"] is True
    for counts in (Counter({True: 1, False: 1}), Counter({True: 1, None: 1}), Counter[bool | None]()):
        assert replay.counted(run, counts)["equal"] is False
    assert (
        replay.counted(run, Counter({False: 2}))["different"] == 2 and replay.counted(run, Counter())["bytes_per_sample"] == 100
    )


def test_a_second_run_samples_nothing_that_the_memo_has(tmp_path: Path) -> None:
    """The same curve to the bit: from the folder with a service, and without one."""
    curves, model = [], tiny("llama")
    for offline in (False, False, True):
        engine, own = tiny_engine(model=copy.deepcopy(model)), copy.deepcopy(model)
        with serving(engine) as service:
            with RolloutClient(None if offline else service.endpoint, memo=tmp_path / "memo") as client:
                use_exact(own, client.info.arithmetic)
                rows = list(grpo.train(OPTIONS, client, Even(), own))  # type: ignore[arg-type]
                assert client.memo is not None
                curves.append([[row[name] for name in ("train/reward", "train/grad_norm", "train/tokens")] for row in rows])
                hits, misses = client.memo.hits, client.memo.misses
        assert (hits, misses) == ((6, 0) if len(curves) > 1 else (0, 6)), "the last batch is not asked for"
    assert curves[0] == curves[1] == curves[2] and len(curves[0]) == 3


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_fifty_steps(tmp_path: Path) -> None:
    *rows, summary = bench_rows(tmp_path, "replay", scale=1.0)
    assert summary["steps"] == 50 and summary["equal"] and summary["different"] == summary["not_made"] == 0
    assert summary["through_a_refresh"] > 0 and summary["bytes_per_sample"] <= 150
    assert sum(row["samples"] for row in rows) == summary["samples"] == 1200
