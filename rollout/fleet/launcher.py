"""Replicas as processes of this host: started, watched, and started again with a growing pause.

    start ─→ (ready file appears) ─→ up(address) ─→ (process ends) ─→ down(why) ─→ pause 0.5 s, 1 s, … 30 s ─→ start

Whoever launches replicas otherwise is `LauncherLike` as well.

With a state file (`rollout.fleet.state_file`) processes outlive a front that is killed: the next front's launcher adopts them.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import NamedTuple, Protocol

from rollout.fleet.state_file import UNKNOWN, AdoptedProcess, ReplicaStateFile, SavedFleet, SavedReplica, adopt, begun_at
from rollout.logs import logger
from rollout.process import Folder
from transport.keys.files import ClientKeys

FIRST_PAUSE_S, MOST_PAUSE_S = 0.5, 30.0
"""before a replica is started again; twice as long each time"""
STEADY_S = 10.0
"""a process that has lived so long starts with the first pause again"""
START_S = 600.0
"""longest that a process may take to listen"""
STOP_S = 15.0

log = logger(__name__)


class ReplicaEvent(NamedTuple):
    """Something has become of a replica's process."""

    name: str
    address: str | ClientKeys | None
    """where it listens; None: it has ended"""
    why: str
    gone: bool = False
    """for good: nobody will be the replica of this name"""


Use = Callable[[str], tuple[int, ...]]
"""ranks replicas by name: those of least use first"""


def alike(name: str) -> tuple[int, ...]:
    """Take all for equally useful."""
    return ()


def least_used(names: Sequence[str], count: int, use: Use) -> list[str]:
    """Choose which of `names`, the newest last, are to go so that `count` stay: the least useful, of equal ones the newest."""
    return sorted(reversed(names), key=use)[: max(0, len(names) - count)]


class LauncherLike(Protocol):
    """Whoever has replicas: starts them (`Launcher`), or lets them join (`rollout.fleet.join_listener`)."""

    @property
    def wanted(self) -> int: ...
    @property
    def outlived(self) -> frozenset[str]:
        """Names of the replicas that have outlived the front before."""
        ...

    def tend(self) -> list[ReplicaEvent]: ...
    def replace(self, name: str, sick: bool = False) -> None: ...
    def restart(self, name: str) -> None: ...
    def remove(self, name: str) -> None: ...
    def scale(self, count: int, use: Use = alike) -> list[str]:
        """Have so many replicas. Returns the names of those that are to go, least used first: `remove` each when nothing runs
        there."""
        ...

    def pid(self, name: str) -> int | None: ...
    def close(self) -> None: ...


class Host(NamedTuple):
    """Where a replica runs."""

    cores: frozenset[int] = frozenset()
    """empty: any"""
    environment: Mapping[str, str] = {}


@dataclass(slots=True)
class ReplicaProcess:
    """A place for one replica, and its present process."""

    name: str
    place: Host
    child: subprocess.Popen[bytes] | AdoptedProcess | None = None
    born: float = 0.0
    """when the process began, as its host says"""
    ready: Path = Path()
    up: bool = False
    started_at: float = 0.0
    start_at: float = 0.0
    """when to start it (again)"""
    pause_s: float = FIRST_PAUSE_S
    wanted: bool = True
    starts: int = 0
    events: list[ReplicaEvent] = field(default_factory=list)


class Launcher:
    """Used by the thread of the front's service.

    Args:
        command: makes the words of a replica's process, which writes its address into the file that it is given, and ends
            when its standard input does; or, with `kept`, when it has had no front for some time.
        places: of the replicas, in order; more than are given are placed as the first ones again.
        kept: has the processes that have outlived the front before, and gets those of this one."""

    def __init__(
        self,
        command: Callable[[Path], list[str]],
        places: Sequence[Host],
        clock: Callable[[], float] = time.monotonic,
        kept: ReplicaStateFile | None = None,
    ):
        self.slots: dict[str, ReplicaProcess] = {}
        """by name of the replica, those that go included"""
        self._command = command
        self._places = places
        self._clock = clock
        self._made = 0
        self._trouble = ""
        """why not all was done at the last look"""
        self._kept = kept if kept is not None else ReplicaStateFile(None)
        before = self._kept.read()
        self._folder = folder_after(before)
        if before is None:
            self.scale(len(places))
        else:
            self._take_over(before)
        self._outlived = frozenset(slot.name for slot in self.slots.values() if slot.child is not None)

    @property
    def wanted(self) -> int:
        """How many replicas there are to be."""
        return sum(slot.wanted for slot in self.slots.values())

    @property
    def outlived(self) -> frozenset[str]:
        return self._outlived

    def scale(self, count: int, use: Use = alike) -> list[str]:
        """Have so many replicas. Returns the names of those that are to go: `remove` each when nothing runs there."""
        staying = [slot for slot in self.slots.values() if slot.wanted]
        for _ in range(count - len(staying)):
            taken = [slot.place for slot in staying]
            place = min(self._places, key=taken.count)
            slot = ReplicaProcess(str(self._made), place, start_at=self._clock())
            self._made += 1
            self.slots[slot.name] = slot
            staying.append(slot)
        going = least_used([slot.name for slot in staying], count, use)
        for name in going:
            self.slots[name].wanted = False
        return going

    def tend(self) -> list[ReplicaEvent]:
        """Start what is to be started. Returns what has become of the others since the last call."""
        events, trouble = list[ReplicaEvent](), ""
        looks: list[Callable[[], list[ReplicaEvent] | None]] = [partial(self._look, slot) for slot in self.slots.values()]
        for look in [*looks, self._keep]:
            try:
                events += look() or []
            except OSError as error:  # no descriptors, no processes, a full disk: the others run on
                trouble = str(error)
        if trouble and trouble != self._trouble:  # once, however often it is tried again
            log.warning("replicas cannot be looked after, tried again reason=%s", trouble)
        self._trouble = trouble
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
            if child.stdin is not None:
                child.stdin.close()
        self._kept.remove()
        self._folder.close()

    def _take_over(self, before: SavedFleet) -> None:
        """Go on with what the front before has left."""
        self._made, now = before.made, self._clock()
        for kept in before.replicas:
            place = self._places[kept.place if kept.place < len(self._places) else 0]
            slot = ReplicaProcess(
                kept.name, place, adopt(kept), kept.started, Path(kept.ready), wanted=kept.wanted, starts=kept.starts
            )
            slot.started_at = slot.start_at = now
            self.slots[slot.name] = slot
            if slot.child is not None:
                log.info("replica taken over name=%s pid=%d", slot.name, slot.child.pid)
        if before.asked != len(self._places):
            for name in self.scale(len(self._places)):
                self.remove(name)

    def _keep(self) -> None:
        if self._kept.lasting:
            slots = [self._kept_slot(slot) for slot in self.slots.values()]
            self._kept.write(SavedFleet(str(self._folder.path), self._kept.told, len(self._places), self._made, slots))

    def _kept_slot(self, slot: ReplicaProcess) -> SavedReplica:
        place = self._places.index(slot.place)
        pid = None if slot.child is None else slot.child.pid
        return SavedReplica(slot.name, place, slot.starts, slot.wanted, str(slot.ready), pid, slot.born)

    def _look(self, slot: ReplicaProcess) -> list[ReplicaEvent]:
        child, now = slot.child, self._clock()
        if child is None:
            if not slot.wanted:
                del self.slots[slot.name]
                return [ReplicaEvent(slot.name, None, "it is not wanted any more", gone=True)]
            if now >= slot.start_at:
                slot.start_at = now + FIRST_PAUSE_S  # unless it succeeds
                self._start(slot, now)
            return []
        slot.born = slot.born or begun_at(child.pid)  # unless the host could not say when it was started
        code = child.poll()
        if code is not None:
            return [self._ended(slot, code, now)]
        if not slot.up and slot.ready.exists():
            slot.up = True
            return [ReplicaEvent(slot.name, slot.ready.read_text(), "it listens")]
        if not slot.up and now - slot.started_at > START_S:
            child.kill()
        return []

    def _start(self, slot: ReplicaProcess, now: float) -> None:
        slot.starts += 1
        slot.ready = self._folder.path / f"ready-{slot.name}-{slot.starts}"
        slot.up, slot.started_at, slot.born = False, now, 0.0
        slot.child = subprocess.Popen(
            self._command(slot.ready),
            stdin=subprocess.DEVNULL if self._kept.lasting else subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            env={**os.environ, **slot.place.environment},
            start_new_session=True,
            pass_fds=[self._folder.lock],  # its socket is there
        )
        slot.born = begun_at(slot.child.pid)
        if slot.place.cores:
            try:
                os.sched_setaffinity(slot.child.pid, slot.place.cores)  # of its first thread, whose all others inherit
            except OSError as error:
                log.warning("replica not bound to its cores name=%s reason=%s", slot.name, error)
        self._keep()
        log.info("replica starts name=%s pid=%d", slot.name, slot.child.pid)

    def _ended(self, slot: ReplicaProcess, code: int, now: float) -> ReplicaEvent:
        assert slot.child is not None
        if slot.child.stdin is not None:
            slot.child.stdin.close()
        slot.child = None
        steady = now - slot.started_at > STEADY_S
        pause = min(slot.pause_s, FIRST_PAUSE_S) if steady else slot.pause_s
        slot.start_at, slot.pause_s = now + pause, min(MOST_PAUSE_S, max(FIRST_PAUSE_S, 2 * pause))
        why = "a status that only its parent was told" if code == UNKNOWN else f"exit status {code}"
        why = f"signal {-code}" if code < 0 else why
        log.info("replica ended name=%s why=%r pause_s=%.1f", slot.name, why, pause)
        return ReplicaEvent(slot.name, None, f"its process ended with {why}", not slot.wanted)


def folder_after(before: SavedFleet | None) -> Folder:
    """Return the folder for the files of replicas: that of the front before, if there is one."""
    if before is not None:
        with suppress(OSError):  # no replica was left that held it
            return Folder.of_another(Path(before.folder))
    return Folder("fleet")
