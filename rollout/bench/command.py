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

from engine.config import EngineConfig, IsaName, KVName
from rollout import models
from rollout.bench.against import parse
from rollout.bench.floor import MachineRates
from rollout.bench.inputs import PromptText, long_enough
from rollout.bench.report import print_row, print_run, print_start, print_table, write_json
from rollout.bench.runner import measure
from rollout.bench.special import SPECIAL, WITH_MODEL, WITHOUT_MODEL, BenchArguments
from rollout.bench.target import open_engine, open_service
from rollout.bench.workloads import WORKLOADS, Workload, find
from rollout.config import InputError


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
    kv_dtype: KVName = "auto",
    device: str = "cpu",
    compare: bool = True,
    unshared: bool = False,
    undrafted: bool = False,
    temperature: float = 1.0,
    against: str = "",
    floor: bool = False,
    replicas: int = 2,
) -> int:
    """Measure what is named, and print it. Returns the exit status. Raises InputError for a name or number that cannot be
    run."""
    check(names, in_process, scale, repeat)
    peers = parse(against)
    check_device(device, names, peers, floor)
    check_kv(kv_dtype, names, peers, floor)
    with ExitStack() as stack:
        out = open_out(stack, json_file)
        measure_without_model(names, scale, threads, out)
        if set(names) <= set(WITHOUT_MODEL):
            return 0
        open_target = open_engine if in_process else open_service
        folder = models.resolve(model)
        text = PromptText(models.load_tokenizer(folder))
        engine = EngineConfig(dtype=dtype, threads=threads, isa=isa, kv_dtype=kv_dtype, device=device)
        measure_special(names, BenchArguments(folder, text, engine, open_target, scale, repeat, replicas), out)
        rows = partial(
            measure, text=text, open_target=open_target, repeat=repeat, compare=compare and not peers, unshared=unshared,
            undrafted=undrafted, against=peers,
        )  # fmt: skip
        bounded = bool(peers or floor) and device == "cpu"
        workloads = [find(name).scaled(scale, engine.block_size, temperature) for name in names if name not in SPECIAL]
        summaries = [measure_workload(workload, folder, engine, bounded, rows, out) for workload in workloads]
        if summaries:
            print_table(out.console, summaries)
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
    for name, rows in WITHOUT_MODEL.items():
        if name in names:
            report_rows(name, rows(scale, threads), out)


def measure_special(names: tuple[str, ...], asked: BenchArguments, out: Out) -> None:
    """Run the benchmarks of WITH_MODEL that are named."""
    for name, benchmark in WITH_MODEL.items():
        if name in names:
            report_rows(name, benchmark.rows(asked), out)


def report_rows(name: str, rows: Iterable[dict[str, Any]], out: Out) -> None:
    """Write and print the rows of a benchmark, each as it comes."""
    for row in rows:
        write_json(out.sink, row)
        print_row(out.console, name, row)


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
        bound = MachineRates(served, engine).bounded if bounded else None
        for row in rows(workload, engine=served_engine, floor=bound):
            if "summary" in row:
                summary = row = row | {"model": str(folder), "weights": weights}
            else:
                print_run(out.console, row)
            write_json(out.sink, row)
    return summary


def check(names: tuple[str, ...], in_process: bool, scale: float, repeat: int) -> None:
    """Find mistakes before the first minute of measuring. Raises InputError."""
    if not scale > 0:
        raise InputError(f"--scale {scale}: must be positive")
    if repeat < 1:
        raise InputError(f"--repeat {repeat}: must be at least 1")
    if not names:
        raise InputError(f"name a workload: {', '.join([*WORKLOADS, *SPECIAL])}")
    for name in (name for name, way in WITH_MODEL.items() if way.between_processes and name in names):
        if in_process:
            raise InputError(f"{name} goes from process to process: leave --in-process out")
    for name in names:
        if name not in WORKLOADS and name not in SPECIAL:
            raise InputError(f"no workload {name!r}; there are: {', '.join([*WORKLOADS, *SPECIAL])}")


def check_device(device: str, names: tuple[str, ...], peers: Iterable[str], floor: bool) -> None:
    """Refuse what measures the CPU alone on another device. Raises InputError."""
    if device == "cpu":
        return
    if not torch.cuda.is_available():
        raise InputError(f"--device {device}: torch {torch.__version__} finds no CUDA device here; --device cpu works")
    on_cpu = [name for name in names if name in SPECIAL and not (name in WITH_MODEL and WITH_MODEL[name].on_a_device)]
    on_cpu += [f"--against {name}" for name in peers if name != "transformers_cb"] + ["--floor"] * floor
    if on_cpu:
        raise InputError(f"{on_cpu[0]} measures the CPU: leave --device {device} out")


def check_kv(kv_dtype: KVName, names: tuple[str, ...], peers: Iterable[str], floor: bool) -> None:
    """Refuse what measures with KV in the model's dtype. Raises InputError."""
    if kv_dtype == "auto":
        return
    others = [name for name in names if name in SPECIAL and not (name in WITH_MODEL and WITH_MODEL[name].any_kv)]
    others += ["--floor"] * (floor or bool(list(peers)))
    if others:
        raise InputError(f"{others[0]} counts KV in the model's dtype: leave --engine.kv-dtype {kv_dtype} out")


def _open(path: str) -> TextIO:
    try:
        return open(path, "w", encoding="utf-8")
    except OSError as error:
        raise InputError(f"--json {path}: {error.strerror}") from error
