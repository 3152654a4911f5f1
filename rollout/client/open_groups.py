"""The groups that somebody waits for, as the client's I/O thread keeps them.

add -> unsent, by priority, then in order -> pop_sendable -> sent -> remove (whole, failed or cancelled)
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from heapq import heappop, heappush
from itertools import count, groupby
from operator import attrgetter

import numpy as np

from engine.types import Limits, Sample, Served
from rollout.client.handle import Handle
from rollout.client.seen import Seen
from rollout.client.send_queue import portions
from rollout.logs import logger
from transport.checks import NOTHING, Bounds
from transport.columns import unpack_progress
from transport.errors import NotBelieved
from transport.frames import Frame
from transport.messages import Abort, Progress, Welcome, digests

log = logger(__name__)


class OpenGroups:
    """Keeps the groups that somebody waits for. For one thread. seen: the service's weights. budget: tokens of groups that are
    sent and have not ended, at most, as `Handle.in_flight` counts them; None = no bound."""

    def __init__(self, seen: Seen, budget: int | None = None) -> None:
        self.sent: dict[str, Handle] = {}
        """by group id, in the order of sending"""
        self._all: dict[str, Handle] = {}
        self._unsent: list[tuple[int, int, Handle]] = []
        """heap of (-priority, order, group)"""
        self._order = count()
        self.bounds = NOTHING
        """of samples of the service's model"""
        self.disbelieved = False
        """a group has failed for what came of it, and the service does not know"""
        self._seen = seen
        self._budget = budget
        self._sent_samples = self._sent_tokens = 0

    def __len__(self) -> int:
        return len(self._all)

    @property
    def unsent(self) -> bool:
        """Whether groups wait to be sent."""
        return bool(self._unsent)

    def add(self, handle: Handle) -> bool:
        """Keep a group. False if its id is taken."""
        if handle.group_id in self._all:
            return False
        self._all[handle.group_id] = handle
        heappush(self._unsent, (-handle.group.sampling.priority, next(self._order), handle))
        return True

    def has(self, handle: Handle) -> bool:
        return self._all.get(handle.group_id) is handle

    def pop_sendable(self, limits: Limits) -> Handle | None:
        """Take the next group that the service has room for besides those sent; the others wait, so that a trainer may submit
        any number. One that it will refuse anyway need not wait for room."""
        while self._unsent and not self.has(self._unsent[0][-1]):  # ended while it waited
            heappop(self._unsent)
        if not self._unsent:
            return None
        handle = self._unsent[0][-1]
        if not self._seen.live.follow(handle.needs):
            return None
        room = len(self.sent) < limits.max_groups_per_client
        room = room and self._sent_samples + handle.n <= limits.max_samples_per_client
        room = room and (self._budget is None or self._sent_tokens + handle.in_flight <= self._budget)
        if self.sent and not room and 1 <= handle.n <= limits.max_n:
            return None
        heappop(self._unsent)
        least = max(self._seen.live.version, handle.bounds.least_version)
        handle.bounds = self.bounds._replace(least_version=least, was_live=handle.was_live)
        handle.sent_at = time.monotonic()
        self.sent[handle.group_id] = handle
        self._sent_samples += handle.n
        self._sent_tokens += handle.in_flight
        return handle

    def cancel(self, handle: Handle, indices: frozenset[int] | None, limits: Limits) -> Iterator[Abort]:
        """Note that the end of a group, or of some of its children, is asked for. Yields what to send. A group that was not
        sent ends at once; of one that has ended goes what is kept."""
        if not self.has(handle):
            if handle.may_pin_kv and handle.group_id not in self._all:
                handle.cancelled_children |= set(handle.group.wanted) if indices is None else indices
                yield from aborts_of_children([handle], limits)
            return
        sent = handle.group_id in self.sent
        if indices is not None:
            handle.cancelled_children |= indices
            if sent:
                yield from aborts_of_children([handle], limits)
            return
        handle.cancelled = True
        if sent:
            yield Abort([handle.group_id])
        else:
            self.remove(handle)
            handle.abort_unsent(limits.max_n)

    def add_samples(self, samples: Iterable[Sample]) -> list[tuple[str, int]]:
        """Give samples to their groups, where they are wanted; a group that cannot have one fails. Returns what is to be acked:
        (group id, index) of each."""
        came = []
        for group_id, some in groupby(samples, attrgetter("group_id")):
            of_group = list(some)
            came += [(group_id, sample.index) for sample in of_group]
            if (handle := self.sent.get(group_id)) is None:
                continue
            before = handle.in_flight
            try:
                for sample in of_group:
                    handle.check(sample)
                handle.add_samples(of_group)
            except ValueError as error:
                self._disbelieve(handle, error)
                continue
            self._sent_tokens -= before - handle.in_flight
            if handle.done:
                self.remove(handle)
        return came

    def add_progress(self, progress: Progress, limits: Limits) -> None:
        """Give tokens of running children to their groups, if these are wanted; a group that cannot have some fails. Raises
        ProtocolError for what cannot be read."""
        for group_id, chunk in unpack_progress(progress, limits.max_samples_per_client):
            if (handle := self.sent.get(group_id)) is not None:
                try:
                    handle.add_chunk(chunk)
                except ValueError as error:
                    self._disbelieve(handle, error)

    def _disbelieve(self, handle: Handle, error: ValueError) -> None:
        """Fail a group of which came what it cannot have. What else comes of it is nobody's."""
        log.error("not believed group=%s reason=%r", handle.group_id, str(error))
        self.remove(handle)
        self.disbelieved = True
        handle.fail(NotBelieved(f"the service sent what cannot be: {error}", handle.group_id))

    def remove(self, handle: Handle) -> None:
        del self._all[handle.group_id]
        if self.sent.pop(handle.group_id, None) is not None:
            self._sent_samples -= handle.n
            self._sent_tokens -= handle.in_flight

    def clear(self) -> list[Handle]:
        """Forget all of them and return them, in the order of adding."""
        handles = list(self._all.values())
        self._all.clear()
        self._unsent.clear()
        self.sent.clear()
        self._sent_samples = self._sent_tokens = 0
        return handles

    def welcomed(self, welcome: Welcome) -> None:
        """Note what samples of the service's model may be."""
        self.bounds = Bounds(welcome.vocab_size, frozenset(welcome.eos_token_ids))

    def digests(self) -> np.ndarray:
        """List digests of those sent, as Hello tells them: [groups, DIGEST_BYTES] uint8."""
        return digests(handle.digest for handle in self.sent.values())

    def aborts(self, limits: Limits) -> Iterator[Abort]:
        """Yield what asks again for the end of those that were sent and cancelled."""
        for some in portions([handle.group_id for handle in self.sent.values() if handle.cancelled], limits):
            yield Abort(some)
        yield from aborts_of_children(self.sent.values(), limits)

    def missing(self, held: np.ndarray | None) -> list[Handle]:
        """Find those sent that are not among `held`, digests as Welcome tells them."""
        known = set() if held is None else {row.tobytes() for row in held}
        return [handle for handle in self.sent.values() if handle.digest not in known]

    def resent(self, held: np.ndarray | None) -> list[list[Frame]]:
        """Return the Submits of those that are `missing`; they begin again."""
        missing = self.missing(held)
        for handle in missing:
            handle.restart()
        return [handle.frames for handle in missing]

    def restarted(self, held: np.ndarray | None, limits: Limits) -> None:
        """Go on after a restart of the service, which has the groups that it names in Welcome (`held`). The others are taken
        back, to be sent again once the weights are as new as they were: children that are here already come twice, and the
        same, which changes nothing. What was not sent waits for these weights as well."""
        for handle in self.missing(held):
            self.remove(handle)
            if handle.cancelled:
                handle.abort_unsent(limits.max_n)
            else:
                self.add(handle)
        for handle in self._all.values():
            handle.restart()
            handle.needs = max(handle.needs, self._seen.live)

    def strangers(self, live: Served) -> list[Handle]:
        """Take back the groups that a restart has stopped under weights of the `live` version which were others."""
        found = [handle for handle in self._all.values() if live.differ(handle.needs)]
        for handle in found:
            self.remove(handle)
        return found


def aborts_of_children(handles: Iterable[Handle], limits: Limits) -> Iterator[Abort]:
    """Yield what asks for the end of the children of these groups that were cancelled one by one."""
    children = [(handle.group_id, index) for handle in handles for index in sorted(handle.cancelled_children)]
    for some in portions(children, limits):
        yield Abort([], some)
