"""recipes/grpo.py as a program: service process, refresh over the wire, wandb offline, files, what Ctrl-C leaves."""

from __future__ import annotations

import json
import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from transformers import AutoModelForCausalLM

from rollout.config import Config
from rollout.engine.engine import Engine
from rollout.engine.values import Sample
from rollout.metrics.catalog import METRICS
from rollout.recipes import grpo, program

ROOT = Path(__file__).parents[2]
STEPS = 3


class Even:
    """In place of reasoning-gym, which need not be installed."""

    held_out = range(40, 44)

    def __init__(self, options: grpo.Options, tokenizer: Any) -> None:
        assert tokenizer.eos_token == "</s>"

    def prompt(self, index: int) -> list[int]:
        return [3, 5, 7 + index % 4]

    def reward(self, index: int, sample: Sample) -> float:
        return float((sample.token_ids % 2 == 0).mean())


def test_the_program(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("wandb")
    pytest.importorskip("matplotlib")
    from tests.support.wandb_file import history

    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(grpo, "Task", Even)
    monkeypatch.setattr(grpo, "service_config", often(grpo.service_config))
    options = grpo.Options(
        model=str(tiny_model), steps=STEPS, groups=2, n=4, max_tokens=24, kv_gib=0.05, out=tmp_path, save=tmp_path / "model"
    )
    rows = grpo.main(options)

    assert [row["train/version"] for row in rows] == list(range(1, STEPS + 1))
    assert max(row["train/lag_max"] for row in rows) == 1
    assert {row["train/mismatch"] for row in rows if "train/mismatch" in row} <= {0}  # of groups that had ended in time
    told = capsys.readouterr()
    assert re.search(r"4 held-out questions, greedily: [\d.]+ right before training, [\d.]+ after", told.out)
    order = (
        "starting the service",
        "asking 4 held-out",
        "before training: ",
        "step 1, sampling",
        f"step {STEPS}, training",
        "after training: ",
    )
    assert [told.err.find(text) for text in order] == sorted(told.err.find(text) for text in order) and order[0] in told.err
    assert set(re.findall(rf"step {STEPS - 1}, (\w+)", told.err)) == {"sampling", "training", "refresh"}
    serves_what_was_trained(tmp_path / "model", tiny_model)
    assert [json.loads(line) for line in (tmp_path / "rewards.jsonl").read_text().splitlines()] == rows
    assert (tmp_path / "curves.png").stat().st_size > 10_000

    document = (ROOT / "docs/trainers.md").read_text()
    assert [key for row in rows for key in row if f"`{key.removeprefix('train/')}`" not in document] == []

    logged, axes = history(tmp_path)
    documented = {name for name, metric in METRICS.items() if metric.over != "histogram" and not name.startswith("fleet/")}
    assert set().union(*logged) >= documented | set().union(*rows)
    assert [row["train/step"] for row in logged if "train/step" in row] == [row["train/step"] for row in rows]
    assert (axes["train/*"], axes["engine/*"]) == ("train/step", "engine/time_s")


def serves_what_was_trained(saved: Path, base: Path) -> None:
    config = Config().engine
    engine = Engine(msgspec.structs.replace(config, model=str(saved), kv_tokens=1024, cpu_offload_gib=0.0))
    assert engine.model.vocab_size > 0 and (saved / "tokenizer.json").is_file()
    kept = json.loads((saved / "config.json").read_text())
    assert "rollout" not in json.dumps(kept), "the trainer's attention is no part of the model"
    trained, first = (AutoModelForCausalLM.from_pretrained(folder).state_dict() for folder in (saved, base))
    assert trained.keys() == first.keys()
    assert any((trained[name] != first[name].to(trained[name].dtype)).any() for name in first)


ROW = {"train/reward": 0.5, "train/tokens_per_s": 1.0}


def interrupted(options: Any, client: Any, task: Any, model: Any, phase: Any) -> Iterator[dict[str, float]]:
    """Two steps; Ctrl-C in the third."""
    for step in range(1, 4):
        if step == 3:
            signal.raise_signal(signal.SIGINT)
        yield {"train/step": step, **ROW}


def stuck(options: Any, client: Any, task: Any, model: Any, phase: Any) -> Iterator[dict[str, float]]:
    yield {"train/step": 1, **ROW}
    raise grpo.NothingToLearn("no sample scores")


@pytest.mark.parametrize(
    ("train", "rows", "status"), [(interrupted, 2, 130), pytest.param(stuck, 1, 1, marks=pytest.mark.long)]
)
def test_what_was_finished_is_kept(
    train: Any,
    rows: int,
    status: int,
    tiny_model: Path,
    tiny_service: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(grpo, "Task", Even)
    words = f"--model {tiny_model} --address {tiny_service} --no-wandb --held-out 0 --out {tmp_path} --save {tmp_path}/model"
    monkeypatch.setattr(sys, "argv", ["grpo", *words.split()])
    assert program.run("grpo", lambda options: grpo.main(options, train), grpo.Options) == status
    told = capsys.readouterr()
    assert "Traceback" not in told.out + told.err
    assert ("grpo: stopped" if status == 130 else "grpo: no sample scores") in told.err
    assert f"{rows} of 60 steps" in told.out and "after training" not in told.err
    written = [json.loads(line) for line in (tmp_path / "rewards.jsonl").read_text().splitlines()]
    assert [row["train/step"] for row in written] == list(range(1, rows + 1))
    assert (tmp_path / "curves.png").stat().st_size > 5_000 and (tmp_path / "model/model.safetensors").is_file()


def often(make: Any) -> Any:
    def config(options: grpo.Options, folder: Path) -> Config:
        made = make(options, folder)
        often = {"interval_s": 0.3, "window_s": 1e6, "audit_every": 1, "audit_max_share": 1.0}  # nothing leaves the window
        tracking = msgspec.structs.replace(made.tracking, **often)
        return msgspec.structs.replace(made, tracking=tracking)

    return config
