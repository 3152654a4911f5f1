"""Fleet: the engine of a router's service. Implements the engine interface by the groups, weights and modes of its replicas.

Service.submit ─→ FleetGroups ─→ Link of a replica ─→ ... ─→ EventQueue ─→ step ─→ samples         ReplicaSet: who serves
Service.commit ─→ FleetWeights ─→ ReplicaTransaction over all ─→ ... ─→ EventQueue ─→ step

`step` takes events from below and passes them on: failures of groups to the replicas, lost replicas to the groups.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any

from rollout.engine.values import (
    Group,
    KVPolicy,
    Limits,
    Mode,
    Refreshed,
    Routing,
    Sample,
    Tag,
    TokenChunk,
    WeightUpdate,
)
from rollout.fleet.event_queue import EventQueue
from rollout.fleet.groups import FleetGroups
from rollout.fleet.join_listener import JoinListener
from rollout.fleet.launcher import LauncherLike
from rollout.fleet.merge import counters, described, merged, totals
from rollout.fleet.replica import Make, Replica, State
from rollout.fleet.replica_set import LOOK_S, NO_PREDECESSOR, Predecessor, ReplicaFacts, ReplicaLost, ReplicaSet, StatusArrived
from rollout.fleet.retries import sent_before
from rollout.fleet.sleeping import SleepState
from rollout.fleet.timing import TIMING, Timing
from rollout.fleet.verifier import Verification, Verifier
from rollout.fleet.weights import FleetStaging
from rollout.transport import messages as m
from rollout.transport.errors import ServiceLost

NOTHING = dict.fromkeys(
    ("running", "waiting", "groups", "steps", "generated_tokens", "offloads", "recompute_preemptions", "recomputed_tokens"), 0
)
"""a status before any replica has reported its own"""
CONTROLS: dict[Mode, Make] = {
    Mode.PAUSED: partial(m.Control, action="pause"),
    Mode.DRAINING: partial(m.Control, action="drain"),
}


@dataclass(frozen=True, slots=True)
class FleetOptions:
    """How a fleet serves clients."""

    limits: Limits = Limits()
    """of requests; no more than the replicas' own"""
    replica_grace_s: float = 60.0
    """seconds that a group waits while no replica serves; then it ends as "error" """
    seed: int = 0
    """groups without a seed get theirs from it"""
    verification: Verification = Verification()
    """of samples of untrusted replicas"""


class Fleet:
    """Engine of a service that has replicas. Called by that service's thread only.

    Example:
        fleet = Fleet(JoinListener(JoinEndpoint(end)))
        fleet.open(count=1, patient=True)
        service = open_service(fleet, ServiceConfig(endpoint="tcp://127.0.0.1:5655"))
        fleet.inbox.wake = service.wake
        service.run()

    Args:
        joins: where replicas join.
        launcher: starts processes that join; None: all are started elsewhere.
        options: how it serves clients.
        predecessor: the router that was killed before this one started.
        timing: time limits of the replicas."""

    def __init__(
        self,
        joins: JoinListener,
        launcher: LauncherLike | None = None,
        *,
        options: FleetOptions | None = None,
        predecessor: Predecessor = NO_PREDECESSOR,
        timing: Timing = TIMING,
    ) -> None:
        options = options or FleetOptions()
        self.limits = options.limits
        self.inbox = EventQueue()
        self.replicas = ReplicaSet(joins, launcher, self.inbox, predecessor, timing)
        self.weights = self.replicas.weights
        self._joins = joins
        self._launcher = launcher
        self.verifier = Verifier(self.inbox, options.verification)
        self._groups = FleetGroups(self.inbox, self.replicas, self.verifier, options.seed)
        self._grace_s = options.replica_grace_s
        self._timing = timing
        self._mode = Mode.RUNNING
        """RUNNING, DRAINING or PAUSED: the last request"""
        self._asleep = SleepState()
        self._drains: dict[Replica, Future[Any]] = {}
        self._retired: list[dict[str, Any]] = []
        """counters of replicas that are dead, added up"""
        self._poll_at = 0.0

    def open(
        self,
        timeout: float = 600.0,
        count: int | None = None,
        patient: bool = False,
        report: Callable[[str], None] = lambda line: None,
    ) -> None:
        """Wait until replicas serve: `count` of them, None = all; or are linked, if the live weights were lost. report: takes a
        line for each. Raises ServiceLost with the reason if a replica ends, unless `patient`, or at the time-out."""
        reported = set[str]()
        deadline = time.monotonic() + timeout
        while True:
            self.step()
            up = self.replicas.linked() if self.weights.lost else self.replicas.serving()
            wanted = count or max(1, len(self.replicas.scaling.names))
            for one in [one for one in up if one.name not in reported]:
                reported.add(one.name)
                report(f"replica {one.name} ready, {len(reported)} of {wanted}")
            if len(up) >= wanted:
                return
            if (self.replicas.deaths and not patient) or time.monotonic() > deadline:
                dead = [f"replica {one.name}: {one.why}" for one in self.replicas.by_name.values() if one.state is State.DEAD]
                why = "; ".join(dead) or f"{len(up)} of {wanted} replicas serve"
                raise ServiceLost(f"the fleet does not start: {why}")
            time.sleep(LOOK_S)

    def close(self) -> None:
        """Disconnect from the replicas, and stop those that the launcher has started."""
        for replica in self.replicas.by_name.values():
            replica.disconnect()
        if self._launcher is not None:
            self._launcher.close()
        self._joins.close()
        self.weights.close()

    # properties

    @property
    def model(self) -> ReplicaFacts:
        assert self.replicas.facts is not None, "open() waits for a replica"
        return self.replicas.facts

    @property
    def arithmetic(self) -> str:
        return self.model.arithmetic

    @property
    def configuration(self) -> str:
        return self.model.configuration

    @property
    def tokenizer(self) -> str:
        return self.model.tokenizer

    @property
    def block_size(self) -> int:
        return self.model.block_size

    @property
    def kv_dtype(self) -> str:
        return self.model.kv_dtype

    @property
    def vocab_size(self) -> int:
        return self.model.vocab_size

    @property
    def context(self) -> int:
        return self.model.context

    @property
    def routing(self) -> Routing | None:
        return self.model.routing

    @property
    def version(self) -> int:
        """Version of the weights that all serving replicas have."""
        return self.weights.version

    @property
    def mode(self) -> Mode:
        if self._asleep.parts:
            return Mode.ASLEEP
        return Mode.WITHOUT_WEIGHTS if self.weights.dropped or self.weights.lost else self._mode

    # groups

    @property
    def has_work(self) -> bool:
        """Whether replicas have sent something, or a poll is due."""
        return bool(self.inbox) or self._groups.has_work or self.verifier.has_work or time.monotonic() >= self._poll_at

    def submit(self, group: Group, client: str = "") -> None:
        """Add a group that the service has validated. If replicas refuse it, its samples end as "error". Raises ValueError for
        an id that is live."""
        if group.id in self._groups.open:
            raise ValueError(f"group id {group.id} is live")
        self._groups.submit(group, client, time.monotonic())

    def step(self) -> list[Sample]:
        """Process the messages of replicas. Returns the samples that ended."""
        arrived = bool(self.inbox)
        self.inbox.run()
        now = time.monotonic()
        self._verify(now)
        failures, self._groups.failures = self._groups.failures, []
        for failure in failures:
            self.replicas.failed(*failure)
        if now >= self._poll_at:
            self._poll_at = now + self._timing.poll_s
            self.replicas.poll(now)
            self.verifier.expire(now)
            self._groups.give_up(now, self.replicas.none_since, self._grace_s)
        elif arrived:
            self.replicas.update(now)
        while events := self.replicas.take_events():
            for event in events:
                self._handle(event, now)
        if self._groups.waiting or self._groups.unjudged:
            self._groups.place_waiting(now)
        while self._groups.unsent:
            self._groups.unsent.pop().calls.wake()
        if arrived and self.weights.staging:
            self.inbox.wake()  # the refresh may wait for an answer that has arrived
        ended, self._groups.ended = self._groups.ended, []
        return ended

    def abort(self, group_id: str, index: int | None = None) -> list[Sample]:
        """Abort a group, or one child. Returns the children that no replica has; `step` returns the others when they arrive."""
        return self._groups.abort(group_id, index)

    def chunks(self, group_id: str, since: Mapping[int, int], least: int, most: int) -> list[TokenChunk]:
        """Return new tokens of running children, as far as replicas have streamed them."""
        return self._groups.chunks(group_id, since, least, most)

    def _verify(self, now: float) -> None:
        """Send samples to be verified, deliver those that were, and ban liars."""
        if self.verifier.waiting:
            self.verifier.step(self.replicas.trusted(), self.version)
        for judged in self.verifier.take():
            if judged.liar is not None:
                self.replicas.ban(judged.liar, judged.why)
                self._groups.disown(judged.liar)
            self._groups.judged(judged)

    def _handle(self, event: ReplicaLost | StatusArrived, now: float) -> None:
        replica = event.replica
        match event:
            case ReplicaLost():
                if replica.status:
                    self._retired = [merged([*self._retired, counters(replica.status)])]
                replica.status = {}
                self._drains.pop(replica, None)
                self.verifier.lost(replica)
                self._groups.move(replica, now)
            case StatusArrived(_, status, requested_at):
                running = self.mode is Mode.RUNNING
                sent = sent_before(self._groups.at.get(replica, ()), requested_at) if running else None
                if replica.state is State.SERVING and (why := replica.progress.check(status, sent, requested_at, now)):
                    self.replicas.lose(replica, why)

    # weights

    def stage(self, update: WeightUpdate) -> FleetStaging:
        """Begin a refresh of all replicas. Raises WeightsRefused, Busy, SourceUnreachable, ValueError while they are asleep."""
        if "weights" in self._asleep.parts:
            raise ValueError("the replicas are asleep: wake them, then refresh")
        return self.weights.stage(update)

    def commit(self, staging: Any, kv: KVPolicy = "keep", via: str = "memory") -> Refreshed | None:
        """Apply what all replicas have prepared. None: not all have confirmed it yet."""
        if kv == "abort" and not staging.transaction.committing:
            self._groups.aborts += 1
        refreshed = self.weights.commit(staging, kv, via)
        self.replicas.update(time.monotonic())
        return refreshed

    # modes

    def pause(self) -> None:
        self._set_mode(Mode.PAUSED)
        self.replicas.request_all(partial(m.Control, action="pause"))

    def resume(self) -> None:
        self._set_mode(Mode.RUNNING)
        self._drains.clear()
        self.replicas.request_all(partial(m.Control, action="resume"))

    def drain(self) -> bool:
        """Start no more groups. Returns True once no replica has a running one."""
        if self._mode is Mode.RUNNING:
            self._set_mode(Mode.DRAINING)
        for replica in self.replicas.linked():
            if replica not in self._drains:
                self._drains[replica] = replica.request(partial(m.Control, action="drain"))
        return all(future.done() for future in self._drains.values())

    def sleep(self, level: int = 1) -> int:
        """Release memory of all replicas. Returns how many bytes. Raises ValueError during a refresh."""
        if self.weights.staging:
            raise ValueError("a refresh is being staged; finish or abandon it first")
        freed = self._asleep.sleep(level, self.replicas.request_all)
        self.weights.dropped |= level == 2
        self._set_mode(self._mode)
        return freed

    def wake(self, tags: Collection[Tag] | None = None) -> None:
        self._asleep.wake(tags, self.replicas.request_all)
        self._set_mode(self._mode)

    def _set_mode(self, mode: Mode) -> None:
        """Set the mode, also of replicas that join later."""
        self._mode = mode
        control = [CONTROLS[mode]] if mode in CONTROLS else []
        self.replicas.first_requests = [*control, *self._asleep.requests()]

    def change_replicas(self, action: str, count: int, name: str) -> None:
        """Scale, drain or roll (`Scaling.change`). Raises ValueError."""
        self.replicas.scaling.change(action, count, name)

    def status(self) -> dict[str, Any]:
        """Return the merged status of all replicas, then that of each."""
        replicas = list(self.replicas.by_name.values())
        whole = merged([*(one.status for one in replicas if one.status), *self._retired])
        return {
            **NOTHING,
            **{name: value for name, value in whole.items() if name not in ("service", "metrics")},
            "model": self.model.name,
            "arithmetic": self.arithmetic,
            "version": self.version,
            "state": self.mode.value,
            "fleet": {
                **totals(self.replicas, self._groups, self.verifier),
                "bans": self._joins.owners.described(),
                "suspended": self.verifier.shares.names(time.monotonic()),
            },
            "replicas": [described(one, self._joins.pid(one.name), len(self._groups.at[one])) for one in replicas],
        }
