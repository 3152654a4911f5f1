"""Histograms: how many values lie below each bound, since the service started."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

SECONDS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0, 3000.0)
"""bounds of durations"""
TOKENS = tuple(float(1 << power) for power in range(0, 18))
"""bounds of lengths: 1 to 131,072"""


class Buckets(NamedTuple):
    """A histogram as it was at one moment."""

    counts: tuple[tuple[float, int], ...]
    """(bound, number of values up to it), ascending; the last bound is infinite"""
    total: float
    """sum of all values"""


Histograms = Mapping[str, Buckets]
"""by name, see `rollout.metrics.catalog`"""


class Histogram:
    """Counts values. bounds: ascending."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(bounds) + 1)
        self._total = 0.0

    def add(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._total += value

    def buckets(self) -> Buckets:
        """Return a copy, which another thread may read."""
        return Buckets(tuple(zip((*self._bounds, float("inf")), accumulate(self._counts), strict=True)), self._total)
