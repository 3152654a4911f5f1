"""Records of the router's unfinished groups, and of their children on each replica. Written by `FleetGroups`."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec
import xxhash

from rollout.client.handle import OpenHandle
from rollout.engine.values import SEED_LIMIT, FinishReason, Group, PartialSample, Sample, Sampling, TokenChunk, no_tokens
from rollout.fleet.owners import Owner
from rollout.fleet.replica import Replica

LEAST_DEADLINE_S = 1e-3

Origins = list[tuple[int, Owner | None]]
"""(first token, owner of the replica that generated it and those after it) of a child, ascending; None: the client gave them"""


@dataclass(slots=True, eq=False)
class PlacedChildren:
    """Children of a group on one replica."""

    open: OpenGroup
    replica: Replica
    handle: OpenHandle
    left: set[int]
    aborts: int
    """refreshes that had aborted all groups when it was sent"""
    origins: dict[int, Origins]
    """of each child; empty if nothing is verified"""


@dataclass(slots=True, eq=False)
class Held:
    """A finished child that is delivered after its verdict."""

    one: OpenGroup
    sample: Sample
    origins: Origins
    until: float
    """time.monotonic: then it is delivered unverified"""

    @property
    def tokens(self) -> int:
        return len(self.one.group.prompt) + len(self.sample.token_ids)


@dataclass(slots=True, eq=False)
class OpenGroup:
    """A group with unfinished children."""

    group: Group
    """with its seed"""
    client: str
    arrived_at: float
    left: set[int] = field(default_factory=set)
    unplaced: set[int] = field(default_factory=set)
    unplaced_since: float = math.inf
    """since when no replica could have them; inf: one could"""
    parts: set[PlacedChildren] = field(default_factory=set)
    partials: dict[int, PartialSample] = field(default_factory=dict)
    origins: dict[int, Origins] = field(default_factory=dict)
    """of the tokens in `partials`"""
    held: dict[int, Held] = field(default_factory=dict)
    """finished children that are verified"""
    doubted: set[int] = field(default_factory=set)
    """children that are generated again on trusted replicas: what others sent of them could not be verified"""
    cancelled: set[int] = field(default_factory=set)
    """aborted children"""
    failed_on: set[str] = field(default_factory=set)
    """names of replicas that get its children only if there is no other"""
    routes_returned: bool = False
    """a sample has the routes of the prompt, which a link gives to all of them"""
    finished: int = 0
    """children that ended as "stop" or "length\""""
    moves: int = 0
    errors: Counter[int] = field(default_factory=Counter)
    """times that each child has ended as "error", or was refused, by index"""

    @classmethod
    def of(cls, group: Group, client: str, now: float) -> OpenGroup:
        """Make the record of a group with a seed; no replica has any of it."""
        partials = {child.index: child for child in group.partials}
        origins: dict[int, Origins] = {index: [(0, None)] for index in partials}
        return cls(group, client, now, set(group.wanted), set(group.wanted), partials=partials, origins=origins)

    @property
    def cut(self) -> bool:
        """Whether `finish_after` children have ended, so that the others end as well."""
        enough = self.group.sampling.finish_after
        return enough is not None and self.finished >= enough

    def sampling(self, indices: Sequence[int], now: float) -> Sampling:
        """Return the sampling of children that are sent at `now`, with the rest of the deadline and of `finish_after`."""
        sampling, changes = self.group.sampling, {}
        if sampling.deadline_s is not None:
            changes["deadline_s"] = max(LEAST_DEADLINE_S, sampling.deadline_s - (now - self.arrived_at))
        if sampling.finish_after is not None:
            changes["finish_after"] = min(len(indices), sampling.finish_after - self.finished)
        return msgspec.structs.replace(sampling, **changes) if changes else sampling

    def at(self, name: str, indices: Sequence[int], after: tuple[str, int] | None, now: float) -> Group:
        """Make the group of these children, with their tokens so far, for a replica to which it is sent at `now`. after: the
        child that it continues, as that replica names it."""
        partials = tuple(self.partials[index] for index in indices if index in self.partials)
        fields = dict(id=name, sampling=self.sampling(indices, now), indices=tuple(indices), partials=partials, after=after)
        return msgspec.structs.replace(self.group, **fields)

    def unfinished(self, index: int, reason: FinishReason, error: str | None = None) -> Sample:
        """Make the sample of a child that ends in the router, with its tokens so far."""
        child = None if self.group.score else self.partials.get(index)
        return Sample(
            group_id=self.group.id,
            index=index,
            finish_reason=reason,
            error=error,
            prompt_tokens=len(self.group.prompt),
            seed=self.group.sampling.seed or 0,
            **(no_tokens() if child is None else child).columns(),
        )

    def with_routes_once(self, sample: Sample) -> Sample:
        """Remove the routes of the prompt from a sample, unless it is the first one that has them."""
        if sample.prompt_routed_experts is None:
            return sample
        first, self.routes_returned = not self.routes_returned, True
        return sample if first else msgspec.structs.replace(sample, prompt_routed_experts=None)

    def rivals(self, part: PlacedChildren, index: int) -> list[PlacedChildren]:
        """List the other parts in which this child also runs."""
        if len(self.parts) == 1 and part in self.parts:
            return []
        return [other for other in self.parts if other is not part and index in other.left]

    def orphans(self, part: PlacedChildren) -> set[int]:
        """Return the children of a part that have not arrived and run nowhere else."""
        return {index for index in (part.left & self.left) - self.held.keys() if not self.rivals(part, index)}

    def take_back(self, part: PlacedChildren, orphans: set[int]) -> None:
        """Make these children of a part unplaced again, with the tokens that were streamed unless the replica sent invalid
        data."""
        if not part.replica.invalid and not self.group.score:  # a scored child generates no tokens
            for child in part.handle.partial_samples():
                if child.index in orphans:
                    self.have(child, part)
        self.unplaced |= orphans

    def have(self, child: PartialSample, part: PlacedChildren) -> None:
        """Note the tokens so far of a child that a part has returned."""
        self.partials[child.index], self.origins[child.index] = child, part.origins.get(child.index, [])

    def tainted(self, part: PlacedChildren) -> set[int]:
        """Return the children of a part that continue tokens of a banned owner."""
        return {index for index in part.left & part.origins.keys() if is_banned(part.origins[index])}

    def with_owner(self, indices: Sequence[int], owner: Owner) -> dict[int, Origins]:
        """Return the origins of children that a replica of this owner continues."""
        had = {index: len(self.partials[index].token_ids) for index in indices if index in self.partials}
        return {index: [*self.origins.get(index, []), (had.get(index, 0), owner)] for index in indices}

    def forget(self, indices: Collection[int]) -> None:
        """Make children unplaced again, with the tokens that the client gave and no others."""
        given = {child.index: child for child in self.group.partials}
        for index in indices:
            for known in (self.partials, self.origins):
                known.pop(index, None)
            if index in given:
                self.partials[index], self.origins[index] = given[index], [(0, None)]
            self.unplaced.add(index)


def remove_child(part: PlacedChildren, index: int) -> bool:
    """Remove a child from a part, and what it adds to the replica's load. Returns whether no other is left."""
    if index not in part.left:
        return False
    part.left.discard(index)
    part.replica.load -= part.open.group.sampling.max_tokens
    if not part.left:
        part.replica.load -= len(part.open.group.prompt)
    return not part.left


def is_banned(origins: Origins) -> bool:
    """Return whether some of the tokens are of a banned owner."""
    return any(owner is not None and owner.ban is not None for _, owner in origins)


def is_untrusted(origins: Origins) -> bool:
    """Return whether some of the tokens are of an owner who is not trusted."""
    return any(owner is not None and not owner.trusted for _, owner in origins)


def seeded(group: Group, text: str) -> Group:
    """Give a group a seed that is a hash of a text."""
    seed = xxhash.xxh3_64_intdigest(text.encode()) % SEED_LIMIT
    return msgspec.structs.replace(group, sampling=msgspec.structs.replace(group.sampling, seed=seed))


def new_tokens(one: OpenGroup, since: Mapping[int, int], least: int, most: int) -> list[TokenChunk]:
    """Return new tokens of running children, as `Engine.chunks` does, as far as replicas have streamed them; of a child that
    runs twice, the longer ones."""
    known = one.partials.copy()
    for child in (child for part in one.parts for child in part.handle.partial_samples()):
        if child.index not in known or len(child.token_ids) > len(known[child.index].token_ids):
            known[child.index] = child
    new = {index: len(known[index].token_ids) - since.get(index, 0) for index in one.left & known.keys()}
    chunks = []
    for index in sorted(new, key=lambda index: (-new[index], index)):
        if new[index] >= max(1, least) and most > 0:
            first = since.get(index, 0)
            tokens = known[index].slice(first, first + most)
            chunks.append(TokenChunk(index=index, first=first, seed=one.group.sampling.seed or 0, **tokens.columns()))
            most -= len(tokens.token_ids)
    return chunks
