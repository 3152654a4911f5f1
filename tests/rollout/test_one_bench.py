"""One benchmark from the command line to its rows: the default tier. All others are nightly (tests/rollout/test_bench*.py)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rollout.commands.main import main


def test_single_stream_prints_its_rows(tiny_model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "rows.jsonl"
    options = [
        "--model",
        str(tiny_model),
        "--in-process",
        "--scale",
        "0.1",
        "--repeat",
        "1",
        "--dtype",
        "float32",
        "--threads",
        "1",
    ]
    assert main(["bench", "single_stream", *options, "--json", str(out)]) == 0
    run, summary = map(json.loads, out.read_text().splitlines())
    assert run["workload"] == summary["workload"] == "single_stream" and run["generated_tokens"] > 0
    assert "single_stream" in capfd.readouterr().out
