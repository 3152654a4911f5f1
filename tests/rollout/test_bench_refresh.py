"""`rollout bench refresh` in small."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from rollout.bench import BenchOptions, refresh, run
from rollout.config import InputError
from tests.support.bench import bench_rows, run_named


def test_bench_refresh_prints_the_ratios(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(refresh, "STEADY_S", 0.0)
    monkeypatch.setattr(refresh, "WINDOW_S", 0.0)
    looks = itertools.count()
    rates = (0, 100, 150, 250)  # tokens a second: 100 before, 50 around, 100 after
    monkeypatch.setattr(refresh, "mark", lambda client: ((look := next(looks)) * 1.0, rates[look % 4]))
    rows = bench_rows(tmp_path, "refresh", model=tiny_model, scale=1.0)
    summaries = [row for row in rows if "summary" in row]
    assert [row["via"] for row in summaries] == list(refresh.WAYS) and rows[-1]["via"] == "shm"
    for row in summaries:
        assert row["workload"] == "refresh" and row["runs"] == 1 and row["bytes"] > 0 and row["samples"] == 16
        assert all(row[name] > 0 for name in ("pause_ratio", "total_ratio"))
        assert (row["tokens_per_second"], row["throughput_ratio"]) == (100, 0.5)
    assert [row["version"] for row in rows if "version" in row] == list(range(1, 9))
    assert "pause_ratio" in capsys.readouterr().out


def test_refresh_needs_two_processes() -> None:
    with pytest.raises(InputError, match="in-process"):
        run(BenchOptions(("refresh",), model="x", in_process=True))


@pytest.mark.long
def test_lora_equals_pefts_merge(tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("peft")
    (row,) = bench_rows(tmp_path, "lora", model=tiny_model, dtype="bfloat16")
    assert row["max_abs_delta"] == 0.0 and row["same_digest"] and row["tokens"] == 16 * 32
    assert 0 < row["sent_bytes"] < row["model_bytes"] and "same_digest True" in capsys.readouterr().out


@pytest.mark.long
def test_delta_sends_what_has_changed(tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (row,) = bench_rows(tmp_path, "delta", model=tiny_model, dtype="bfloat16")
    assert row["via"] == "delta" and row["same_digest"] and "same_digest True" in capsys.readouterr().out
    assert 0 < row["one_step_fraction"] < row["bytes_fraction"] <= 0.2


@pytest.mark.parametrize("name", ["lora", "delta"])
def test_what_goes_between_processes(name: str) -> None:
    with pytest.raises(InputError, match="in several processes"):
        run_named((name,), model="x", in_process=True)
