"""The command: workloads one after the other, each in a target of its own."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from typing import Any, Literal

from rich.console import Console

from engine.config import EngineConfig
from rollout import models
from rollout.bench.report import print_run, print_start, print_table, write_json
from rollout.bench.runner import measure
from rollout.bench.target import open_engine, open_service
from rollout.bench.text import PromptText
from rollout.bench.workloads import WORKLOADS, find
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
) -> int:
    """Returns the exit status. Raises InputError for a name or number that cannot be run."""
    if not scale > 0:
        raise InputError(f"--scale {scale}: must be positive")
    if repeat < 1:
        raise InputError(f"--repeat {repeat}: must be at least 1")
    if not names:
        raise InputError(f"name a workload: {', '.join(WORKLOADS)}")
    for name in names:
        find(name)  # a mistake shows before the first minute of measuring
    folder = models.resolve(model)
    engine = EngineConfig(model=str(folder), dtype=dtype, threads=threads)
    text = PromptText(models.load_tokenizer(folder))
    open_target = open_engine if in_process else open_service
    summaries: list[dict[str, Any]] = []
    with ExitStack() as stack:
        sink = None
        if json_file is not None:
            sink = sys.stdout if json_file == "-" else stack.enter_context(open(json_file, "w", encoding="utf-8"))
        console = Console(stderr=json_file == "-", highlight=False)
        for name in names:
            workload = find(name).scaled(scale, engine.block_size)
            print_start(console, workload)
            for row in measure(workload, text, engine, open_target, repeat):
                write_json(sink, row)
                if "summary" in row:
                    summaries.append(row)
                else:
                    print_run(console, row)
        print_table(console, summaries)
    return 0
