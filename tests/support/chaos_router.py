"""The router of a tormented fleet, in a process of its own: what `rollout serve --replicas N --journal FILE` makes, with
hash engines for replicas and with links that can be cut.

    python -m tests.support.chaos_router FOLDER ADDRESS READY_FILE REPLICAS SEED [FAULT]

Lines of standard input: "cut NAME" cuts the link of that replica; its end is the router's. FOLDER/doubled gets a line for each
child that comes out of the router twice, FOLDER/unprepared one for each commit of what a replica had not prepared,
FOLDER/alarms one for each lie, as there is none. FAULT, which
the accounts must show: "stale" = replica 1 takes no weights; "repeats" = repeats come and are not dropped; "unprepared" =
commits are sent to replicas that have not prepared; "lies" = the samples of replica 1 have another first token.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from rollout.config import ServiceConfig
from rollout.engine.values import KVPolicy, Limits, Refreshed, Sample, Served
from rollout.fleet.fleet import Fleet, FleetOptions
from rollout.fleet.groups import FleetGroups
from rollout.fleet.join_listener import JoinEndpoint, JoinListener, ReplicaEvent
from rollout.fleet.launcher import Host, Launcher, ProcessExit, RouterFolder
from rollout.fleet.owners import Owners
from rollout.fleet.replica_set import Predecessor
from rollout.fleet.verifier import Verification
from rollout.fleet.weights import ReplicaTransaction
from rollout.process import write_atomically
from rollout.service.build import open_service
from rollout.service.journal import Journal
from rollout.transport.sockets import ServiceEnd
from tests.support.faulty_link import Proxy

STEP_S = 0.004
WAIT = 120.0
"""for what comes: a bound for hangs only"""
TRUSTED, VERIFIED = "local-0", 0.3
"""replica that verifies this share of the children of the others, unless something is broken on purpose"""
ALONE_S = 20.0
"""that a replica outlives its router"""


class Cut(JoinListener):
    """Reaches replicas through a proxy, so that their links can be cut."""

    def __init__(self, seed: int, *endpoints: JoinEndpoint, owners: Owners) -> None:
        super().__init__(*endpoints, owners=owners)
        self.seed = seed
        self.proxies: dict[str, Proxy] = {}

    def poll(self, exits: Sequence[ProcessExit] = ()) -> list[ReplicaEvent]:
        events = []
        for event in super().poll(exits):
            if old := self.proxies.pop(event.name, None):
                old.__exit__(None, None, None)
            if isinstance(event.address, str):
                proxy = self.proxies[event.name] = Proxy(event.address, self.seed)
                event = event._replace(address=proxy.address)
            events.append(event)
        return events

    def close(self) -> None:
        super().close()
        for proxy in self.proxies.values():
            proxy.__exit__(None, None, None)


class Watched(Fleet):
    """Writes down what must not be: children that come out of the router twice, commits of what was not prepared."""

    def __init__(self, joins: JoinListener, launcher: Launcher, before: Served, folder: Path, share: float) -> None:
        predecessor, options = Predecessor(before, launcher.folder.returning), FleetOptions(verification=Verification(share))
        super().__init__(joins, launcher, options=options, predecessor=predecessor)
        self._folder, self._given, self._lies = folder, set[tuple[str, int]](), 0

    def commit(self, staging: Any, kv: KVPolicy = "keep", via: str = "memory") -> Refreshed | None:
        transaction = staging.transaction
        if not transaction.committing and transaction.prepared != transaction.members:
            self._write("unprepared", f"{staging.version}")
        return super().commit(staging, kv, via)

    def step(self) -> list[Sample]:
        ended = super().step()
        for sample in ended:
            if (sample.group_id, sample.index) in self._given:
                self._write("doubled", f"{sample.group_id} {sample.index}")
            self._given.add((sample.group_id, sample.index))
        if self.verifier.counts["lies"] > self._lies:
            self._lies = self.verifier.counts["lies"]
            self._write("alarms", self._joins.owners.banned[-1].name)
        return ended

    def close(self) -> None:
        super().close()
        print(f"verification: {dict(self.verifier.counts)}", file=sys.stderr, flush=True)

    def _write(self, name: str, line: str) -> None:
        with (self._folder / name).open("a") as file:
            file.write(f"{line}\n")


def break_it(fault: str) -> None:
    """Take away what keeps one promise."""
    if fault == "unprepared":
        ReplicaTransaction.ready = property(lambda self: bool(self.members))  # type: ignore[assignment, method-assign]
    if fault == "repeats":
        arrived = FleetGroups._arrived

        def twice(self: FleetGroups, part: Any, sample: Sample | None) -> None:
            arrived(self, part, sample)
            if sample is not None and not part.open.left:  # of a group that is done: nobody waits for what is lost by this
                self.ended.append(msgspec.structs.replace(sample, group_id=part.open.group.id))

        FleetGroups._arrived = twice  # type: ignore[method-assign]


def main() -> None:
    given = sys.argv[1:]
    folder, address, ready, replicas, seed, fault = Path(given[0]), given[1], *given[2:5], (given[5] if given[5:] else "")
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    break_it(fault)

    where = RouterFolder(folder / "replicas")

    def command(name: str) -> list[str]:
        kind = "" if name != "local-1" else fault if fault in ("stale", "lies") else "picky"
        words = [where.endpoint, name, str(STEP_S), f"fault={kind}", f"alone={ALONE_S}"]
        return [sys.executable, "-m", "tests.support.joined", *words]

    journal = Journal(str(folder / "journal"), "hash")
    launcher = Launcher(command, [Host()] * int(replicas), where)
    verified = fault in ("", "lies")
    owners = Owners((TRUSTED,) if verified else ())
    joins = Cut(int(seed), JoinEndpoint(ServiceEnd(where.endpoint, Limits()), launcher.admit), owners=owners)
    fleet = Watched(joins, launcher, journal.weights, folder, VERIFIED if verified else 0.0)
    try:
        signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(0))
        fleet.open(WAIT, count=1 if where.returning else None, patient=True)
        service = open_service(fleet, ServiceConfig(endpoint=address, client_grace_s=WAIT), journal=journal)
        fleet.inbox.wake = service.wake
        signal.signal(signal.SIGTERM, lambda number, frame: service.stop("SIGTERM"))

        def listen() -> None:
            for line in sys.stdin:
                if proxy := joins.proxies.get(line.split()[1]):
                    proxy.cut()
            os.kill(os.getpid(), signal.SIGTERM)

        threading.Thread(target=listen, daemon=True).start()
        write_atomically(Path(ready), service.endpoint)
        service.run()
    finally:
        fleet.close()


if __name__ == "__main__":
    main()
