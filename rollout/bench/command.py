"""The command: workloads one after the other, each in a target of its own."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple, TextIO

import msgspec
import torch
from rich.console import Console

from engine.config import EngineConfig, IsaName
from rollout import models
from rollout.bench import (
    cuda_static,
    delta,
    fidelity,
    fleet,
    host,
    http,
    keys,
    lora,
    policies,
    products,
    refresh,
    score,
    sharing,
    tail,
    turns,
)
from rollout.bench import plot as drawing
from rollout.bench.against import parse
from rollout.bench.floor import Machine
from rollout.bench.longer import long_enough
from rollout.bench.record import Recording
from rollout.bench.report import print_run, print_start, print_table, write_json
from rollout.bench.runner import measure
from rollout.bench.target import OpenTarget, open_engine, open_service
from rollout.bench.text import PromptText
from rollout.bench.workloads import WORKLOADS, Workload, find
from rollout.config import InputError

SPECIAL = (
    host.NAME,
    keys.NAME,
    products.NAME,
    refresh.NAME,
    lora.NAME,
    delta.NAME,
    fidelity.NAME,
    sharing.NAME,
    score.NAME,
    policies.NAME,
    tail.NAME,
    http.NAME,
    turns.NAME,
    fleet.NAME,
    cuda_static.NAME,
)
"""measured in their own way; everything else is a row of WORKLOADS"""
WITHOUT_MODEL = (host.NAME, keys.NAME, products.NAME, cuda_static.NAME)


def run(
    names: tuple[str, ...],
    *,
    model: str,
    in_process: bool,
    scale: float,
    repeat: int,
    json_file: str | None,
    dtype: Literal["bfloat16", "float32"],
    threads: int | None,
    isa: IsaName = "auto",
    device: str = "cpu",
    compare: bool = True,
    unshared: bool = False,
    undrafted: bool = False,
    temperature: float = 1.0,
    against: str = "",
    floor: bool = False,
    plot: str | None = None,
    replicas: int = 2,
) -> int:
    """Measure what is named, and print it. Returns the exit status. Raises InputError for a name or number that cannot be
    run."""
    check(names, in_process, scale, repeat, plot)
    peers = parse(against)
    check_device(device, names, peers, floor)
    recordings: list[Recording] | None = None if plot is None else []
    with ExitStack() as stack:
        out = open_out(stack, json_file)
        measure_without_model(names, scale, threads, out)
        if set(names) <= set(WITHOUT_MODEL):
            return 0
        open_target = open_engine if in_process else open_service
        folder = models.resolve(model)
        text = PromptText(models.load_tokenizer(folder))
        engine = EngineConfig(dtype=dtype, threads=threads, isa=isa, device=device)
        measure_special(names, text, folder, engine, open_target, scale, repeat, replicas, plot, out)
        rows = partial(
            measure, text=text, open_target=open_target, repeat=repeat, compare=compare and not peers, unshared=unshared,
            undrafted=undrafted, against=peers, recordings=recordings,
        )  # fmt: skip
        bounded = bool(peers or floor) and device == "cpu"
        workloads = [find(name).scaled(scale, engine.block_size, temperature) for name in names if name not in SPECIAL]
        summaries = [measure_workload(workload, folder, engine, bounded, rows, out) for workload in workloads]
        if summaries:
            print_table(out.console, summaries)
        if plot is not None and recordings:
            drawing.draw(recordings, plot)
            out.console.print(f"drawn: {plot}")
    return 0


class Out(NamedTuple):
    """Where rows go."""

    sink: TextIO | None
    """one JSON object a line"""
    console: Console


def open_out(stack: ExitStack, json_file: str | None) -> Out:
    """Open what `--json` names; rows on standard output send the tables to standard error. Raises InputError."""
    sink = None
    if json_file is not None:
        sink = sys.stdout if json_file == "-" else stack.enter_context(_open(json_file))
    console = Console(stderr=json_file == "-", highlight=False)
    if not console.is_terminal:
        console = Console(stderr=json_file == "-", highlight=False, width=120)
    return Out(sink, console)


def measure_without_model(names: tuple[str, ...], scale: float, threads: int | None, out: Out) -> None:
    """Measure what needs no model: WITHOUT_MODEL."""
    if host.NAME in names:
        for row in keep((host.measure(sequences, scale, threads) for sequences in host.SEQUENCES), out.sink):
            host.print_row(out.console, row)
    if products.NAME in names:
        products.print_rows(out.console, list(keep(products.measure(scale, threads), out.sink)))
    if keys.NAME in names:
        for row in keep(keys.measure(scale), out.sink):
            keys.print_row(out.console, row)
    if cuda_static.NAME in names:
        for row in keep(cuda_static.measure(), out.sink):
            cuda_static.print_row(out.console, row)


def measure_workload(
    workload: Workload,
    folder: Path,
    engine: EngineConfig,
    bounded: bool,
    rows: Callable[..., Iterator[dict[str, Any]]],
    out: Out,
) -> dict[str, Any]:
    """Run one workload and tell its rows. bounded: with what bounds it on this machine. rows: `measure`, but for what is
    named here. Returns the summary."""
    print_start(out.console, workload)
    summary: dict[str, Any] = {}
    with long_enough(folder, workload.tokens) as (served, weights):
        served_engine = msgspec.structs.replace(engine, model=str(served))
        bound = Machine(served, getattr(torch, engine.dtype)).floor if bounded else None
        for row in rows(workload, engine=served_engine, floor=bound):
            if "summary" in row:
                summary = row = row | {"model": str(folder), "weights": weights}
            else:
                print_run(out.console, row)
            write_json(out.sink, row)
    return summary


def measure_special(
    names: tuple[str, ...],
    text: PromptText,
    folder: Path,
    engine: EngineConfig,
    open_target: OpenTarget,
    scale: float,
    repeat: int,
    replicas: int,
    plot: str | None,
    out: Out,
) -> None:
    """Measure what is measured in its own way, with a model. plot: where the picture of `policies` goes."""
    sink, console = out
    if refresh.NAME in names:
        rows = list(keep(refresh.measure(folder, engine.dtype, engine.threads, repeat, text), sink))
        refresh.print_summaries(console, [row for row in rows if "summary" in row])
    for bench in (lora, delta):
        if bench.NAME in names:
            row = bench.measure(folder, engine, text, scale)
            write_json(sink, row)
            bench.print_summary(console, row)
    if fidelity.NAME in names:
        row = fidelity.measure(text, engine, folder, open_target, scale)
        write_json(sink, row)
        fidelity.print_summary(console, row)
    for each in (tail, score):
        if each.NAME in names:
            for row in keep(each.measure(text, engine, folder, scale, repeat), sink):
                each.print_row(console, row)
    if turns.NAME in names:
        for row in keep(turns.measure(folder, engine, text, scale), sink):
            turns.print_row(console, row)
    if policies.NAME in names:
        rows = []
        for row in keep(policies.measure(folder, engine, scale, repeat), sink):
            policies.print_row(console, row)
            rows.append(row)
        if plot is not None:
            policies.draw(rows, plot)
    if sharing.NAME in names:
        for row in keep(sharing.measure_model(folder, engine, scale, repeat), sink):
            sharing.print_row(console, row)
    if fleet.NAME in names:
        for row in keep(fleet.measure(folder, engine, scale, repeat, replicas), sink):
            fleet.print_row(console, row)
    if http.NAME in names:
        for row in keep(http.measure(folder, engine, scale, repeat, text), sink):
            if "summary" in row:
                http.print_summary(console, row)


def check(names: tuple[str, ...], in_process: bool, scale: float, repeat: int, plot: str | None) -> None:
    """Find mistakes before the first minute of measuring. Raises InputError."""
    if not scale > 0:
        raise InputError(f"--scale {scale}: must be positive")
    if repeat < 1:
        raise InputError(f"--repeat {repeat}: must be at least 1")
    if not names:
        raise InputError(f"name a workload: {', '.join([*WORKLOADS, *SPECIAL])}")
    for name in (refresh.NAME, lora.NAME, delta.NAME, turns.NAME, fleet.NAME):
        if name in names and in_process:
            raise InputError(f"{name} goes from process to process: leave --in-process out")
    for name in set(names) - set(SPECIAL):
        find(name)
    if plot is not None:
        without = [name for name in SPECIAL if name != policies.NAME]
        if not set(names) - set(without):
            raise InputError(
                f"--plot draws workloads and policies; {', '.join(without[:-1])} and {without[-1]} have no picture"
            )
        drawing.check(plot)


def check_device(device: str, names: tuple[str, ...], peers: Iterable[str], floor: bool) -> None:
    """Refuse what measures the CPU alone on another device. Raises InputError."""
    if device == "cpu":
        return
    if not torch.cuda.is_available():
        raise InputError(f"--device {device}: torch {torch.__version__} finds no CUDA device here; --device cpu works")
    on_cpu = [name for name in names if name in SPECIAL and name != sharing.NAME]
    on_cpu += [f"--against {name}" for name in peers if name != "transformers_cb"] + ["--floor"] * floor
    if on_cpu:
        raise InputError(f"{on_cpu[0]} measures the CPU: leave --device {device} out")


def _open(path: str) -> TextIO:
    try:
        return open(path, "w", encoding="utf-8")
    except OSError as error:
        raise InputError(f"--json {path}: {error.strerror}") from error


def keep(rows: Iterator[dict[str, Any]], sink: TextIO | None) -> Iterator[dict[str, Any]]:
    """Yield the rows, each written as it comes."""
    for row in rows:
        write_json(sink, row)
        yield row
