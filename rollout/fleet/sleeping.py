"""Sleep and wake of a fleet: which memory of the replicas is released (weights, KV)."""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial
from typing import Any, get_args

from rollout.engine.values import Tag
from rollout.transport import messages as m

PARTS: frozenset[Tag] = frozenset(get_args(Tag))

RequestAll = Callable[[Callable[[int], Any]], list[Any]]
"""sends all replicas the request that is built for an id, and waits for their answers"""


class SleepState:
    """Written by the service's thread."""

    def __init__(self) -> None:
        self.parts: frozenset[Tag] = frozenset()
        self._level = 1
        """of the last sleep"""

    def sleep(self, level: int, request_all: RequestAll) -> int:
        """Release memory of all replicas. Returns how many bytes. Raises ValueError while a part is asleep."""
        if level not in (1, 2):
            raise ValueError(f"level={level!r}: must be 1 (weights to host memory) or 2 (weights dropped)")
        if self.parts:
            raise ValueError(f"asleep already ({', '.join(sorted(self.parts))}); wake them first")
        answers = request_all(self._sleep(level))
        self._level, self.parts = level, PARTS
        return sum(answer.freed_bytes for answer in answers)

    def wake(self, tags: Collection[Tag] | None, request_all: RequestAll) -> None:
        """Wake parts, None = all that are asleep. Raises ValueError for a part that is not asleep."""
        wanted = self.parts if tags is None else frozenset(tags)
        if not wanted or not wanted <= self.parts:
            asleep = ", ".join(sorted(self.parts)) or "nothing"
            raise ValueError(f"wake {', '.join(sorted(wanted)) or 'all'}: of the replicas {asleep} is asleep")
        request_all(self._wake(wanted))
        self.parts -= wanted

    def requests(self) -> list[Callable[[int], Any]]:
        """List the requests that bring a replica into this state."""
        if not self.parts:
            return []
        awake = PARTS - self.parts
        return [self._sleep(self._level), *([self._wake(awake)] if awake else [])]

    def _sleep(self, level: int) -> Callable[[int], Any]:
        return partial(m.Sleep, level=2 if level == 2 else 1)

    def _wake(self, tags: Collection[Tag]) -> Callable[[int], Any]:
        return partial(m.Wake, tags=tuple(sorted(tags)))
