"""`python -m tests.bench int8` in small."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from rollout.engine.values import Group, Sampling
from rollout.engine.values.arithmetic import INT8
from tests.bench import int8
from tests.support.bench import bench_rows
from tests.support.samebits import torchs_log_softmax
from tests.support.tiny import tiny_engine


@torchs_log_softmax
def test_bench_int8_compares_steps_and_log_probs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(int8, "TEXTS", 2)
    *rows, summary = bench_rows(tmp_path, "int8", model="shape:tiny", dtype="bfloat16", scale=0.1, repeat=3)
    assert [row["rows"] for row in rows] == [1, 2, 4, 8]
    for row in rows:
        assert row["speedup"] == pytest.approx(row["milliseconds"] / row["int8_milliseconds"], rel=1e-3)
        plain, eight = row["rounds"]
        assert row["milliseconds"] == pytest.approx(sorted(plain)[1], abs=1e-2) and len(eight) == 3
    assert summary["arithmetic"].endswith(INT8) and summary["speedup_min"] == min(row["speedup"] for row in rows)
    assert summary["max_abs_exact"] == 0 and summary["max_abs_plain"] > 0, "both trainers would do"
    assert summary["text_tokens"] == 2 * 32 and 0 < summary["mean_abs"] <= summary["max_abs"]
    assert summary["perplexity"] != summary["int8_perplexity"]


def test_a_sequence_that_ends_in_a_round_is_an_error() -> None:
    """Later steps would be of fewer rows."""
    engine = tiny_engine(weight_dtype="int8", dtype="bfloat16")
    engine.submit(Group("g", np.arange(9, 20, dtype=np.int32), Sampling(max_tokens=3, ignore_eos=True)))
    with pytest.raises(AssertionError):
        int8.timed_steps(engine, 9)
