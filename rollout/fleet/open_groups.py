"""Records of the router's unfinished groups, and of their children on each replica. Written by `FleetGroups`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import msgspec
import xxhash

from rollout.client.handle import OpenHandle
from rollout.engine.types import SEED_LIMIT, FinishReason, Group, PartialSample, Sample, Sampling, TokenChunk, no_tokens
from rollout.fleet.replica import Replica

LEAST_DEADLINE_S = 1e-3


@dataclass(slots=True, eq=False)
class PlacedChildren:
    """Children of a group on one replica."""

    open: OpenGroup
    replica: Replica
    handle: OpenHandle
    left: set[int]
    aborts: int
    """refreshes that had aborted all groups when it was sent"""


@dataclass(slots=True, eq=False)
class OpenGroup:
    """A group with unfinished children."""

    group: Group
    """with its seed"""
    client: str
    arrived_at: float
    left: set[int] = field(default_factory=set)
    unplaced: set[int] = field(default_factory=set)
    parts: set[PlacedChildren] = field(default_factory=set)
    partials: dict[int, PartialSample] = field(default_factory=dict)
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
        return cls(group, client, now, set(group.wanted), set(group.wanted), partials=partials)

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
        return {index for index in part.left & self.left if not self.rivals(part, index)}

    def take_back(self, part: PlacedChildren, orphans: set[int]) -> None:
        """Make these children of a part unplaced again, with the tokens that were streamed unless the replica sent invalid
        data."""
        if not part.replica.invalid and not self.group.score:  # a scored child generates no tokens
            self.partials |= {child.index: child for child in part.handle.partial_samples() if child.index in orphans}
        self.unplaced |= orphans


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
