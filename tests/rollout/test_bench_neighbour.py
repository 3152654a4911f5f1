"""`python -m tests.bench neighbour` in small."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollout.bench.harness import BenchFailed
from tests.bench import neighbour
from tests.support.bench import bench_rows


def test_bench_neighbour_prints_both_rates(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    *turns, summary = bench_rows(tmp_path, "neighbour", model="shape:tiny", scale=0.02, repeat=1)
    assert len(turns) == 1 and summary["summary"] and summary["threads"] == 1
    for turn in turns:
        assert turn["tokens_per_second"] > 0 and turn["steps_per_second"] > 0
        total = turn["engine_fraction"] + turn["neighbour_fraction"]
        assert abs(turn["sum_of_fractions"] - total) <= 6e-6, "each of the three has six significant digits"
    assert summary["sum_of_fractions"] == turns[0]["sum_of_fractions"]
    assert "neighbour: " in capsys.readouterr().out


def test_a_neighbour_that_exits_is_an_error() -> None:
    with neighbour.neighbour(1) as other:
        print("not a number", file=other._to, flush=True)
        with pytest.raises(BenchFailed, match="exited with status 1"):
            other.rate()
