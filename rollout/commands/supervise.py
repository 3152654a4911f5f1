"""`rollout serve --restart`: a parent process that restarts the service when it dies, or exits because its loop is stalled.

    Supervisor ── rollout serve ──> ends by itself ──> pause ──> another one, at the same address

The parent loads no model and has no clients, so little can fail in it. The journal (`--journal`) stores the groups of the
service; without it clients submit them again (`resubmit=True`) or get an error.
"""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from rollout.config import Config, dump
from rollout.engine.processes import run_module
from rollout.process import Folder, write_atomically

FIRST_PAUSE_S, MAX_PAUSE_S = 0.5, 30.0
"""delay before the next start; doubles while processes live shorter than STEADY_S"""
STEADY_S = 60.0
LOOK_S = 0.05
STALLS = 10
"""default of `exit_when_stalled_s`, as a multiple of `stall_s`"""
FINAL = (0, 2)
"""exit statuses after which there is no restart: it was asked to stop, or its configuration cannot be served"""

Command = Callable[[Path, str | None], list[str]]
"""returns the command line, for the file to which the process writes its address, and the address, None = any"""


class Supervisor:
    """Runs one process after the other. `stop` is for any thread, and for signal handlers.

    Args:
        ready_file: is written when the first process listens.
        clock: seconds, monotonic."""

    def __init__(self, command: Command, ready_file: str | None = None, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.starts = 0
        self.pid: int | None = None
        self._command = command
        self._ready_file = ready_file
        self._clock = clock
        self._asked = threading.Event()
        self._child: subprocess.Popen[bytes] | None = None

    def stop(self) -> None:
        """Stop the process, and start no other."""
        self._asked.set()
        if (child := self._child) is not None:
            child.terminate()

    def run(self) -> int:
        """Run processes until one was asked to stop, its model cannot be served, or the first one has never listened. Returns
        the exit status of the last one, 1 for a signal."""
        address, pause_s = None, 0.0
        with Folder("restart") as folder:
            while True:
                started = self._clock()
                status, address = self._live(folder, address)
                if self._asked.is_set() or status in FINAL or address is None:
                    return status if status >= 0 else 1
                steady = self._clock() - started > STEADY_S
                pause_s = FIRST_PAUSE_S if steady or not pause_s else min(MAX_PAUSE_S, 2 * pause_s)
                why = f"signal {-status}" if status < 0 else f"exit status {status}"
                line = f"rollout serve: the service ended with {why}; start {self.starts + 1} in {pause_s:.1f} s"
                print(line, file=sys.stderr, flush=True)
                if self._asked.wait(pause_s):
                    return 0

    def _live(self, folder: Path, address: str | None) -> tuple[int, str | None]:
        """Run one process until it ends. Returns its exit status, and the address of the service."""
        self.starts += 1
        ready = folder / f"ready{self.starts}"
        child = subprocess.Popen(self._command(ready, address), stdin=subprocess.PIPE, start_new_session=True)
        self._child, self.pid = child, child.pid
        assert child.stdin is not None
        with child.stdin:  # it closes when this process dies, which stops the service
            if self._asked.is_set():  # before the child was started
                child.terminate()
            while (status := child.poll()) is None and not ready.exists():
                time.sleep(LOOK_S)
            if ready.exists():
                address = ready.read_text()
                if self.starts == 1 and self._ready_file is not None:
                    write_atomically(Path(self._ready_file), address)
            return child.wait() if status is None else status, address


def serving(config: Config, folder: Path, quiet: bool = False) -> Command:
    """Return the command that serves a configuration, which is written into a folder. A stalled service exits."""
    exit_s = config.service.exit_when_stalled_s
    exit_s = STALLS * config.service.stall_s if exit_s is None else exit_s

    def command(ready: Path, address: str | None) -> list[str]:
        service = msgspec.structs.replace(
            config.service, exit_when_stalled_s=exit_s, endpoint=address or config.service.endpoint
        )
        toml = folder / "serve.toml"
        toml.write_text(dump(msgspec.structs.replace(config, service=service)))
        words = ["serve", "--config", str(toml), "--ready-file", str(ready), "--exit-on-stdin-close"]
        return run_module("rollout", *words, *(["--quiet"] if quiet else []))

    return command
