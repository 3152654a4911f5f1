"""Starts replicas on a Ray cluster. Only Ray core is used: it places actors and restarts them.

router ── a thread ──→ placement group, a bundle a replica, SPREAD ──→ actor (max_restarts=-1) ──→ child: rollout serve --join
       ←── Join ─────────────────────────────────────────────────────────────────────────────────────┘

A bundle is on one node, so all resources of a replica are together. They join the router like any other replica. A process has
ended when the actor's call returns. Ray's calls may take seconds, so they have a thread of their own.
"""

from __future__ import annotations

import os
import queue
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, NamedTuple

from rollout.fleet.launcher import ProcessExit, Use, alike, how_ended, least_used
from rollout.fleet.ray_actor import STOP_S, ReplicaHolder
from rollout.fleet.timing import TIMING
from rollout.logs import logger

LOOK_S = 0.2
START_S = 180.0
"""longest that Ray itself may take to start"""
PLACE_S = 60.0
"""interval of log lines while replicas wait for resources"""
OBJECT_STORE_BYTES = 80 << 20
"""of a Ray that is started here, the minimum: nothing is stored there"""

log = logger(__name__)


@dataclass(slots=True)
class ReplicaActor:
    """A replica's actor. Written by the thread."""

    name: str
    actor: Any
    group: Any
    """its placement group"""
    running: Any = None
    """the call that returns when the replica ends; None: none runs"""
    started_at: float = 0.0
    start_at: float = 0.0
    pause_s: float = TIMING.first_pause_s
    wanted: bool = True


class Reservation(NamedTuple):
    """What Ray reserves for one replica."""

    cpus: float | None
    """None: the cluster's, divided by the number of replicas"""
    gpus: float = 0.0

    def resources(self) -> dict[str, float]:
        """Return it as Ray's resources; CPU 0: not known yet."""
        return {"CPU": self.cpus or 0.0, **({"GPU": self.gpus} if self.gpus else {})}


class RayLauncher:
    """Used by the thread of the router's service.

    Args:
        label: makes the names of the actors unique on the cluster.
        count: how many replicas.
        toml: returns the configuration of the replica of a name that has so many CPUs.
        address: of the cluster, as `ray.init` takes it; "local" = a Ray of this machine, for this process.
        reserved: resources of each.

    Raises RuntimeError where Ray does not start, ModuleNotFoundError where it is not installed."""

    def __init__(
        self,
        label: str,
        count: int,
        toml: Callable[[str, int], str],
        address: str,
        reserved: Reservation,
    ) -> None:
        import ray

        self._ray = ray
        self._label = label
        self._toml = toml
        self._resources: dict[str, float] = reserved.resources()
        self._made = 0
        self._names = self._new_names(count)
        self._slots: dict[str, ReplicaActor] = {}
        self._exits: queue.SimpleQueue[ProcessExit] = queue.SimpleQueue()
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        started: Future[None] = Future()
        # not the main thread: Ray would take its signals
        self._thread = threading.Thread(target=self._run, args=(address, self.names, started), name="rollout-ray", daemon=True)
        self._thread.start()
        started.result(START_S)
        keep_signals()

    @property
    def names(self) -> list[str]:
        return list(self._names)

    def poll(self) -> list[ProcessExit]:
        exits = []
        while not self._exits.empty():
            exits.append(self._exits.get_nowait())
        return exits

    def kill(self, name: str) -> None:
        self._calls.put(lambda: self._kill(name))

    def remove(self, name: str) -> None:
        if name in self._names:
            self._names.remove(name)
        self._calls.put(lambda: self._release(name))

    def scale(self, count: int, use: Use = alike) -> list[str]:
        if more := self._new_names(count - len(self._names)):
            self._names += more
            self._calls.put(lambda: self._place(more))
        return least_used(self._names, count, use)

    def close(self) -> None:
        """Stop the replicas and their actors, and a Ray that was started here."""
        self._calls.put(None)
        self._thread.join(2 * STOP_S)

    def _new_names(self, count: int) -> list[str]:
        first, self._made = self._made, self._made + max(0, count)
        return [f"ray-{i}" for i in range(first, self._made)]

    # the thread

    def _run(self, address: str, names: list[str], started: Future[None]) -> None:
        try:
            self._init(address, len(names))
            started.set_result(None)
        except BaseException as error:
            started.set_exception(RuntimeError(f"Ray does not start: {type(error).__name__}: {error}"))
            return
        try:
            self._place(names)
            self._supervise()
        except Exception:
            log.exception("supervision of replicas on Ray ended")
        finally:
            self._end()

    def _init(self, address: str, count: int) -> None:
        ray = self._ray
        if address == "local":
            ray.init(
                address="local",
                num_cpus=max(count, int(self._resources["CPU"] * count), len(os.sched_getaffinity(0))),
                include_dashboard=False,
                object_store_memory=OBJECT_STORE_BYTES,
                _node_ip_address="127.0.0.1",
            )
        else:
            ray.init(address=address)
        if not self._resources["CPU"]:
            self._resources["CPU"] = max(1.0, ray.cluster_resources().get("CPU", 1.0) // count)

    def _place(self, names: list[str]) -> None:
        """Make the actors of these replicas, in a placement group of their own."""
        from ray.util.placement_group import placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        ray, resources = self._ray, self._resources
        group = placement_group([resources] * len(names), strategy="SPREAD")
        while not ray.wait([group.ready()], timeout=PLACE_S)[0]:
            available = ray.available_resources()
            log.warning("no resources for %d replicas of %s each; available: %s", len(names), resources, available)
        for i, name in enumerate(names):
            actor = (
                ray.remote(ReplicaHolder)
                .options(
                    name=f"rollout-{self._label}-{name}",
                    num_cpus=resources["CPU"],
                    num_gpus=resources.get("GPU", 0.0),
                    max_restarts=-1,
                    max_task_retries=0,
                    max_concurrency=2,
                    scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=i),
                )
                .remote(self._toml(name, int(resources["CPU"])))
            )
            self._slots[name] = ReplicaActor(name, actor, group)

    def _supervise(self) -> None:
        while True:
            try:
                call = self._calls.get(timeout=LOOK_S)
                if call is None:
                    return
                call()
            except queue.Empty:
                pass
            for slot in list(self._slots.values()):
                self._look(slot, time.monotonic())

    def _look(self, slot: ReplicaActor, now: float) -> None:
        if slot.running is None:
            if slot.wanted and now >= slot.start_at:
                slot.running, slot.started_at = slot.actor.serve.remote(), now
                log.info("replica starts name=%s", slot.name)
            return
        if not self._ray.wait([slot.running], timeout=0)[0]:
            return
        try:
            status = self._ray.get(slot.running)
            why = f"its process ended with {how_ended(status)}"
        except Exception as error:  # the actor or its node: Ray starts another
            why = f"its actor was lost: {type(error).__name__}"
        slot.running = None
        steady = now - slot.started_at > TIMING.steady_s
        pause = min(slot.pause_s, TIMING.first_pause_s) if steady else slot.pause_s
        slot.start_at, slot.pause_s = now + pause, min(TIMING.max_pause_s, 2 * pause)
        log.info("replica ended name=%s why=%r pause_s=%.1f", slot.name, why, pause)
        self._exits.put(ProcessExit(slot.name, why, not slot.wanted))

    def _kill(self, name: str) -> None:
        if (slot := self._slots.get(name)) is not None and slot.running is not None:
            slot.actor.kill.remote()

    def _release(self, name: str) -> None:
        """Stop an actor; remove its placement group with its last actor."""
        if (slot := self._slots.pop(name, None)) is None:
            return
        slot.wanted = False
        slot.actor.stop.remote()
        self._exits.put(ProcessExit(name, "it was removed", True))
        if slot.running is not None:
            self._ray.wait([slot.running], timeout=STOP_S)
        self._ray.kill(slot.actor)
        if all(other.group is not slot.group for other in self._slots.values()):
            self._remove_group(slot.group)

    def _end(self) -> None:
        """Stop all actors, and remove everything that was made."""
        slots = list(self._slots.values())
        for slot in slots:
            slot.wanted = False
        stopping = [slot.actor.stop.remote() for slot in slots]
        if stopping:
            self._ray.wait(stopping, num_returns=len(stopping), timeout=STOP_S)
        for slot in slots:
            self._ray.kill(slot.actor)
        for group in {id(slot.group): slot.group for slot in slots}.values():
            self._remove_group(group)
        self._ray.shutdown()

    def _remove_group(self, group: Any) -> None:
        from ray.util.placement_group import remove_placement_group

        remove_placement_group(group)


def keep_signals() -> None:
    """Install this process's signal handlers again: Ray's core replaces them, in whichever thread it starts."""
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.getsignal(number))
