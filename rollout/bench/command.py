"""The command: workloads one after the other, each in a target of its own."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal, TextIO

import msgspec
import torch
from rich.console import Console

from engine.config import EngineConfig, IsaName
from rollout import models
from rollout.bench import cuda_static, fidelity, host, products, refresh, sharing
from rollout.bench import plot as drawing
from rollout.bench.against import parse
from rollout.bench.floor import Machine
from rollout.bench.longer import long_enough
from rollout.bench.record import Recording
from rollout.bench.report import print_run, print_start, print_table, write_json
from rollout.bench.runner import measure
from rollout.bench.target import OpenTarget, open_engine, open_service
from rollout.bench.text import PromptText
from rollout.bench.workloads import WORKLOADS, find
from rollout.config import InputError

SPECIAL = (host.NAME, products.NAME, refresh.NAME, fidelity.NAME, sharing.NAME, cuda_static.NAME)
"""measured in their own way; everything else is a row of WORKLOADS"""


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
    against: str = "",
    floor: bool = False,
    plot: str | None = None,
) -> int:
    """Returns the exit status. Raises InputError for a name or number that cannot be run."""
    check(names, in_process, scale, repeat, plot)
    peers = parse(against)
    check_device(device, names, peers, floor)
    open_target = open_engine if in_process else open_service
    summaries: list[dict[str, Any]] = []
    recordings: list[Recording] | None = None if plot is None else []
    with ExitStack() as stack:
        sink = None
        if json_file is not None:
            sink = sys.stdout if json_file == "-" else stack.enter_context(_open(json_file))
        console = Console(stderr=json_file == "-", highlight=False)
        if not console.is_terminal:
            console = Console(stderr=json_file == "-", highlight=False, width=120)
        if host.NAME in names:
            for sequences in host.SEQUENCES:
                row = host.measure(sequences, scale, threads)
                write_json(sink, row)
                host.print_row(console, row)
        if products.NAME in names:
            products.print_rows(console, list(keep(products.measure(scale, threads), sink)))
        if cuda_static.NAME in names:
            for row in keep(cuda_static.measure(), sink):
                cuda_static.print_row(console, row)
        if set(names) <= {host.NAME, products.NAME, cuda_static.NAME}:
            return 0  # those without a model
        folder = models.resolve(model)
        text = PromptText(models.load_tokenizer(folder))
        base = EngineConfig(dtype=dtype, threads=threads, isa=isa, device=device)
        measure_special(names, text, folder, base, open_target, scale, repeat, sink, console)
        for name in [name for name in names if name not in SPECIAL]:
            workload = find(name).scaled(scale, EngineConfig().block_size)
            print_start(console, workload)
            with long_enough(folder, workload.tokens) as (served, weights):
                engine = msgspec.structs.replace(base, model=str(served))
                bound = Machine(served, getattr(torch, dtype)).floor if (peers or floor) and device == "cpu" else None
                for row in measure(
                    workload, text, engine, open_target, repeat, compare=compare and not peers, unshared=unshared,
                    against=peers, floor=bound, recordings=recordings,
                ):  # fmt: skip
                    if "summary" in row:
                        row |= {"model": str(folder), "weights": weights}
                        summaries.append(row)
                    else:
                        print_run(console, row)
                    write_json(sink, row)
        if summaries:
            print_table(console, summaries)
        if plot is not None and recordings:
            drawing.draw(recordings, plot)
            console.print(f"drawn: {plot}")
    return 0


def measure_special(
    names: tuple[str, ...],
    text: PromptText,
    folder: Path,
    engine: EngineConfig,
    open_target: OpenTarget,
    scale: float,
    repeat: int,
    sink: TextIO | None,
    console: Console,
) -> None:
    """What is measured in its own way, with a model."""
    if refresh.NAME in names:
        rows = list(keep(refresh.measure(folder, engine.dtype, engine.threads, repeat, text), sink))
        refresh.print_summaries(console, [row for row in rows if "summary" in row])
    if fidelity.NAME in names:
        row = fidelity.measure(text, engine, folder, open_target, scale)
        write_json(sink, row)
        fidelity.print_summary(console, row)
    if sharing.NAME in names:
        for row in keep(sharing.measure_model(folder, engine, scale, repeat), sink):
            sharing.print_row(console, row)


def check(names: tuple[str, ...], in_process: bool, scale: float, repeat: int, plot: str | None) -> None:
    """A mistake shows before the first minute of measuring. Raises InputError."""
    if not scale > 0:
        raise InputError(f"--scale {scale}: must be positive")
    if repeat < 1:
        raise InputError(f"--repeat {repeat}: must be at least 1")
    if not names:
        raise InputError(f"name a workload: {', '.join([*WORKLOADS, *SPECIAL])}")
    if refresh.NAME in names and in_process:
        raise InputError("refresh goes from process to process: leave --in-process out")
    for name in set(names) - set(SPECIAL):
        find(name)
    if plot is not None:
        if not set(names) - set(SPECIAL):
            raise InputError(f"--plot draws workloads; {', '.join(SPECIAL[:-1])} and {SPECIAL[-1]} have no picture")
        drawing.check(plot)


def check_device(device: str, names: tuple[str, ...], peers: Iterable[str], floor: bool) -> None:
    """What measures the CPU alone is refused elsewhere. Raises InputError."""
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
    """The rows, each written as it comes."""
    for row in rows:
        write_json(sink, row)
        yield row
