"""Starts replicas as processes of this host, and restarts them when they end. They join the router like any other replica.

    start ─→ (the process joins: `admit`) ─→ (the process ends) ─→ ProcessExit ─→ pause 0.5 s, 1 s, … 30 s ─→ start

With a journal the processes outlive a router that was killed, and join the next one, which listens in the same `RouterFolder`.
"""

from __future__ import annotations

import fcntl
import os
import re
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

from rollout.fleet.survivor import Survivor
from rollout.fleet.timing import TIMING, Timing
from rollout.logs import logger
from rollout.process import Folder, open_lock, write_atomically
from rollout.transport import own_files

PREFIX = "local-"
"""of the names of replicas that the router starts on this host"""
NOTE = re.compile(rb"(?:/[^\n]*/rollout-fleet-[a-z0-9_]{8}\n[^\n]*\n)?")
"""content of `RouterFolder`'s note: the folder, and the digest of the configuration"""

log = logger(__name__)


class ProcessExit(NamedTuple):
    """The process of a replica has ended."""

    name: str
    why: str
    removed: bool = False
    """no other process is started in its place"""


Use = Callable[[str], tuple[int, ...]]
"""rank of a replica by name; the lowest is removed first"""


def alike(name: str) -> tuple[int, ...]:
    """Rank all replicas equally."""
    return ()


def least_used(names: Sequence[str], count: int, use: Use) -> list[str]:
    """Choose which of `names`, ordered from oldest to newest, to remove so that `count` remain: the lowest rank first, and of
    equal ranks the newest."""
    return sorted(reversed(names), key=use)[: max(0, len(names) - count)]


class LauncherLike(Protocol):
    """Starts and stops the processes of replicas: on this host (`Launcher`), on Ray (`rollout.fleet.ray_launcher`)."""

    @property
    def names(self) -> list[str]:
        """Names of the replicas that should run."""
        ...

    def poll(self) -> list[ProcessExit]:
        """Start processes that are due. Returns those that have ended since the last call."""
        ...

    def kill(self, name: str) -> None:
        """Kill the process of a replica, if this launcher started it; another one is started."""
        ...

    def remove(self, name: str) -> None:
        """Stop the process of a replica, if this launcher started it, and start no other."""
        ...

    def scale(self, count: int, use: Use = alike) -> list[str]:
        """Change the number of replicas. Returns the names of those to `remove` once they are idle."""
        ...

    def close(self) -> None: ...


class Host(NamedTuple):
    """Where a replica runs."""

    cores: frozenset[int] = frozenset()
    """empty: any"""
    environment: Mapping[str, str] = {}


class RouterFolder:
    """The folder in which a router listens for the replicas that it starts.

    Args:
        note: file beside the journal that names the folder, so that the next router finds it after this one was killed;
            None: there is no journal.
        configuration: digest of what replicas are started with."""

    def __init__(self, note: Path | None = None, configuration: str = "") -> None:
        self._note = note
        before, had = _noted(note)
        self.folder = before if before is not None else Folder("fleet")
        self.returning = before is not None and had == configuration
        """replicas of a router that was killed may join again"""
        self.lasting = note is not None
        """replicas outlive this router"""
        if note is not None:
            write_atomically(note, f"{self.path}\n{configuration}\n")

    @property
    def path(self) -> Path:
        return self.folder.path

    @property
    def endpoint(self) -> str:
        """Where replicas join."""
        return f"ipc://{self.path}/join"

    def close(self) -> None:
        if self._note is not None and own_files.is_own(self._note, NOTE):
            self._note.unlink(missing_ok=True)
        self.folder.close()


def _noted(note: Path | None) -> tuple[Folder | None, str]:
    """Return the folder of the router before and the digest of its configuration, if replicas still hold the folder. Raises
    OSError for a file that is no note."""
    if note is None or not own_files.is_there(note):
        return None, ""
    if not own_files.is_own(note, NOTE):
        raise FileExistsError(f"{note} is there, and no router wrote it: it stays; name another journal, or move it")
    with suppress(OSError, ValueError):  # it is empty after a crash of the machine, or the folder is gone
        path, configuration = note.read_text().splitlines()
        if _is_held(Path(path)):
            return Folder.of_another(Path(path)), configuration
    return None, ""


def _is_held(path: Path) -> bool:
    """Whether a process holds the folder. Raises OSError if it is gone, or no folder of ours."""
    lock = open_lock(path)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(lock)
    return False


@dataclass(slots=True)
class ReplicaProcess:
    """A replica that should run, and its present process."""

    name: str
    place: Host
    start_at: float
    """when to start it (again)"""
    pause_s: float
    child: subprocess.Popen[bytes] | Survivor | None = None
    started_at: float = 0.0
    joined: bool = False
    wanted: bool = True


class Launcher:
    """Used by the thread of the router's service.

    Args:
        command: returns the command line of the replica of this name.
        places: of the replicas, in order; further replicas share the places of the first ones.
        folder: held open by the processes; closed by `close`."""

    def __init__(
        self,
        command: Callable[[str], list[str]],
        places: Sequence[Host],
        folder: RouterFolder,
        clock: Callable[[], float] = time.monotonic,
        timing: Timing = TIMING,
    ):
        self.folder = folder
        self._processes: dict[str, ReplicaProcess] = {}
        """by name, including those that are being removed"""
        self._command = command
        self._places = places
        self._clock = clock
        self._timing = timing
        self._made = 0
        self._trouble = ""
        """why a process could not be started at the last poll"""
        self._returning_until = clock() + timing.return_s if folder.returning else 0.0
        self.scale(len(places))

    @property
    def names(self) -> list[str]:
        return [one.name for one in self._processes.values() if one.wanted]

    def scale(self, count: int, use: Use = alike) -> list[str]:
        staying = [one for one in self._processes.values() if one.wanted]
        for _ in range(count - len(staying)):
            used = [one.place for one in staying]
            start_at = max(self._clock(), self._returning_until)
            place = min(self._places, key=used.count)
            one = ReplicaProcess(f"{PREFIX}{self._made}", place, start_at, self._timing.first_pause_s)
            self._made += 1
            self._processes[one.name] = one
            staying.append(one)
        removed = least_used([one.name for one in staying], count, use)
        for name in removed:
            self._processes[name].wanted = False
        return removed

    def admit(self, name: str, pid: int) -> bool:
        """Whether a process that joins is the replica of this name. One that has outlived the router before it is admitted if
        no other process was started in its place, and only under one name."""
        one = self._processes.get(name)
        if one is None or not one.wanted:
            return one is not None and one.child is not None and one.child.pid == pid
        taken = any(other.child is not None and other.child.pid == pid for other in self._processes.values())
        if one.child is None and not taken and self._clock() < self._returning_until:
            one.child = Survivor.of(pid)
            one.started_at = self._clock()
            log.info("replica has joined again name=%s pid=%d", name, pid)
        one.joined = one.child is not None and one.child.pid == pid
        return one.joined

    def poll(self) -> list[ProcessExit]:
        exits, trouble = list[ProcessExit](), ""
        for one in list(self._processes.values()):
            try:
                exits += self._poll_one(one, self._clock())
            except OSError as error:  # no descriptors, no processes, a full disk: the others run on
                trouble = str(error)
        if trouble and trouble != self._trouble:  # once, however often the start is repeated
            log.warning("replica not started, trying again reason=%s", trouble)
        self._trouble = trouble
        return exits

    def kill(self, name: str) -> None:
        one = self._processes.get(name)
        if one is not None and one.child is not None:
            one.child.kill()

    def remove(self, name: str) -> None:
        one = self._processes.get(name)
        if one is not None:
            one.wanted = False
            if one.child is not None:
                one.child.terminate()

    def close(self) -> None:
        """Stop all processes; kill those that do not stop within `stop_s`."""
        children = [one.child for one in self._processes.values() if one.child is not None]
        for child in children:
            child.terminate()
        deadline = time.monotonic() + self._timing.stop_s
        for child in children:
            try:
                child.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()
            if child.stdin is not None:
                child.stdin.close()
        self.folder.close()

    def _poll_one(self, one: ReplicaProcess, now: float) -> list[ProcessExit]:
        if one.child is None:
            if not one.wanted:
                del self._processes[one.name]
                return [ProcessExit(one.name, "it was removed", True)]
            if now >= one.start_at:
                one.start_at = now + self._timing.first_pause_s  # unless it succeeds
                self._start(one, now)
            return []
        status = one.child.poll()
        if status is not None:
            return [self._ended(one, one.child, status, now)]
        if not one.joined and now - one.started_at > self._timing.start_s:
            one.child.kill()
        return []

    def _start(self, one: ReplicaProcess, now: float) -> None:
        one.joined, one.started_at = False, now
        one.child = subprocess.Popen(
            self._command(one.name),
            stdin=subprocess.DEVNULL if self.folder.lasting else subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            env={**os.environ, **one.place.environment},
            start_new_session=True,
            pass_fds=[self.folder.folder.lock],  # its socket is there
        )
        if one.place.cores:
            try:
                os.sched_setaffinity(one.child.pid, one.place.cores)  # of its first thread, whose all others inherit
            except OSError as error:
                log.warning("replica not bound to its cores name=%s reason=%s", one.name, error)
        log.info("replica starts name=%s pid=%d", one.name, one.child.pid)

    def _ended(self, one: ReplicaProcess, child: subprocess.Popen[bytes] | Survivor, status: int, now: float) -> ProcessExit:
        if child.stdin is not None:
            child.stdin.close()
        one.child = None
        first, last = self._timing.first_pause_s, self._timing.max_pause_s
        pause = min(one.pause_s, first) if now - one.started_at > self._timing.steady_s else one.pause_s
        one.start_at, one.pause_s = now + pause, min(last, max(first, 2 * pause))
        why = how_ended(status)
        log.info("replica ended name=%s why=%r pause_s=%.1f", one.name, why, pause)
        return ProcessExit(one.name, f"its process ended with {why}", not one.wanted)


def how_ended(status: int) -> str:
    """Describe the exit status of a process."""
    if status == Survivor.UNKNOWN:
        return "an exit status that only its parent knew"
    return f"signal {-status}" if status < 0 else f"exit status {status}"
