"""The replicas of a fleet and what becomes of them. docs/fleet.md draws the states.

launcher says up ─→ connect ─→ Welcome ─→ which weights? ─→ the live ones: SERVING          others: STALE ─→ update ─→ SERVING
link down ─→ SUSPECT ─→ LOST_S later, or its process ended, or it fails again and again ─→ DEAD ─→ the launcher starts another
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from functools import partial
from typing import Any

import msgspec

from engine.types import NONE_SERVED, Served
from rollout.fleet.changes import Changes
from rollout.fleet.event_queue import EventQueue
from rollout.fleet.launcher import LauncherLike, ReplicaEvent
from rollout.fleet.replica import OVERDUE_S, Replica, State
from rollout.fleet.told import Told, ToldWeights
from rollout.fleet.weights import FleetWeights
from rollout.logs import logger
from transport import messages as m
from transport.errors import NotBelieved, RolloutError, ServiceLost, StaleWeights

JOIN_S = 10.0
"""longest that a replica that listens may take to say who it is"""
LOST_S = 1.5
"""a replica whose link is down for so long is lost; a stopped process is noticed 4 s before"""
STATUS_S = 1.0
"""between two looks at a replica's status"""
ANSWER_S = 120.0
"""longest that the front waits for replicas to pause, to sleep or to wake"""
GIVEN_BACK_S = 10.0
"""longest that a replica may be stopping, once it has given children back that nobody had ended"""
LOOK_S = 0.05
MOST_FAILING = 3
"""groups in a row that a replica may fail on"""
MOST_UPDATES = 3
"""times that a replica may fail to take the live weights"""

Make = Callable[[int], Any]
"""builds a message for the id of a request"""

log = logger(__name__)


class ReplicaFacts(msgspec.Struct, frozen=True):
    """What all replicas must have in common, or a group's samples would depend on where it runs."""

    name: str
    vocab_size: int
    context: int
    eos_token_ids: tuple[int, ...]
    arithmetic: str
    device: None = None

    @classmethod
    def of(cls, welcome: m.Welcome) -> ReplicaFacts:
        return cls(welcome.model, welcome.vocab_size, welcome.context, welcome.eos_token_ids, welcome.arithmetic)


class ReplicaSet:
    """Written by the service's thread.

    Args:
        on_lost: called with a replica that is dead, after its link is closed.
        on_serving: called when a replica serves that has not.
        asked: requests that a replica gets before its first group: the fleet is paused, drains or sleeps.
        sent: counts the groups that a replica was sent before a time, and that have not come back; None where it may do nothing
            with them: the fleet is paused, drains or sleeps.
        before: the weights that were live when the front before was killed; version 0: there was none. What is live now is
            known when all replicas that have outlived it have told, or are lost."""

    def __init__(
        self,
        launcher: LauncherLike,
        inbox: EventQueue,
        on_lost: Callable[[Replica], None],
        on_serving: Callable[[], None],
        asked: Callable[[], list[Make]],
        sent: Callable[[Replica, float], int | None],
        before: Served = NONE_SERVED,
    ) -> None:
        self.facts: ReplicaFacts | None = None
        """of the first replica"""
        self.replicas: dict[str, Replica] = {}
        self.changes = Changes(launcher, self.replicas)
        self.deaths = 0
        self.none_since: float | None = time.monotonic()
        """when the last replica stopped serving; None: one serves"""
        self.weights = FleetWeights(self.serving, self.linked, self._weights_changed, before)
        self._awaited = set(launcher.outlived)
        self._launcher = launcher
        self._inbox = inbox
        self._on_lost = on_lost
        self._on_serving = on_serving
        self._asked = asked
        self._sent = sent
        self._looked_at = 0.0
        self._failed_updates: dict[Replica, int] = {}

    def serving(self) -> list[Replica]:
        """List those that have the live weights and a link, and do not leave or stop."""
        there = [one for one in self.replicas.values() if one.state is State.SERVING and one.gave_back_at is None]
        return [one for one in there if not one.leaving | one.restarting]

    def linked(self) -> list[Replica]:
        """List those that a request may be sent to."""
        return [one for one in self.replicas.values() if one.state in (State.STALE, State.SERVING, State.SUSPECT)]

    def tend(self, now: float) -> None:
        """Look at processes, links and weights, and do what is due."""
        for event in self._launcher.tend():
            self._happened(event)
        for replica in list(self.replicas.values()):
            self._look_at_link(replica, now)
            self._look_at_work(replica, now)
        self.changes.tend(len(self.serving()))
        self.weights.tend(now)
        if now - self._looked_at >= STATUS_S:
            self._looked_at = now
            for replica in self.linked():
                replica.ask_status(partial(self._told_status, replica))
                if replica.state is State.STALE and self.weights.settled:
                    self._admit(replica)
        self.none_since = None if self.serving() or self.weights.lost else self.none_since or now

    def lose(self, replica: Replica, why: str, sick: bool = True) -> None:
        """Take a replica for dead: what runs there goes elsewhere, and another process takes its place; one that is not `sick`
        may come back itself."""
        if replica.state is State.DEAD:
            return
        log.warning("replica lost name=%s state=%s why=%r", replica.name, replica.state.value, why)
        self._set(replica, State.DEAD, why)
        self.deaths += 1
        replica.deaths += 1
        replica.disconnect()
        self._failed_updates.pop(replica, None)
        self.weights.drop(replica)
        self._launcher.replace(replica.name, sick)
        self._on_lost(replica)
        self._told_or_gone(replica.name)

    def failed(self, replica: Replica, group_id: str, error: RolloutError | None) -> None:
        """Note that a replica has failed on a group. `error`: why it refused; None: a sample ended as "error"."""
        if replica.state is State.DEAD:
            return
        if isinstance(error, NotBelieved):
            self.lose(replica, error.message)
            return
        replica.failing.add(group_id)
        if isinstance(error, ServiceLost):
            self.lose(replica, error.message, sick=False)
        elif isinstance(error, StaleWeights):
            self.lose(replica, f"it has not the weights that it said it had: {error.message}")
        elif len(replica.failing) >= MOST_FAILING:
            self.lose(replica, f"it failed on {len(replica.failing)} groups in a row")

    def ask_all(self, make: Make) -> list[Any]:
        """Send all replicas a request and wait for their answers. One that is lost meanwhile is left out. Raises a refusal that
        is everybody's."""
        asked = {replica: replica.request(make) for replica in self.linked()}
        deadline = time.monotonic() + ANSWER_S
        while pending := [replica for replica, future in asked.items() if not future.done() and replica.link is not None]:
            wait([asked[replica] for replica in pending], LOOK_S)
            self.tend(time.monotonic())
            if time.monotonic() > deadline:
                for replica in pending:
                    self.lose(replica, f"it did not answer for {ANSWER_S} s")
        return results([future for replica, future in asked.items() if replica.link is not None])

    # joining

    def _happened(self, event: ReplicaEvent) -> None:
        replica = self.replicas.get(event.name)
        if event.address is None:
            if replica is None and not event.gone:  # it never listened
                replica = self.replicas[event.name] = Replica(event.name, self._inbox, self.lose)
            if replica is not None:
                self.lose(replica, event.why, sick=False)
                if replica.leaving:
                    self._launcher.remove(event.name)  # it may have ended for another reason
                if replica.leaving or event.gone:
                    del self.replicas[event.name]
            self._told_or_gone(event.name)  # also of one that had not said where it listens
            return
        if replica is None:
            replica = self.replicas[event.name] = Replica(event.name, self._inbox, self.lose)
        self._set(replica, State.JOINING, "it is asked who it is")
        replica.fresh()
        replica.connect(event.address, lambda answer: self._welcomed(replica, answer))

    def _welcomed(self, replica: Replica, answer: Future[Any]) -> None:
        if (error := answer.exception()) is not None:
            self.lose(replica, f"it does not let the front in: {error}", sick=False)
            return
        facts = ReplicaFacts.of(answer.result())
        if self.facts is None:
            self.facts = facts
        differs = [name for name in facts.__struct_fields__ if getattr(facts, name) != getattr(self.facts, name)]
        if differs:
            what = ", ".join(f"{name} {getattr(facts, name)!r} for {getattr(self.facts, name)!r}" for name in differs)
            self.lose(replica, f"it is not as the others: {what}")
            return
        replica.ask_status(partial(self._told_status, replica))
        replica.ask(lambda id: m.WeightsRequest(id), lambda answer: self._told_weights(replica, answer))

    def _told_weights(self, replica: Replica, answer: Future[Any]) -> None:
        if (error := answer.exception()) is not None:
            self.lose(replica, f"it does not say which weights it has: {error}")
            return
        told = msgspec.convert(answer.result(), ToldWeights)
        replica.version, replica.digest, replica.base_digest = told.version, told.digest, told.base_digest
        self.weights.names = max(self.weights.names, told.names)
        self._set(replica, State.STALE, "its weights are looked at")
        self._told_or_gone(replica.name)
        if self.weights.settled:
            self._admit(replica)

    def _told_or_gone(self, name: str) -> None:
        """Settle which weights are live, once all that may know have told theirs."""
        self._awaited.discard(name)
        told = [replica for replica in self.linked() if replica.version >= 0]
        if told and not self._awaited and not self.weights.settled:
            self.weights.settle(told)
            for replica in told:
                self._admit(replica)

    def _admit(self, replica: Replica) -> None:
        """Let a replica serve if it has the live weights; otherwise give them to it."""
        weights = self.weights
        if replica.version == weights.version and not weights.digest:
            weights.digest = replica.digest  # all that had these weights before have died
        if (replica.version, replica.digest) == (weights.version, weights.digest):
            self._failed_updates.pop(replica, None)
            for make in self._asked():
                replica.request(make)  # its answer to drain comes when nothing runs there
            self._set(replica, State.SERVING, "it has the live weights")
            self.none_since = None
            self._on_serving()
        elif replica.version >= weights.version:
            self.lose(replica, f"its weights are other ones: {replica.version} {replica.digest[:12]}, not {weights.version}")
        else:
            what = "waits for a refresh" if weights.lost else f"gets {weights.version}"
            self._set(replica, State.STALE, f"it has version {replica.version} and {what}")
            weights.update(replica, self._updated)

    def _updated(self, replica: Replica, error: Exception | None) -> None:
        if error is None:
            self._admit(replica)
            return
        failed = self._failed_updates[replica] = self._failed_updates.get(replica, 0) + 1
        replica.why = f"it could not take the live weights: {error}"
        if failed >= MOST_UPDATES:
            self.lose(replica, replica.why)

    def _weights_changed(self) -> None:
        """Let nobody serve who has other weights."""
        for replica in self.linked():
            differs = (replica.version, replica.digest) != (self.weights.version, self.weights.digest)
            if replica.state is State.STALE or (differs and replica.state is State.SERVING):
                self._admit(replica)

    # looking

    def _told_status(self, replica: Replica, told: Told) -> None:
        """Look at what a replica says that it does."""
        self.weights.sized(told.weights.resident_bytes + told.weights.offloaded_bytes)
        sent = self._sent(replica, replica.status_asked_at)
        if replica.state is State.SERVING:
            why = replica.progress.look(told, sent or 0, sent is not None, time.monotonic())
            if why:
                self.lose(replica, why)

    def _look_at_work(self, replica: Replica, now: float) -> None:
        if replica.overdue(now):
            self.lose(replica, f"it has not answered a request for {OVERDUE_S} s, and lives")
        elif replica.gave_back_at is not None and now - replica.gave_back_at > GIVEN_BACK_S:
            replica.gave_back_at = None
            self.failed(replica, f"given back at {now}", None)

    def _look_at_link(self, replica: Replica, now: float) -> None:
        if replica.link is None:
            return replica.connect_again()
        if replica.link.welcome is None:
            replica.silent_since = replica.silent_since or now
            if now - replica.silent_since > JOIN_S:
                self.lose(replica, f"it has not answered for {JOIN_S} s", sick=False)
            return
        if replica.connected:
            replica.silent_since = None
            if replica.state is State.SUSPECT:
                self._set(replica, State.STALE, "its link is back")
                self._admit(replica)
            return
        if replica.silent_since is None:
            replica.silent_since = now
        if now - replica.silent_since > LOST_S:
            self.lose(replica, f"its link was down for {LOST_S} s", sick=False)
        elif replica.state is State.SERVING:
            self._set(replica, State.SUSPECT, "its link is down")

    def _set(self, replica: Replica, state: State, why: str) -> None:
        if replica.state is not state:
            log.info("replica name=%s %s -> %s why=%r", replica.name, replica.state.value, state.value, why)
        replica.state, replica.why = state, why


def results(answers: list[Future[Any]]) -> list[Any]:
    """Take the results of answers that have come. Raises a refusal that is everybody's."""
    refused = [error for future in answers if isinstance(error := future.exception(), RolloutError)]
    if refused and len(refused) == len(answers):
        raise refused[0]
    return [future.result() for future in answers if future.exception() is None]
