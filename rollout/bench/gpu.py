"""What a GPU makes of the engine, beside what its memory would allow; models of known shapes with random weights, no hub.

    python -m rollout.bench.gpu --model qwen3-8b --json results.jsonl        # make bench-gpu runs both models
    python -m rollout.bench.gpu --model qwen3-0.6b --parts decode,sharing

Every part (`rollout.bench.gpu_parts`) writes its JSON lines as soon as it has them. One that fails is reported and does not end
the others; one that would begin after `--minutes` is left out, and that is reported too.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TextIO

import torch
import tyro

from rollout.bench.by_hand import release
from rollout.bench.gpu_bench import MODELS, Args, Bench, kept
from rollout.bench.gpu_parts import PARTS
from rollout.bench.report import figures
from rollout.config import InputError


def measure(bench: Bench, parts: dict[str, Callable[[Bench], Iterator[dict[str, Any]]]]) -> Iterator[dict[str, Any]]:
    """Yield the rows of all parts. What goes wrong in one is a row with an `error`."""
    for name, part in parts.items():
        base = {"model": bench.name, "part": name}
        if bench.seconds_left < 0:
            yield base | {"error": "left out: the minutes are over"}
            continue
        began = time.perf_counter()
        for row in kept(part(bench)):
            yield base | row
        yield base | {"seconds": round(time.perf_counter() - began, 2)}
        release(bench.device)


def check(args: Args, known: dict[str, Any]) -> list[str]:
    """Return the names of the parts. Raises InputError."""
    if args.model not in MODELS:
        raise InputError(f"--model {args.model!r}: must be one of {', '.join(MODELS)}")
    names = [name for name in args.parts.split(",") if name] or list(known)
    for name in names:
        if name not in known:
            raise InputError(f"--parts: no part {name!r}; there are: {', '.join(known)}")
    if torch.device(args.device).type == "cuda" and not torch.cuda.is_available():
        raise InputError(
            f"--device {args.device}: torch {torch.__version__} finds no CUDA device here; --device cpu --quick tries"
        )
    return names


def run(args: Args, out: TextIO) -> int:
    """Measure, and write a JSON object a row. Returns the exit status: 1 if a part failed or was left out."""
    names = check(args, PARTS)
    failed = False
    for row in measure(Bench(args), {name: PARTS[name] for name in names}):
        failed |= "error" in row
        out.write(json.dumps(row) + "\n")
        out.flush()
        if out is not sys.stdout:
            print(text(row), flush=True)
    return int(failed)


def text(row: dict[str, Any]) -> str:
    return f"{row['model']} {row['part']}: {figures({name: row[name] for name in row if name not in ('model', 'part')})}"


def main(argv: list[str] | None = None) -> int:
    args = tyro.cli(Args, args=argv, prog="python -m rollout.bench.gpu")
    logging.basicConfig(level=logging.WARNING)
    try:
        if args.json in (None, "-"):
            return run(args, sys.stdout)
        with Path(args.json).open("w", encoding="utf-8") as out:
            return run(args, out)
    except InputError as error:
        print(f"rollout.bench.gpu: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
