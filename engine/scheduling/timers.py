"""What ends at a time of its own, unless it has ended before."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from heapq import heapify, heappop, heappush
from typing import Generic, TypeVar

T = TypeVar("T")


class Timers(Generic[T]):
    """A heap of things by the time at which they end. `alive`: whether one still counts; those that do not are forgotten."""

    def __init__(self, alive: Callable[[T], bool]) -> None:
        self._alive = alive
        self._heap: list[tuple[float, int, T]] = []
        """(time, number, thing); the number makes them comparable"""
        self._number = 0
        self._most = 64
        """entries from which on it is worth looking for those that do not count"""

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, at: float, thing: T) -> None:
        """Note that a thing ends at a time."""
        self._number += 1
        heappush(self._heap, (at, self._number, thing))
        if len(self._heap) > self._most:
            self._heap = [each for each in self._heap if self._alive(each[2])]
            heapify(self._heap)
            self._most = 2 * len(self._heap) + 64

    def due(self, now: float) -> bool:
        """True if something may end at this time."""
        return bool(self._heap) and self._heap[0][0] <= now

    def take(self, now: float) -> Iterator[T]:
        """Yield what ends by this time, and take it out."""
        while self.due(now):
            thing = heappop(self._heap)[2]
            if self._alive(thing):
                yield thing
