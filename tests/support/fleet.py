"""Fleets whose replicas are threads of the test: hash engines behind real services and sockets, without a process."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from rollout.config import ServiceConfig
from rollout.engine.values import KVPolicy, Limits, Refreshed, Sample, WeightUpdate
from rollout.fleet.fleet import Fleet, FleetOptions
from rollout.fleet.join_listener import JoinEndpoint, JoinListener
from rollout.fleet.launcher import ProcessExit, Use, alike, least_used
from rollout.fleet.owners import Owners
from rollout.fleet.timing import Timing
from rollout.fleet.verifier import Verification
from rollout.service.build import open_service
from rollout.service.loop import Service, ServiceTiming
from rollout.transport import messages as m
from rollout.transport.frames import Decoder, pack
from tests.support.hash_engine import HashEngine, Weights, expected, key_of, manifest_of, weights_of
from tests.support.waiting import until

WAIT = 60.0
"""for what comes: a bound for hangs only"""
TIMING = Timing(poll_s=0.02)
NO_VERIFICATION = Verification()
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
    """Launches replicas as threads, and is the address at which they join. `faults`: of each, see `HashEngine`. `make`: makes
    their engines, if others are wanted."""

    endpoint, keys = "threads", None

    def __init__(
        self,
        count: int,
        step_s: float = 0.0,
        faults: dict[str, str] | None = None,
        make: Callable[[], Any] | None = None,
    ) -> None:
        self.names: list[str] = []
        self.engines: dict[str, Any] = {}
        self.services: dict[str, Service] = {}
        self.threads: dict[str, threading.Thread] = {}
        self.exits: list[ProcessExit] = []
        self.replaced: list[str] = []
        self.refused: dict[str, str] = {}
        """why the router refuses those that join"""
        self.again = True
        """whether another thread takes the place of one that has ended"""
        self._joins: dict[str, m.Join] = {}
        """what each replica reports"""
        self._to_start: list[str] = []
        self._made = 0
        self._step_s, self._faults, self._make = step_s, faults or {}, make
        self.scale(count)

    def start(self, name: str) -> None:
        make = self._make or (lambda: HashEngine(self._step_s, self._faults.get(name, "")))
        engine = self.engines[name] = make()
        config = ServiceConfig(endpoint="tcp://127.0.0.1:*", client_grace_s=3600.0)
        service = self.services[name] = open_service(engine, config, timing=ServiceTiming(linger_s=0.5))
        thread = self.threads[service.endpoint] = threading.Thread(target=service.run, daemon=True)
        thread.start()
        self._joins[name] = m.Join(m.PROTOCOL, name, secrets.token_hex(16), service.endpoint)

    def die(self, name: str) -> None:
        """Behave as if a replica's process had been killed."""
        del self._joins[name]
        self.exits.append(ProcessExit(name, "its process ended with signal 9", name not in self.names))

    def leave(self, name: str) -> None:
        """Stop a replica in order."""
        if self._joins.pop(name, None) is None:
            return
        service = self.services[name]
        service.stop()

        def ended() -> None:
            self.threads[service.endpoint].join(WAIT)
            self.exits.append(ProcessExit(name, "its process ended with exit status 0", name not in self.names))

        threading.Thread(target=ended, daemon=True).start()

    # as `LauncherLike`

    def poll(self) -> list[ProcessExit]:
        for name in self._to_start:
            self.start(name)
        exits, self.exits = self.exits, []
        self._to_start = [one.name for one in exits if self.again and one.name in self.names]
        return exits

    def kill(self, name: str) -> None:
        self.replaced.append(name)
        if name in self._joins:
            self.die(name)
        self.services.pop(name).stop()

    def remove(self, name: str) -> None:
        if name in self.names:
            self.names.remove(name)
            self.leave(name)

    def scale(self, count: int, use: Use = alike) -> list[str]:
        while len(self.names) < count:
            self.names.append(f"r{self._made}")
            self._made += 1
            self.start(self.names[-1])
        return least_used(self.names, count, use)

    # as `ServiceTransport`

    def receive(self, timeout: float, most: int = 0) -> list[tuple[bytes, list[Any]]]:
        return [(name.encode(), list(pack(join))) for name, join in self._joins.items()]

    def send(self, peer: bytes, frames: list[Any]) -> bool:
        answer = Decoder(m.RouterMessage, Limits()).unpack(list(map(bytes, frames)))
        if isinstance(answer, m.Refused):
            self.refused[peer.decode()] = answer.message
            return True
        if answer.leave:
            self.leave(peer.decode())
        return True

    def reaches(self, peer: bytes, frames: list[Any]) -> bool:
        return True

    def expect(self, extra_bytes: int) -> None: ...
    def wake(self) -> None: ...

    def close(self, linger: float = 0.0) -> None:
        for service in self.services.values():
            service.stop()
        for thread in self.threads.values():
            thread.join(WAIT)
            assert not thread.is_alive()


def fleet_over(threads: Threads, timing: Timing = TIMING, owners: Owners | None = None, **options: Any) -> Fleet:
    """Make a fleet whose replicas are threads."""
    joins = JoinListener(JoinEndpoint(threads, lambda name, pid: True), owners=owners, timing=timing)
    return Fleet(joins, threads, timing=timing, **options)


@contextmanager
def fleet_of(
    count: int,
    grace_s: float = 60.0,
    timing: Timing = TIMING,
    owners: Owners | None = None,
    verification: Verification = NO_VERIFICATION,
    **options: Any,
) -> Iterator[tuple[Fleet, Threads]]:
    """Open a fleet of so many replicas that serve."""
    launcher = Threads(count, **options)
    fleet = fleet_over(launcher, timing, owners, options=FleetOptions(replica_grace_s=grace_s, verification=verification))
    try:
        fleet.open(WAIT)
        yield fleet, launcher
    finally:
        fleet.close()


@contextmanager
def router_of(fleet: Fleet, **options: Any) -> Iterator[Service]:
    """Run the service of a router, in a thread. options: of `open_service`."""
    service = open_service(fleet, ServiceConfig(endpoint="tcp://127.0.0.1:*", client_grace_s=60.0), **options)
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
    staging = staging or fleet.stage(WeightUpdate(manifest_of(weights), version=version, partial=partial))
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
