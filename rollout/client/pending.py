"""Open groups and requests that callers wait for, and the first Welcome; used by the client's I/O thread.

OpenGroups.add -> unsent, by priority, then in order -> pop_sendable -> sent -> remove (complete, failed or cancelled)
PendingRequests.add -> open, repeated after a reconnect -> answer, once
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from heapq import heappop, heappush
from itertools import count, groupby
from operator import attrgetter
from typing import Any

import numpy as np

from rollout.client.connection import split_ids
from rollout.client.handle import OpenHandle
from rollout.engine.values import Limits, Sample, Served
from rollout.identity import WORDS
from rollout.logs import logger
from rollout.transport.checks import NOTHING, Bounds
from rollout.transport.columns import unpack_progress
from rollout.transport.errors import NotBelieved, RolloutError, ServiceLost, ServiceRestarted, copy_of
from rollout.transport.frames import Frame
from rollout.transport.messages import Abort, Applied, Progress, StatusReply, Welcome, digests

REMEMBERED = 64
"""versions whose digest is remembered"""

log = logger(__name__)


class WeightHistory:
    """Versions of the service's weights and their digests. The I/O thread writes; any thread may read."""

    def __init__(self) -> None:
        self.live = Served()
        """as last reported"""
        self._digests: OrderedDict[int, str] = OrderedDict()
        self._awaited = 0
        """version that groups wait for on a service that counts from 0 again; 0: none"""

    def add(self, weights: Served) -> None:
        """Remember weights that are or were live."""
        self.live = max(self.live, weights)
        if weights.digest:
            self._digests[weights.version] = weights.digest
            self._digests.move_to_end(weights.version)
        while len(self._digests) > REMEMBERED:
            self._digests.popitem(last=False)

    def set_live(self, live: Served) -> None:
        """Note which weights are live now."""
        self.live = live
        self._awaited = self._awaited if live.version < self._awaited else 0
        self.add(live)

    def restarted(self, same_incarnation: bool, resubmit: bool) -> None:
        """Note a restart. If the incarnation is a new one, versions start at 0 again, and with `resubmit` open groups wait
        until the weights are as new as before."""
        if not same_incarnation:
            self._awaited = max(self._awaited, self.live.version) if resubmit else 0

    def digest(self, version: int) -> str:
        """Return the digest of a version; "": unknown."""
        return self._digests.get(version, "")

    def next_version(self) -> int | None:
        """Return the version for a refresh that names none: above the one that groups wait for. None: the service's next."""
        return self._awaited + 1 if self._awaited else None


class OpenGroups:
    """Groups that callers wait for.

    Args:
        weights: of the service.
        budget: maximum tokens of sent groups, as `Handle.in_flight` counts; None = unbounded."""

    def __init__(self, weights: WeightHistory, budget: int | None = None) -> None:
        self.sent: dict[str, OpenHandle] = {}
        """by group id, in the order of sending"""
        self._all: dict[str, OpenHandle] = {}
        self._unsent: list[tuple[int, int, OpenHandle]] = []
        """heap of (-priority, order, group)"""
        self._order = count()
        self.bounds = NOTHING
        """of samples of the service's model"""
        self.configuration = ""
        """of the service's model"""
        self.must_resync = False
        """a group failed here, and the service does not know it yet"""
        self._weights = weights
        self._budget = budget
        self._sent_samples = self._sent_tokens = 0

    def __len__(self) -> int:
        return len(self._all)

    @property
    def unsent(self) -> bool:
        """Whether groups wait to be sent."""
        return bool(self._unsent)

    def add(self, handle: OpenHandle) -> bool:
        """Add a group to the unsent ones. False if its id is taken."""
        if handle.group_id in self._all:
            return False
        self._all[handle.group_id] = handle
        heappush(self._unsent, (-handle.group.sampling.priority, next(self._order), handle))
        return True

    def has(self, handle: OpenHandle) -> bool:
        """Return whether the group is open."""
        return self._all.get(handle.group_id) is handle

    def pop_sendable(self, limits: Limits) -> OpenHandle | None:
        """Take the next unsent group that fits the service's limits and the budget; the others wait, so a trainer may submit
        any number. A group that the service will refuse anyway does not wait."""
        while self._unsent and not self.has(self._unsent[0][-1]):  # ended while it waited
            heappop(self._unsent)
        if not self._unsent:
            return None
        handle = self._unsent[0][-1]
        if not self._weights.live.follow(handle.needs):
            return None
        fits = len(self.sent) < limits.max_groups_per_client
        fits = fits and self._sent_samples + handle.n <= limits.max_samples_per_client
        fits = fits and (self._budget is None or self._sent_tokens + handle.in_flight <= self._budget)
        if self.sent and not fits and 1 <= handle.n <= limits.max_n:
            return None
        heappop(self._unsent)
        least = max(self._weights.live.version, handle.bounds.least_version)
        model = self.bounds
        handle.bounds = handle.bounds._replace(
            vocab_size=model.vocab_size, eos_token_ids=model.eos_token_ids, routing=model.routing, least_version=least
        )
        handle.configuration = self.configuration
        self.sent[handle.group_id] = handle
        self._sent_samples += handle.n
        self._sent_tokens += handle.in_flight
        return handle

    def cancel(self, handle: OpenHandle, indices: frozenset[int] | None, limits: Limits) -> Iterator[Abort]:
        """Cancel a group, or some of its children. Yields what to send. An unsent group ends at once; of a finished one, pinned
        KV is released."""
        if not self.has(handle):
            if handle.may_pin_kv and handle.group_id not in self._all:
                handle.cancelled_children |= set(handle.group.wanted) if indices is None else indices
                yield from child_aborts([handle], limits)
            return
        sent = handle.group_id in self.sent
        if indices is not None:
            handle.cancelled_children |= indices
            if sent:
                yield from child_aborts([handle], limits)
            return
        handle.cancelled = True
        if sent:
            yield Abort([handle.group_id])
        else:
            self.remove(handle)
            handle.abort_unsent(limits.max_n)

    def add_samples(self, samples: Iterable[Sample]) -> list[tuple[str, int]]:
        """Hand samples to their groups; a group fails if a sample is impossible for it. Returns what to ack: (group id, index)
        of each."""
        received = []
        for group_id, some in groupby(samples, attrgetter("group_id")):
            of_group = list(some)
            received += [(group_id, sample.index) for sample in of_group]
            if (handle := self.sent.get(group_id)) is None:
                continue
            before = handle.in_flight
            try:
                for sample in of_group:
                    handle.check(sample)
                handle.add_samples(of_group)
            except ValueError as error:
                self._reject(handle, error)
                continue
            self._sent_tokens -= before - handle.in_flight
            if handle.done:
                self.remove(handle)
        return received

    def add_progress(self, progress: Progress, limits: Limits) -> None:
        """Hand new tokens of running children to their groups; a group fails if they are impossible for it. Raises
        ProtocolError if the message cannot be read."""
        for group_id, chunk in unpack_progress(progress, limits.max_samples_per_client):
            if (handle := self.sent.get(group_id)) is not None:
                try:
                    handle.add_chunk(chunk)
                except ValueError as error:
                    self._reject(handle, error)

    def _reject(self, handle: OpenHandle, error: ValueError) -> None:
        """Fail a group that received an impossible value; its further samples are ignored."""
        log.error("impossible sample group=%s reason=%r", handle.group_id, str(error))
        self.remove(handle)
        self.must_resync = True
        handle.fail(NotBelieved(f"the service sent an impossible value: {error}", handle.group_id))

    def remove(self, handle: OpenHandle) -> None:
        """Remove an open group."""
        del self._all[handle.group_id]
        if self.sent.pop(handle.group_id, None) is not None:
            self._sent_samples -= handle.n
            self._sent_tokens -= handle.in_flight

    def clear(self) -> list[OpenHandle]:
        """Remove all groups. Returns them in the order of adding."""
        handles = list(self._all.values())
        self._all.clear()
        self._unsent.clear()
        self.sent.clear()
        self._sent_samples = self._sent_tokens = 0
        return handles

    def welcomed(self, welcome: Welcome) -> None:
        """Note the bounds of the service's model, and its configuration."""
        self.configuration = welcome.configuration
        self.bounds = Bounds(welcome.vocab_size, frozenset(welcome.eos_token_ids), routing=welcome.routing)

    def digests(self) -> np.ndarray:
        """List the digests of the sent groups for Hello: [groups, DIGEST_BYTES] uint8."""
        return digests(handle.digest for handle in self.sent.values())

    def aborts(self, limits: Limits) -> Iterator[Abort]:
        """Yield the aborts of sent groups again."""
        for some in split_ids([handle.group_id for handle in self.sent.values() if handle.cancelled], limits):
            yield Abort(some)
        yield from child_aborts(self.sent.values(), limits)

    def resent(self, held: np.ndarray | None) -> list[list[Frame]]:
        """Return the Submits of the sent groups that the service lacks; they start again."""
        missing = self._missing(held)
        for handle in missing:
            handle.restart()
        return [handle.frames for handle in missing]

    def restarted(self, held: np.ndarray | None, limits: Limits) -> None:
        """Continue after a restart of the service. Groups that it lacks become unsent again, and all unsent groups wait until
        the weights are as new as before. Samples that already arrived come twice, with equal content, and are ignored."""
        for handle in self._missing(held):
            self.remove(handle)
            if handle.cancelled:
                handle.abort_unsent(limits.max_n)
            else:
                self.add(handle)
        for handle in self._all.values():
            handle.restart()
            handle.needs = max(handle.needs, self._weights.live)

    def _missing(self, held: np.ndarray | None) -> list[OpenHandle]:
        """List the sent groups that are not among the digests in Welcome."""
        known = set() if held is None else {row.tobytes() for row in held}
        return [handle for handle in self.sent.values() if handle.digest not in known]

    def take_incompatible(self, live: Served) -> list[OpenHandle]:
        """Remove and return the groups that started under other weights with the version of the live ones."""
        found = [handle for handle in self._all.values() if live.differ(handle.needs)]
        for handle in found:
            self.remove(handle)
        return found


def child_aborts(handles: Iterable[OpenHandle], limits: Limits) -> Iterator[Abort]:
    """Yield the aborts of single children of these groups."""
    children = [(handle.group_id, index) for handle in handles for index in sorted(handle.cancelled_children)]
    for some in split_ids(children, limits):
        yield Abort([], some)


class PendingRequests:
    """Open requests and groups, and the future of the first Welcome. True while a caller waits for a group or an answer."""

    def __init__(self, budget: int | None = None) -> None:
        self.weights = WeightHistory()
        self.groups = OpenGroups(self.weights, budget)
        self.first_welcome: Future[Welcome] = Future()
        self._open: dict[int, tuple[list[Frame], Future[Any], type]] = {}
        """frames, future and kind of the answer of each request, by request id, in order"""

    def __bool__(self) -> bool:
        return bool(self.groups) or not all(future.cancelled() for _, future, _ in self._open.values())

    def add(self, request_id: int, frames: list[Frame], future: Future[Any], kind: type) -> None:
        """Add a request. kind: of its answer."""
        self._open[request_id] = frames, future, kind

    def frames(self) -> Iterator[list[Frame]]:
        """Yield the frames of open requests whose caller still waits."""
        return (frames for frames, future, _ in self._open.values() if not future.cancelled())

    def answer(self, request_id: int, result: Any) -> None:
        """Complete a request with its answer, the content of a StatusReply, or an error. An answer of another type is an error.
        Ignored if the request was answered or cancelled before."""
        if isinstance(result, Applied):
            self.weights.add(Served(result.refreshed.version, result.refreshed.digest))
        _, future, kind = self._open.pop(request_id, (None, None, object))
        if future is None or not future.set_running_or_notify_cancel():
            return
        if not isinstance(result, BaseException | (dict if kind is StatusReply else kind)):
            result = NotBelieved(f"the service answered with a {type(result).__name__} instead of a {kind.__name__}")
        if isinstance(result, BaseException):
            future.set_exception(result)
        else:
            future.set_result(result)

    def fail(self, error: RolloutError, groups: bool = True) -> list[int]:
        """Fail all requests and, if `groups`, all groups, each with its own copy of the error: raising mutates the traceback. A
        lost service does not fail the first Welcome: its caller has a timeout. Returns the ids of the requests."""
        for handle in self.groups.clear() if groups else []:
            handle.fail(copy_of(error, handle.group_id))
        failed = list(self._open)
        for request_id in failed:
            self.answer(request_id, copy_of(error))
        if not self.first_welcome.done() and not isinstance(error, ServiceLost):
            self.first_welcome.set_exception(copy_of(error))
        return failed

    def restarted(self, old: Welcome, new: Welcome, address: str, resubmit: bool) -> list[int]:
        """Continue after a restart of the service. With a journal, nothing is lost; otherwise requests fail, and groups too
        unless `resubmit`. Returns the ids of the requests that failed."""
        failed = []
        same = old.incarnation == new.incarnation
        self.weights.restarted(same, resubmit)
        other = next((name for name in WORDS if getattr(old, name) != getattr(new, name)), None)
        if not same or other is not None:
            # unsent groups were never in the old one, but their caller chose it, its model and its weights
            how = "" if other is None else f" with another {WORDS[other]}"
            failed = self.fail(
                ServiceRestarted(f"{address} was restarted{how}, so its open groups are lost: submit them again"),
                groups=not resubmit or other is not None,
            )
        live, needed = new.version, self.weights.live.version
        if self.groups and live < needed:
            log.warning("service restarted with older weights, open groups wait for a refresh live=%d needed=%d", live, needed)
        self.groups.restarted(new.groups, new.limits)
        return failed

    def set_live(self, live: Served, address: str) -> bool:
        """Note which weights are live. Fails the groups that cannot continue under them; returns whether there were any."""
        self.weights.set_live(live)
        incompatible = self.groups.take_incompatible(live)
        for handle in incompatible:
            handle.fail(
                ServiceRestarted(
                    f"{address} was restarted with other weights as version {live.version} (digest {live.digest:.12}…, before "
                    f"{handle.needs.digest:.12}…): groups of the old weights cannot continue",
                    handle.group_id,
                )
            )
        return bool(incompatible)
