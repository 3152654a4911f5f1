"""Replicas that join a fleet: processes with a hash engine, and the router's end of it.

Run as a program, it joins and serves until SIGTERM, as `rollout serve --join` does:

    python -m tests.support.joined ROUTER NAME STEP_SECONDS [elsewhere] [fault=FAULT] [alone=SECONDS]

"elsewhere": it says that it is on another host than the router, and shares no memory with it. FAULT: see `HashEngine`. "alone":
it ends when it has had no router for so long.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rollout.engine.values import Limits
from rollout.fleet.fleet import Fleet, FleetOptions
from rollout.fleet.join_listener import JoinEndpoint, JoinListener
from rollout.fleet.owners import Owners
from rollout.process import STOP_TIMEOUT_S
from rollout.transport.keys import files
from rollout.transport.sockets import ServiceEnd
from tests.support.fleet import WAIT, step_until

ROOT = Path(__file__).parents[2]


class JoinedFleet:
    """A router that listens for replicas, with keys where `folder` is given, and processes that join it."""

    def __init__(
        self,
        folder: Path | None = None,
        endpoint: str = "tcp://127.0.0.1:*",
        owners: Owners | None = None,
        options: FleetOptions | None = None,
    ) -> None:
        self.folder = folder
        self.file = None if folder is None else folder / "service.json"
        if self.file is not None:
            files.create(self.file, "tcp://127.0.0.1:1")
        self.end = ServiceEnd(endpoint, Limits(), None if self.file is None else str(self.file))
        self.joins = JoinListener(JoinEndpoint(self.end), owners=owners)
        self.fleet = Fleet(self.joins, options=options)
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def key(self, name: str, *roles: files.Role) -> Path:
        """Make a connection file for the router's address for replicas."""
        assert self.folder is not None and self.file is not None
        path = self.folder / f"{name}.json"
        files.add(self.file, name, roles, path, self.end.endpoint)
        self.end.keys.reload()  # type: ignore[union-attr]  now, and not a tenth of a second later
        return path

    def start(self, name: str, step_s: float = 0.0, *words: str, router: str = "") -> subprocess.Popen[bytes]:
        if not router:
            path = None if self.folder is None else self.folder / f"{name}.json"
            router = self.end.endpoint if path is None else str(path if path.exists() else self.key(name, "replica"))
        command = [sys.executable, "-m", "tests.support.joined", router, name, str(step_s), *words]
        if (before := self.processes.get(name)) is not None:
            end(before)
        child = self.processes[name] = subprocess.Popen(command, stdin=subprocess.PIPE, cwd=ROOT)
        return child

    def replica(self, name: str) -> dict[str, Any]:
        """Return what the status has of a replica; {} for one that the fleet does not know."""
        found = [one for one in self.fleet.status()["replicas"] if one["name"] == name]
        return found[0] if found else {}

    def await_state(self, name: str, state: str) -> None:
        step_until(self.fleet, lambda: self.replica(name).get("state") == state, f"{name} is {state}")

    def close(self) -> None:
        self.fleet.close()
        for child in self.processes.values():
            child.terminate()
        for child in self.processes.values():
            end(child)


def end(child: subprocess.Popen[bytes]) -> None:
    child.wait(STOP_TIMEOUT_S)
    assert child.stdin is not None
    child.stdin.close()


@contextmanager
def joined_fleet(folder: Path | None, *names: str, step_s: float = 0.0) -> Iterator[JoinedFleet]:
    """Open a fleet of replicas of these names, all of them serving. `folder`: for its keys; None = without."""
    joined = JoinedFleet(folder)
    try:
        for name in names:
            joined.start(name, step_s)
        if names:
            joined.fleet.open(WAIT, len(names), patient=True)
        yield joined
    finally:
        joined.close()


def main() -> None:
    from rollout.commands.progress import Phases, nothing
    from rollout.commands.serve_replica import joined_service
    from rollout.commands.starting import Stopper
    from rollout.config import Config, FleetConfig, ServiceConfig
    from rollout.transport.weights import receiving
    from tests.support.hash_engine import HashEngine

    router, name, step_s, *words = sys.argv[1:]
    options = dict(word.split("=") for word in words if "=" in word)
    if "elsewhere" in words:
        receiving.host_key = lambda: "shm:elsewhere"  # type: ignore[attr-defined]
    stop = Stopper()
    alone_s = float(options["alone"]) if "alone" in options else None
    config = Config(service=ServiceConfig(exit_without_clients_s=alone_s), fleet=FleetConfig(join=router, name=name))
    make = lambda config, progress: HashEngine(float(step_s), options.get("fault", ""))  # noqa: E731
    with joined_service(config, stop, Phases("replica", nothing), make) as service:
        stop.service_stop = service.stop
        service.run()
    sys.stdout.flush()
    os._exit(stop.status)


if __name__ == "__main__":
    main()
