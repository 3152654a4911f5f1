"""Fleets whose replicas are threads of the test: hash engines behind real services and sockets, without a process."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from engine.types import KVPolicy, Refreshed, Sample
from rollout.fleet.fleet import Fleet
from rollout.fleet.launcher import ReplicaEvent, Use, alike, least_used
from rollout.service.loop import Service
from tests.support.hash_engine import HashEngine, Weights, expected, key_of, manifest_of, weights_of
from tests.support.waiting import until

WAIT = 60.0
"""for what comes: a bound for hangs only"""
KEYS = {version: key_of(weights_of(version)) for version in range(8)}


def prompt(i: int, length: int = 12) -> np.ndarray:
    """Draw the prompt of group `gI`: [length] int32."""
    return np.random.default_rng(i).integers(0, 900, length).astype(np.int32)


def check(samples: Iterable[Sample]) -> None:
    """Assert that every token of groups `gI` with `prompt(I)` is what one service would have made."""
    for sample in samples:
        assert sample.finish_reason == "length", sample.error
        assert sample.token_ids.tolist() == expected(prompt(int(sample.group_id[1:])), sample, KEYS)


class Threads:
    """Launches replicas as threads. `faults`: of each, see `HashEngine`. `make`: makes their engines, if others are wanted."""

    def __init__(
        self,
        count: int,
        step_s: float = 0.0,
        faults: dict[str, str] | None = None,
        make: Callable[[], Any] | None = None,
    ) -> None:
        self.wanted = count
        self.engines: dict[str, Any] = {}
        self.services: dict[str, Service] = {}
        self.threads: list[threading.Thread] = []
        self.events: list[ReplicaEvent] = []
        self.replaced: list[str] = []
        self.going: set[str] = set()
        self.outlived = frozenset[str]()
        self.again = True
        """whether another thread takes the place of one that is lost"""
        self._step_s, self._faults, self._make = step_s, faults or {}, make
        for i in range(count):
            self.start(str(i))

    def start(self, name: str) -> None:
        make = self._make or (lambda: HashEngine(self._step_s, self._faults.get(name, "")))
        engine = self.engines[name] = make()
        service = self.services[name] = Service(engine, "tcp://127.0.0.1:*", client_grace_s=3600.0, linger_s=0.5)
        thread = threading.Thread(target=service.run, name=f"replica {service.endpoint}", daemon=True)
        self.threads.append(thread)
        thread.start()
        self.events.append(ReplicaEvent(name, service.endpoint, "it listens"))

    def die(self, name: str) -> None:
        """Behave as if a replica's process had been killed: nothing comes of it any more."""
        self.events.append(ReplicaEvent(name, None, "its process ended with signal 9"))

    def tend(self) -> list[ReplicaEvent]:
        events, self.events = self.events, []
        return events

    def replace(self, name: str, sick: bool = False) -> None:
        self.replaced.append(name)
        self.services.pop(name).stop()
        if self.again and name not in self.going:
            self.start(name)

    def restart(self, name: str) -> None:
        service = self.services[name]
        service.stop()

        def tell() -> None:
            for thread in self.threads:
                if thread is not threading.current_thread() and thread.name == f"replica {service.endpoint}":
                    thread.join(WAIT)
            self.events.append(ReplicaEvent(name, None, "its process ended with exit status 0"))

        threading.Thread(target=tell, daemon=True).start()

    def remove(self, name: str) -> None:
        if name in self.services:
            self.going.add(name)
            self.services[name].stop()
            self.events.append(ReplicaEvent(name, None, "it was asked to go"))

    def scale(self, count: int, use: Use = alike) -> list[str]:
        going = least_used(sorted(self.services), count, use)
        for i in range(self.wanted, count):
            self.start(str(i))
        self.wanted = count
        return going

    def pid(self, name: str) -> int | None:
        return None

    def close(self) -> None:
        for service in self.services.values():
            service.stop()
        for thread in self.threads:
            thread.join(WAIT)
            assert not thread.is_alive()


@contextmanager
def fleet_of(count: int, grace_s: float = 60.0, **options: object) -> Iterator[tuple[Fleet, Threads]]:
    """Open a fleet of so many replicas that serve."""
    launcher = Threads(count, **options)  # type: ignore[arg-type]
    fleet = Fleet(launcher, replica_grace_s=grace_s)
    try:
        fleet.open(WAIT)
        yield fleet, launcher
    finally:
        fleet.close()


@contextmanager
def front_of(fleet: Fleet) -> Iterator[Service]:
    """Run the service in front, in a thread."""
    service = Service(fleet, "tcp://127.0.0.1:*", client_grace_s=60.0)
    fleet.inbox.wake = service.wake
    thread = threading.Thread(target=service.run, daemon=True)
    thread.start()
    try:
        yield service
    finally:
        service.stop()
        thread.join(WAIT)
        assert not thread.is_alive()


def collect(fleet: Fleet, count: int) -> dict[tuple[str, int], Sample]:
    """Step until so many samples have come, each of them once."""
    got: dict[tuple[str, int], Sample] = {}

    def look() -> bool:
        if not fleet.has_work:
            time.sleep(0.001)
        for sample in fleet.step():
            assert (sample.group_id, sample.index) not in got, "a child came twice"
            got[sample.group_id, sample.index] = sample
        return len(got) >= count

    until(look, f"{count} samples", WAIT)
    return got


def step_until(fleet: Fleet, condition: object, what: str = "it came true") -> list[Sample]:
    """Step until `condition()`; returns the samples that ended meanwhile."""
    ended: list[Sample] = []

    def look() -> bool:
        ended.extend(fleet.step())
        return bool(condition())  # type: ignore[operator]

    until(look, what, WAIT)
    return ended


def fed(staging: Any, weights: Weights) -> Callable[[], bool]:
    """Return a condition for `step_until`: it feeds what the staging still takes, and tells whether all have prepared."""
    payload = np.concatenate([values.view(np.uint8) for values in weights.values()])

    def read(memory: np.ndarray) -> int:
        piece = payload[staging.received :][: len(memory)]
        memory[: len(piece)] = piece
        return len(piece)

    def prepared() -> bool:
        while not staging.complete and staging.feed(read):
            pass
        return bool(staging.complete)

    return prepared


def refresh(
    fleet: Fleet,
    version: int,
    weights: Weights | None = None,
    *,
    kv: KVPolicy = "keep",
    partial: bool = False,
    staging: Any = None,
) -> Refreshed:
    """Refresh the replicas as the service does, turn by turn: stage, feed until all have prepared, commit until all have
    applied.

    weights: those of the version unless given. staging: one of them that has begun. Raises what the fleet refuses."""
    weights = weights_of(version) if weights is None else weights
    staging = staging or fleet.stage(manifest_of(weights), version=version, partial=partial)
    applied: list[Refreshed | None] = [None]

    def committed() -> bool:
        applied[0] = fleet.commit(staging, kv)
        return applied[0] is not None

    try:
        step_until(fleet, fed(staging, weights), "all have prepared")
        step_until(fleet, committed, "all have applied")
    finally:
        staging.close()
    assert applied[0] is not None
    return applied[0]
