"""What is measured in its own way, as a table: everything else is a row of WORKLOADS."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console

from engine.config import EngineConfig
from rollout.bench import (
    delta,
    fidelity,
    fleet,
    host,
    http,
    keys,
    lora,
    products,
    refresh,
    score,
    sharing,
    tail,
    train_step,
    turns,
)
from rollout.bench.target import OpenTarget
from rollout.bench.text import PromptText

Row = dict[str, Any]


class BenchArguments(NamedTuple):
    """What the command was asked for."""

    folder: Path
    """of the model"""
    text: PromptText
    engine: EngineConfig
    open_target: OpenTarget
    scale: float
    repeat: int
    replicas: int


class Special(NamedTuple):
    """A way to measure. `show` prints a row as it comes, `show_all` all of them at the end."""

    rows: Callable[[BenchArguments], Iterable[Row]]
    show: Callable[[Console, Row], None] | None = None
    show_all: Callable[[Console, list[Row]], None] | None = None
    between_processes: bool = False
    """it cannot be measured in one process"""
    any_kv: bool = False
    """KV may be kept in any dtype"""
    on_a_device: bool = False
    """it can be measured on a GPU"""


class WithoutModel(NamedTuple):
    """A way to measure that needs no model: by the scale and the number of threads."""

    rows: Callable[[float, int | None], Iterable[Row]]
    show: Callable[[Console, Row], None] | None = None
    show_all: Callable[[Console, list[Row]], None] | None = None


WITHOUT_MODEL = {
    host.NAME: WithoutModel(
        lambda scale, threads: (host.measure(each, scale, threads) for each in host.SEQUENCES), host.print_row
    ),
    products.NAME: WithoutModel(lambda scale, threads: products.measure(scale, threads), show_all=products.print_rows),
    keys.NAME: WithoutModel(lambda scale, _: keys.measure(scale), keys.print_row),
}
WITH_MODEL = {
    refresh.NAME: Special(
        lambda it: refresh.measure(it.folder, it.engine.dtype, it.engine.threads, it.repeat, it.text),
        show_all=lambda console, rows: refresh.print_summaries(console, [row for row in rows if "summary" in row]),
        between_processes=True,
    ),
    lora.NAME: Special(
        lambda it: [lora.measure(it.folder, it.engine, it.text, it.scale)], lora.print_summary, between_processes=True
    ),
    delta.NAME: Special(
        lambda it: [delta.measure(it.folder, it.engine, it.text, it.scale)], delta.print_summary, between_processes=True
    ),
    fidelity.NAME: Special(
        lambda it: [fidelity.measure(it.text, it.engine, it.folder, it.open_target, it.scale)], fidelity.print_summary,
        any_kv=True,
    ),
    tail.NAME: Special(lambda it: tail.measure(it.text, it.engine, it.folder, it.scale, it.repeat), tail.print_row),
    score.NAME: Special(lambda it: score.measure(it.text, it.engine, it.folder, it.scale, it.repeat), score.print_row),
    train_step.NAME: Special(
        lambda it: train_step.measure(it.folder, it.engine, it.text, it.scale, it.repeat), train_step.print_row
    ),
    turns.NAME: Special(
        lambda it: turns.measure(it.folder, it.engine, it.text, it.scale), turns.print_row, between_processes=True
    ),
    sharing.NAME: Special(
        lambda it: sharing.measure_model(it.folder, it.engine, it.scale, it.repeat), sharing.print_row, any_kv=True,
        on_a_device=True,
    ),
    fleet.NAME: Special(
        lambda it: fleet.measure(it.folder, it.engine, it.scale, it.repeat, it.replicas), fleet.print_row,
        between_processes=True,
    ),
    http.NAME: Special(
        lambda it: http.measure(it.folder, it.engine, it.scale, it.repeat, it.text),
        lambda console, row: http.print_summary(console, row) if "summary" in row else None,
    ),
}  # fmt: skip
SPECIAL = (*WITHOUT_MODEL, *WITH_MODEL)
"""names"""
