"""recipes/grpo.py as a program: service process, refresh over the wire, wandb offline, files."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from rollout.config import Config
from rollout.engine.types import Sample
from rollout.recipes import grpo

ROOT = Path(__file__).parents[2]
STEPS = 8


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
    options = grpo.Options(model=str(tiny_model), steps=STEPS, groups=2, n=4, max_tokens=24, kv_gib=0.05, out=tmp_path)
    rows = grpo.main(options)

    assert [row["train/version"] for row in rows] == list(range(1, STEPS + 1))
    assert max(row["train/lag_max"] for row in rows) == 1
    assert {row["train/mismatch"] for row in rows if "train/mismatch" in row} <= {0}  # of groups that had ended in time
    assert re.search(r"4 held-out questions, greedily: 0\.\d+ right before training, \d\.\d+ after", capsys.readouterr().out)
    assert [json.loads(line) for line in (tmp_path / "rewards.jsonl").read_text().splitlines()] == rows
    assert (tmp_path / "curves.png").stat().st_size > 10_000

    document = (ROOT / "docs/trainers.md").read_text()
    assert [key for row in rows for key in row if f"`{key.removeprefix('train/')}`" not in document] == []

    logged, axes = history(tmp_path)
    documented = set(re.findall(r"^\| `((?!fleet/)[a-z_/]+)` \|", (ROOT / "docs/metrics.md").read_text(), re.MULTILINE))
    assert set().union(*logged) >= documented | set().union(*rows)
    assert [row["train/step"] for row in logged if "train/step" in row] == [row["train/step"] for row in rows]
    assert (axes["train/*"], axes["engine/*"]) == ("train/step", "engine/time_s")


def often(make: Any) -> Any:
    def config(options: grpo.Options, folder: Path) -> Config:
        made = make(options, folder)
        often = {"interval_s": 0.3, "window_s": 1e6, "audit_every": 1, "audit_max_share": 1.0}  # nothing leaves the window
        tracking = msgspec.structs.replace(made.tracking, **often)
        return msgspec.structs.replace(made, tracking=tracking)

    return config
