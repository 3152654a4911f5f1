"""Checks the status messages of replicas, and compares them with the groups that the replica was sent.

A replica that answers may still have lost groups, or compute nothing. It sends its status once a second, after all samples sent
before, since a connection keeps the order. So a replica that reports fewer groups than it was sent before the request, and has
not finished, has lost some; and one with groups whose counters do not change computes nothing. A step that takes minutes is
neither: a replica answers between steps only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import msgspec

MAX_DEPTH = 8
"""of a status: objects in objects"""
MAX_VALUES = 100_000
"""of a status, objects among them"""
MAX_FLOAT = 2.0**128
"""above all float32 numbers: a mean of log-probs may be any of them"""
MAX_MISSING = 4
"""statuses in a row in which groups are missing"""

Count = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]


class WeightSizes(msgspec.Struct, frozen=True):
    """Sizes of a replica's weights in bytes."""

    resident_bytes: Count = 0
    offloaded_bytes: Count = 0


class ReplicaStatus(msgspec.Struct, frozen=True):
    """Fields of a status that the router uses. All others are passed on."""

    groups: Count
    """in its engine"""
    steps: Count
    generated_tokens: Count
    weights: WeightSizes = WeightSizes()


class ReplicaWeights(msgspec.Struct, frozen=True):
    """The weights that a replica reports."""

    version: Count
    digest: str
    base_digest: str
    names: Count


def read_status(status: dict[str, Any]) -> ReplicaStatus:
    """Convert a status. Raises ValueError for missing fields, wrong types, and numbers that are not finite."""
    left = MAX_VALUES
    open_: list[tuple[Any, int]] = [(status, 0)]
    while open_:
        value, depth = open_.pop()
        if isinstance(value, dict | list) and depth < MAX_DEPTH and (left := left - len(value)) >= 0:
            open_ += [(each, depth + 1) for each in (value.values() if isinstance(value, dict) else value)]
        elif isinstance(value, dict | list):
            raise ValueError(f"a status of more than {MAX_VALUES} values, or {MAX_DEPTH} levels")
        elif isinstance(value, int) and not abs(value) < 2**63:
            raise ValueError(f"a status holds {str(value)[:40]}, which is no count")
        elif isinstance(value, float) and not abs(value) < MAX_FLOAT:
            raise ValueError(f"a status holds {value}: floats must be finite and within float32's range")
    return msgspec.convert(status, ReplicaStatus)


@dataclass(slots=True)
class ProgressWatch:
    """Compares the statuses of one replica in their order."""

    no_progress_s: float
    """longest time that the counters of a replica with groups may stay the same"""
    missing: int = 0
    """statuses in a row that did not name all groups"""
    seen: tuple[int, int] = (-1, -1)
    """the last counters"""
    since: float = 0.0
    """when the last status arrived whose counters had changed, or whose replica had nothing to do"""

    def check(self, status: ReplicaStatus, sent: int | None, requested_at: float, arrived_at: float) -> str:
        """Compare a status with the number of groups that the replica was sent before the request and has not finished.
        `sent`: None: the fleet is paused, asleep or draining. Returns why the replica is unhealthy, "" if it is healthy.

        A replica answers between `requested_at` and `arrived_at`. From one arrival to the next request its counters were the
        same for certain, however late the router reads an answer."""
        counters = (status.steps, status.generated_tokens)
        if counters != self.seen or not sent:
            self.seen, self.since = counters, arrived_at
        self.missing = self.missing + 1 if sent is not None and status.groups < sent else 0
        if self.missing >= MAX_MISSING:
            return f"it has lost groups: it reports {status.groups} of {sent} unfinished groups"
        if requested_at - self.since > self.no_progress_s:
            return f"it has computed nothing for {self.no_progress_s} s, and has {status.groups} groups"
        return ""
