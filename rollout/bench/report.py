"""How figures leave: a table for people, JSON lines for programs."""

from __future__ import annotations

import json
from typing import Any, TextIO

from rich.console import Console
from rich.table import Table

from rollout.bench.workloads import Workload


def write_json(sink: TextIO | None, row: dict[str, Any]) -> None:
    if sink is not None:
        sink.write(json.dumps(row) + "\n")
        sink.flush()


def figures(row: dict[str, Any]) -> str:
    """Return a row as text: the names that it has in JSON, numbers with four digits."""
    short = {name: f"{value:.4g}" if isinstance(value, float) else value for name, value in row.items()}
    return ", ".join(f"{name} {value}" for name, value in short.items())


def print_row(console: Console, name: str, row: dict[str, Any]) -> None:
    """Print a row of the benchmark `name` as one line, however long."""
    rest = {key: value for key, value in row.items() if (key, value) not in (("workload", name), ("summary", True))}
    console.print(f"{name}{' summary' * ('summary' in row)}: {figures(rest)}", soft_wrap=True, markup=False)


def print_start(console: Console, workload: Workload) -> None:
    console.print(
        f"{workload.name}: {workload.prompts} × {workload.prompt_tokens} prompt tokens, "
        f"n = {workload.n}, {workload.new_tokens} new"
    )


def print_run(console: Console, row: dict[str, Any]) -> None:
    variant = row["workload"].partition("/")[2]
    console.print(
        f"  run {row['run']}{f', {variant}' if variant else ''}: {row['generated_tokens']} tokens in {row['seconds']:.2f} s, "
        f"{row['tokens_per_second']:.0f} tokens/s"
    )


def print_table(console: Console, summaries: list[dict[str, Any]]) -> None:
    """Medians of the runs; the range is the slowest and the fastest."""
    table = Table(box=None, padding=(0, 1, 0, 0))
    table.add_column("workload", no_wrap=True)
    for name in ("tokens/s", "range", "seconds", "prefilled", "recomputed", "off/restored", "resets", "RSS GiB"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in summaries:
        table.add_row(
            row["workload"],
            f"{row['tokens_per_second']:.0f}",
            f"{row['tokens_per_second_min']:.0f}-{row['tokens_per_second_max']:.0f}",
            f"{row['seconds']:.2f}",
            f"{row['prefill_tokens']:.0f}",
            f"{row['recomputed_tokens']:.0f}",
            f"{row['offloaded_blocks']:.0f}/{row['restored_blocks']:.0f}",
            f"{row['soft_resets']:.0f}",
            f"{row['peak_rss_bytes'] / 2**30:.2f}",
        )
    console.print(table)
    for row in summaries:
        others = [name.removeprefix("ratio_to_") for name in row if name.startswith("ratio_to_")]
        for other in sorted(others):
            ratio, speed = row[f"ratio_to_{other}"], row[f"{other}_tokens_per_second"]
            console.print(f"{row['workload']}: {ratio:.2f} x {other} ({speed:.0f} tokens/s)")
        for peer, ratio in row.get("ratios", {}).items():
            console.print(f"{row['workload']}: {ratio:.2f} x {peer} {row['peers'][peer]}")
        if "floor_fraction" in row:
            of = f"of the floor, {row['floor_tokens_per_second']:.0f} tokens/s by {row['floor_bound']}"
            console.print(f"{row['workload']}: {row['floor_fraction']:.2f} {of}")
