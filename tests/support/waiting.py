"""One way to wait for what another thread or process does."""

from __future__ import annotations

import time
from collections.abc import Callable

POLL_S = 0.002


def until(condition: Callable[[], object], what: str = "it came true", seconds: float = 60.0) -> None:
    """Wait until `condition` is true. Raises AssertionError naming `what` after so many seconds: no test waits for ever."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds:g} s: {what}"
        time.sleep(POLL_S)
