"""Passes events from the threads of the links to the thread of the router's service, as calls.

link threads --post(call)--> EventQueue --run, by the service's thread--> groups, replicas, weights
"""

from __future__ import annotations

import queue
from collections.abc import Callable

MAX_CALLS = 512
"""most calls in one iteration of the loop, so that clients are served too"""


class EventQueue:
    """Calls that wait for the service's thread; false when empty. `wake`: ends the service's wait (`Service.wake`)."""

    def __init__(self) -> None:
        self.wake: Callable[[], None] = lambda: None
        self._waiting: queue.SimpleQueue[tuple[Callable[[], None], int]] = queue.SimpleQueue()
        self._woken = False

    def __bool__(self) -> bool:
        return not self._waiting.empty()

    def post(self, call: Callable[[], None], size: int = 1) -> None:
        """Have the service's thread make `call`; it counts as `size` of MAX_CALLS. For any thread."""
        self._waiting.put((call, size))
        if not self._woken:
            self._woken = True
            self.wake()

    def run(self) -> None:
        """Make waiting calls, at most MAX_CALLS. For the service's thread."""
        self._woken = False  # before the loop: a later post wakes again
        made = 0
        for _ in range(self._waiting.qsize()):
            if made >= MAX_CALLS:
                return
            call, size = self._waiting.get_nowait()
            call()
            made += max(1, size)
