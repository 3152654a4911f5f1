"""From the threads of the links to the thread of the front's service: what has happened, as calls to make.

link threads --post(call)--> Inbox --run, by the service's thread--> groups, members, weights
"""

from __future__ import annotations

import queue
from collections.abc import Callable

MOST_AT_ONCE = 512
"""calls of one turn of the loop; clients have their turn between"""


class EventQueue:
    """True while something waits. `wake`: ends the service's wait for messages, see `Service.wake`."""

    def __init__(self) -> None:
        self.wake: Callable[[], None] = lambda: None
        self._waiting: queue.SimpleQueue[tuple[Callable[[], None], int]] = queue.SimpleQueue()
        self._woken = False

    def __bool__(self) -> bool:
        return not self._waiting.empty()

    def post(self, call: Callable[[], None], size: int = 1) -> None:
        """Have `call` made by the service's thread; it is worth `size` of MOST_AT_ONCE. For any thread."""
        self._waiting.put((call, size))
        if not self._woken:
            self._woken = True
            self.wake()

    def run(self) -> None:
        """Make calls that wait, until they are MOST_AT_ONCE. For the service's thread."""
        self._woken = False  # before looking: what is posted from here on wakes again
        made = 0
        for _ in range(self._waiting.qsize()):
            if made >= MOST_AT_ONCE:
                return
            call, size = self._waiting.get_nowait()
            call()
            made += max(1, size)
