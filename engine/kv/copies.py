"""When the copies of a step run: in line with the compute, or beside it on a stream of their own.

Both lanes run `first`, which the step's compute needs, and `beside`, which it does not: copies of full blocks, which nobody
writes any more, to host memory.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch

Work = Callable[[], None]


class Copied(NamedTuple):
    """Copies whose end is known."""

    blocks: int
    seconds: float


class Lane(Protocol):
    def run(self, first: Work, beside: Work, blocks: int) -> Copied:
        """Run the copies of a step, of so many blocks. Returns those that have ended since the last call."""
        ...

    def finish(self) -> None:
        """Wait on the host until no copy is under way."""
        ...


class InLine:
    """For devices whose copies and compute take turns anyway."""

    def run(self, first: Work, beside: Work, blocks: int) -> Copied:
        started = time.perf_counter()
        first()
        beside()
        return Copied(blocks, time.perf_counter() - started if blocks else 0.0)

    def finish(self) -> None:
        pass


class Beside:
    """A CUDA stream for copies.

        compute   … step k │                │ wait(done k) │ step k + 1 …            │ wait(beside k) │ …
        copies             │ wait(compute)  │ first ─ done k ─ beside ─ end k        │

    The copies start when the compute that was issued before has ended, since it may still write what they read; what is
    issued after waits for `first` alone. What `beside` reads stays as it is for one step: the next call waits for it before
    its slots may be given to anybody. Order comes from events, no call waits on the host. `cuda` is torch.cuda; tests have
    another one.
    """

    def __init__(self, device: torch.device, cuda: Any = torch.cuda) -> None:
        self._device = device
        self._cuda = cuda
        self._stream = cuda.Stream(device)
        self._ended: Any = None
        """event behind the last call's copies"""
        self._timed: deque[tuple[int, Any, Any]] = deque()
        """(blocks, began, ended) of calls whose time is not known yet"""

    def run(self, first: Work, beside: Work, blocks: int) -> Copied:
        compute = self._cuda.current_stream(self._device)
        if self._ended is not None:
            compute.wait_event(self._ended)
            self._ended = None
        if blocks:
            self._stream.wait_stream(compute)
            began, ended = (self._cuda.Event(enable_timing=True) for _ in range(2))
            with self._cuda.stream(self._stream):
                began.record(self._stream)
                first()
                compute.wait_event(self._stream.record_event())
                beside()
                ended.record(self._stream)
            self._ended = ended
            self._timed.append((blocks, began, ended))
        return self._known()

    def finish(self) -> None:
        self._stream.synchronize()

    def _known(self) -> Copied:
        blocks, seconds = 0, 0.0
        while self._timed and self._timed[0][2].query():
            count, began, ended = self._timed.popleft()
            blocks += count
            seconds += began.elapsed_time(ended) / 1000
        return Copied(blocks, seconds)
