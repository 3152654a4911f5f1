"""Lines on standard error that say what a long start is doing: one when a phase begins, and more while it lasts.

Imports nothing that takes time: the first line of `rollout serve` appears before the imports of the command line.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import Self

STILL_S = 3.0
"""seconds without a line after which a phase is printed again; with the delay of a busy process a line comes every 5 s"""

Report = Callable[[str], None]
"""takes the name of the phase that begins"""


def write_line(line: str) -> None:
    """Write a line to standard error. Safe in a signal handler; a closed standard error is ignored."""
    with suppress(OSError, ValueError):
        os.write(sys.stderr.fileno(), f"{line}\n".encode())


def nothing(line: str) -> None:
    """Print nothing."""


class Phases:
    """Prints phases. A thread prints the phase that still lasts, until `close`. Methods are for any thread.

    Args:
        name: begins each line, e.g. "rollout serve".
        write: takes a line; `nothing` for a quiet command.
        clock: seconds, monotonic.

    Example:
        with Phases("rollout serve") as progress:
            progress.begin("loading smollm2")      # rollout serve: loading smollm2
            ...                                    # rollout serve: still loading smollm2, 3 s
            progress.say("KV for 23,296 tokens")   # rollout serve: KV for 23,296 tokens
    """

    def __init__(
        self, name: str, write: Callable[[str], None] = write_line, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._name, self._write, self._clock = name, write, clock
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._phase = ""
        self._began = self._said_at = self._started = clock()
        self._durations: list[tuple[str, float]] = []
        """phases that have ended, with their seconds"""
        threading.Thread(target=self._watch, name="progress", daemon=True).start()

    @property
    def seconds(self) -> float:
        """Return the seconds since this object was made."""
        return self._clock() - self._started

    def begin(self, phase: str) -> None:
        """Print the phase that begins; it ends the one before."""
        with self._lock:
            self._end()
            self._phase, self._began = phase, self._clock()
            self._say(phase)

    def took(self, word: str) -> float:
        """Return the seconds of the phases that have ended and whose name begins with `word`."""
        return sum(seconds for phase, seconds in self._durations if phase.startswith(word))

    def say(self, line: str) -> None:
        """Print a line."""
        with self._lock:
            self._say(line)

    def look(self) -> float:
        """Print the phase if it has lasted for `STILL_S` since the last line. Returns the seconds until the next look."""
        with self._lock:
            now = self._clock()
            if self._phase and now - self._said_at >= STILL_S:
                self._say(f"still {self._phase}, {now - self._began:.0f} s")
            return STILL_S - (now - self._said_at) if self._phase else STILL_S

    def close(self) -> None:
        """End the phase and the thread."""
        with self._lock:
            self._end()
        self._closed.set()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _say(self, line: str) -> None:
        self._said_at = self._clock()
        self._write(f"{self._name}: {line}")

    def _end(self) -> None:
        if self._phase:
            self._durations.append((self._phase, self._clock() - self._began))
            self._phase = ""

    def _watch(self) -> None:
        while not self._closed.wait(max(0.0, self.look())):
            pass
