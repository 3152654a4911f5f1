"""A step that was launched and whose draws are not read yet.

    one after the other   host     plan 1, launch 1 │ read 1, commit 1, plan 2, launch 2 │ …
                          device                    ─ step 1 ─┤                          ─ step 2 ─┤

    overlapped            host     plan 1, launch 1, plan 2, launch 2 │ read 1, commit 1, plan 3, launch 3 │ read 2 …
                          device                   ──── step 1 ───────┤──── step 2 ──────────────────────┤──── step 3 …

Overlapped, the device goes from one step to the next without waiting for the host. A step takes the tokens that it continues
from the draws of the one before, on the device (`Batch.build`). That a child has ended is seen one step late: its row of the
step in flight is computed and thrown away. The device runs what it is given in order, so blocks that an ended child gives back
are written again only after that row. Refresh and sleep land the step in flight first, and so does a plan that would stop
somebody. Idea: SGLang's overlap scheduler (v0.4), vLLM's async scheduling.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch

from engine.forward.sampling import Draws
from engine.scheduling.counters import Counters
from engine.scheduling.plan import Drawn, Plan


@dataclass(slots=True, eq=False)
class Flight:
    plan: Plan
    began: float
    """when the host began to plan it"""
    draws: Draws
    prefill: Stopwatch | None
    """what the forward took, if nearly all tokens of the step were prefill"""

    def land(self, counters: Counters) -> Drawn:
        """Wait for the draws."""
        started = time.perf_counter()
        drawn = self.draws.read()
        if self.prefill is not None:
            counters.prefilled(self.plan.num_tokens, self.prefill.seconds())
        counters.sample_seconds += time.perf_counter() - started
        return drawn


class Stopwatch:
    """Seconds between two points of a device's time. On the CPU the host's clock is the device's."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._marks: list[Any] = []
        self.mark()

    def mark(self) -> None:
        if self._cuda:
            self._marks.append(torch.cuda.Event(enable_timing=True))
            self._marks[-1].record()
        else:
            self._marks.append(time.perf_counter())

    def seconds(self) -> float:
        """Between the first two marks; waits for the second."""
        began, ended = self._marks
        if not self._cuda:
            return float(ended - began)
        ended.synchronize()
        return float(began.elapsed_time(ended)) / 1000
