"""`python -m tests.bench products` in small."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollout.engine.cpu.isa import best
from tests.bench import products
from tests.support.bench import bench_rows


def test_bench_products_prints_each_kernel_beside_the_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(products, "SHAPES", {"tiny": ((48, 64), (33, 70))})
    monkeypatch.setattr(products, "ROWS", (1, 9))
    monkeypatch.setattr(products, "ISAS", {best(): None})
    monkeypatch.setattr(products, "WEIGHT_BYTES", 64 << 20)
    rows = bench_rows(tmp_path, "products", scale=0.01)
    measured = [row for row in rows if "summary" not in row and best() != "plain"]
    summaries = [row for row in rows if "summary" in row]
    assert len(measured) == (0 if best() == "plain" else 2 * 2 * 2) and len(summaries) == len(measured) // 2
    for row in measured:
        flops = 2e-3 * row["rows"] * row["outputs"] * row["inputs"] / row["microseconds"]
        assert row["gflops"] == pytest.approx(flops, rel=0.05, abs=0.01)
        bound = min(row["peak_gflops"], row["peak_gbytes"] * row["gflops"] / row["gbytes"])
        assert row["ratio"] == pytest.approx(row["gflops"] / bound, rel=0.2, abs=0.01)
        assert row["peak_gflops"] > 0 and row["peak_gbytes"] > 0
    for row in summaries:
        same = [each["ratio"] for each in measured if (each["dtype"], each["rows"]) == (row["dtype"], row["rows"])]
        assert row["worst_ratio"] == min(same)
    assert best() == "plain" or "outputs 48, inputs 64" in capsys.readouterr().out
