"""What replicas tell of themselves: checked before the front counts on it, and compared with what was given to them.

A replica that lives and answers may still have lost groups, or compute nothing. Its own status tells, once a second; it comes
behind all samples that were sent by then, since a connection keeps the order. So where a replica holds fewer groups than it was
sent before it was asked, and has not given back, some are lost; and where it holds them, may compute, and its counters stand
still, it does not compute. A step that takes minutes is neither: a replica answers between steps only.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec

MOST_DEPTH = 8
"""of a status: objects in objects"""
MOST_VALUES = 100_000
"""numbers and texts of a status"""
MOST_MISSING = 4
"""statuses in a row in which groups are missing"""
STILL_S = 60.0
"""longest that a replica may answer, and compute nothing of what it holds"""

Count = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]


class Sizes(msgspec.Struct, frozen=True):
    """Of the weights of a replica, in bytes."""

    resident_bytes: Count = 0
    offloaded_bytes: Count = 0


class Told(msgspec.Struct, frozen=True):
    """Fields of a status that the front counts on. All others are passed on."""

    groups: Count
    """that its engine holds"""
    steps: Count
    generated_tokens: Count
    weights: Sizes = Sizes()


class ToldWeights(msgspec.Struct, frozen=True):
    """Which weights a replica says it has."""

    version: Count
    digest: str
    base_digest: str
    names: Count


def told(status: dict[str, Any]) -> Told:
    """Read a status. Raises ValueError for one that is none: a field missing, numbers that are not finite."""
    left = MOST_VALUES
    open_: list[tuple[Any, int]] = [(status, 0)]
    while open_:
        value, depth = open_.pop()
        left -= 1
        if isinstance(value, dict | list) and depth < MOST_DEPTH:
            open_ += [(each, depth + 1) for each in (value.values() if isinstance(value, dict) else value)]
        elif isinstance(value, dict | list) or left < 0:
            raise ValueError(f"a status of more than {MOST_VALUES} values, or {MOST_DEPTH} levels")
        elif isinstance(value, int | float) and not (math.isfinite(value) and abs(value) < 2**63):
            raise ValueError(f"a status holds {str(value)[:40]}, which is no count")
    return msgspec.convert(status, Told)


@dataclass(slots=True)
class ProgressWatch:
    """What the statuses of one replica have said, one after the other."""

    missing: int = 0
    """statuses in a row that did not name all groups"""
    seen: tuple[int, int] = (-1, -1)
    """counters, as they stood"""
    since: float = 0.0
    """when they changed, or nothing was to be done"""

    def look(self, told: Told, sent: int, may_run: bool, now: float) -> str:
        """Compare a status with the groups that the replica was sent before it was asked, and that have not come back. may_run:
        the fleet is not paused, asleep or draining. Returns why the replica is of no use, "" if it is."""
        counters = (told.steps, told.generated_tokens)
        if counters != self.seen or not sent or not may_run:
            self.seen, self.since = counters, now
        self.missing = self.missing + 1 if may_run and told.groups < sent else 0
        if self.missing >= MOST_MISSING:
            return f"it has lost groups: it holds {told.groups} of {sent} that it was given and has not given back"
        if now - self.since > STILL_S:
            return f"it has computed nothing for {STILL_S} s, and holds {told.groups} groups"
        return ""
