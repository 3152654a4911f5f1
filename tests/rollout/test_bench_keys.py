"""`python -m tests.bench keys` in small."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.bench import bench_rows


def test_bench_keys_prints_what_travels_with_and_without(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    *rows, summary = bench_rows(tmp_path, "keys", scale=0.01)
    assert [(row["what"], row.get("keys")) for row in rows] == [
        ("samples", False), ("weights", False), ("samples", True), ("weights", True), ("journal", None),
    ]  # fmt: skip
    assert all(row["mb_per_s"] > 0 for row in rows[:4]) and 0 < rows[4]["median_us"] <= rows[4]["longest_us"]
    assert summary["samples_ratio"] == pytest.approx(rows[2]["mb_per_s"] / rows[0]["mb_per_s"], rel=0.1)
    assert "samples_ratio" in capsys.readouterr().out
