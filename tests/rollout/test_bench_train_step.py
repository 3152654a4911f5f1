"""`python -m tests.bench train_step` in small: a process for each instruction set, JSON that adds up, right gradients."""

from __future__ import annotations

import statistics
from pathlib import Path

import pytest

from rollout.bench.harness import BenchFailed, BenchSetup
from rollout.engine.cpu.isa import best, here
from tests.bench import train_step
from tests.bench.options import DeveloperOptions
from tests.support.bench import bench_rows


def test_every_set_that_is_below_this_machine_s() -> None:
    emulated = train_step.emulated()
    assert list(emulated)[0] == best() and emulated[best()] == {}
    assert set(emulated) - {best()} == set(here()) & set(train_step.EMULATED) - {best()}
    assert all(set(limits) == set(train_step.LIMITS) for isa, limits in emulated.items() if isa != best())


def test_bench_train_step_prints_its_rows(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the lowest set alone, whatever limits this process itself runs under."""
    isa, limits = list(train_step.emulated().items())[-1]
    monkeypatch.setattr(train_step, "emulated", lambda: {isa: limits})
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "SSE41")
    *turns, summary = bench_rows(tmp_path, "train_step", model=tiny_model, repeat=3, dtype="bfloat16")
    assert [row["turn"] for row in turns] == [0, 1, 2] and summary["summary"] and summary["turns"] == 3
    assert {row["workload"] for row in (*turns, summary)} == {"train_step"} and {row["isa"] for row in turns} == {isa}
    assert summary["environment"] == limits and summary["tokens"] == 4 * 8
    assert not limits or limits.get("ATEN_CPU_CAPABILITY") != "avx2" or not summary["fast_in_bf16"]
    for way in ("bf16", "fp32"):
        each = statistics.median(row[f"{way}_seconds"] / row["exact_seconds"] for row in turns)
        assert summary[f"ratio_to_{way}"] == pytest.approx(each, rel=0.2)
    assert 0 < summary["gradient_distance"] < 0.1 and summary["gradient_distance_bf16"] < 0.1


def test_a_process_that_ends_is_no_result(tiny_model: Path) -> None:
    setup = BenchSetup(DeveloperOptions(("train_step",), model=str(tiny_model), scale=0.1, repeat=1, threads=1))
    assert setup.text is not None and setup.folder is not None
    setup.folder = tiny_model / "nowhere"
    with pytest.raises(BenchFailed, match="ended with status 1; standard error has why"):
        list(train_step.measure(setup))
