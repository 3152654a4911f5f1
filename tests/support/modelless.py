"""`rollout serve` with an engine that needs neither a model nor torch, for tests of the process alone.

    python -m tests.support.modelless serve --config FILE …

`service_process(config, python=str(as_python(folder)))` starts it.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rollout.config import Config

ROOT = Path(__file__).parents[2]


def as_python(folder: Path) -> Path:
    """Write a program that takes the place of `python` in `python -P -m rollout …`."""
    program = folder / "python"
    program.write_text(f'#!/bin/sh\nshift 3\ncd {ROOT} && exec {sys.executable} -m tests.support.modelless "$@"\n')
    program.chmod(0o700)
    return program


def run() -> int:
    from rollout.commands import starting
    from rollout.commands.main import main
    from tests.support.fake_engine import FakeEngine

    def load(config: Config, progress: object) -> FakeEngine:
        engine = FakeEngine(config.limits)
        engine.model.name = config.engine.model
        return engine

    starting.load = load  # type: ignore[assignment]
    return main(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(run())
