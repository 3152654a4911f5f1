"""What happened along a run, from statuses taken on the way. `rollout.bench.plot` draws it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec

INTERVAL_S = 0.2


class Point(msgspec.Struct, frozen=True):
    """One look at the engine; counters run from the start of the target."""

    seconds: float
    """since the run began"""
    generated_tokens: int
    block_bytes: int
    device_blocks: int
    device_used: int
    device_cached: int
    host_blocks: int
    host_used: int
    host_cached: int
    offloads: int
    soft_resets: int
    version: int


class Recording(msgspec.Struct):
    """The points of one run, in order of time."""

    title: str
    points: list[Point] = []
    began: float = msgspec.field(default_factory=time.perf_counter)

    @property
    def due(self) -> bool:
        """Whether the last point is INTERVAL_S old."""
        return not self.points or time.perf_counter() - self.began - self.points[-1].seconds >= INTERVAL_S

    def add(self, status: dict[str, Any]) -> None:
        kv = status["kv"]
        values = {**kv, **status, "seconds": time.perf_counter() - self.began}
        self.points.append(Point(**{name: values[name] for name in Point.__struct_fields__}))


@contextmanager
def watching(recording: Recording, status: Callable[[], dict[str, Any]]) -> Iterator[None]:
    """Add a status to the recording every INTERVAL_S, in a thread, until the block ends. An error of `status` ends the
    watching and is raised at the end of the block."""
    stop, failed = threading.Event(), []

    def watch() -> None:
        try:
            recording.add(status())
            while not stop.wait(INTERVAL_S):
                recording.add(status())
        except Exception as error:
            failed.append(error)

    thread = threading.Thread(target=watch, daemon=True, name="bench-watch")
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(timeout=30)
    if failed:
        raise failed[0]
    recording.add(status())
