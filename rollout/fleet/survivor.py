"""Handle of a replica process whose router was killed, for the router that was started after it."""

from __future__ import annotations

import subprocess
import time
from typing import Final

import psutil


class Survivor:
    """A process that is not a child of this one, with the methods of `subprocess.Popen` that `rollout.fleet.launcher` uses."""

    UNKNOWN: Final = 1 << 16
    """in place of the exit status, which only the parent learns"""
    POLL_S: Final = 0.05
    stdin = None

    def __init__(self, process: psutil.Process) -> None:
        self.pid = process.pid
        self._process = process

    @classmethod
    def of(cls, pid: int) -> Survivor | None:
        """Find a process; None if it has ended."""
        try:
            return cls(psutil.Process(pid))
        except psutil.NoSuchProcess:
            return None

    def poll(self) -> int | None:
        try:
            ended = not self._process.is_running() or self._process.status() == psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            ended = True
        return self.UNKNOWN if ended else None

    def wait(self, timeout: float | None = None) -> int:
        """Raises subprocess.TimeoutExpired."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while self.poll() is None:
            if deadline is not None and time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0)
            time.sleep(self.POLL_S)
        return self.UNKNOWN

    def kill(self) -> None:
        self._send("kill")

    def terminate(self) -> None:
        self._send("terminate")

    def _send(self, action: str) -> None:
        try:
            getattr(self._process, action)()  # psutil checks that the pid is still the same process
        except psutil.NoSuchProcess:
            pass
