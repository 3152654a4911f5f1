"""A fleet's router as a process that may be killed and started again, with its log."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil

from rollout.config import Config, dump
from tests.support.lasting import ROOT

START_S = 400.0
STOP_S = 60.0

FAILURES = re.compile(
    r"Traceback|message not served|engine\.(step|submit|abort) failed|I/O thread failed|sample of an unknown group|Fatal Python"
)
"""in a log: what a client must never bring about"""
LIAR = "liar"
"""name of a replica that lies: the router says so, and that is no failure"""
OTHER = "other"
"""name of a replica with the same weights and another configuration"""
EXPECTED = ("signal 9", "exit status 0", "an exit status that only its parent")
ENDED = re.compile(r"replica ended name=(\S+) why='?\"?([^'\"]*)")


class Router:
    """`rollout serve --replicas 2 --journal`, one life after the other at one address."""

    def __init__(self, config: Config, folder: Path) -> None:
        self.folder = folder
        self.endpoint = config.service.endpoint
        self.lives = 0
        self.told: dict[str, int] = {}
        """pid of each replica, by name, as the router's status had it last; written by who asks for that"""
        self.excused: dict[int, int] = {}
        """by life, from which byte of its log on it may tell of its end"""
        self.toml = folder / "serve.toml"
        self.toml.write_text(dump(config))
        replica = folder / "replica.toml"
        replica.write_text(dump(Config(engine=config.engine)))
        self.replica = replica
        """configuration of a replica that joins"""
        self.join_address = str(config.fleet.listen_replicas)
        self.environment: dict[str, str] = {}
        """variables of the router and its replicas"""
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def log(self) -> Path:
        """Return the log of this life."""
        return self.folder / f"service{self.lives}.log"

    def joining(self, name: str) -> list[str]:
        """Return the words of a replica that joins."""
        return ["--config", str(self.replica), "--join", self.join_address, "--fleet.name", name]

    def refused_configuration(self, life: int) -> bool | None:
        """Whether a life's log says that the replica OTHER was refused for its configuration. None: it has not joined."""
        text = (self.folder / f"service{life}.log").read_text(errors="replace")
        if f"replica joins name={OTHER} " not in text:
            return None
        return any(f"name={OTHER} " in line and ", configuration '" in line for line in text.splitlines())

    def excuse(self) -> None:
        """Let the router tell of errors from here on: its disk is full."""
        self.excused[self.lives] = self.log.stat().st_size

    def start(self) -> None:
        self.lives += 1
        ready = self.folder / f"ready{self.lives}"
        words = ["-m", "rollout", "serve", "--config", str(self.toml), "--ready-file", str(ready), "--exit-on-stdin-close"]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, *words],
                cwd=ROOT,
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=log,
                env={**os.environ, **self.environment},
            )
        deadline = time.monotonic() + START_S
        while not ready.exists():
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the service does not start; its log:\n{self.log.read_text()[-4000:]}")
            time.sleep(0.05)

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    @property
    def alive(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def replicas(self) -> dict[str, int]:
        """Return the pid of each replica that has a process, by name, as far as the router has told; they outlive one that is
        killed."""
        return {name: pid for name, pid in self.told.items() if is_replica(pid)}

    def kill(self) -> None:
        """Kill the router, if it has not ended."""
        assert self.process is not None and self.process.stdin is not None
        self.process.kill()
        self.process.wait(STOP_S)
        self.process.stdin.close()

    def left(self) -> dict[str, int]:
        """Kill the replicas that are still there though their router was stopped in order. Returns their pids by name."""
        deadline = time.monotonic() + STOP_S
        while (left := self.replicas()) and time.monotonic() < deadline:
            time.sleep(0.1)
        for pid in left.values():
            psutil.Process(pid).kill()
        return left

    def stop(self) -> int:
        """Stop the router in order (SIGTERM). Returns the exit status."""
        assert self.process is not None and self.process.stdin is not None
        self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(STOP_S)
            return -9
        finally:
            self.process.stdin.close()

    def failures(self) -> list[str]:
        """Return the lines of the logs that tell of what must not be: mistakes that came through, replicas that ended by
        themselves."""
        lines: list[str] = []
        for life in range(1, self.lives + 1):
            text = (self.folder / f"service{life}.log").read_bytes()
            lines += text[: self.excused.get(life)].decode(errors="replace").splitlines()
        found = [traceback_at(lines, i) for i, line in enumerate(lines) if FAILURES.search(line)]
        for line in lines:
            ended = ENDED.search(line)
            if ended and ended[1] not in (LIAR, OTHER) and not ended[2].startswith(EXPECTED):
                found.append(line)
        return found


def traceback_at(lines: list[str], at: int) -> str:
    """Join a line of a log and, if a traceback begins there, the lines up to its error."""
    if "Traceback" not in lines[at]:
        return lines[at]
    end = at + 1
    while end < len(lines) and lines[end].startswith((" ", "\t")):
        end += 1
    return "\n".join(lines[at : end + 1])


def is_replica(pid: int) -> bool:
    try:
        process = psutil.Process(pid)
        return process.status() != psutil.STATUS_ZOMBIE and "--join" in process.cmdline()
    except psutil.Error:
        return False
