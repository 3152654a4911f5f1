"""`rollout bench cache` in small."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollout.bench import cache
from tests.support.bench import bench_rows


@pytest.mark.long
@pytest.mark.timeout(900)  # two minutes on a quiet machine
def test_a_second_run_of_grpo_has_the_same_curve(tiny_model: Path, tmp_path: Path) -> None:
    first, second, summary = bench_rows(tmp_path, "cache", model=tiny_model, scale=0.2)
    assert first["misses"] == second["hits"] == 60 and first["hits"] == second["misses"] == 0
    assert summary["equal"] and summary["cache_seconds_ratio"] > 0


def test_another_curve_and_slow_hits_are_told() -> None:
    first = {"curve": [[1, 0.5]], "generation_seconds": 2.0, "hits": 0, "misses": 6}
    second = {"curve": [[1, 0.25]], "generation_seconds": 1.0, "hits": 4, "misses": 2}
    found = cache.compared(first, second)
    assert found == {"cache_seconds_ratio": 0.5, "equal": False, "hits": 4, "misses": 2}
    assert cache.compared(first, second | {"curve": [[1, 0.5]]})["equal"]
