"""`rollout bench keys` in small."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rollout.bench import run


def test_bench_keys_prints_what_travels_with_and_without(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "rows.jsonl"
    options = {"in_process": False, "scale": 0.01, "repeat": 1, "dtype": "float32", "threads": 1}
    assert run(("keys",), model="no such model", json_file=str(out), **options) == 0  # type: ignore[arg-type]
    *rows, summary = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(row["what"], row.get("keys")) for row in rows] == [
        ("samples", False), ("weights", False), ("samples", True), ("weights", True), ("journal", None),
    ]  # fmt: skip
    assert all(row["mb_per_s"] > 0 for row in rows[:4]) and 0 < rows[4]["median_us"] <= rows[4]["longest_us"]
    assert summary["samples_ratio"] == pytest.approx(rows[2]["mb_per_s"] / rows[0]["mb_per_s"], rel=0.1)
    assert "samples_ratio" in capsys.readouterr().out
