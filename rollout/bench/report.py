"""Output of benchmarks: JSON lines for programs, lines and a table for people."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console
from rich.table import Table

import rollout
from rollout.bench.harness import Row
from rollout.config import InputError

ROOT = Path(rollout.__path__[0]).parent


def open_json(stack: ExitStack, path: str | None) -> TextIO | None:
    """Open the file of JSON lines; "-" is standard output. Raises InputError."""
    if path is None or path == "-":
        return None if path is None else sys.stdout
    try:
        return stack.enter_context(open(path, "w", encoding="utf-8"))
    except OSError as error:
        raise InputError(f"--json {path}: {error.strerror}") from error


class Report:
    """Writes rows as JSON lines and prints them. Tables go to standard error if the JSON lines go to standard output."""

    def __init__(self, sink: TextIO | None, origin: dict[str, str]) -> None:
        self.sink = sink
        self.origin = origin
        """fields of every summary: commit, machine and command"""
        aside = sink is sys.stdout
        self.console = Console(stderr=aside, highlight=False)
        if not self.console.is_terminal:
            self.console = Console(stderr=aside, highlight=False, width=120)

    def write(self, row: Row) -> None:
        """Write a row as a line of JSON, floats with six significant digits."""
        if self.sink is not None:
            row = row | self.origin if "summary" in row else row
            self.sink.write(json.dumps({name: short(value, 6) for name, value in row.items()}) + "\n")
            self.sink.flush()

    def rows(self, name: str, rows: Iterable[Row]) -> None:
        """Write and print the rows of a benchmark, each as soon as it is measured."""
        for row in rows:
            self.write({"workload": name} | row)
            shown = {key: value for key, value in row.items() if (key, value) not in (("workload", name), ("summary", True))}
            self.line(f"{name}{' summary' * ('summary' in row)}: {figures(shown)}")

    def line(self, text: str) -> None:
        self.console.print(text, soft_wrap=True, markup=False)

    def table(self, columns: dict[str, str], rows: Iterable[Row]) -> None:
        """Print a table. columns: format strings for a row, by heading; the first column is left-aligned."""
        table = Table(box=None, padding=(0, 1, 0, 0))
        for number, heading in enumerate(columns):
            table.add_column(heading, justify="right" if number else "left", no_wrap=True)
        for row in rows:
            table.add_row(*(text.format(**row) for text in columns.values()))
        self.console.print(table)


def short(value: Any, digits: int) -> Any:
    return float(f"{value:.{digits}g}") if isinstance(value, float) else value


def figures(row: Row) -> str:
    """Return a row as text: its JSON names, floats with four significant digits."""
    return ", ".join(f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}" for name, value in row.items())


def commit_of(root: Path) -> str:
    """Return the short hash of a checkout's commit, with "+changes" if files differ from it; "" outside of git."""

    def git(*words: str) -> str:
        try:
            return subprocess.run(["git", "-C", str(root), *words], capture_output=True, text=True).stdout.strip()
        except OSError:  # no git here
            return ""

    return git("rev-parse", "--short", "HEAD") + "+changes" * bool(git("status", "--porcelain", "--untracked-files=no"))


def machine() -> str:
    """Return the CPU's name and the number of cores that this process may use."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{next(iter(names), platform.processor() or platform.machine())}, {len(os.sched_getaffinity(0))} cores"


def origin_of(command: str) -> dict[str, str]:
    """Return what identifies a measurement: commit, machine and command."""
    return {"commit": commit_of(ROOT), "machine": machine(), "command": command}
