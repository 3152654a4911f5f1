"""Tracks the replicas of a fleet: which of them join, serve, are suspect or dead (docs/fleet.md shows the states).

it joins ─→ connect ─→ Welcome ─→ its weights? ─→ the live ones: SERVING          others: STALE ─→ update ─→ SERVING
link down ─→ SUSPECT ─→ lost_s later, or its process ended, or it fails again and again ─→ DEAD ─→ it joins again

`poll` processes the reports of processes, joins, links and weights; `take_events` returns the events for the fleet.
"""

from __future__ import annotations

import time
from concurrent.futures import Future, wait
from functools import partial
from typing import Any, NamedTuple

import msgspec

from rollout.engine.values import NONE_SERVED, Routing, Served
from rollout.fleet.event_queue import EventQueue
from rollout.fleet.join_listener import JoinListener, ReplicaEvent
from rollout.fleet.launcher import LauncherLike
from rollout.fleet.owners import Owner
from rollout.fleet.replica import Make, Replica, State, linked, serving
from rollout.fleet.replica_status import ReplicaStatus, ReplicaWeights
from rollout.fleet.scaling import Scaling
from rollout.fleet.timing import TIMING, Timing
from rollout.fleet.weights import FleetWeights
from rollout.logs import logger
from rollout.transport import messages as m
from rollout.transport.errors import NotBelieved, RolloutError, ServiceLost, StaleWeights

LOOK_S = 0.05
MAX_FAILING = 3
"""groups in a row that a replica may fail on"""
MOST_JOINING = 64
"""replicas of others to which the router connects at a time: each link has threads and some eleven descriptors, also to an
address at which nothing listens. Replicas of trusted owners, and those that the router starts, do not wait for them"""
MAX_UPDATES = 3
"""times that a replica may fail to apply the live weights"""

log = logger(__name__)


class ReplicaFacts(msgspec.Struct, frozen=True):
    """What all replicas must have in common, or a group's samples would depend on where it runs."""

    name: str
    vocab_size: int
    context: int
    eos_token_ids: tuple[int, ...]
    arithmetic: str
    configuration: str
    tokenizer: str
    block_size: int
    kv_dtype: str
    routing: Routing | None
    device: None = None

    @classmethod
    def of(cls, welcome: m.Welcome) -> ReplicaFacts:
        return cls(
            name=welcome.model,
            vocab_size=welcome.vocab_size,
            context=welcome.context,
            eos_token_ids=welcome.eos_token_ids,
            arithmetic=welcome.arithmetic,
            configuration=welcome.configuration,
            tokenizer=welcome.tokenizer,
            block_size=welcome.block_size,
            kv_dtype=welcome.kv_dtype,
            routing=welcome.routing,
        )


class Predecessor(NamedTuple):
    """The router that was killed before this one started."""

    live: Served = NONE_SERVED
    """its live weights; version 0: there was no such router"""
    returning: bool = False
    """its replicas may join again"""


NO_PREDECESSOR = Predecessor()


class ReplicaLost(NamedTuple):
    """A replica is dead; its link is closed."""

    replica: Replica


class StatusArrived(NamedTuple):
    """The status of a replica that serves."""

    replica: Replica
    status: ReplicaStatus
    requested_at: float


class ReplicaSet:
    """Written by the service's thread.

    Args:
        joins: where replicas join.
        launcher: starts processes that join; None: all are started elsewhere.
        inbox: queue of the answers of replicas.
        predecessor: the router that was killed before this one started. If its replicas may join again, which weights are live
            is known when they have reported theirs, or `return_s` has passed."""

    def __init__(
        self,
        joins: JoinListener,
        launcher: LauncherLike | None,
        inbox: EventQueue,
        predecessor: Predecessor = NO_PREDECESSOR,
        timing: Timing = TIMING,
    ) -> None:
        self.facts: ReplicaFacts | None = None
        """of the first replica"""
        self.by_name: dict[str, Replica] = {}
        self.scaling = Scaling(joins, launcher, self.by_name)
        self.weights = FleetWeights(self.by_name, predecessor.live)
        self.deaths = 0
        self.none_since: float | None = time.monotonic()
        """when the last replica stopped serving; None: one serves"""
        self.first_requests: list[Make] = []
        """sent to a replica before its first group: the fleet is paused, drains or sleeps. Written by `Fleet`"""
        self._joins = joins
        self._launcher = launcher
        self._inbox = inbox
        self._timing = timing
        self._returning_until = time.monotonic() + timing.return_s if predecessor.returning else None
        self._status_at = 0.0
        self._failed_updates: dict[Replica, int] = {}
        self._admitted_for = self._live
        """live weights when replicas were last compared with them"""
        self._events: list[ReplicaLost | StatusArrived] = []
        self._waiting: list[ReplicaEvent] = []
        """replicas to which the router connects once others have answered"""

    @property
    def _live(self) -> tuple[int, str]:
        return self.weights.version, self.weights.digest

    def serving(self) -> list[Replica]:
        """List the replicas that may get groups."""
        return serving(self.by_name)

    def linked(self) -> list[Replica]:
        """List the replicas that may be sent requests."""
        return linked(self.by_name)

    def take_events(self) -> list[ReplicaLost | StatusArrived]:
        """Return what has happened since the last call."""
        events, self._events = self._events, []
        return events

    def poll(self, now: float) -> None:
        """Check processes, joins, links and weights, and do what is due."""
        events = [*self._waiting, *self._joins.poll(() if self._launcher is None else self._launcher.poll())]
        self._waiting = []
        room = MOST_JOINING - sum(one.state is State.JOINING and _is_others(one.owner) for one in self.by_name.values())
        for event in events:
            room -= self._joined_or_ended(event, room)
        for replica in list(self.by_name.values()):
            self._check_link(replica, now)
            self._check_work(replica, now)
        self.scaling.poll(len(self.serving()))
        self.update(now)
        if now - self._status_at >= self._timing.status_s:
            self._status_at = now
            for replica in self.linked():
                replica.request_status(partial(self._status_arrived, replica))
                if replica.state is State.STALE and self.weights.settled:
                    self._admit(replica)
        self.none_since = None if self.serving() or self.weights.lost else self.none_since or now

    def update(self, now: float) -> None:
        """Apply the changes that answers made: invalid answers, weights."""
        for replica in [one for one in self.by_name.values() if one.invalid]:
            self.lose(replica, f"it sent an invalid answer: {replica.invalid}")
        self._settle(now)
        for replica, error in self.weights.poll(now):
            self._updated(replica, error)
        if self._live != self._admitted_for:
            self._admitted_for = self._live
            self._compare_weights()

    def lose(self, replica: Replica, why: str, sick: bool = True) -> None:
        """Declare a replica dead and end its process; its groups are placed on others. sick: a process that was started
        elsewhere is asked to restart."""
        if replica.state is State.DEAD:
            return
        log.warning("replica lost name=%s state=%s why=%r", replica.name, replica.state.value, why)
        replica.set_state(State.DEAD, why)
        self.deaths += 1
        replica.deaths += 1
        replica.disconnect()
        self._failed_updates.pop(replica, None)
        self.weights.drop(replica)
        self._joins.lost(replica.name, sick)
        if self._launcher is not None:
            self._launcher.kill(replica.name)
        self._events.append(ReplicaLost(replica))

    def ban(self, owner: Owner, why: str) -> None:
        """Lose all replicas of an owner whose samples are proven wrong, and refuse those that join again."""
        if owner.ban is not None:
            return
        self._joins.owners.ban(owner, why)
        for replica in [one for one in self.by_name.values() if one.owner is owner]:
            replica.invalid = why  # its tokens are not continued
            self.lose(replica, f"banned: {why}", sick=False)
            if self._launcher is not None:
                self._launcher.remove(replica.name)

    def trusted(self) -> list[Replica]:
        """List the replicas that may verify samples of others."""
        return [replica for replica in self.serving() if replica.owner.trusted]

    def failed(self, replica: Replica, group_id: str, error: RolloutError | None) -> None:
        """Record that a replica has failed on a group. error: its refusal; None: a sample ended as "error"."""
        if replica.state is State.DEAD:
            return
        if isinstance(error, NotBelieved):
            self.lose(replica, error.message)
            return
        replica.failing.add(group_id)
        if isinstance(error, ServiceLost):
            self.lose(replica, error.message, sick=False)
        elif isinstance(error, StaleWeights):
            self.lose(replica, f"it lacks the weights that it reported: {error.message}")
        elif len(replica.failing) >= MAX_FAILING:
            self.lose(replica, f"it failed on {len(replica.failing)} groups in a row")

    def request_all(self, make: Make) -> list[Any]:
        """Send all replicas a request and wait for their answers, without those that are lost meanwhile. Raises the refusal if
        all refuse."""
        sent = {replica: replica.request(make) for replica in self.linked()}
        deadline = time.monotonic() + self._timing.answer_s
        while pending := [replica for replica, future in sent.items() if not future.done() and replica.link is not None]:
            wait([sent[replica] for replica in pending], LOOK_S)
            self.poll(time.monotonic())
            if time.monotonic() > deadline:
                for replica in pending:
                    self.lose(replica, f"it did not answer for {self._timing.answer_s} s")
        return results([future for replica, future in sent.items() if replica.link is not None])

    # joining

    def _joined_or_ended(self, event: ReplicaEvent, room: int) -> bool:
        """Connect to a replica that has joined, or lose one that has ended. room: how many of others may be connected. Returns
        whether this takes the place of one."""
        if event.address is None:
            self._waiting = [one for one in self._waiting if one.name != event.name]
        elif room < 1 and _is_others(event.owner):
            self._waiting.append(event)
            return False
        replica = self.by_name.get(event.name)
        if replica is None and event.removed:
            return False
        if replica is None:
            replica = self.by_name[event.name] = Replica(event.name, self._inbox, self._timing)
        if event.address is not None:
            replica.owner = event.owner or replica.owner
            replica.set_state(State.JOINING, "the router connects to it")
            replica.connect(event.address, partial(self._welcomed, replica))
            return _is_others(replica.owner)
        self.lose(replica, event.why, sick=False)
        if replica.draining:
            self.scaling.remove(event.name)  # it may have ended for another reason
        if replica.draining or event.removed:
            del self.by_name[event.name]
        return False

    def _welcomed(self, replica: Replica, answer: Future[Any]) -> None:
        if (error := answer.exception()) is not None:
            self.lose(replica, f"it refuses the router: {error}", sick=False)
            return
        facts = ReplicaFacts.of(answer.result())
        if self.facts is None:
            self.facts = facts
        if what := differences(facts, self.facts):
            self.lose(replica, f"its configuration differs from the fleet's: {what}")
            return
        replica.request_status(partial(self._status_arrived, replica))
        replica.request_then(lambda id: m.WeightsRequest(id), partial(self._weights_reported, replica))

    def _weights_reported(self, replica: Replica, answer: Future[Any]) -> None:
        if (error := answer.exception()) is not None:
            self.lose(replica, f"it does not report its weights: {error}")
            return
        has = msgspec.convert(answer.result(), ReplicaWeights)
        replica.version, replica.digest, replica.base_digest = has.version, has.digest, has.base_digest
        self.weights.names = max(self.weights.names, has.names)
        replica.set_state(State.STALE, "its weights are compared with the live ones")
        if self.weights.settled:
            self._admit(replica)

    def _settle(self, now: float) -> None:
        """Decide which weights are live, once the replicas have reported theirs."""
        reported = [replica for replica in self.linked() if replica.version >= 0]
        if self.weights.settled or not reported:
            return
        if self._returning_until is not None:
            names = self.scaling.names
            all_reported = self._launcher is not None and names == {replica.name for replica in reported}
            joining = any(replica.state is State.JOINING for replica in self.by_name.values())
            if joining or not (all_reported or now > self._returning_until):
                return
        self.weights.settle(reported)
        self._joins.owners.open_to_all = True
        for replica in reported:
            self._admit(replica)

    def _admit(self, replica: Replica) -> None:
        """Let a replica serve if it has the live weights; otherwise send them to it."""
        weights = self.weights
        if replica.version == weights.version and not weights.digest:
            weights.digest = replica.digest  # all that had these weights before have died
        if (replica.version, replica.digest) == self._live:
            self._failed_updates.pop(replica, None)
            for make in self.first_requests:
                replica.request(make)  # it answers a drain when it is idle
            replica.set_state(State.SERVING, "it has the live weights")
            self.none_since = None
        elif replica.version >= weights.version:
            self.lose(replica, f"its weights differ: {replica.version} {replica.digest[:12]}, not {weights.version}")
        else:
            what = "waits for a refresh" if weights.lost else f"gets {weights.version}"
            replica.set_state(State.STALE, f"it has version {replica.version} and {what}")
            weights.update(replica)

    def _updated(self, replica: Replica, error: Exception | None) -> None:
        if error is None:
            self._admit(replica)
            return
        failed = self._failed_updates[replica] = self._failed_updates.get(replica, 0) + 1
        replica.why = f"it failed to apply the live weights: {error}"
        if failed >= MAX_UPDATES:
            self.lose(replica, replica.why)

    def _compare_weights(self) -> None:
        """Stop replicas with other weights from serving; give them the live ones."""
        for replica in self.linked() if self.weights.settled else []:
            differs = (replica.version, replica.digest) != self._live
            if replica.state is State.STALE or (differs and replica.state is State.SERVING):
                self._admit(replica)

    # checks

    def _status_arrived(self, replica: Replica, status: ReplicaStatus, requested_at: float) -> None:
        self.weights.sized(status.weights.resident_bytes + status.weights.offloaded_bytes)
        if replica.state is State.SERVING:
            self._events.append(StatusArrived(replica, status, requested_at))

    def _check_work(self, replica: Replica, now: float) -> None:
        if why := replica.overdue(now):
            self.lose(replica, why)
        elif replica.stopping_since is not None and now - replica.stopping_since > self._timing.stopping_s:
            replica.stopping_since = None
            self.failed(replica, f"returned at {now}", None)

    def _check_link(self, replica: Replica, now: float) -> None:
        if replica.link is None:
            replica.retry_connect()
        elif why := replica.silent(now):
            self.lose(replica, why, sick=False)
        elif replica.silent_since is not None and replica.state is State.SERVING:
            replica.set_state(State.SUSPECT, "its link is down")
        elif replica.silent_since is None and replica.state is State.SUSPECT:
            replica.set_state(State.STALE, "its link is back")
            self._admit(replica)


def _is_others(owner: Owner | None) -> bool:
    """Return whether a replica is neither trusted nor started by the router."""
    return owner is None or not (owner.trusted or owner.own)


def differences(one: ReplicaFacts, other: ReplicaFacts) -> str:
    """Describe the fields in which `one` differs from `other`, "" if they are equal."""
    pairs = [(name, getattr(one, name), getattr(other, name)) for name in one.__struct_fields__]
    return ", ".join(f"{name} {mine!r} for {theirs!r}" for name, mine, theirs in pairs if mine != theirs)


def results(answers: list[Future[Any]]) -> list[Any]:
    """Return the results of answers that have arrived. Raises the refusal if all are refusals."""
    refused = [error for future in answers if isinstance(error := future.exception(), RolloutError)]
    if refused and len(refused) == len(answers):
        raise refused[0]
    return [future.result() for future in answers if future.exception() is None]
