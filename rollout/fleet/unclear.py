"""Counts samples that cannot be verified, and suspends owners that send more of them than trusted replicas do.

A sample that was generated during a refresh has tokens or KV of several versions, or of one that is no longer live. An owner
who lies would say that of all samples. So the share of such samples among those of an owner is compared with the share among
those of trusted replicas that arrived in the same time.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from rollout.engine.values import Sample
from rollout.fleet.owners import Owner
from rollout.logs import logger

LEAST = 32
"""samples of an owner, unclear ones of an owner, and samples of trusted replicas, that a comparison needs"""
WINDOW = 1024
"""samples of an owner that are counted together"""
FACTOR, MORE = 2.0, 0.125
"""an owner may have this many times the share of trusted replicas, and so much more: it may be slower"""
FIRST_S, MAX_S = 60.0, 3600.0
"""length of a suspension; it doubles with each one"""

log = logger(__name__)


def is_unclear(sample: Sample, live: int) -> bool:
    """Return whether a finished sample cannot be computed again under the live weights."""
    return bool(sample.kv_versions) or {version for _, version in sample.weight_versions} != {live}


@dataclass(slots=True)
class Window:
    """Samples of an owner, and those of trusted replicas when it began."""

    trusted: tuple[int, int]
    """all, unclear"""
    all: int = 0
    unclear: int = 0


@dataclass(slots=True)
class UnclearShares:
    """Written by `Verifier`."""

    all: int = 0
    """samples of trusted replicas"""
    unclear: int = 0
    windows: dict[Owner, Window] = field(default_factory=dict)
    suspended: dict[Owner, float] = field(default_factory=dict)
    """until when, time.monotonic"""
    times: dict[Owner, int] = field(default_factory=dict)
    """suspensions so far"""

    def add_trusted(self, unclear: bool) -> None:
        """Count a sample all of whose tokens are of trusted replicas."""
        self.all += 1
        self.unclear += unclear

    def add(self, owners: Iterable[Owner], unclear: bool, now: float) -> bool:
        """Count a sample with tokens of these owners, who are not trusted. Returns whether it is one too many."""
        return any([self._add(owner, unclear, now) for owner in owners])

    def is_suspended(self, owner: Owner, now: float) -> bool:
        """Return whether the replicas of an owner get no groups."""
        return now < self.suspended.get(owner, 0.0)

    def names(self, now: float) -> list[str]:
        """List the names of suspended owners."""
        return sorted(owner.name for owner in self.suspended if self.is_suspended(owner, now))

    def _add(self, owner: Owner, unclear: bool, now: float) -> bool:
        window = self.windows.get(owner)
        if window is None or window.all >= WINDOW:
            window = self.windows[owner] = Window((self.all, self.unclear))
        window.all += 1
        window.unclear += unclear
        theirs = self.all - window.trusted[0]
        if not unclear or min(window.unclear, theirs) < LEAST:
            return False
        share, usual = window.unclear / window.all, (self.unclear - window.trusted[1]) / theirs
        if share <= FACTOR * usual + MORE:
            return False
        if not self.is_suspended(owner, now):
            self._suspend(owner, share, usual, now)
        return True

    def _suspend(self, owner: Owner, share: float, usual: float, now: float) -> None:
        count = self.times[owner] = self.times.get(owner, 0) + 1
        seconds = min(MAX_S, FIRST_S * 2 ** (count - 1))
        self.suspended[owner] = now + seconds
        log.error(
            "replicas suspended owner=%r seconds=%.0f why=%r",
            owner.name, seconds, f"{share:.0%} of its samples cannot be verified, {usual:.0%} of those of trusted replicas",
        )  # fmt: skip
