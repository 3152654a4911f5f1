"""What becomes of children that a replica fails on: how often they are tried again, and whose fault it is."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from engine.types import Sample
from rollout.fleet.placement import OpenGroup, PlacedChildren
from rollout.fleet.replica import Replica
from transport.errors import InvalidRequest, LimitExceeded, RolloutError

MOST_MOVES = 8
"""replicas that may be lost with a group before it ends as "error": it may be what kills them"""
MOST_ERRORS = 2
"""times that a child is tried again after an "error" or a refusal of a replica"""


def unasked(part: PlacedChildren, sample: Sample, aborts: int) -> bool:
    """Whether a replica ended this child for a reason of its own: it fails, or it stops. aborts: refreshes that have ended all
    groups."""
    if sample.finish_reason == "error":
        return part.open.errors[sample.index] < MOST_ERRORS
    return sample.finish_reason == "aborted" and sample.index not in part.open.cancelled and part.aborts == aborts


def of_the_group(error: RolloutError) -> bool:
    """Whether a refusal is about the group, and so no failure of the replica."""
    return isinstance(error, InvalidRequest | LimitExceeded)


def note(part: PlacedChildren, indices: Iterable[int]) -> None:
    """Note that a replica has failed on children, or has refused them."""
    part.open.errors.update(indices)
    part.open.failed_on.add(part.replica.name)


def spent(part: PlacedChildren, orphans: set[int], error: RolloutError, serving: Sequence[Replica]) -> set[int]:
    """Return which of the children that a replica has refused are not tried again; of a group that cannot be served, all as
    soon as everybody has said so: one replica may be wrong."""
    left = {index for index in orphans if part.open.errors[index] > MOST_ERRORS}
    everybody = all(replica.name in part.open.failed_on for replica in serving)
    return orphans if of_the_group(error) and everybody else left


def candidates(one: OpenGroup, serving: Sequence[Replica]) -> dict[str, Replica]:
    """Choose who may be given children of a group, by name: those that have not failed on it, if there are any. One that has
    failed on others is given one group at a time, until it succeeds."""
    others = [replica for replica in serving if replica.name not in one.failed_on] or serving
    steady = [replica for replica in others if not (replica.failing and replica.load)] or others
    return {replica.name: replica for replica in steady}


def sent_before(parts: Iterable[PlacedChildren], before: float) -> int:
    """Count the groups that were sent before then (time.monotonic)."""
    return sum(part.handle.sent_at is not None and part.handle.sent_at < before for part in parts)
