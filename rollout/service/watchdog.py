"""Detects a stalled event loop: a thread logs its stack, and can end the process.

    loop ── at("receive"), at("step"), … ──> LoopPhase <── reads ── Watchdog, a thread

If a phase of an iteration exceeds `stall_s`, the watchdog logs it with the stack of the loop's thread while it lasts, and the
time is counted when it ends (`loop/stalled_s`). If it exceeds `exit_s`, the process exits and prints the stacks of all threads
to standard error, so that a supervisor can start another one. This uses faulthandler's timer, which needs no Python code to
run: it also ends a process whose loop is stuck in native code that holds the GIL.
"""

from __future__ import annotations

import faulthandler
import sys
import threading
import traceback

from rollout.logs import logger
from rollout.service.phases import LoopPhase

CHECKS_PER_STALL = 4
"""checks of the watchdog within `stall_s`"""

log = logger(__name__)


class Watchdog:
    """A thread that checks the loop of the thread that creates it, until `close`.

    Args:
        watch: written by the loop.
        exit_s: seconds in one phase after which the process exits; None: never.
    """

    def __init__(self, watch: LoopPhase, exit_s: float | None = None) -> None:
        self._watch = watch
        self._exit_s = exit_s
        self._loop = threading.get_ident()
        self._logged_s = 0.0
        """how long the present stall had lasted when it was last logged"""
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
        every = min(self._watch.stall_s, self._exit_s or self._watch.stall_s) / CHECKS_PER_STALL
        while True:
            self._check()
            if self._closed.wait(every):
                return

    def _check(self) -> None:
        phase, stalled = self._watch.current()
        waits = phase == "wait"
        if self._exit_s is not None:
            # Armed again at each check with the remaining time: if Python stops running, the last timer expires.
            left = self._exit_s if waits else self._exit_s - stalled
            faulthandler.dump_traceback_later(max(0.01, left), exit=True)
        if waits or stalled <= self._watch.stall_s:
            self._logged_s = 0.0
        elif stalled >= 2 * self._logged_s:  # at stall_s, then whenever the duration has doubled
            self._logged_s = stalled
            log.error("event loop stalled phase=%s stalled_s=%.1f stack=%r", phase, stalled, self._stack())

    def _stack(self) -> str:
        frame = sys._current_frames().get(self._loop)
        return "" if frame is None else "".join(traceback.format_stack(frame, limit=12))
