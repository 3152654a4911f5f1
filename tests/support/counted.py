"""Counts the lines of Python that a call runs: what it costs, whatever the machine."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any


def lines_of(work: Callable[[], Any]) -> int:
    """Count the lines of Python that are run, calls of comprehensions and generators among them. Raises what `work` raises."""
    count = 0

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal count
        count += 1
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
    return count
