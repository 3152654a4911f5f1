"""Wakes asyncio tasks from the client's I/O thread: each event loop once for all that arrived together.

I/O thread   receive: Signal.notify, Signal.notify, … ──→ Wakeups: one call_soon_threadsafe per loop
event loop   Signal.wait_for
"""

from __future__ import annotations

import asyncio
import queue
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from contextlib import suppress

from rollout.client.link import CallQueue


class Wakeups:
    """Collects the waits that one turn of the I/O thread ends, and wakes their loops when what has arrived is handed on.

    calls: of the I/O thread."""

    def __init__(self, calls: CallQueue) -> None:
        self._calls = calls
        self._ended: queue.SimpleQueue[asyncio.Future[None]] = queue.SimpleQueue()

    def add(self, waits: Sequence[asyncio.Future[None]]) -> None:
        """End these waits. For the I/O thread."""
        for wait in waits:
            self._ended.put(wait)
        self._calls.put(self._wake, None, wake=False)

    def _wake(self, _: None) -> None:
        by_loop: defaultdict[asyncio.AbstractEventLoop, list[asyncio.Future[None]]] = defaultdict(list)
        with suppress(queue.Empty):
            while True:
                wait = self._ended.get_nowait()
                by_loop[wait.get_loop()].append(wait)
        for loop, waits in by_loop.items():
            with suppress(RuntimeError):  # a closed loop: its tasks wait no more
                loop.call_soon_threadsafe(end_waits, waits)


def end_waits(waits: Sequence[asyncio.Future[None]]) -> None:
    """Let the tasks of these waits continue. For their event loop."""
    for wait in waits:
        if not wait.done():  # otherwise its task was cancelled
            wait.set_result(None)


class Signal:
    """Lets tasks of any event loop wait for a state that the I/O thread changes."""

    def __init__(self, wakeups: Wakeups) -> None:
        self._wakeups = wakeups
        self._waits: deque[asyncio.Future[None]] = deque()

    def notify(self) -> None:
        """Have the waiting tasks look at the state again. For the I/O thread, after a change."""
        if waits := [self._waits.popleft() for _ in range(len(self._waits))]:
            self._wakeups.add(waits)

    async def wait_for(self, condition: Callable[[], object]) -> None:
        """Wait until `condition` is true. It reads what the I/O thread has written before `notify`."""
        while not condition():
            wait: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waits.append(wait)
            if condition():  # it became true before the wait was there
                return
            await wait
