"""`python -m tests.bench verify` in small."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollout.bench.harness import BenchSetup
from tests.bench import forgeries, verify
from tests.bench.options import DeveloperOptions
from tests.support.bench import bench_rows


def test_bench_verify_counts_forgeries_and_alarms(tiny_model: Path, tmp_path: Path) -> None:
    *rows, summary = bench_rows(tmp_path, "verify", model=tiny_model, scale=0.003)
    honest, lies = [row for row in rows if "isa" in row], [row for row in rows if "forgery" in row]
    assert [row["isa"] for row in honest] == summary["isas"] and {row["checked"] for row in honest} == {8}
    assert [row["forgery"] for row in lies] == list(forgeries.KINDS)
    assert summary["forged"] == summary["caught"] == sum(row["forged"] for row in lies) == 6
    assert summary["checked"] == 8 * len(honest) and summary["false_alarms"] == 0
    turns = [row for row in rows if "turn" in row]
    assert len(turns) == 2 and all(row["verify_seconds"] > 0 for row in turns)
    assert summary["ratio_to_prefill"] == turns[0]["ratio_to_prefill"] > 0 < summary["ratio_to_prefill_8b"]


def test_a_missed_forgery_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control: log-probs are not compared."""
    monkeypatch.setattr("rollout.client.verification.COLUMNS", ())
    monkeypatch.setattr(forgeries, "KINDS", ("old_weights", "logprob"))
    setup = BenchSetup(DeveloperOptions(("verify",), scale=0.001))
    rows = {row["forgery"]: row for row in verify.forged_rows(setup, tmp_path, "plain")}
    assert (rows["logprob"]["forged"], rows["logprob"]["caught"]) == (1, 0)
