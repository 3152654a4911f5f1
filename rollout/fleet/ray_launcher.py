"""Starts replicas on a Ray cluster. Only Ray core is used: it places actors and restarts them.

router ── a thread ──→ placement group, a bundle a replica, SPREAD ──→ actor (max_restarts=-1) ──→ child: rollout serve --join
       ←── Join ─────────────────────────────────────────────────────────────────────────────────────┘

A bundle is on one node, so all resources of a replica are together. A replica of several ranks has a placement group of its
own, STRICT_PACK, with a bundle and an actor for each rank, on one node, whose memory they share; when one ends, all do.
Replicas join the router like any other replica. A process has ended when the actor's call returns. Ray's calls may take
seconds, so they have a thread of their own.
"""

from __future__ import annotations

import os
import queue
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from rollout.fleet.launcher import ProcessExit, Use, alike, how_ended, least_used
from rollout.fleet.ray_actor import STOP_S, ReplicaHolder
from rollout.fleet.timing import TIMING
from rollout.logs import logger

LOOK_S = 0.2
START_S = 180.0
"""longest that Ray itself may take to start"""
PORT_S = 10.0
"""longest that an actor may take to name a port; the others are not looked at meanwhile"""
PLACE_S = 60.0
"""interval of log lines while replicas wait for resources"""
OBJECT_STORE_BYTES = 80 << 20
"""of a Ray that is started here, the minimum: nothing is stored there"""

log = logger(__name__)


@dataclass(slots=True)
class ReplicaActor:
    """A replica's actor. Written by the thread."""

    name: str
    actors: list[Any]
    """of its ranks"""
    group: Any
    """its placement group"""
    running: list[Any] = field(default_factory=list)
    """the calls that return when its ranks end; []: none runs"""
    started_at: float = 0.0
    end_by: float | None = None
    """when its other ranks must have ended, after one has"""
    start_at: float = 0.0
    pause_s: float = TIMING.first_pause_s
    wanted: bool = True


class Reservation(NamedTuple):
    """What Ray reserves for one replica."""

    cpus: float | None
    """None: the cluster's, divided by the number of replicas"""
    gpus: float = 0.0
    """of one rank"""
    ranks: int = 1

    def resources(self, cluster_cpus: float, replicas: int) -> tuple[dict[str, float], int]:
        """Return the resources of a rank, as Ray has them, and the CPUs of the replica."""
        cpus = self.cpus or max(1.0, cluster_cpus // replicas)
        each = cpus / self.ranks
        rank = {"CPU": float(int(each)) if each > 1 else each, **({"GPU": self.gpus} if self.gpus else {})}
        return rank, int(cpus)


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
        self._reserved = reserved
        self._resources: dict[str, float] = {}
        """of one rank"""
        self._cpus = 0
        """of a replica"""
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
                num_cpus=max(count, int((self._reserved.cpus or 0) * count), len(os.sched_getaffinity(0))),
                include_dashboard=False,
                object_store_memory=OBJECT_STORE_BYTES,
                _node_ip_address="127.0.0.1",
            )
        else:
            ray.init(address=address)
        self._resources, self._cpus = self._reserved.resources(ray.cluster_resources().get("CPU", 1.0), count)

    def _place(self, names: list[str]) -> None:
        """Make the actors of these replicas: of one rank each in a placement group of all, of several in one of each."""
        if (ranks := self._reserved.ranks) == 1:
            group = self._group(len(names), "SPREAD")
            for i, name in enumerate(names):
                self._slots[name] = ReplicaActor(name, [self._actor(name, group, i)], group)
            return
        for name in names:
            group = self._group(ranks, "STRICT_PACK")
            actors = [self._actor(name, group, rank, f"-rank-{rank}") for rank in range(ranks)]
            self._slots[name] = ReplicaActor(name, actors, group)

    def _group(self, bundles: int, strategy: str) -> Any:
        """Wait for a placement group of so many ranks."""
        from ray.util.placement_group import placement_group

        ray, resources = self._ray, self._resources
        group = placement_group([resources] * bundles, strategy=strategy)
        while not ray.wait([group.ready()], timeout=PLACE_S)[0]:
            available = ray.available_resources()
            log.warning("no resources for %d × %s, %s; available: %s", bundles, resources, strategy, available)
        return group

    def _actor(self, name: str, group: Any, bundle: int, suffix: str = "") -> Any:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        return (
            self._ray.remote(ReplicaHolder)
            .options(
                name=f"rollout-{self._label}-{name}{suffix}",
                num_cpus=self._resources["CPU"],
                num_gpus=self._resources.get("GPU", 0.0),
                max_restarts=-1,
                max_task_retries=0,
                max_concurrency=2,
                scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle),
            )
            .remote(self._toml(name, self._cpus))
        )

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
        if not slot.running:
            if slot.wanted and now >= slot.start_at:
                self._start(slot, now)
            return
        ended, _ = self._ray.wait(slot.running, num_returns=len(slot.running), timeout=0)
        if len(ended) < len(slot.running):
            self._one_fate(slot, now, bool(ended))
            return
        try:
            status = self._ray.get(slot.running)[0]  # rank 0's: it has the reason
            why = f"its process ended with {how_ended(status)}"
        except Exception as error:  # an actor or its node: Ray starts another
            why = f"its actor was lost: {type(error).__name__}"
        slot.running, slot.end_by = [], None
        steady = now - slot.started_at > TIMING.steady_s
        pause = min(slot.pause_s, TIMING.first_pause_s) if steady else slot.pause_s
        slot.start_at, slot.pause_s = now + pause, min(TIMING.max_pause_s, 2 * pause)
        log.info("replica ended name=%s why=%r pause_s=%.1f", slot.name, why, pause)
        self._exits.put(ProcessExit(slot.name, why, not slot.wanted))

    def _start(self, slot: ReplicaActor, now: float) -> None:
        ranks = len(slot.actors)
        try:
            port = self._ray.get(slot.actors[0].free_port.remote(), timeout=PORT_S) if ranks > 1 else 0
        except Exception as error:  # the actor is lost: Ray starts another
            log.warning("replica not started name=%s reason=%r", slot.name, error)
            slot.start_at = now + slot.pause_s
            return
        slot.running = [each.serve.remote(rank_variables(rank, ranks, port)) for rank, each in enumerate(slot.actors)]
        slot.started_at = now
        log.info("replica starts name=%s ranks=%d", slot.name, ranks)

    def _one_fate(self, slot: ReplicaActor, now: float, ends: bool) -> None:
        """Kill the ranks of a replica that have not ended STOP_S after another one."""
        if ends and slot.end_by is None:
            slot.end_by = now + STOP_S
        elif slot.end_by is not None and now > slot.end_by:
            for actor in slot.actors:
                actor.kill.remote()

    def _kill(self, name: str) -> None:
        if (slot := self._slots.get(name)) is not None and slot.running:
            slot.actors[0].kill.remote()  # other ranks end with rank 0

    def _release(self, name: str) -> None:
        """Stop an actor; remove its placement group with its last actor."""
        if (slot := self._slots.pop(name, None)) is None:
            return
        slot.wanted = False
        slot.actors[0].stop.remote()
        self._exits.put(ProcessExit(name, "it was removed", True))
        if slot.running:
            self._ray.wait(slot.running, num_returns=len(slot.running), timeout=STOP_S)
        for actor in slot.actors:
            self._ray.kill(actor)
        if all(other.group is not slot.group for other in self._slots.values()):
            self._remove_group(slot.group)

    def _end(self) -> None:
        """Stop all actors, and remove everything that was made."""
        slots = list(self._slots.values())
        for slot in slots:
            slot.wanted = False
        stopping = [slot.actors[0].stop.remote() for slot in slots]
        stopping += [call for slot in slots for call in slot.running]
        if stopping:
            self._ray.wait(stopping, num_returns=len(stopping), timeout=STOP_S)
        for actor in (each for slot in slots for each in slot.actors):
            self._ray.kill(actor)
        for group in {id(slot.group): slot.group for slot in slots}.values():
            self._remove_group(group)
        self._ray.shutdown()

    def _remove_group(self, group: Any) -> None:
        from ray.util.placement_group import remove_placement_group

        remove_placement_group(group)


def rank_variables(rank: int, ranks: int, port: int) -> dict[str, str]:
    """Return torchrun's variables for a rank of a replica on one node; {}: it is the only one. port: of loopback, for the
    start."""
    if ranks == 1:
        return {}
    counts = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "MASTER_PORT": port}
    return {"MASTER_ADDR": "127.0.0.1", **{name: str(value) for name, value in counts.items()}}


def keep_signals() -> None:
    """Install this process's signal handlers again: Ray's core replaces them, in whichever thread it starts."""
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.getsignal(number))
