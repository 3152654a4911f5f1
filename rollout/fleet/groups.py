"""Assigns the router's groups to replicas, children of lost replicas to others, and returns each child once.

    submit -> place -> PlacedChildren -> sample -> ended          replica lost -> its children unplaced -> place again

A child is a function of (arithmetic, weights, prompt, seed, index), so it may be moved, and be generated twice.
"""

from __future__ import annotations

import itertools
import math
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import msgspec

from rollout.client.handle import OpenHandle
from rollout.client.link import Link
from rollout.client.submission import handle_of, submit_of
from rollout.engine.values import FinishReason, Group, PartialSample, Sample, TokenChunk
from rollout.fleet import retries, routing
from rollout.fleet.event_queue import EventQueue
from rollout.fleet.open_groups import OpenGroup, Origins, PlacedChildren, is_banned, new_tokens, remove_child, seeded
from rollout.fleet.owners import Owner
from rollout.fleet.replica import Replica
from rollout.fleet.replica_set import ReplicaSet
from rollout.fleet.retries import candidates, concerns_group, count_failure, exhausted, runs_again
from rollout.fleet.sample_locations import SampleLocations
from rollout.fleet.verifier import Judged, Verifier
from rollout.fleet.weights import FleetWeights
from rollout.transport.checks import NOTHING, Bounds
from rollout.transport.errors import NotBelieved, RolloutError, ServiceLost, StaleWeights

MAX_PLACED = 2048
"""children of waiting groups that are sent, or ended, in one iteration of the loop"""


CLOCKS = 0.99
"""of a deadline that a replica must wait for, by the router's clock"""


class GroupFailure(NamedTuple):
    """A replica has failed on a group, or its link has ended."""

    replica: Replica
    group_id: str
    error: RolloutError | None
    """why it refused; None: a sample ended as "error\""""


class FleetGroups:
    """Written by the service's thread.

    Args:
        inbox: queue of the answers of replicas.
        replicas: of the fleet.
        verifier: holds samples of untrusted replicas until they are verified.
        seed: from which groups without a seed get theirs."""

    def __init__(self, inbox: EventQueue, replicas: ReplicaSet, verifier: Verifier, seed: int = 0) -> None:
        self.open: dict[str, OpenGroup] = {}
        self.waiting: dict[str, OpenGroup] = {}
        """groups with unplaced children, which any replica may get"""
        self.unjudged: dict[str, OpenGroup] = {}
        """scores, which only a trusted replica may compute, while none serves"""
        self.at: defaultdict[Replica, set[PlacedChildren]] = defaultdict(set)
        """what runs on each replica"""
        self.ended: list[Sample] = []
        """not returned yet"""
        self.failures: list[GroupFailure] = []
        """not taken yet"""
        self.unsent: set[Link] = set()
        """links with groups to send; each is woken once per iteration of the loop"""
        self.moved = self.repeats = 0
        """children that were sent again, samples that arrived twice"""
        self.aborts = 0
        """refreshes so far that have aborted all groups"""
        self._locations = SampleLocations()
        self._inbox = inbox
        self._replicas = replicas
        self._verifier = verifier
        self._seed = seed
        self._seeded = 0
        self._numbers = itertools.count(1)

    @property
    def has_work(self) -> bool:
        """Whether samples were not returned, links not woken, failures not taken, or groups wait though a replica serves."""
        placed = (self.waiting and self._replicas.serving()) or (self.unjudged and self._replicas.trusted())
        return bool(self.ended or self.unsent or self.failures or placed)

    def submit(self, group: Group, client: str, now: float) -> None:
        """Add a group, and send it if a replica serves."""
        if group.sampling.seed is None:
            self._seeded += 1
            group = seeded(group, f"{self._seed}/{self._seeded}")
        self.open[group.id] = one = OpenGroup.of(group, client, now)
        self.place(one, now)

    def place(self, one: OpenGroup, now: float) -> None:
        """Send the unplaced children. They wait if no replica serves."""
        if one.cut:
            self._end(one, sorted(one.unplaced - one.cancelled), "cut")
        self._end(one, sorted(one.unplaced & one.cancelled), "aborted")
        trusted = self._replicas.trusted() if self._verifier.on else []
        judges = one.group.score and self._verifier.on  # nothing verifies a score, and who is doubted does not verify others
        replicas = candidates(one, trusted if judges else self._verifier.not_suspended(self._replicas.serving(), now))
        if judges:
            self.waiting.pop(one.group.id, None)
        if not one.unplaced or not replicas:
            if one.unplaced:
                (self.unjudged if judges else self.waiting)[one.group.id] = one
                one.unplaced_since = min(one.unplaced_since, now)
            return
        self.waiting.pop(one.group.id, None)
        self.unjudged.pop(one.group.id, None)
        one.unplaced_since = math.inf
        doubted = one.unplaced & one.doubted if trusted else set()
        for wanted, some in ((one.unplaced - doubted, replicas), (doubted, candidates(one, trusted))):
            for indices, replica in places(one, sorted(wanted), some, self._locations):
                self._send(one, indices, replica, now)

    def _send(self, one: OpenGroup, indices: tuple[int, ...], replica: Replica, now: float) -> None:
        name = f"{one.group.id}/{next(self._numbers)}"
        group = one.at(name, indices, self._locations.name_on(one.group.after, replica), now)
        handle = handle_for(group, one.client, replica, self._replicas.weights)
        origins = one.with_owner(indices, replica.owner) if self._verifier.on else {}
        part = PlacedChildren(one, replica, handle, set(indices), self.aborts, origins)
        one.unplaced -= part.left
        one.parts.add(part)
        self.at[replica].add(part)
        replica.load += len(one.group.prompt) + len(indices) * one.group.sampling.max_tokens
        if group.sampling.stream_every:
            handle.on_tokens(lambda handle, chunk: self._inbox.post(lambda: None))  # wakes the service
        handle.on_change = lambda handle, samples: self._inbox.post(partial(self._changed, part, samples), len(samples or ()))
        assert replica.link is not None
        replica.link.submit(handle, wake=False)
        self.unsent.add(replica.link)

    def abort(self, group_id: str, index: int | None) -> list[Sample]:
        """Abort the children of a group, or one of them. Returns the unplaced ones; the others arrive from their replicas, with
        their tokens so far."""
        one = self.open.get(group_id)
        if one is None:
            self._locations.release(group_id, index)
            return []
        aborted = (one.left if index is None else one.left & {index}) - one.cancelled
        one.cancelled |= aborted
        for part in one.parts:
            if some := part.left & aborted:
                part.handle.cancel(None if some == part.left else some)
        before = len(self.ended)
        for held in self._verifier.release(one, aborted):
            self._out(one, held.sample)
        self._end(one, sorted(one.unplaced & aborted), "aborted")
        here, self.ended[before:] = self.ended[before:], []
        return here

    def chunks(self, group_id: str, since: Mapping[int, int], least: int, most: int) -> list[TokenChunk]:
        """Return new tokens of running children, as `Engine.chunks` does, as far as replicas have streamed them."""
        one = self.open.get(group_id)
        return [] if one is None else new_tokens(one, since, least, most)

    def move(self, replica: Replica, now: float) -> None:
        """Send the children of a lost replica to others."""
        lost, replica.load = self.at.pop(replica, set()), 0
        for part in lost:
            one, orphans = part.open, part.open.orphans(part)
            one.parts.discard(part)
            self._lost(part, orphans)

    def judged(self, judged: Judged) -> None:
        """Deliver a held child, or generate it again if it is a lie."""
        one, sample = judged.held.one, judged.held.sample
        if judged.again:
            one.doubted.add(sample.index)
        if judged.again or judged.liar is not None or is_banned(judged.held.origins):
            self._repeat(one, sample)
        else:
            self._deliver(one, sample, judged.held.origins, judged.verified)

    def disown(self, owner: Owner) -> None:
        """Generate all children again that have tokens of a banned owner; those that its replicas run are moved."""
        for one in list(self.open.values()):
            one.forget([index for index in one.unplaced if is_banned(one.origins.get(index, []))])
            for part in [part for part in one.parts if part.replica.owner is not owner]:
                if tainted := one.tainted(part):
                    part.handle.cancel(tainted)
                    for index in tainted:
                        self._left(part, index)
                    one.forget(tainted)
                    self.waiting[one.group.id] = one
            for held in self._verifier.release(one, [i for i, held in one.held.items() if is_banned(held.origins)]):
                self._repeat(one, held.sample)

    def place_waiting(self, now: float) -> None:
        """Send waiting groups, if a replica serves that may have them: some of them at each call."""
        for one in (*first_of(self.waiting), *first_of(self.unjudged if self._replicas.trusted() else {})):
            self.place(one, now)

    def give_up(self, now: float, none_since: float | None, grace_s: float) -> None:
        """End groups that have waited so long for a replica as "error": some of them at each call. none_since: since when no
        replica serves; None: one does."""
        late = [] if none_since is None or now - none_since <= grace_s else first_of(self.waiting)
        unjudged = [one for one in first_of(self.unjudged) if now - one.unplaced_since > grace_s]
        for groups, replica in ((late, "replica"), (unjudged, "trusted replica (fleet.trust)")):
            for one in groups:
                self._end(one, sorted(one.unplaced), "error", f"no {replica} has served for {grace_s} s (replica_grace_s)")

    def _changed(self, part: PlacedChildren, samples: Sequence[Sample] | None) -> None:
        if samples is not None:
            for sample in samples:
                self._arrived(part, sample)
            self._locations.expire()
        elif part in part.open.parts:  # otherwise its replica is lost already
            self._part_failed(part)

    def _arrived(self, part: PlacedChildren, sample: Sample) -> None:
        one = part.open
        rivals = one.rivals(part, sample.index)
        origins = part.origins.get(sample.index, [])
        if is_banned(origins):
            return
        if sample.index not in one.left or sample.index in one.held:
            self._left(part, sample.index)
            self.repeats += 1
        elif rivals and runs_again(part, sample, self.aborts):
            self._left(part, sample.index)  # it also runs elsewhere
        elif runs_again(part, sample, self.aborts):
            self._again(part, sample)
        else:
            if sample.finish_reason != "error":
                part.replica.failing.clear()
            one.finished += sample.finish_reason in ("stop", "length")
            if part.handle.may_pin_kv:
                self._locations.add(one.group.id, sample.index, part.replica, part.handle)
            self._left(part, sample.index)
            for rival in rivals:
                rival.handle.cancel([sample.index])  # it was moved, and has arrived from the lost replica
            done = msgspec.structs.replace(sample, group_id=one.group.id)
            trusted = bool(self._replicas.trusted())
            match self._verifier.decide(one, done, origins, self._replicas.weights.version, trusted):
                case "deliver":
                    self._deliver(one, done, origins)
                case "again":
                    one.doubted.add(done.index)
                    self._repeat(one, done)

    def _deliver(self, one: OpenGroup, sample: Sample, origins: Origins, verified: bool = False) -> None:
        for owner in {owner for _, owner in origins if owner is not None and not (owner.trusted or verified)}:
            owner.add_delivered(one.client, one.group.label or one.group.id, sample.index)
        self._out(one, sample)

    def _repeat(self, one: OpenGroup, sample: Sample) -> None:
        """Generate a finished child again, of which nothing is believed; on a trusted replica if it is in `doubted`."""
        one.finished -= sample.finish_reason in ("stop", "length")
        one.forget([sample.index])
        self.waiting[one.group.id] = one

    def _again(self, part: PlacedChildren, sample: Sample) -> None:
        """Continue a child elsewhere, from its tokens unless it ended as "error\"."""
        one = part.open
        if part not in one.parts:
            return  # it was moved already
        self._left(part, sample.index)
        if len(sample.token_ids) and sample.finish_reason == "aborted" and not one.group.score:
            one.have(PartialSample.of(sample), part)
        one.unplaced.add(sample.index)
        self.waiting[one.group.id] = one  # placed in `step`: by then its replica may be known to stop
        self.moved += 1
        if sample.finish_reason == "error":
            count_failure(part, {sample.index})
            self.failures.append(GroupFailure(part.replica, one.group.id, None))
        else:
            part.replica.returned_unasked()

    def _part_failed(self, part: PlacedChildren) -> None:
        """Handle children that a replica has refused or lost, or of which it sent invalid data."""
        one, error = part.open, part.handle.error
        orphans = one.orphans(part)
        for index in sorted(part.left):
            self._left(part, index)
        if isinstance(error, ServiceLost | StaleWeights | NotBelieved):
            if isinstance(error, NotBelieved):
                part.replica.invalid = error.message
            self._lost(part, orphans)
            self.failures.append(GroupFailure(part.replica, one.group.id, error))
        elif orphans and error is not None:  # the others have arrived, or run elsewhere
            self._refused(part, orphans, error)

    def _lost(self, part: PlacedChildren, orphans: set[int]) -> None:
        """Make the children of a part whose replica is lost unplaced again."""
        one = part.open
        one.take_back(part, orphans)
        one.moves += 1
        self.moved += len(orphans)
        if one.moves > retries.MAX_MOVES:
            self._end(one, sorted(one.unplaced), "error", f"{one.moves} replicas were lost while they ran this group")
        if one.unplaced:
            self.waiting[one.group.id] = one

    def _refused(self, part: PlacedChildren, orphans: set[int], error: RolloutError) -> None:
        """Make the children that a replica has refused unplaced again."""
        one = part.open
        one.take_back(part, orphans)
        count_failure(part, orphans)
        ends = exhausted(part, orphans, error, self._replicas.serving())
        self._end(one, sorted(ends), "error", f"{error.kind}: {error.message}")
        if one.unplaced:
            self.waiting[one.group.id] = one
        if not concerns_group(error):
            self.failures.append(GroupFailure(part.replica, one.group.id, error))

    def _left(self, part: PlacedChildren, index: int) -> None:
        """Remove a child from its part."""
        if part in part.open.parts and remove_child(part, index):
            self.at[part.replica].discard(part)
            part.open.parts.discard(part)

    def _end(self, one: OpenGroup, indices: Iterable[int], reason: FinishReason, error: str | None = None) -> None:
        for index in indices:
            one.unplaced.discard(index)
            self._out(one, one.unfinished(index, reason, error))

    def _out(self, one: OpenGroup, sample: Sample) -> None:
        one.left.discard(sample.index)
        one.unplaced.discard(sample.index)
        self.ended.append(one.with_routes_once(sample))
        if not one.unplaced:
            self.waiting.pop(one.group.id, None)
            self.unjudged.pop(one.group.id, None)
        if not one.left:
            del self.open[one.group.id]


def places(
    one: OpenGroup, wanted: list[int], replicas: Mapping[str, Replica], locations: SampleLocations
) -> Iterator[tuple[tuple[int, ...], Replica]]:
    """Divide children among replicas. Yields the children of each; the caller sends them at once."""
    if not wanted:
        return
    ranking = routing.ranked(one.group.prompt, list(replicas))
    if (found := locations.find(one.group.after)) is not None and found.replica.name in replicas:
        ranking = [found.replica.name, *(name for name in ranking if name != found.replica.name)]
    loads = {name: replica.load for name, replica in replicas.items()}
    whole = one.group.sampling.finish_after is not None  # its children are counted on one replica
    for indices in [tuple(wanted)] if whole else routing.parts(wanted, one.group.sampling.max_tokens, loads):
        name = routing.choose(ranking, loads)
        yield indices, replicas[name]
        loads[name] = replicas[name].load


def handle_for(group: Group, client: str, replica: Replica, weights: FleetWeights) -> OpenHandle:
    """Make the handle of a group that is sent to a replica now."""
    submit = submit_of(group, serial=0, require_version=weights.version, client=client)
    handle = handle_of(group, submit, replica.welcome.limits)
    handle.bounds = bounds_of(group, weights, weights.version)
    assert replica.link is not None
    handle.on_cancel = replica.link.cancel
    return handle


def bounds_of(group: Group, weights: FleetWeights, least_version: int) -> Bounds:
    """Return what the router knows of a group that it sends now: which versions were live, and when its deadline ends."""
    deadline_s = group.sampling.deadline_s
    return NOTHING._replace(
        least_version=least_version,
        was_live=weights.versions.__contains__,
        newest_version=lambda: weights.versions.newest,
        deadline_at=-math.inf if deadline_s is None else time.monotonic() + CLOCKS * deadline_s,
    )


def first_of(waiting: Mapping[str, OpenGroup]) -> list[OpenGroup]:
    """Return the groups that have waited longest, as many as one iteration of the loop may place."""
    children = itertools.accumulate(len(one.unplaced) for one in waiting.values())
    some = [one for one, sum in zip(waiting.values(), children, strict=False) if sum <= MAX_PLACED]
    return some or [*itertools.islice(waiting.values(), 1)]
