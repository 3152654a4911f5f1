"""Options of `python -m tests.bench`: those of `rollout bench`, and two that only some of the developers' benchmarks have."""

from __future__ import annotations

from typing import ClassVar

from rollout.bench.harness import BenchOptions, BenchSetup


class DeveloperOptions(BenchOptions, frozen=True):
    """`tests.bench.__main__.Args` describes them."""

    program: ClassVar[str] = "python -m tests.bench"
    replicas: int = 2
    trace: str = ""


def options_of(setup: BenchSetup) -> DeveloperOptions:
    """Return the options of a benchmark that has more than those of `rollout bench`."""
    assert isinstance(setup.options, DeveloperOptions)
    return setup.options
