"""One benchmark from the command line to its rows: the default tier. All others are nightly (tests/rollout/test_bench*.py)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rollout.bench import command
from rollout.bench.workloads import WORKLOADS
from rollout.commands.arguments import DEVELOPERS
from rollout.commands.main import main
from tests.bench.__main__ import main as developers
from tests.bench.command import BENCHMARKS


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


def test_a_developers_benchmark_prints_its_rows(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "rows.jsonl"
    assert developers(["keys", "--scale", "0.01", "--json", str(out)]) == 0
    *rows, summary = map(json.loads, out.read_text().splitlines())
    assert {row["workload"] for row in (*rows, summary)} == {"keys"} and "samples_ratio" in capfd.readouterr().out
    assert summary["command"] == f"python -m tests.bench keys --scale 0.01 --json {out}"


def test_each_name_belongs_to_one_command(capfd: pytest.CaptureFixture[str]) -> None:
    assert list(DEVELOPERS) == list(BENCHMARKS)
    assert not {*BENCHMARKS} & {*WORKLOADS, *command.BENCHMARKS}
    for name in BENCHMARKS:
        assert main(["bench", name]) == 1
        assert f"`python -m tests.bench {name}`" in capfd.readouterr().err
    for words, message in (["fanout"], "no workload 'fanout'; there are: batch"), (["keys", "--trace", "x"], "only `turns`"):
        assert developers(words) == 1 and message in capfd.readouterr().err


def test_help_lists_what_each_command_has(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["bench", "--help"])
    users = capfd.readouterr().out
    with pytest.raises(SystemExit):
        developers(["--help"])
    theirs = capfd.readouterr().out
    assert "--against" in users and "--against" not in theirs
    for flag in "--replicas", "--trace":
        assert flag in theirs and flag not in users
    assert not [name for name in DEVELOPERS if f"{name}," in users or f" {name} " in users]
