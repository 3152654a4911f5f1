"""Benchmark of the CUDA path, with models of known shapes and random weights: speed, and the limits that the device sets.

    python -m tests.bench.gpu --model qwen3-8b --json results.jsonl        # make bench-gpu runs both models
    python -m tests.bench.gpu --model qwen3-0.6b --parts decode,sharing

Each part writes its JSON lines as soon as it has them. An error in one part is a line with `error`, and the next part runs. A
part that would start after `--minutes` is skipped, which is an `error` too.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

import torch
import tyro

from rollout.bench.against import parse
from rollout.bench.report import figures
from rollout.config import InputError
from rollout.engine.forward.shapes import SHAPES
from tests.bench.by_hand import release
from tests.bench.gpu_bench import Args, Bench, Rows, kept
from tests.bench.gpu_kernels import attention, products, profile
from tests.bench.gpu_runs import ipc, machine, naps, offload, refresh, workloads
from tests.bench.gpu_steps import decode, exact, prefill, sharing, weights

PARTS: dict[str, Callable[[Bench], Rows]] = {
    part.__name__: part
    for part in (
        machine,
        attention,
        products,
        decode,
        profile,
        prefill,
        exact,
        sharing,
        offload,
        weights,
        refresh,
        ipc,
        naps,
        workloads,
    )
}


def measure(bench: Bench, parts: dict[str, Callable[[Bench], Rows]]) -> Rows:
    """Yield the rows of all parts. An error is a row with `error`."""
    for name, part in parts.items():
        base = {"model": bench.name, "part": name}
        if bench.seconds_left < 0:
            yield base | {"error": "skipped: --minutes are over"}
            continue
        began = time.perf_counter()
        for row in kept(part(bench)):
            yield base | row
        yield base | {"seconds": round(time.perf_counter() - began, 2)}
        release(bench.device)


def check(args: Args, known: dict[str, Any]) -> list[str]:
    """Return the names of the parts to run. Raises InputError."""
    names = [name for name in args.parts.split(",") if name] or list(known)
    unknown = [name for name in names if name not in known]
    cuda = torch.device(args.device).type == "cuda"
    rules: tuple[tuple[object, str], ...] = (
        (parse(args.against)[1], f"--against {args.against}: this benchmark compares with engines, not with checkouts"),
        (args.model not in SHAPES, f"--model {args.model!r}: must be one of {', '.join(SHAPES)}"),
        (unknown, f"--parts: no part {next(iter(unknown), None)!r}; there are: {', '.join(known)}"),
        (
            cuda and not torch.cuda.is_available(),
            f"--device {args.device}: torch {torch.__version__} finds no CUDA device here; try --device cpu --quick",
        ),
    )
    for refused, message in rules:
        if refused:
            raise InputError(message)
    return names


def run(args: Args, out: TextIO) -> int:
    """Run the parts and write a JSON object per row. Returns the exit status: 1 if a part failed or was skipped."""
    names = check(args, PARTS)
    failed = False
    for row in measure(Bench(args), {name: PARTS[name] for name in names}):
        failed |= "error" in row
        out.write(json.dumps(row) + "\n")
        out.flush()
        if out is not sys.stdout:
            shown = {name: row[name] for name in row if name not in ("model", "part")}
            print(f"{row['model']} {row['part']}: {figures(shown)}", flush=True)
    return int(failed)


def main(argv: list[str] | None = None) -> int:
    args = tyro.cli(Args, args=argv, prog="python -m tests.bench.gpu")
    logging.basicConfig(level=logging.WARNING)
    try:
        if args.json in (None, "-"):
            return run(args, sys.stdout)
        with Path(args.json).open("w", encoding="utf-8") as out:
            return run(args, out)
    except InputError as error:
        print(f"tests.bench.gpu: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
