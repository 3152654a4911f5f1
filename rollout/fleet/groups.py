"""The groups of the front: which children run where, and which have come. A child is given out once, wherever it was made.

    submit -> place -> Part at a replica -> sample -> once out          replica lost -> its children unplaced -> place again

A child is a function of (arithmetic, weights, prompt, seed, index), so it may be moved, and be made twice.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

import msgspec

from engine.types import FinishReason, Group, PartialSample, Sample, TokenChunk
from rollout.client.link import Link
from rollout.client.submission import handle_of, submit_of
from rollout.fleet import failures, routing
from rollout.fleet.event_queue import EventQueue
from rollout.fleet.failures import candidates, note, of_the_group, spent, unasked
from rollout.fleet.placement import OpenGroup, PlacedChildren, new_tokens, seeded
from rollout.fleet.replica import Replica
from rollout.fleet.sample_locations import SampleLocations
from transport.checks import NOTHING
from transport.errors import NotBelieved, RolloutError, ServiceLost, StaleWeights

MOST_PLACED = 2048
"""children of waiting groups that are sent, or ended, at once"""


class FleetGroups:
    """Written by the service's thread.

    Args:
        serving: replicas that may be given groups.
        version: of the live weights; a replica that has older ones refuses.
        fail: called with a replica that has failed on a group, or whose link has ended.
        was_live: whether weights of a version were live; called by the links' threads.
        seed: from which groups without a seed get theirs."""

    def __init__(
        self,
        inbox: EventQueue,
        serving: Callable[[], list[Replica]],
        version: Callable[[], int],
        fail: Callable[[Replica, str, RolloutError | None], None],
        was_live: Callable[[int], bool],
        seed: int = 0,
    ) -> None:
        self.open: dict[str, OpenGroup] = {}
        self.waiting: dict[str, OpenGroup] = {}
        """those with children that no replica has"""
        self.at: defaultdict[Replica, set[PlacedChildren]] = defaultdict(set)
        """what runs at each replica"""
        self._homes = SampleLocations()
        self.ended: list[Sample] = []
        """not handed out yet"""
        self.unsent: set[Link] = set()
        """links that have groups to send, and are not woken before all of this turn are there"""
        self.moved = self.repeats = 0
        """children that were sent again, samples that came twice"""
        self.aborts = 0
        """refreshes so far that have ended all groups"""
        self._inbox = inbox
        self._serving = serving
        self._version = version
        self._fail = fail
        self._was_live = was_live
        self._seed = seed
        self._seeded = 0
        self._numbers = itertools.count(1)

    @property
    def has_work(self) -> bool:
        """Whether samples have not been handed out, links not woken, or groups wait though a replica serves."""
        return bool(self.ended or self.unsent) or (bool(self.waiting) and bool(self._serving()))

    def submit(self, group: Group, client: str, now: float) -> None:
        """Take a group, and send it if a replica serves."""
        if group.sampling.seed is None:
            self._seeded += 1
            group = seeded(group, f"{self._seed}/{self._seeded}")
        self.open[group.id] = one = OpenGroup.of(group, client, now)
        self.place(one, now)

    def place(self, one: OpenGroup, now: float) -> None:
        """Send the children that no replica has. They wait if no replica serves."""
        if one.cut:
            self._end(one, sorted(one.unplaced - one.cancelled), "cut")
        self._end(one, sorted(one.unplaced & one.cancelled), "aborted")
        replicas = candidates(one, self._serving())
        if not one.unplaced or not replicas:
            if one.unplaced:
                self.waiting[one.group.id] = one
            return
        self.waiting.pop(one.group.id, None)
        ranking = routing.ranked(one.group.prompt, list(replicas))
        if (home := self._homes.find(one.group.after)) is not None and home.replica.name in replicas:
            ranking = [home.replica.name, *(name for name in ranking if name != home.replica.name)]
        loads = {name: replica.load for name, replica in replicas.items()}
        wanted, tokens = sorted(one.unplaced), one.group.sampling.max_tokens
        whole = one.group.sampling.finish_after is not None  # its children must be counted in one place
        for indices in [tuple(wanted)] if whole else routing.parts(wanted, tokens, loads):
            name = routing.choose(ranking, loads)
            self._send(one, indices, replicas[name], now)
            loads[name] = replicas[name].load

    def _send(self, one: OpenGroup, indices: tuple[int, ...], replica: Replica, now: float) -> None:
        name = f"{one.group.id}/{next(self._numbers)}"
        group = one.at(name, indices, self._homes.hint(one.group.after, replica), now)
        submit = submit_of(group, serial=0, require_version=self._version(), client=one.client)
        handle = handle_of(group, submit, replica.welcome.limits)
        part = PlacedChildren(one, replica, handle, set(indices), self.aborts)
        one.unplaced -= part.left
        one.parts.add(part)
        self.at[replica].add(part)
        replica.load += len(one.group.prompt) + len(indices) * one.group.sampling.max_tokens
        assert replica.link is not None
        handle.bounds, handle.was_live = NOTHING._replace(least_version=submit.require_version), self._was_live
        handle.on_cancel = replica.link.cancel
        if group.sampling.stream_every:
            handle.on_tokens(lambda handle, chunk: self._inbox.post(lambda: None))  # so that the service looks
        handle.on_change = lambda handle, samples: self._inbox.post(partial(self._changed, part, samples), len(samples or ()))
        replica.link.submit(handle, wake=False)
        self.unsent.add(replica.link)

    def abort(self, group_id: str, index: int | None) -> list[Sample]:
        """End the children of a group, or one of them. Returns those that end here; the others come from their replicas, with
        the tokens they have."""
        one = self.open.get(group_id)
        if one is None:
            self._homes.give_up(group_id, index)
            return []
        asked = (one.left if index is None else one.left & {index}) - one.cancelled
        one.cancelled |= asked
        for part in one.parts:
            if some := part.left & asked:
                part.handle.cancel(None if some == part.left else some)
        before = len(self.ended)
        self._end(one, sorted(one.unplaced & asked), "aborted")
        here, self.ended[before:] = self.ended[before:], []
        return here

    def chunks(self, group_id: str, since: Mapping[int, int], least: int, most: int) -> list[TokenChunk]:
        """Return new tokens of children that run, as `Engine.chunks` does: of those that replicas have streamed."""
        one = self.open.get(group_id)
        return [] if one is None else new_tokens(one, since, least, most)

    def move(self, replica: Replica, now: float) -> None:
        """Send what ran at a replica that is lost to others."""
        lost, replica.load = self.at.pop(replica, set()), 0
        for part in lost:
            one, orphans = part.open, part.open.orphans(part)
            one.parts.discard(part)
            self._lost(part, orphans)

    def place_waiting(self, now: float) -> None:
        """Send what waits, if a replica serves: some of it at each call."""
        for one in first_of(self.waiting):
            self.place(one, now)

    def give_up(self, reason: str) -> None:
        """End what waits for a replica: some of it at each call."""
        for one in first_of(self.waiting):
            self._end(one, sorted(one.unplaced), "error", reason)

    def _changed(self, part: PlacedChildren, samples: Sequence[Sample] | None) -> None:
        if samples is not None:
            for sample in samples:
                self._arrived(part, sample)
            self._homes.tend()
        elif part in part.open.parts:  # otherwise its replica was lost, and this is why
            self._part_failed(part)

    def _arrived(self, part: PlacedChildren, sample: Sample) -> None:
        one = part.open
        rivals = one.rivals(part, sample.index)
        if sample.index not in one.left:
            self._left(part, sample.index)
            self.repeats += 1
        elif rivals and unasked(part, sample, self.aborts):
            self._left(part, sample.index)  # it runs on elsewhere
        elif unasked(part, sample, self.aborts):
            self._again(part, sample)
        else:
            if sample.finish_reason != "error":
                part.replica.failing.clear()
            one.finished += sample.finish_reason in ("stop", "length")
            if part.handle.may_pin_kv:
                self._homes.add(one.group.id, sample.index, part.replica, part.handle)
            self._left(part, sample.index)
            for rival in rivals:
                rival.handle.cancel([sample.index])  # it was moved, and has come from the replica that was lost
            self._out(one, msgspec.structs.replace(sample, group_id=one.group.id))

    def _again(self, part: PlacedChildren, sample: Sample) -> None:
        """Have a child go on elsewhere: from the tokens that it has, unless something failed while they were made."""
        one = part.open
        if part not in one.parts:
            return  # it was moved already
        self._left(part, sample.index)
        if len(sample.token_ids) and sample.finish_reason == "aborted" and not one.group.score:
            one.partials[sample.index] = PartialSample.of(sample)
        one.unplaced.add(sample.index)
        self.waiting[one.group.id] = one  # until the next look: by then its replica may be known to stop
        self.moved += 1
        if sample.finish_reason == "error":
            note(part, {sample.index})
            self._fail(part.replica, one.group.id, None)
        else:
            part.replica.gives_back()

    def _part_failed(self, part: PlacedChildren) -> None:
        """A replica has refused these children, has lost them, or is not believed."""
        one, error = part.open, part.handle.error
        orphans = one.orphans(part)
        for index in sorted(part.left):
            self._left(part, index)
        if isinstance(error, ServiceLost | StaleWeights | NotBelieved):
            part.replica.believed &= not isinstance(error, NotBelieved)
            self._lost(part, orphans)
            self._fail(part.replica, one.group.id, error)
        elif orphans and error is not None:  # the others have come, or run elsewhere
            self._refused(part, orphans, error)

    def _lost(self, part: PlacedChildren, orphans: set[int]) -> None:
        """Have the children of a part whose replica is lost run elsewhere."""
        one = part.open
        one.take_back(part, orphans)
        one.moves += 1
        self.moved += len(orphans)
        if one.moves > failures.MOST_MOVES:
            self._end(one, sorted(one.unplaced), "error", f"{one.moves} replicas were lost while they ran this group")
        if one.unplaced:
            self.waiting[one.group.id] = one

    def _refused(self, part: PlacedChildren, orphans: set[int], error: RolloutError) -> None:
        """Have others asked for children that a replica has refused."""
        one = part.open
        one.take_back(part, orphans)
        note(part, orphans)
        self._end(one, sorted(spent(part, orphans, error, self._serving())), "error", f"{error.kind}: {error.message}")
        if one.unplaced:
            self.waiting[one.group.id] = one
        if not of_the_group(error):
            self._fail(part.replica, one.group.id, error)

    def _left(self, part: PlacedChildren, index: int) -> None:
        """Take a child off its part."""
        if index not in part.left or part not in part.open.parts:
            return
        part.left.discard(index)
        part.replica.load -= part.open.group.sampling.max_tokens
        if not part.left:
            part.replica.load -= len(part.open.group.prompt)
            self.at[part.replica].discard(part)
            part.open.parts.discard(part)

    def _end(self, one: OpenGroup, indices: Iterable[int], reason: FinishReason, error: str | None = None) -> None:
        for index in indices:
            one.unplaced.discard(index)
            self._out(one, one.unfinished(index, reason, error))

    def _out(self, one: OpenGroup, sample: Sample) -> None:
        one.left.discard(sample.index)
        one.unplaced.discard(sample.index)
        self.ended.append(sample)
        if not one.unplaced:
            self.waiting.pop(one.group.id, None)
        if not one.left:
            del self.open[one.group.id]


def first_of(waiting: Mapping[str, OpenGroup]) -> list[OpenGroup]:
    """Return those that have waited longest, as many as one turn of the loop has time for."""
    children = itertools.accumulate(len(one.unplaced) for one in waiting.values())
    some = [one for one, sum in zip(waiting.values(), children, strict=False) if sum <= MOST_PLACED]
    return some or [*itertools.islice(waiting.values(), 1)]
