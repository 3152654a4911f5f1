"""Where the service's loop is, and since when: for those who have to know that it stands.

    loop ── at("take"), at("step"), … ──> Watch <── looks ── Watchdog, a thread of its own

A part of a turn that lasts longer than `stall_s` is told while it lasts, with the stack of the loop's thread, and counted when
it has ended (`loop/stalled_s`). A loop that stands for `exit_s` ends the process, with the stacks of all threads on standard
error, so that a supervisor may start another one. That is faulthandler's own timer, which needs no Python to run: it also ends
a process whose loop stands in foreign code that holds the interpreter's lock.
"""

from __future__ import annotations

import faulthandler
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Literal

from rollout.logs import logger

Part = Literal["wait", "take", "refresh", "commit", "step", "send", "timers"]
"""of a turn. In `wait` nothing is to do; `commit` exchanges the weights and `step` computes, which takes what the model takes;
all others are the service's own work"""
MODELS: frozenset[Part] = frozenset({"commit", "step"})

LOOKS_A_STALL = 4
"""so many times in `stall_s` the watchdog looks"""

log = logger(__name__)


class LoopPhase:
    """Notes which part of its turn a loop is in. Written by the loop's thread only, with the time of the call.

    Args:
        stall_s: seconds after which a part of a turn counts as a stall.
        clock: seconds, monotonic.
        cpu_clock: seconds that the calling thread has computed.
        alone_s: seconds without any client after which the service is to end; None: never.
        models: parts that take what the model takes, and are not counted as the service's own work.
    """

    def __init__(
        self,
        stall_s: float = 30.0,
        clock: Callable[[], float] = time.monotonic,
        cpu_clock: Callable[[], float] = time.thread_time,
        alone_s: float | None = None,
        models: frozenset[Part] = MODELS,
    ) -> None:
        self.stall_s = stall_s
        self._alone_s = alone_s
        self._alone_since: float | None = None
        self.stalled_s = 0.0
        """seconds of all parts that lasted longer than `stall_s`"""
        self.stalls = 0
        self.longest_turn_s = 0.0
        """the longest turn so far, without what is the model's and without waiting"""
        self.longest_turn_in: Part = "wait"
        """the part that took most of it"""
        self.longest_turn_cpu_s = 0.0
        """the most that a turn has computed, counted alike: a machine that is busy with others does not add to this"""
        self._clock, self._cpu_clock = clock, cpu_clock
        self._apart = models | {"wait"}
        self._turn: dict[Part, float] = {}
        """seconds of its parts so far"""
        self._turn_cpu_s, self._cpu_at = 0.0, 0.0
        self._now: tuple[Part, float] = ("wait", clock())
        """assigned whole, so that another thread never sees half of it"""

    def at(self, part: Part) -> None:
        """Note that a part begins and the one before has ended. With "wait" begins the next turn."""
        was, since = self._now
        now, cpu_now = self._clock(), self._cpu_clock()
        self._now = part, now
        seconds = now - since
        if was not in self._apart:
            self._turn[was] = self._turn.get(was, 0.0) + seconds
            self._turn_cpu_s += cpu_now - self._cpu_at
        self._cpu_at = cpu_now
        if was != "wait" and seconds > self.stall_s:
            self.stalls += 1
            self.stalled_s += seconds
            log.warning("loop goes on part=%s stood_s=%.1f", was, seconds)
        if part == "wait":
            self._end_turn()

    def _end_turn(self) -> None:
        if (turn_s := sum(self._turn.values())) > self.longest_turn_s:
            self.longest_turn_s = turn_s
            self.longest_turn_in = max(self._turn, key=self._turn.__getitem__)
        self.longest_turn_cpu_s = max(self.longest_turn_cpu_s, self._turn_cpu_s)
        self._turn.clear()
        self._turn_cpu_s = 0.0

    def alone(self, clients: int, now: float) -> bool:
        """Note how many clients there are at `now`, of the service's clock. Returns whether it was alone for too long."""
        self._alone_since = None if clients else now if self._alone_since is None else self._alone_since
        return self._alone_s is not None and self._alone_since is not None and now - self._alone_since > self._alone_s

    def standing(self) -> tuple[Part, float]:
        """Return the part that the loop is in and the seconds since it began; for any thread."""
        part, since = self._now
        return part, self._clock() - since

    def status(self) -> dict[str, float | str]:
        """Describe the loop for `rollout status` and the metrics."""
        return {
            "stalled_s": round(self.stalled_s, 3),
            "stalls": self.stalls,
            "longest_turn_s": round(self.longest_turn_s, 4),
            "longest_turn_in": self.longest_turn_in,
            "longest_turn_cpu_s": round(self.longest_turn_cpu_s, 4),
        }


class Watchdog:
    """Looks after the thread that makes it, until `close`.

    Args:
        watch: written by that thread.
        exit_s: seconds in one part of a turn after which the process ends; None = never.
    """

    def __init__(self, watch: LoopPhase, exit_s: float | None = None) -> None:
        self._watch = watch
        self._exit_s = exit_s
        self._loop = threading.get_ident()
        self._told: float = 0.0
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="rollout-watchdog", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread and disarm the timer. May be repeated."""
        self._closed.set()
        self._thread.join()
        if self._exit_s is not None:
            faulthandler.cancel_dump_traceback_later()

    def _run(self) -> None:
        every = min(self._watch.stall_s, self._exit_s or self._watch.stall_s) / LOOKS_A_STALL
        while True:
            self._look()
            if self._closed.wait(every):
                return

    def _look(self) -> None:
        part, stood = self._watch.standing()
        waits = part == "wait"
        if self._exit_s is not None:
            # Armed anew at each look, by what the loop has left: where no Python runs any more, the last one holds.
            left = self._exit_s if waits else self._exit_s - stood
            faulthandler.dump_traceback_later(max(0.01, left), exit=True)
        if waits or stood <= self._watch.stall_s:
            self._told = 0.0
        elif stood >= 2 * self._told:  # at stall_s, then each time that the wait has doubled
            self._told = stood
            log.error("loop stands part=%s stood_s=%.1f stack=%r", part, stood, self._stack())

    def _stack(self) -> str:
        frame = sys._current_frames().get(self._loop)
        return "" if frame is None else "".join(traceback.format_stack(frame, limit=12))
