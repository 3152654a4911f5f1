"""`rollout bench train_step` in small: a process for each instruction set, JSON that adds up, gradients that are right."""

from __future__ import annotations

import json
import statistics
from pathlib import Path

import pytest

from engine.config import EngineConfig
from engine.cpu.isa import best, here
from rollout import models
from rollout.bench import train_step
from rollout.bench.command import run
from rollout.bench.errors import BenchFailed
from rollout.bench.inputs import PromptText


def test_every_set_that_is_below_this_machine_s() -> None:
    shown = train_step.shown()
    assert list(shown)[0] == best() and shown[best()] == {}
    assert set(shown) - {best()} == set(here()) & set(train_step.SHOWN) - {best()}
    assert all(set(limits) == set(train_step.LIMITS) for isa, limits in shown.items() if isa != best())


def test_bench_train_step_prints_its_rows(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the lowest set alone, whatever limits this process itself runs under."""
    isa, limits = list(train_step.shown().items())[-1]
    monkeypatch.setattr(train_step, "shown", lambda: {isa: limits})
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "SSE41")
    out = tmp_path / "rows.jsonl"
    options = {"in_process": False, "scale": 0.1, "repeat": 3, "dtype": "bfloat16", "threads": 1}
    assert run(("train_step",), model=str(tiny_model), json_file=str(out), **options) == 0  # type: ignore[arg-type]
    *turns, summary = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["turn"] for row in turns] == [0, 1, 2] and summary["summary"] and summary["turns"] == 3
    assert {row["workload"] for row in (*turns, summary)} == {"train_step"} and {row["isa"] for row in turns} == {isa}
    assert summary["environment"] == limits and summary["tokens"] == 4 * 8
    assert not limits or limits.get("ATEN_CPU_CAPABILITY") != "avx2" or not summary["fast_in_bf16"]
    for way in ("bf16", "fp32"):
        each = statistics.median(row[f"{way}_seconds"] / row["exact_seconds"] for row in turns)
        assert summary[f"ratio_to_{way}"] == pytest.approx(each, rel=0.2)
    assert 0 < summary["gradient_distance"] < 0.1 and summary["gradient_distance_bf16"] < 0.1


def test_a_process_that_ends_is_no_result(tiny_model: Path) -> None:
    text = PromptText(models.load_tokenizer(tiny_model))
    engine = EngineConfig(model=str(tiny_model), threads=1)
    with pytest.raises(BenchFailed, match="ended with status 1; standard error has why"):
        list(train_step.measure(tiny_model / "nowhere", engine, text, 0.1, 1))
