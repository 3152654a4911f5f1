"""Estimates how long a step takes from its number of tokens, for the choice of draft lengths."""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from statistics import median

import numpy as np

SIZES = (*range(1, 17), *range(20, 65, 4), *range(72, 257, 8))
"""size classes: numbers of tokens of a step"""
ENOUGH, NEWEST = 3, 9
"""least measurements of a size class for an estimate, so that a pause of the machine does not decide it; and how many of the
newest the estimate is the median of"""
REMEMBERED = 1024
"""steps after which a size class without a new measurement is dropped, so that it is tried again"""
TRIED = 4
"""sizes beyond the largest measured one are tried up to so many tokens more, or one part in so many of that size"""


class StepSeconds:
    """Durations of decode steps by number of tokens: the median of the newest measurements of each size class, made
    non-decreasing over the classes (isotonic regression, by pooling adjacent violators: Ayer et al. 1955)."""

    def __init__(self) -> None:
        self._newest: dict[int, deque[float]] = {}
        """measured seconds by index of SIZES"""
        self._seen: dict[int, int] = {}
        """number of the last step of each size class"""
        self._steps = 0
        self._table: tuple[list[int], list[float]] | None = None
        """`table`; None: a measurement was added since it was computed"""

    def add(self, tokens: int, seconds: float) -> None:
        """Add a measured step."""
        if tokens > SIZES[-1] or seconds <= 0:
            return
        size, self._steps, self._table = bisect_right(SIZES, tokens) - 1, self._steps + 1, None
        self._newest.setdefault(size, deque(maxlen=NEWEST)).append(seconds)
        self._seen[size] = self._steps
        if self._steps % 64 == 0:
            for old in [size for size, step in self._seen.items() if step < self._steps - REMEMBERED]:
                del self._newest[old], self._seen[old]

    def knows(self, tokens: int) -> bool:
        """Return whether the size class of so many tokens has enough measurements."""
        return len(self._newest.get(bisect_right(SIZES, tokens) - 1, ())) >= ENOUGH

    @property
    def table(self) -> tuple[list[int], list[float]]:
        """Sizes with enough measurements, ascending, and their estimated seconds, non-decreasing."""
        if self._table is None:
            known = {size: each for size, each in sorted(self._newest.items()) if len(each) >= ENOUGH}
            rising = non_decreasing([median(each) for each in known.values()], [len(each) for each in known.values()])
            self._table = [SIZES[size] for size in known], rising
        return self._table

    def of(self, tokens: np.ndarray) -> np.ndarray:
        """Estimate the seconds of steps of so many tokens. Returns [T] float64 for [T] ascending numbers.

        Between measured sizes the estimate is interpolated. Slightly larger sizes than the largest measured one cost as much as
        that one, so that they are tried; still larger ones cost in proportion to their tokens. Sizes below the smallest
        measured one cost in proportion too, so that nothing is drafted before the cost of a step without drafts is known."""
        sizes, known = self.table
        if not sizes:
            return np.ones(len(tokens))
        tried, far = sizes[-1] + max(TRIED, sizes[-1] // TRIED), 1000 * sizes[-1]
        seconds: np.ndarray = np.interp(tokens, [0, *sizes, tried, far], [0.0, *known, known[-1], known[-1] * far / tried])
        return seconds


def non_decreasing(values: list[float], weights: list[int]) -> list[float]:
    """Return the non-decreasing values with the least weighted squared distance from `values`."""
    pools: list[tuple[float, int, int]] = []
    """(mean, weight, number of values) of each pool"""
    for value, weight in zip(values, weights, strict=True):
        pools.append((value, weight, 1))
        while len(pools) > 1 and pools[-2][0] > pools[-1][0]:
            (mean, before, some), (other, after, more) = pools[-2:]
            total = before + after
            pools[-2:] = [((mean * before + other * after) / total, total, some + more)]
    return [mean for mean, _, count in pools for _ in range(count)]
