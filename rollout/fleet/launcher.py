"""Replicas as processes of this host: started, watched, and started again with a growing pause.

    start ─→ (ready file appears) ─→ up(address) ─→ (process ends) ─→ down(why) ─→ pause 0.5 s, 1 s, … 30 s ─→ start

Whoever launches replicas otherwise is `LauncherLike` as well.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, Protocol

from rollout.logs import logger
from transport.keys.files import ClientKeys

FIRST_PAUSE_S, MOST_PAUSE_S = 0.5, 30.0
"""before a replica is started again; twice as long each time"""
STEADY_S = 10.0
"""a process that has lived so long starts with the first pause again"""
START_S = 600.0
"""longest that a process may take to listen"""
STOP_S = 15.0

log = logger("rollout.fleet.launcher")


class Event(NamedTuple):
    """Something has become of a replica's process."""

    name: str
    address: str | ClientKeys | None
    """where it listens; None: it has ended"""
    why: str
    gone: bool = False
    """for good: nobody will be the replica of this name"""


class LauncherLike(Protocol):
    """Whoever has replicas: starts them (`Launcher`), or lets them join (`rollout.fleet.joins`)."""

    @property
    def wanted(self) -> int: ...
    def tend(self) -> list[Event]: ...
    def replace(self, name: str, sick: bool = False) -> None: ...
    def restart(self, name: str) -> None: ...
    def remove(self, name: str) -> None: ...
    def scale(self, count: int) -> list[str]: ...
    def pid(self, name: str) -> int | None: ...
    def close(self) -> None: ...


class Place(NamedTuple):
    """Where a replica runs."""

    cores: frozenset[int] = frozenset()
    """empty: any"""
    environment: Mapping[str, str] = {}


@dataclass(slots=True)
class Slot:
    """A place for one replica, and its present process."""

    name: str
    place: Place
    child: subprocess.Popen[bytes] | None = None
    ready: Path = Path()
    up: bool = False
    started_at: float = 0.0
    start_at: float = 0.0
    """when to start it (again)"""
    pause_s: float = FIRST_PAUSE_S
    wanted: bool = True
    starts: int = 0
    events: list[Event] = field(default_factory=list)


class Launcher:
    """Used by the thread of the front's service.

    Args:
        command: makes the words of a replica's process, which writes its address into the file that it is given, and ends
            when its standard input does.
        places: of the replicas, in order; more than are given are placed as the first ones again."""

    def __init__(
        self, command: Callable[[Path], list[str]], places: Sequence[Place], clock: Callable[[], float] = time.monotonic
    ):
        self.slots: dict[str, Slot] = {}
        """by name of the replica, those that go included"""
        self._command = command
        self._places = places
        self._clock = clock
        self._made = 0
        self._folder = tempfile.TemporaryDirectory(prefix="rollout-fleet-")
        self.scale(len(places))

    @property
    def wanted(self) -> int:
        """How many replicas there are to be."""
        return sum(slot.wanted for slot in self.slots.values())

    def scale(self, count: int) -> list[str]:
        """Have so many replicas. Returns the names of those that are to go: `remove` each when nothing runs there."""
        staying = [slot for slot in self.slots.values() if slot.wanted]
        for _ in range(count - len(staying)):
            taken = [slot.place for slot in staying]
            place = min(self._places, key=taken.count)
            slot = Slot(str(self._made), place, start_at=self._clock())
            self._made += 1
            self.slots[slot.name] = slot
            staying.append(slot)
        going = staying[count:]
        for slot in going:
            slot.wanted = False
        return [slot.name for slot in going]

    def tend(self) -> list[Event]:
        """Start what is to be started. Returns what has become of the others since the last call."""
        events: list[Event] = []
        for slot in list(self.slots.values()):
            events += self._look(slot, self._clock())
        return events

    def replace(self, name: str, sick: bool = False) -> None:
        """Kill a replica's process, if it lives, `sick` or cut off, and start another one after the pause."""
        slot = self.slots.get(name)
        if slot is not None and slot.child is not None:
            slot.child.kill()

    def restart(self, name: str) -> None:
        """Ask a replica's process to stop in order; another one starts."""
        slot = self.slots[name]
        slot.pause_s = 0.0
        if slot.child is not None:
            slot.child.terminate()

    def remove(self, name: str) -> None:
        """End a replica for good."""
        slot = self.slots.get(name)
        if slot is not None:
            slot.wanted = False
            if slot.child is not None:
                slot.child.terminate()

    def pid(self, name: str) -> int | None:
        """Return the process of a replica, None while it has none."""
        slot = self.slots.get(name)
        return slot.child.pid if slot is not None and slot.child is not None else None

    def close(self) -> None:
        """Stop all of them; those that do not stop in STOP_S are killed."""
        children = [slot.child for slot in self.slots.values() if slot.child is not None]
        for child in children:
            child.terminate()
        deadline = time.monotonic() + STOP_S
        for child in children:
            try:
                child.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()
            assert child.stdin is not None
            child.stdin.close()
        self._folder.cleanup()

    def _look(self, slot: Slot, now: float) -> list[Event]:
        child = slot.child
        if child is None:
            if not slot.wanted:
                del self.slots[slot.name]
            elif now >= slot.start_at:
                self._start(slot, now)
            return []
        code = child.poll()
        if code is not None:
            return [self._ended(slot, code, now)]
        if not slot.up and slot.ready.exists():
            slot.up = True
            return [Event(slot.name, slot.ready.read_text(), "it listens")]
        if not slot.up and now - slot.started_at > START_S:
            child.kill()
        return []

    def _start(self, slot: Slot, now: float) -> None:
        slot.starts += 1
        slot.ready = Path(self._folder.name) / f"ready-{slot.name}-{slot.starts}"
        slot.up, slot.started_at = False, now
        slot.child = subprocess.Popen(
            self._command(slot.ready),
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            env={**os.environ, **slot.place.environment},
            start_new_session=True,
        )
        if slot.place.cores:
            try:
                os.sched_setaffinity(slot.child.pid, slot.place.cores)  # of its first thread, whose all others inherit
            except OSError as error:
                log.warning("replica not bound to its cores name=%s reason=%s", slot.name, error)
        log.info("replica starts name=%s pid=%d", slot.name, slot.child.pid)

    def _ended(self, slot: Slot, code: int, now: float) -> Event:
        assert slot.child is not None and slot.child.stdin is not None
        slot.child.stdin.close()
        slot.child = None
        steady = now - slot.started_at > STEADY_S
        pause = min(slot.pause_s, FIRST_PAUSE_S) if steady else slot.pause_s
        slot.start_at, slot.pause_s = now + pause, min(MOST_PAUSE_S, max(FIRST_PAUSE_S, 2 * pause))
        why = f"signal {-code}" if code < 0 else f"exit status {code}"
        log.info("replica ended name=%s why=%r pause_s=%.1f", slot.name, why, pause)
        return Event(slot.name, None, f"its process ended with {why}")
