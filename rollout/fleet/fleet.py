"""Fleet: what a front's service has for an engine.

Service.submit ─→ Groups ─→ Link of a replica ─→ ... ─→ Inbox ─→ step ─→ samples          Members: who serves
Service.commit ─→ FleetWeights ─→ Transaction over all ─→ ... ─→ Inbox ─→ step
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

from engine.types import (
    NONE_SERVED,
    Adapter,
    Group,
    KVPolicy,
    Limits,
    Mode,
    Refreshed,
    Sample,
    Served,
    Tag,
    TensorInfo,
    TokenChunk,
)
from rollout.fleet.event_queue import EventQueue
from rollout.fleet.failures import sent_before
from rollout.fleet.groups import FleetGroups
from rollout.fleet.launcher import LauncherLike
from rollout.fleet.merge import counters, described, merged, totals
from rollout.fleet.replica import Replica, State
from rollout.fleet.replica_set import LOOK_S, Make, ReplicaFacts, ReplicaSet
from rollout.fleet.sleeping import SleepState
from rollout.fleet.weights import FleetStaging
from transport import messages as m
from transport.errors import ServiceLost

NOTHING = dict.fromkeys(
    ("running", "waiting", "groups", "steps", "generated_tokens", "offloads", "soft_resets", "recomputed_tokens"), 0
)
"""of a status, when no replica has told its own"""
TEND_S = 0.2
"""between two looks at the replicas while nothing comes from them"""


class Fleet:
    """Engine of a service that has replicas. Called by that service's thread only.

    Example:
        fleet = Fleet(Launcher(command, places))
        fleet.open()
        service = Service(fleet, "tcp://127.0.0.1:5655")
        fleet.inbox.wake = service.wake
        service.run()
        fleet.close()

    Args:
        launcher: starts replicas and tells where they listen.
        limits: what clients may ask for; no more than the replicas' own.
        replica_grace_s: a group waits so long for a replica that serves, then it ends as "error".
        seed: groups without a seed of their own draw theirs from this one.
        before: the weights that were live when the front before was killed; version 0: there was none."""

    def __init__(
        self,
        launcher: LauncherLike,
        limits: Limits | None = None,
        replica_grace_s: float = 60.0,
        seed: int = 0,
        before: Served = NONE_SERVED,
    ) -> None:
        self.limits = limits or Limits()
        self.inbox = EventQueue()
        self._launcher = launcher
        self._grace_s = replica_grace_s
        self._members = ReplicaSet(launcher, self.inbox, self._lost, self._serving, self._asked_of_all, self._sent, before)
        self.weights = self._members.weights
        members, weights = self._members, self.weights
        told = members.failed, weights.versions.__contains__
        self._groups = FleetGroups(self.inbox, members.serving, lambda: self.version, *told, seed)
        self._mode = Mode.RUNNING
        """RUNNING, DRAINING or PAUSED: what was asked for last"""
        self._asleep = SleepState()
        self._drains: dict[Replica, Future[Any]] = {}
        self._retired: list[dict[str, Any]] = []
        """counters of replicas that are dead, added up"""
        self._tend_at = 0.0

    def open(self, timeout: float = 600.0, count: int | None = None, patient: bool = False) -> None:
        """Wait until replicas serve: `count` of them, None = all; or would, if the live weights were not lost. Raises
        ServiceLost with what has become of one that ended, unless `patient`, or of all at the time-out."""
        deadline = time.monotonic() + timeout
        while True:
            self.step()
            up = self._members.linked() if self.weights.lost else self._members.serving()
            serving, wanted = len(up), count or self._launcher.wanted
            if serving >= wanted:
                return
            if (self._members.deaths and not patient) or time.monotonic() > deadline:
                dead = [f"replica {one.name}: {one.why}" for one in self._members.replicas.values() if one.state is State.DEAD]
                why = "; ".join(dead) or f"{serving} of {wanted} replicas serve"
                raise ServiceLost(f"the fleet does not start: {why}")
            time.sleep(LOOK_S)

    def close(self) -> None:
        """End the replicas."""
        for replica in self._members.replicas.values():
            replica.disconnect()
        self._launcher.close()
        self.weights.close()

    # what it is

    @property
    def model(self) -> ReplicaFacts:
        assert self._members.facts is not None, "open() waits for a replica"
        return self._members.facts

    @property
    def arithmetic(self) -> str:
        return self.model.arithmetic

    @property
    def vocab_size(self) -> int:
        return self.model.vocab_size

    @property
    def context(self) -> int:
        return self.model.context

    @property
    def version(self) -> int:
        """Version that every replica has that serves."""
        return self.weights.version

    @property
    def mode(self) -> Mode:
        if self._asleep.parts:
            return Mode.ASLEEP
        return Mode.WITHOUT_WEIGHTS if self.weights.dropped or self.weights.lost else self._mode

    # groups

    @property
    def has_work(self) -> bool:
        """Whether something has come from the replicas, or it is time to look at them."""
        return bool(self.inbox) or self._groups.has_work or time.monotonic() >= self._tend_at

    def submit(self, group: Group, client: str = "") -> None:
        """Take a group, as the service has checked it. What a replica finds wrong with it comes as samples that end as "error".
        Raises ValueError for an id that is live."""
        if group.id in self._groups.open:
            raise ValueError(f"group id {group.id} is live")
        self._groups.submit(group, client, time.monotonic())

    def step(self) -> list[Sample]:
        """Take in what has come. Returns the samples that ended."""
        came = bool(self.inbox)
        self.inbox.run()
        now = time.monotonic()
        if now >= self._tend_at:
            self._tend_at = now + TEND_S
            self._members.tend(now)
            self._wait_for_replicas(now)
        elif came:
            self.weights.tend(now)
        if self._groups.waiting:
            self._groups.place_waiting(now)
        while self._groups.unsent:
            self._groups.unsent.pop().calls.wake()
        if came and self.weights.staging:
            self.inbox.wake()  # what has come may be what the refresh waits for
        ended, self._groups.ended = self._groups.ended, []
        return ended

    def abort(self, group_id: str, index: int | None = None) -> list[Sample]:
        """Ask for the end of a group, or of one child. Returns those that no replica has; `step` returns the others when they
        come."""
        return self._groups.abort(group_id, index)

    def chunks(self, group_id: str, since: Mapping[int, int], least: int, most: int) -> list[TokenChunk]:
        """Return new tokens of children that run, as far as replicas have streamed them."""
        return self._groups.chunks(group_id, since, least, most)

    def _wait_for_replicas(self, now: float) -> None:
        since = self._members.none_since
        if since is not None and now - since > self._grace_s:
            self._groups.give_up(f"no replica has served for {self._grace_s} s (replica_grace_s)")

    def _lost(self, replica: Replica) -> None:
        if replica.status:
            self._retired = [merged([*self._retired, counters(replica.status)])]
        replica.status = {}
        self._drains.pop(replica, None)
        self._groups.move(replica, time.monotonic())

    def _sent(self, replica: Replica, before: float) -> int | None:
        """Count the groups that a replica holds; None where it may do nothing with them."""
        return sent_before(self._groups.at.get(replica, ()), before) if self.mode is Mode.RUNNING else None

    def _serving(self) -> None:
        self._groups.place_waiting(time.monotonic())

    # weights

    def stage(
        self,
        manifest: Sequence[TensorInfo],
        *,
        version: int | None = None,
        partial: bool = False,
        adapter: Adapter | None = None,
    ) -> FleetStaging:
        """Begin a refresh of all replicas. Raises WeightsRefused, Busy, SourceUnreachable."""
        if "weights" in self._asleep.parts:
            raise ValueError("the replicas are asleep: wake them, then refresh")
        return self.weights.stage(manifest, version, partial, adapter)

    def commit(self, staging: Any, kv: KVPolicy = "keep", via: str = "memory") -> Refreshed | None:
        """Have what all replicas have prepared applied by all. None: not all have said yet that they have it."""
        if kv == "abort" and not staging.transaction.committing:
            self._groups.aborts += 1
        return self.weights.commit(staging, kv, via)

    # modes

    def pause(self) -> None:
        self._mode = Mode.PAUSED
        self._members.ask_all(partial(m.Control, action="pause"))

    def resume(self) -> None:
        self._mode = Mode.RUNNING
        self._drains.clear()
        self._members.ask_all(partial(m.Control, action="resume"))

    def drain(self) -> bool:
        """Start no group. Returns True once no replica has one that it began."""
        if self._mode is Mode.RUNNING:
            self._mode = Mode.DRAINING
        for replica in self._members.linked():
            if replica not in self._drains:
                self._drains[replica] = replica.request(partial(m.Control, action="drain"))
        return all(future.done() for future in self._drains.values())

    def sleep(self, level: int = 1) -> int:
        """Have all replicas give memory back. Returns how many bytes went back."""
        if self.weights.staging:
            raise ValueError("a refresh is being staged; finish or abandon it first")
        freed = self._asleep.sleep(level, self._members.ask_all)
        self.weights.dropped |= level == 2
        return freed

    def wake(self, tags: Collection[Tag] | None = None) -> None:
        self._asleep.wake(tags, self._members.ask_all)

    def _asked_of_all(self) -> list[Make]:
        """List what a replica must be told that comes now."""
        modes: dict[Mode, Make] = {
            Mode.PAUSED: partial(m.Control, action="pause"),
            Mode.DRAINING: partial(m.Control, action="drain"),
        }
        asked = [modes[self._mode]] if self._mode in modes else []
        return [*asked, *self._asleep.told()]

    def change_replicas(self, action: str, count: int, name: str) -> None:
        self._members.changes.change(action, count, name)

    # looking

    def status(self) -> dict[str, Any]:
        """Tell everything there is to know: the sum of all replicas, then each."""
        replicas = list(self._members.replicas.values())
        whole = merged([*(one.status for one in replicas if one.status), *self._retired])
        return {
            **NOTHING,
            **{name: value for name, value in whole.items() if name not in ("service", "metrics")},
            "model": self.model.name,
            "arithmetic": self.arithmetic,
            "version": self.version,
            "state": self.mode.value,
            "fleet": totals(self._members, self._groups),
            "replicas": [described(one, self._launcher.pid(one.name), len(self._groups.at[one])) for one in replicas],
        }
