"""`python -m tests.bench NAME … --json FILE`: the benchmarks that answer developers' questions. Users have `rollout bench`."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

import msgspec
import tyro

from rollout.commands.arguments import DEVELOPERS, MeasureArgs
from rollout.config import CannotServe, InputError
from rollout.models import ModelNotFound
from rollout.process import ServiceFailed
from rollout.transport.errors import RolloutError


class Args(MeasureArgs, kw_only=True):
    names: tyro.conf.Positional[tuple[str, ...]]
    """benchmarks; an unknown name prints the list"""
    replicas: int = 2
    """replicas in `fleet`, `trust` and `vanish`"""
    trace: str = ""
    """a file of recorded lengths for `turns` to replay; tests/bench/trace.py describes its lines"""


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the command line and measure. Returns the exit status."""
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # before torch is imported, as `rollout` does
    about = f"Benchmarks for developers: {', '.join(DEVELOPERS)}."
    args = tyro.cli(Args, args=argv, prog="python -m tests.bench", description=about)
    from rollout.bench.harness import BenchFailed
    from tests.bench.command import run
    from tests.bench.options import DeveloperOptions

    try:
        return run(DeveloperOptions(**msgspec.structs.asdict(args)))
    except (BenchFailed, CannotServe, InputError, ModelNotFound, RolloutError, ServiceFailed) as error:
        print(f"tests.bench: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
