"""Verifies samples of untrusted replicas on trusted ones, while they are held back.

    FleetGroups ─→ choose ─→ hold ─→ queue ─→ GroupCheck, a redraw on a trusted replica ─→ Judged ─→ FleetGroups
                     └ not chosen: delivered at once          full, too late, refused: skipped
                                                              no verdict: generated again on a trusted replica, for
                                                              which it waits as long as for a verdict

A child is chosen when it arrives, by a random number that only the router has: the replica has made all of it by then. Children
of one group that wait together share the prefill of its prompt.
"""

from __future__ import annotations

import itertools
import random
import time
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Literal, NamedTuple

from rollout.client.submission import handle_of, submit_of
from rollout.client.verification import GroupCheck, Here, Verified
from rollout.engine.values import Sample
from rollout.fleet.event_queue import EventQueue
from rollout.fleet.open_groups import Held, OpenGroup, Origins, is_untrusted
from rollout.fleet.owners import Owner
from rollout.fleet.replica import Replica
from rollout.fleet.unclear import UnclearShares, is_unclear
from rollout.logs import logger
from rollout.transport.checks import NOTHING
from rollout.transport.errors import GroupFailed, NotBelieved, RolloutError, ServiceLost

CLIENT = "verification"
"""name under which a trusted replica shares its steps between verification and the router's clients"""
MOST_TOKENS = 1 << 20
"""of prompts and samples that are held: further ones are skipped"""
MOST_CHILDREN = 64
"""that one trusted replica verifies at a time"""
ABORTED = "children that were aborted end with their tokens so far: they are not generated again"

log = logger(__name__)


@dataclass(frozen=True, slots=True)
class Verification:
    """How many children are verified."""

    share: float = 0.0
    """of the children of untrusted replicas, 0 to 1; 0 = none"""
    wait_s: float = 60.0
    """longest time that a sample is held; then it is delivered unverified"""
    draw: Callable[[], float] = random.SystemRandom().random
    """returns a number in [0, 1) that no replica can predict"""


Decision = Literal["deliver", "hold", "again"]
"""a child is delivered now, or after its verdict, or is generated again on a trusted replica: one that streams, whose client
has tokens already, only if its owner has too many without a verdict"""


class Judged(NamedTuple):
    """A held child may be delivered, unless there is a liar."""

    held: Held
    liar: Owner | None = None
    """who sent tokens that are proven wrong"""
    why: str = ""
    """evidence against the liar"""
    verified: bool = False
    """it is proven right"""
    again: bool = False
    """nothing proves it right or wrong: it is to be generated again on a trusted replica"""


@dataclass(slots=True, eq=False)
class Check:
    """Children of one group that a trusted replica computes again."""

    replica: Replica
    held: list[Held]
    check: GroupCheck
    left: int
    drawn: list[Sample] = field(default_factory=list)


class Verifier:
    """Written by the thread of the router's service.

    Args:
        inbox: queue of the answers of replicas."""

    def __init__(self, inbox: EventQueue, options: Verification) -> None:
        self.counts: Counter[str] = Counter()
        """verified, lies, unverifiable, skipped: children"""
        self._options = options
        self._inbox = inbox
        self._queue: OrderedDict[str, list[Held]] = OrderedDict()
        """by group"""
        self._unclear: list[Held] = []
        """wait for a trusted replica that generates them again"""
        self._checks: defaultdict[Replica, list[Check]] = defaultdict(list)
        self._judged: list[Judged] = []
        self._held_tokens = 0
        self._numbers = itertools.count(1)
        self._last_skip = ""
        self.shares = UnclearShares()
        """samples that cannot be verified"""

    @property
    def on(self) -> bool:
        return self._options.share > 0

    @property
    def has_work(self) -> bool:
        """Whether `take` returns something."""
        return bool(self._judged)

    @property
    def waiting(self) -> bool:
        """Whether children wait for a trusted replica."""
        return bool(self._queue or self._unclear)

    @property
    def holding(self) -> int:
        """Number of children that wait for a verdict."""
        checked = sum(len(check.held) for checks in self._checks.values() for check in checks)
        return checked + len(self._unclear) + sum(map(len, self._queue.values()))

    def decide(self, one: OpenGroup, sample: Sample, origins: Origins, live: int, trusted: bool) -> Decision:
        """Choose what becomes of a finished child.

        Args:
            live: version of the weights.
            trusted: whether a trusted replica serves."""
        if not (self.on and origins and len(sample.token_ids)):
            return "deliver"
        unclear, now = is_unclear(sample, live), time.monotonic()
        if not is_untrusted(origins):
            if not one.group.score and sample.index not in one.doubted:  # these run on trusted replicas only
                self.shares.add_trusted(unclear)
            return "deliver"
        too_many = self.shares.add(_untrusted(origins), unclear, now)
        if not too_many and self._options.draw() >= self._options.share:
            return "deliver"
        held = Held(one, sample, origins, now + self._options.wait_s)
        if unclear and sample.finish_reason == "aborted":
            self._skip([held], ABORTED)
            return "deliver"
        if unclear and trusted:
            self._count("unverifiable", [held])
            return "again" if too_many or not one.group.sampling.stream_every else "deliver"
        if self._held_tokens + held.tokens > MOST_TOKENS:
            self._skip([held], f"{self._held_tokens} tokens wait to be verified")
            return "deliver"
        self._held_tokens += held.tokens
        one.held[sample.index] = held
        (self._unclear if unclear else self._queue.setdefault(one.group.id, [])).append(held)
        return "hold"

    def not_suspended(self, replicas: Sequence[Replica], now: float) -> Sequence[Replica]:
        """Leave out the replicas of suspended owners, unless no others serve."""
        if not self.shares.suspended:
            return replicas
        return [one for one in replicas if not self.shares.is_suspended(one.owner, now)] or replicas

    def release(self, one: OpenGroup, indices: Iterable[int]) -> list[Held]:
        """Give up the verification of held children of a group. Returns them."""
        found = [one.held.pop(index) for index in indices if index in one.held]
        if not found:
            return []
        self._held_tokens -= sum(held.tokens for held in found)
        queued = (self._unclear, self._queue.get(one.group.id, []))
        for waiting in (*queued, *(check.held for each in self._checks.values() for check in each)):
            waiting[:] = [held for held in waiting if held not in found]
        if not self._queue.get(one.group.id):
            self._queue.pop(one.group.id, None)
        return found

    def expire(self, now: float) -> None:
        """Skip what has waited too long."""
        checked = (held for checks in self._checks.values() for check in checks for held in check.held)
        late = [held for held in (*checked, *self._unclear, *itertools.chain(*self._queue.values())) if now > held.until]
        if late:
            self._skip(late, f"no verdict within {self._options.wait_s} s (fleet.verify_wait_s)")
            self._deliver(map(Judged, late))

    def step(self, trusted: Sequence[Replica], version: int) -> None:
        """Send what waits to trusted replicas that have room. version: of the live weights."""
        if trusted and self._unclear:
            self._count("unverifiable", self._unclear)
            self._deliver(Judged(held, again=True) for held in self._unclear.copy())
        while self._queue and trusted:
            replica = min(trusted, key=self._busy)
            if self._busy(replica) >= MOST_CHILDREN:
                return
            _, waiting = self._queue.popitem(last=False)
            if room := waiting[MOST_CHILDREN:]:
                self._queue[waiting[0].one.group.id] = room
            self._check(replica, waiting[:MOST_CHILDREN], version)

    def take(self) -> list[Judged]:
        """Return the children that were judged since the last call."""
        judged, self._judged = self._judged, []
        return judged

    def lost(self, replica: Replica) -> None:
        """Have what a lost replica was verifying verified by another one."""
        for check in self._checks.pop(replica, []):
            self._again(check.held)

    def _busy(self, replica: Replica) -> int:
        return sum(len(check.held) for check in self._checks.get(replica, ()))

    def _check(self, replica: Replica, held: list[Held], version: int) -> None:
        group, link = held[0].one.group, replica.link
        assert link is not None
        here = Here(replica.welcome, version, lambda version: "")
        name = lambda: f"verify/{next(self._numbers)}"  # noqa: E731
        check = GroupCheck([each.sample for each in held], group.prompt, group.sampling, None, here, name, False)
        mine = Check(replica, held, check, sum(len(again.wanted) for again in check.groups))
        self._checks[replica].append(mine)
        for again in check.groups:
            submit = submit_of(again, serial=0, require_version=version, client=CLIENT)
            try:
                handle = handle_of(again, submit, replica.welcome.limits)
            except RolloutError as error:
                self._failed(mine, error)
                return
            handle.bounds = NOTHING._replace(least_version=version)
            handle.on_change = lambda handle, samples: self._inbox.post(partial(self._drawn, mine, samples, handle.error))
            link.submit(handle)
        if not mine.left:
            self._judge(mine)

    def _drawn(self, check: Check, samples: Sequence[Sample] | None, error: RolloutError | None) -> None:
        if check not in self._checks.get(check.replica, ()):
            return  # its replica was lost, or another part of it failed
        if samples is None:
            self._failed(check, error or ServiceLost("the link has ended"))
            return
        check.drawn += samples
        check.left -= len(samples)
        if check.left <= 0:
            self._judge(check)

    def _failed(self, check: Check, error: RolloutError) -> None:
        """Handle a redraw that a replica has refused or lost."""
        self._end(check)
        if isinstance(error, NotBelieved):
            check.replica.invalid = error.message
        if isinstance(error, ServiceLost | NotBelieved):
            self._again(check.held)
        else:
            self._skip(check.held, f"{check.replica.name} refuses to verify: {error.kind}: {error.message}")
            self._deliver(map(Judged, check.held))

    def _judge(self, check: Check) -> None:
        self._end(check)
        if any(sample.finish_reason == "aborted" for sample in check.drawn):
            check.replica.returned_unasked()
            self._again(check.held)
            return
        try:
            verdicts = check.check.judge(check.drawn)
        except GroupFailed as error:
            self._skip(check.held, f"{check.replica.name} fails to verify: {error.message}")
            self._deliver(map(Judged, check.held))
            return
        by_index = {verdict.index: verdict for verdict in verdicts}
        self._deliver(self._judged_as(held, by_index[held.sample.index], check.replica) for held in check.held)

    def _judged_as(self, held: Held, verdict: Verified, by: Replica) -> Judged:
        liar = accused(verdict, held.origins)
        if liar is not None and not liar.trusted:
            self._count("lies", [held])
            return Judged(held, liar, evidence(held, verdict, by))
        if liar is not None:
            log.error("trusted replicas differ: %s of %s", evidence(held, verdict, by), liar.name)
        if verdict.ok is None and held.sample.finish_reason == "aborted":
            self._skip([held], ABORTED)
            return Judged(held)
        self._count("verified" if verdict.ok else "unverifiable", [held])
        again = verdict.ok is None and not held.one.group.sampling.stream_every
        return Judged(held, verified=verdict.ok is True, again=again)

    def _end(self, check: Check) -> None:
        self._checks[check.replica].remove(check)
        if not self._checks[check.replica]:
            del self._checks[check.replica]

    def _again(self, held: list[Held]) -> None:
        """Queue children again, before all others."""
        for each in held:
            self._queue.setdefault(each.one.group.id, []).append(each)
            self._queue.move_to_end(each.one.group.id, last=False)

    def _skip(self, held: Sequence[Held], reason: str) -> None:
        self._count("skipped", held)
        kind = reason.lstrip("0123456789")
        if kind != self._last_skip:  # once, however often it happens
            self._last_skip = kind
            log.warning("verification skipped, now and until another line says otherwise reason=%r", reason)

    def _count(self, what: str, held: Sequence[Held]) -> None:
        self.counts[what] += len(held)
        for each in held:
            for owner in _untrusted(each.origins):
                owner.counts[what] += 1

    def _deliver(self, judged: Iterable[Judged]) -> None:
        for each in list(judged):
            self.release(each.held.one, [each.held.sample.index])
            self._judged.append(each)


def _untrusted(origins: Origins) -> set[Owner]:
    """Return the owners of tokens who are not trusted."""
    return {owner for _, owner in origins if owner is not None and not owner.trusted}


def accused(verdict: Verified, origins: Origins) -> Owner | None:
    """Return who computed what is proven wrong, None if nothing is, or if it may follow from tokens that the client gave."""
    if verdict.ok is not False:
        return None
    given = any(owner is None for _, owner in origins)
    if given and (verdict.first_bad is None or verdict.expected is None):
        return None  # how a child ends depends on the given tokens
    at = verdict.first_bad
    owners = [owner for first, owner in origins if at is None or first <= at]
    return owners[-1]


def evidence(held: Held, verdict: Verified, by: Replica) -> str:
    """Describe what a replica sent, and what a trusted one has computed instead."""
    group, client = held.one.group, held.one.client
    where = f"group {group.label or group.id!r} of client {client}, child {verdict.index}"
    what = f"field={verdict.field} first_bad={verdict.first_bad} expected={verdict.expected!r} got={verdict.got!r}"
    return f"{where}: {what}: {verdict.why}; verified by {by.name}"
