"""Calls from any thread to the client's I/O thread.

user threads --put(function, argument)--> queue + wake --run--> I/O thread
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any

from transport.errors import RolloutError


class CallQueue:
    """Hands calls to the I/O thread. `wake`: makes the I/O thread come and `run` what waits."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self.ended: RolloutError | None = None
        """why the I/O thread serves nobody any more; calls then run in the thread that they come from, and fail"""
        self._wake = wake
        self._woken = False
        """a wake is on its way, after which all that waits is called"""
        self._waiting: queue.SimpleQueue[tuple[Callable[[Any], None], Any]] = queue.SimpleQueue()
        self._lock = threading.Lock()

    def put(self, function: Callable[[Any], None], argument: Any, wake: bool = True) -> None:
        """Have `function(argument)` called by the I/O thread. wake: now; otherwise after the next `wake`. For any thread."""
        with self._lock:
            if self.ended is None:
                self._waiting.put((function, argument))
                if wake:
                    self.wake()
                return
        function(argument)

    def wake(self) -> None:
        """Have the I/O thread come, if something waits. For any thread."""
        if not self._woken and not self._waiting.empty():
            self._woken = True
            self._wake()

    def run(self) -> None:
        """Make the calls that wait. For the I/O thread."""
        self._woken = False  # before looking: what is put from here on wakes again
        while True:
            try:
                function, argument = self._waiting.get_nowait()
            except queue.Empty:
                return
            function(argument)

    def end(self, error: RolloutError) -> None:
        """Serve nobody any more: what waits is called, and what comes later finds `ended`. For the I/O thread."""
        with self._lock:
            self.ended = error
        self.run()
