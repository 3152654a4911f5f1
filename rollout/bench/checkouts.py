"""`rollout bench WORKLOAD … --against CHECKOUT`: workloads of this checkout and of another one, in turn.

    turn 0   here, CHECKOUT      each is a process: the checkout's own `rollout bench WORKLOAD … --repeat 1 --json -`,
    turn 1   CHECKOUT, here      all workloads after one another
    turn 2   here, CHECKOUT

A slow moment of the machine then affects both. The ratio is here / CHECKOUT in tokens/s; the summary has the median of the
turns."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
from collections.abc import Iterator
from pathlib import Path

import msgspec

from rollout.bench.harness import BenchFailed, BenchOptions, Row
from rollout.bench.report import ROOT, Report, commit_of
from rollout.engine.processes import run_module

COLUMNS = {
    "workload": "{workload}",
    "here": "{tokens_per_second:.0f}",
    "other": "{other_tokens_per_second:.0f}",
    "ratio": "{ratio:.3f}",
    "range": "{ratio_min:.3f}-{ratio_max:.3f}",
}


def compare(options: BenchOptions, other: Path, report: Report) -> None:
    """Run the workloads of both checkouts `--repeat` times in turn and print the ratios. Raises BenchFailed."""
    report.line(f"here: {commit_of(ROOT)}; other: {commit_of(other)} in {other}")
    summaries = []
    for row in measure(options, ROOT, other):
        if "summary" in row:
            summaries.append(row)
        else:
            speeds = f"{row['tokens_per_second']:.0f} and {row['other_tokens_per_second']:.0f} tokens/s"
            report.line(f"  turn {row['turn']}, {row['workload']}: {speeds}, ratio {row['ratio']:.3f}")
        report.write(row)
    report.table(COLUMNS, summaries)


def measure(options: BenchOptions, here: Path, other: Path) -> Iterator[Row]:
    """Yield a row per turn and workload, then a summary per workload. Raises BenchFailed."""
    ratios: dict[str, list[tuple[float, float]]] = {name: [] for name in options.names}
    for turn in range(options.repeat):
        order = (here, other) if turn % 2 == 0 else (other, here)
        speeds = {root: speeds_of(root, options) for root in order}
        for name in options.names:
            pair = speeds[here][name], speeds[other][name]
            ratios[name].append(pair)
            speed = {"tokens_per_second": pair[0], "other_tokens_per_second": pair[1]}
            yield {"workload": name, "turn": turn, **speed, "ratio": pair[0] / pair[1]}
    for name, pairs in ratios.items():
        each = [ours / theirs for ours, theirs in pairs]
        yield {
            "workload": name,
            "summary": True,
            "turns": options.repeat,
            "other": str(other),
            "other_commit": commit_of(other),
            "tokens_per_second": statistics.median(ours for ours, _ in pairs),
            "other_tokens_per_second": statistics.median(theirs for _, theirs in pairs),
            "ratio": statistics.median(each),
            "ratio_min": min(each),
            "ratio_max": max(each),
        }


def speeds_of(root: Path, options: BenchOptions) -> dict[str, float]:
    """Run each workload once with a checkout's own command line. Returns tokens/s by workload. Raises BenchFailed."""
    once = msgspec.structs.replace(options, repeat=1, json_file="-", against="", compare=False)
    own = root / ".venv/bin/python"
    python = str(own) if root != ROOT and own.exists() else None
    environment = os.environ | {"PYTHONPATH": str(root)}
    command = run_module("rollout", "bench", *once.words(), python=python)
    done = subprocess.run(command, cwd=root, env=environment, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise BenchFailed(f"{root}: rollout bench exited with status {done.returncode}; standard error says why")
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    speeds = {row["workload"]: float(row["tokens_per_second"]) for row in rows if "summary" not in row}
    if missing := [name for name in options.names if name not in speeds]:
        raise BenchFailed(f"{root}: rollout bench reported no tokens/s of {', '.join(missing)}")
    return speeds
