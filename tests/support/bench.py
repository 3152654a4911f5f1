"""Runs benchmarks in this process, of `rollout bench` or of `python -m tests.bench`, and reads their JSON lines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rollout.bench import BenchOptions, run
from rollout.commands.arguments import DEVELOPERS
from tests.bench.command import run as run_developers
from tests.bench.options import DeveloperOptions


def bench_rows(folder: Path, *names: str, model: str | Path = "no such model", **options: Any) -> list[dict[str, Any]]:
    """Run benchmarks in small, on one thread and in fp32 unless the options say otherwise. Returns the rows."""
    out = folder / "rows.jsonl"
    small: dict[str, Any] = {"scale": 0.1, "repeat": 1, "dtype": "float32", "threads": 1}
    assert run_named(names, model=str(model), json_file=str(out), **(small | options)) == 0
    return [json.loads(line) for line in out.read_text().splitlines()]


def run_named(names: tuple[str, ...], **options: Any) -> int:
    """Run benchmarks that are all of one of the two commands. Returns the exit status."""
    if set(names) <= set(DEVELOPERS):
        return run_developers(DeveloperOptions(names, **options))
    return run(BenchOptions(names, **options))
