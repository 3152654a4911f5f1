"""The last children of a step run twice: where they are, and on a replica that has nothing to do.

    few children left, a replica idle -> due -> the same seed and indices there -> the first one counts -> the other is compared

Whichever comes first is the sample: both are the same, so which one it is says nothing about its length, and nothing is biased.
What comes second is compared as far as it goes. A difference means that a sample depends on where it was made: an alarm.

The straggler of a whole batch on another machine: backup tasks of MapReduce (Dean, Ghemawat 2004), hedged requests of "The Tail
at Scale" (Dean, Barroso 2013). There the two may differ; here they must not.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from engine.types import Sample
from rollout.fleet.placement import FinishedChild, OpenGroup, PlacedChildren
from rollout.fleet.replica import Replica
from rollout.logs import logger

OLD_S = 1.0
"""a group that came later is no straggler"""
BY_THEMSELVES = ("stop", "length")

log = logger(__name__)


class Hedging:
    """Written by `Groups`. most: children that are left when the last ones are run twice; 0 = never."""

    def __init__(self, most: int = 0) -> None:
        self.hedged = self.wins = self.mismatch = 0
        """children that were run twice, those of them that came first from the second replica, and those that differed"""
        self.last_mismatch = ""
        self._most = most

    def due(
        self, groups: Iterable[OpenGroup], serving: Sequence[Replica], version: int, now: float
    ) -> list[tuple[OpenGroup, tuple[int, ...], Replica]]:
        """Choose which children are to run on which replica as well: all that are left, if these are few and old, and began
        under the live version of the weights. Idle replicas take them in turn, group by group."""
        idle = [replica for replica in serving if not replica.load] if self._most else []
        if not idle:
            return []
        left = list(groups)
        if sum(len(one.left) for one in left) > self._most or any(one.unplaced for one in left):
            return []
        chosen: list[tuple[OpenGroup, tuple[int, ...], Replica]] = []
        for one in left:
            parts = [part for part in one.parts if part.version == version]
            alone = {index for part in parts for index in part.left if not one.rivals(part, index)} - one.cancelled
            if alone and hedgeable(one) and now - one.arrived_at >= OLD_S:
                chosen.append((one, tuple(sorted(alone)), idle[len(chosen) % len(idle)]))
                self.hedged += len(alone)
        return chosen

    def may_win(self, part: PlacedChildren, sample: Sample) -> bool:
        """Whether a child that runs elsewhere as well may be given out as it came from this part. The first replica's always
        may. The second one's must have ended by itself, under one version of the weights: when others came in between, the two
        were at different tokens, and are not equal."""
        return not part.hedge or sample.finish_reason in BY_THEMSELVES and len(sample.weight_versions) == 1

    def won(self, part: PlacedChildren, sample: Sample, rivals: Sequence[PlacedChildren]) -> None:
        """Note a child that is given out, and end it where it still runs: what it has there comes back, to be compared."""
        part.open.won[sample.index] = FinishedChild(sample, part.replica.name)
        self.wins += part.hedge
        for rival in rivals:
            rival.handle.cancel([sample.index])

    def came_second(self, part: PlacedChildren, sample: Sample) -> bool:
        """Compare a child with the one that was given out. False: it was not run twice."""
        first = part.open.won.pop(sample.index, None)
        if first is None:
            return False
        if why := difference(first.sample, sample):
            self.mismatch += 1
            self.last_mismatch = (
                f"child {sample.index} of group {part.open.group.id}, made by the replicas {first.replica} and "
                f"{part.replica.name}: {why}"
            )
            log.error("replicas make different samples mismatch=%d %s", self.mismatch, self.last_mismatch)
        return True

    def status(self) -> dict[str, object]:
        told: dict[str, object] = {"hedged": self.hedged, "hedge_wins": self.wins, "mismatch": self.mismatch}
        return {**told, "last_mismatch": self.last_mismatch} if self.mismatch else told


def hedgeable(one: OpenGroup) -> bool:
    """Whether the children of a group may run twice: those of `finish_after` are counted in one place, and scoring is short."""
    return one.group.sampling.finish_after is None and not one.group.score


def difference(one: Sample, other: Sample) -> str:
    """Return where two runs of a child differ, as far as both go under the same versions of the weights; "" if nowhere."""
    length = min(len(one.token_ids), len(other.token_ids))
    if spans(one, length) != spans(other, length):
        return ""
    for name in ("token_ids", "logprobs", "raw_logprobs", "top_ids", "top_logprobs"):
        a, b = getattr(one, name), getattr(other, name)
        if a is None or b is None:
            continue
        same = np.equal(a[:length], b[:length]) | (np.isnan(a[:length]) & np.isnan(b[:length]))
        if not same.all():
            at = int(np.argmin(same if same.ndim == 1 else same.all(axis=1)))
            return f"{name} from token {at} on, {a[at].tolist()} and {b[at].tolist()}"
    (shorter, at), (longer, goes_on) = sorted(
        ((each.finish_reason, len(each.token_ids)) for each in (one, other)), key=at_token
    )
    if shorter in BY_THEMSELVES and (at != goes_on or longer in BY_THEMSELVES and longer != shorter):
        return f"the end, {shorter} after {at} tokens and {longer} after {goes_on}"
    return ""


def at_token(end: tuple[str, int]) -> int:
    return end[1]


def spans(sample: Sample, length: int) -> list[tuple[int, int]]:
    """Return the versions that made the first tokens."""
    return [(first, version) for first, version in sample.weight_versions if first < length]
