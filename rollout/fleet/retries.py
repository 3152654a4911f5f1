"""Retries of children that a replica has failed on: how often, and where."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rollout.engine.values import Sample
from rollout.fleet.open_groups import OpenGroup, PlacedChildren
from rollout.fleet.replica import Replica
from rollout.transport.errors import InvalidRequest, LimitExceeded, RolloutError

MAX_MOVES = 8
"""replicas that may be lost with a group before it ends as "error", since it may be what kills them"""
MAX_RETRIES = 2
"""retries of a child after an "error" or a refusal of a replica"""


def runs_again(part: PlacedChildren, sample: Sample, aborts: int) -> bool:
    """Whether a child runs again because its replica ended it without a request: the replica fails, or stops. aborts: refreshes
    that have aborted all groups."""
    if sample.finish_reason == "error":
        return part.open.errors[sample.index] < MAX_RETRIES
    return sample.finish_reason == "aborted" and sample.index not in part.open.cancelled and part.aborts == aborts


def concerns_group(error: RolloutError) -> bool:
    """Whether a refusal concerns the group, so that it is no failure of the replica."""
    return isinstance(error, InvalidRequest | LimitExceeded)


def count_failure(part: PlacedChildren, indices: Iterable[int]) -> None:
    """Record that a replica has failed on children, or has refused them."""
    part.open.errors.update(indices)
    part.open.failed_on.add(part.replica.name)


def exhausted(part: PlacedChildren, orphans: set[int], error: RolloutError, serving: Sequence[Replica]) -> set[int]:
    """Return which of the refused children are not retried. A group that cannot be served ends as soon as all replicas have
    refused it; one replica may be wrong."""
    left = {index for index in orphans if part.open.errors[index] > MAX_RETRIES}
    all_refused = all(replica.name in part.open.failed_on for replica in serving)
    return orphans if concerns_group(error) and all_refused else left


def candidates(one: OpenGroup, serving: Sequence[Replica]) -> dict[str, Replica]:
    """Choose the replicas that may get children of a group, by name: those that have not failed on it, if there are any. A
    replica that has failed on others gets one group at a time, until it succeeds."""
    others = [replica for replica in serving if replica.name not in one.failed_on] or serving
    steady = [replica for replica in others if not (replica.failing and replica.load)] or others
    return {replica.name: replica for replica in steady}


def sent_before(parts: Iterable[PlacedChildren], before: float) -> int:
    """Count the groups that were sent before a time (time.monotonic)."""
    return sum(part.handle.sent_at is not None and part.handle.sent_at < before for part in parts)
