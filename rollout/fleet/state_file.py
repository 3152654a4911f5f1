"""The processes of replicas, in a file: they outlive a front that is killed, and the next front takes them over.

    front 1: starts them ─→ Kept.write ─→ SIGKILL            front 2: Kept.read ─→ an Adopted for each that lives

The file lies beside the front's journal, whose lock says that one front at a time has it. A process that is in no file, since
its front was killed between starting it and writing that, ends by itself (`ServiceConfig.exit_without_clients_s`).
"""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

import msgspec
import psutil

from rollout.logs import logger

UNKNOWN = 1 << 16
"""stands for the exit status of a process that was another one's child"""
SAME_S = 2.0
"""by which two readings of when a process began may differ: the clock of the host is put right now and then"""
POLL_S = 0.05

log = logger(__name__)


class SavedReplica(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A place for a replica, and its process, if it has one."""

    name: str
    place: int
    starts: int
    wanted: bool
    ready: str
    pid: int | None = None
    started: float = 0.0
    """when the process began, seconds since 1970: another one may have its number by now"""


class SavedFleet(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the file holds."""

    folder: str
    """of the files in which processes say where they listen"""
    told: str
    """what the processes were told: a front that tells another thing starts others"""
    asked: int
    """how many replicas the front was started with"""
    made: int
    """names given so far"""
    replicas: list[SavedReplica]


class AdoptedProcess:
    """A process that another front started: what `rollout.fleet.launcher` needs of `subprocess.Popen`."""

    stdin = None

    def __init__(self, process: psutil.Process) -> None:
        self.pid = process.pid
        self._process = process

    def poll(self) -> int | None:
        try:
            ended = not self._process.is_running() or self._process.status() == psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            ended = True
        return UNKNOWN if ended else None

    def wait(self, timeout: float | None = None) -> int:
        """Raises subprocess.TimeoutExpired."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while self.poll() is None:
            if deadline is not None and time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0)
            time.sleep(POLL_S)
        return UNKNOWN

    def kill(self) -> None:
        self._send("kill")

    def terminate(self) -> None:
        self._send("terminate")

    def _send(self, what: str) -> None:
        try:
            getattr(self._process, what)()  # to no other process of that number
        except psutil.NoSuchProcess:
            pass


def adopt(kept: SavedReplica) -> AdoptedProcess | None:
    """Find the process of a replica; None if it has ended."""
    if kept.pid is None:
        return None
    try:
        process = psutil.Process(kept.pid)
        same = abs(process.create_time() - kept.started) < SAME_S
    except psutil.NoSuchProcess:
        return None
    found = AdoptedProcess(process) if same else None
    return found if found is not None and found.poll() is None else None


def begun_at(pid: int) -> float:
    """Return when a process began, seconds since 1970; 0.0 for one that is gone."""
    try:
        return float(psutil.Process(pid).create_time())
    except psutil.NoSuchProcess:
        return 0.0


class ReplicaStateFile:
    """The file. `path`: None: nothing is kept. `told`: what processes are told, as text that is equal if that is."""

    def __init__(self, path: Path | None, told: str = "") -> None:
        self._path = path
        self.told = told
        self._written: SavedFleet | None = None

    @property
    def lasting(self) -> bool:
        return self._path is not None

    def read(self) -> SavedFleet | None:
        """Return what the front before has left; None: nothing that can be used. Processes that were told another thing are
        killed."""
        if self._path is None:
            return None
        try:
            kept = msgspec.json.decode(self._path.read_bytes(), type=SavedFleet)
        except FileNotFoundError:
            return None
        except (OSError, msgspec.MsgspecError) as error:
            log.warning(
                "replicas of the front before are not known, they end by themselves path=%s reason=%s", self._path, error
            )
            return None
        if kept.told == self.told and os.path.isdir(kept.folder):
            return kept
        for one in kept.replicas:
            if (process := adopt(one)) is not None:
                log.warning("replica of another configuration is killed name=%s pid=%d", one.name, process.pid)
                process.kill()
        return None

    def write(self, fleet: SavedFleet) -> None:
        """Keep this, if it is new. Raises OSError."""
        if self._path is not None and fleet != self._written:
            temporary = self._path.with_name(f".{self._path.name}.{os.getpid()}")
            temporary.write_bytes(msgspec.json.encode(fleet))
            temporary.replace(self._path)  # whole, or not at all
            self._written = fleet

    def remove(self) -> None:
        if self._path is not None:
            self._path.unlink(missing_ok=True)
