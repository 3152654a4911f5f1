"""A stand-in for torch.cuda whose streams run in any order that their events allow."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch


class FakeEvent:
    def __init__(self, enable_timing: bool = False) -> None:
        self.happened = False
        self.timed = enable_timing

    def record(self, stream: FakeStream) -> None:
        stream.issue(self._happen)

    def _happen(self) -> None:
        self.happened = True

    def query(self) -> bool:
        return self.happened

    def elapsed_time(self, end: FakeEvent) -> float:
        return 250.0


class FakeStream:
    """Work in the order of issue; what waits for an event holds up what is behind it."""

    def __init__(self, device: torch.device | None = None) -> None:
        self.queue: list[tuple[FakeEvent | None, Callable[[], None]]] = []

    def issue(self, work: Callable[[], None]) -> None:
        self.queue.append((None, work))

    def wait_event(self, event: FakeEvent) -> None:
        self.queue.append((event, lambda: None))

    def wait_stream(self, other: FakeStream) -> None:
        self.wait_event(other.record_event())

    def record_event(self) -> FakeEvent:
        event = FakeEvent()
        event.record(self)
        return event

    def synchronize(self) -> None:
        while self.queue:
            assert self.ready(), "it waits for what nobody does"
            self.queue.pop(0)[1]()

    def ready(self) -> bool:
        return bool(self.queue) and (self.queue[0][0] is None or self.queue[0][0].happened)


class FakeCuda:
    def __init__(self, r: random.Random, copies: type[FakeStream] = FakeStream) -> None:
        self.r = r
        self.compute = FakeStream()
        self.streams = [self.compute]
        self.current = self.compute
        self._copies = copies
        self.Event = FakeEvent

    def Stream(self, device: torch.device) -> FakeStream:
        self.streams.append(self._copies())
        return self.streams[-1]

    def current_stream(self, device: torch.device) -> FakeStream:
        return self.current

    @contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        self.current, before = stream, self.current
        yield
        self.current = before

    def work_on(self, stream: FakeStream) -> None:
        """Do all that one stream can do while the others stand still."""
        while stream.ready():
            stream.queue.pop(0)[1]()

    def work(self, most: int) -> None:
        """Do up to so many pieces of work, on whichever stream has one that may run."""
        for _ in range(most):
            ready = [stream for stream in self.streams if stream.ready()]
            if not ready:
                assert not any(stream.queue for stream in self.streams), "streams that wait for each other"
                return
            self.r.choice(ready).queue.pop(0)[1]()
