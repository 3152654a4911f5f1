"""A commit of new weights that fails at a given slice."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from rollout.engine.weights.buffers import RefreshBuffers


class Failing:
    """A slice whose `fail_at`-th writing stops in the middle."""

    def __init__(self, array: np.ndarray, fail_at: int) -> None:
        self.array, self.writes, self.fail_at = array, 0, fail_at

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        return self.array

    def __setitem__(self, at: Any, value: Any) -> None:
        self.writes += 1
        if self.writes == self.fail_at:
            half = len(self.array) // 2
            self.array[:half] = np.asarray(value)[:half]
            raise MemoryError("injected")
        self.array[at] = value


def fail_commit(monkeypatch: pytest.MonkeyPatch, k: int, where: str) -> None:
    """Let the next commit fail at slice k of the model. where: one of PLACES."""
    slices, count = RefreshBuffers.slices, iter(range(10_000))

    def failing(self: RefreshBuffers, name: str) -> Iterator[Any]:
        for live, kept, scratch in slices(self, name):
            if next(count) != k:
                yield live, kept, scratch
                continue
            if where == "before":
                raise MemoryError("injected")
            yield (
                Failing(live, 1 if where == "writing" else 0),
                Failing(kept, 1 if where == "keeping" else 0),
                Failing(scratch, 1 if where == "saving" else 0),
            )
            if where == "after":
                raise MemoryError("injected")

    monkeypatch.setattr(RefreshBuffers, "slices", failing)


PLACES = ["before", "saving", "writing", "keeping", "after"]
