"""Replicas on a Ray cluster: Ray core places them and starts them again, nothing else of it is used.

front ── a thread ──→ placement group, a bundle a replica, SPREAD ──→ actor (max_restarts=-1) ──→ child: rollout serve --join
      ←── Join ─────────────────────────────────────────────────────────────────────────────────────┘

A bundle lies on one node, so all that a replica has is together. Which replica serves, and with which weights, is the front's
business as with any that joins; what ends here is known from the actor's call, which ends too. Ray's calls may take seconds,
so they have a thread of their own.
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
from typing import Any

from rollout.fleet.join_listener import JoinListener
from rollout.fleet.launcher import FIRST_PAUSE_S, MOST_PAUSE_S, STEADY_S, ReplicaEvent, Use, alike, least_used
from rollout.fleet.ray_actor import STOP_S, ReplicaHolder
from rollout.logs import logger

LOOK_S = 0.2
START_S = 180.0
"""longest that Ray itself may take to start"""
PLACE_S = 60.0
"""between two words that replicas wait for a place"""
OBJECT_STORE_BYTES = 80 << 20
"""of a Ray that is started here, the least that it takes: nothing of ours is put there"""

log = logger(__name__)


@dataclass(slots=True)
class ReplicaActor:
    """A replica's actor. Written by the thread."""

    name: str
    actor: Any
    group: Any
    """its placement group"""
    running: Any = None
    """the call that ends with the replica; None: none runs"""
    started_at: float = 0.0
    start_at: float = 0.0
    pause_s: float = FIRST_PAUSE_S
    wanted: bool = True


class RayLauncher:
    """Used by the thread of the front's service.

    Args:
        joins: where the replicas join.
        count: how many replicas.
        toml: makes the configuration of the one of a name, for the CPUs that it has.
        address: of the cluster, as `ray.init` takes it; "local" = a Ray of this machine, for this process.
        cpus: of each; None = the cluster's, divided.
        gpus: of each.

    Raises RuntimeError where Ray does not start, ModuleNotFoundError where it is not installed."""

    def __init__(
        self,
        joins: JoinListener,
        count: int,
        toml: Callable[[str, int], str],
        address: str,
        cpus: float | None = None,
        gpus: float = 0.0,
    ) -> None:
        import ray

        self._ray = ray
        self._joins = joins
        self._toml = toml
        self._resources: dict[str, float] = {"CPU": cpus or 0.0, **({"GPU": gpus} if gpus else {})}
        self._wanted = count
        self._made = 0
        self._slots: dict[str, ReplicaActor] = {}
        self._events: queue.SimpleQueue[ReplicaEvent] = queue.SimpleQueue()
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._ended_by_itself: set[str] = set()
        """named by the events of the last `tend`: nothing is left there to kill"""
        started: Future[None] = Future()
        # not the main thread: Ray would take its signals
        self._thread = threading.Thread(target=self._run, args=(address, count, started), name="rollout-ray", daemon=True)
        self._thread.start()
        started.result(START_S)
        keep_signals()

    @property
    def wanted(self) -> int:
        return self._wanted

    @property
    def outlived(self) -> frozenset[str]:
        """No one: actors end with the front that made them."""
        return self._joins.outlived

    def tend(self) -> list[ReplicaEvent]:
        events = []
        while not self._events.empty():
            events.append(self._events.get_nowait())
        self._ended_by_itself = {event.name for event in events}
        return [*events, *self._joins.tend()]

    def replace(self, name: str, sick: bool = False) -> None:
        """Kill a replica's process, if it lives; its actor starts another."""
        self._joins.replace(name, sick)
        if name not in self._ended_by_itself:
            self._calls.put(lambda: self._kill(name))

    def restart(self, name: str) -> None:
        self._joins.restart(name)

    def remove(self, name: str) -> None:
        """End a replica and its actor for good."""
        self._joins.remove(name)
        self._calls.put(lambda: self._release(name))

    def scale(self, count: int, use: Use = alike) -> list[str]:
        """Have so many of Ray's replicas. Returns those that are to go."""
        more, self._wanted = count - self._wanted, count
        if more > 0:
            self._calls.put(lambda: self._place(more))
        return least_used([name for name, slot in self._slots.items() if slot.wanted], count, use)

    def pid(self, name: str) -> int | None:
        return self._joins.pid(name)

    def close(self) -> None:
        """End the replicas and their actors, and a Ray that was started here."""
        self._calls.put(None)
        self._thread.join(2 * STOP_S)
        self._joins.close()

    # the thread

    def _run(self, address: str, count: int, started: Future[None]) -> None:
        try:
            self._init(address, count)
            started.set_result(None)
        except BaseException as error:
            started.set_exception(RuntimeError(f"Ray does not start: {type(error).__name__}: {error}"))
            return
        try:
            self._place(count)
            self._supervise()
        except Exception:
            log.exception("Ray's replicas are not looked after any more")
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

    def _place(self, count: int) -> None:
        """Make so many more actors, in a placement group of their own."""
        from ray.util.placement_group import placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        ray, resources = self._ray, self._resources
        group = placement_group([resources] * count, strategy="SPREAD")
        while not ray.wait([group.ready()], timeout=PLACE_S)[0]:
            log.warning("no place for %d replicas of %s each; have %s", count, resources, ray.available_resources())
        for i in range(count):
            name = f"ray-{self._made}"
            self._made += 1
            actor = (
                ray.remote(ReplicaHolder)
                .options(
                    name=f"rollout-{self._joins.endpoint}-{name}",
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
            why = f"its process ended with {f'signal {-status}' if status < 0 else f'exit status {status}'}"
        except Exception as error:  # the actor, or its node: Ray makes another
            why = f"its actor was lost: {type(error).__name__}"
        slot.running = None
        pause = min(slot.pause_s, FIRST_PAUSE_S) if now - slot.started_at > STEADY_S else slot.pause_s
        slot.start_at, slot.pause_s = now + pause, min(MOST_PAUSE_S, 2 * pause)
        log.info("replica ended name=%s why=%r pause_s=%.1f", slot.name, why, pause)
        self._events.put(ReplicaEvent(slot.name, None, why, not slot.wanted))

    def _kill(self, name: str) -> None:
        if (slot := self._slots.get(name)) is not None and slot.running is not None:
            slot.actor.kill.remote()

    def _release(self, name: str) -> None:
        """Let go of an actor; a group whose replicas are all gone gives its places back."""
        if (slot := self._slots.pop(name, None)) is None:
            return
        slot.wanted = False
        slot.actor.stop.remote()
        self._events.put(ReplicaEvent(name, None, "it was asked to go", True))
        if slot.running is not None:
            self._ray.wait([slot.running], timeout=STOP_S)
        self._ray.kill(slot.actor)
        if all(other.group is not slot.group for other in self._slots.values()):
            self._remove_group(slot.group)

    def _end(self) -> None:
        """Stop all, in order as far as they hear, and take everything away that was made."""
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
    """Install this process's signal handlers again: Ray's core has put its own in their place, whichever thread starts it."""
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.getsignal(number))
