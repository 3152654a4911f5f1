"""Options of `python -m tests.bench`."""

from __future__ import annotations

from typing import ClassVar

from rollout.bench.harness import BenchOptions


class DeveloperOptions(BenchOptions, frozen=True):
    """`tests.bench.__main__.Args` describes them."""

    program: ClassVar[tuple[str, ...]] = ("python", "-m", "tests.bench")
