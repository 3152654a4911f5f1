"""Time that moves when a test says so."""

from __future__ import annotations


class Clock:
    """In place of the module `time`, or of one of its functions. Seconds.

    now: where it stands. tick: what each call and each `perf_counter` moves it by, so that neither the machine nor its load
    says how long work takes; `monotonic` reads it without a move."""

    def __init__(self, now: float = 0.0, tick: float = 0.0) -> None:
        self.now, self.tick = now, tick
        self.asked = 0
        """times that somebody has looked"""

    def __call__(self) -> float:
        self.asked += 1
        self.now += self.tick
        return self.now

    perf_counter = __call__

    def monotonic(self) -> float:
        self.asked += 1
        return self.now
