"""Runs `rollout bench` in this process and reads its JSON lines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rollout.bench import BenchOptions, run


def bench_rows(folder: Path, *names: str, model: str | Path = "no such model", **options: Any) -> list[dict[str, Any]]:
    """Run benchmarks in small, on one thread and in fp32 unless the options say otherwise. Returns the rows."""
    out = folder / "rows.jsonl"
    small: dict[str, Any] = {"scale": 0.1, "repeat": 1, "dtype": "float32", "threads": 1}
    assert run(BenchOptions(names, model=str(model), json_file=str(out), **(small | options))) == 0
    return [json.loads(line) for line in out.read_text().splitlines()]
