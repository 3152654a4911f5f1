"""What the service's loop does now, and how long it took. `rollout.service.watchdog` reads it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Literal

from rollout.logs import logger

Phase = Literal["wait", "receive", "refresh", "commit", "step", "send", "timers"]
"""of an iteration. In `wait` the loop waits for messages; `commit` swaps the weights and `step` runs the engine, whose
durations depend on the model; the other phases are the service's own work"""
MODELS: frozenset[Phase] = frozenset({"commit", "step"})

log = logger(__name__)


class LoopPhase:
    """Records the current phase of a loop and its longest iteration. Written by the loop's thread only.

    Args:
        stall_s: seconds after which a phase counts as a stall.
        clock: seconds, monotonic.
        cpu_clock: CPU seconds of the calling thread.
        alone_s: seconds without a client after which the service ends; None: never.
        models: phases whose duration depends on the model; they are not counted in the longest iteration.
    """

    def __init__(
        self,
        stall_s: float = 30.0,
        clock: Callable[[], float] = time.monotonic,
        cpu_clock: Callable[[], float] = time.thread_time,
        alone_s: float | None = None,
        models: frozenset[Phase] = MODELS,
    ) -> None:
        self.stall_s = stall_s
        self._alone_s = alone_s
        self._alone_since: float | None = None
        self.stalled_s = 0.0
        """sum of the phases that exceeded `stall_s`"""
        self.stalls = 0
        self.longest_turn_s = 0.0
        """longest iteration so far, without `models` and without waiting"""
        self.longest_turn_in: Phase = "wait"
        """the phase that took most of it"""
        self.longest_turn_cpu_s = 0.0
        """most CPU time of an iteration, of the same phases; other processes on the machine do not add to it"""
        self._clock, self._cpu_clock = clock, cpu_clock
        self._apart = models | {"wait"}
        self._turn: dict[Phase, float] = {}
        """seconds of each phase of this iteration so far"""
        self._turn_cpu_s, self._cpu_at = 0.0, 0.0
        self._now: tuple[Phase, float] = ("wait", clock())
        """phase and its start. One tuple, so that the watchdog's thread reads a consistent pair"""

    def at(self, phase: Phase) -> None:
        """Record that a phase begins. The phase "wait" begins the next iteration."""
        was, since = self._now
        now, cpu_now = self._clock(), self._cpu_clock()
        self._now = phase, now
        seconds = now - since
        if was not in self._apart:
            self._turn[was] = self._turn.get(was, 0.0) + seconds
            self._turn_cpu_s += cpu_now - self._cpu_at
        self._cpu_at = cpu_now
        if was != "wait" and seconds > self.stall_s:
            self.stalls += 1
            self.stalled_s += seconds
            log.warning("event loop recovered phase=%s stalled_s=%.1f", was, seconds)
        if phase == "wait":
            self._end_turn()

    def _end_turn(self) -> None:
        if (turn_s := sum(self._turn.values())) > self.longest_turn_s:
            self.longest_turn_s = turn_s
            self.longest_turn_in = max(self._turn, key=self._turn.__getitem__)
        self.longest_turn_cpu_s = max(self.longest_turn_cpu_s, self._turn_cpu_s)
        self._turn.clear()
        self._turn_cpu_s = 0.0

    def alone(self, clients: int, now: float) -> bool:
        """Record the number of clients at `now` of the service's clock. Returns whether there was none for `alone_s`."""
        self._alone_since = None if clients else now if self._alone_since is None else self._alone_since
        return self._alone_s is not None and self._alone_since is not None and now - self._alone_since > self._alone_s

    def current(self) -> tuple[Phase, float]:
        """Return the current phase and the seconds since it began. For any thread."""
        phase, since = self._now
        return phase, self._clock() - since

    def status(self) -> dict[str, float | str]:
        """Return the figures for `rollout status` and the metrics."""
        return {
            "stalled_s": round(self.stalled_s, 3),
            "stalls": self.stalls,
            "longest_turn_s": round(self.longest_turn_s, 4),
            "longest_turn_in": self.longest_turn_in,
            "longest_turn_cpu_s": round(self.longest_turn_cpu_s, 4),
        }
