"""A fleet under attack for hours:  make endurance HOURS=0.1 SEED=0     (python -m tests.support.endurance.run)

    router of two replicas ── trainers ── Account ── Judge (an engine of its own)
       │    │    └─ garbage, half handshakes, deaf readers, broken weights
       │    └─ Adversary: SIGKILL, SIGSTOP, cut links; in the last part of a phase the router as well
       └─ Watcher: memory, descriptors, threads, pinned bytes

Phases with a tiny model and SmolLM2 take turns. It ends with a table, promise by promise, the seed that replays what was found,
and one line of JSON. The exit status is 1 if anything was found, or a turn of a loop was too long.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from rich.console import Console
from rich.table import Table

from rollout.client.api import RolloutClient
from rollout.config import Config, FleetConfig, ServiceConfig
from rollout.transport.errors import RolloutError
from rollout.transport.keys.cookie import FOLDER_VARIABLE
from tests.support.endurance import leaks, ledgers, ranks
from tests.support.endurance.account import Account, Judge
from tests.support.endurance.adversary import Adversary, proxy_of
from tests.support.endurance.foreign import Foreign
from tests.support.endurance.http import HttpTrainer
from tests.support.endurance.models import Kind, TestModel
from tests.support.endurance.numberless import Numberless
from tests.support.endurance.pushing import Pushing
from tests.support.endurance.serving import Router
from tests.support.endurance.trainers import KINDS, WAIT, Remembering
from tests.support.lasting import ROOT
from tests.support.ports import free_port

PHASE_S = 1800.0
VERIFIED = 0.3
"""share of the samples of the replica that is not spared"""
STORM = 0.2
"""last part of a phase, in which the router is killed as well"""
GARBAGE_A_SECOND = 170.0
"""of each attacker; more than half of them are no messages"""
ATTACKERS = 2
REPLICAS = 2
LOOK_S = 2.0
QUIET_S = 90.0
"""for what clients that were killed have left behind to be gone"""
FOUND = ("lost", "doubled", "mixed", "unequal", "orphans", "crashes", "leaks", "believed", "unrecorded", "alarms", "harmed")
"""what must not be"""
TURN_S = 0.5
"""CPU seconds that a turn of a loop may take at most, besides its step; its wall time is shown, other programs add to it"""


class Phase:
    """A model's turn."""

    def __init__(self, kind: Kind, seconds: float, seed: int, number: int, scratch: Path, trainers: int) -> None:
        self.seconds, self.number, self.scratch, self.trainers = seconds, number, scratch, trainers
        self.seed = seed + 1000 * number
        self.model = TestModel(kind, scratch)
        self.account = Account(self.model, self.seed)
        self.over, self.settled = threading.Event(), threading.Event()
        """nothing more is asked for; nothing more is owed"""
        self.folder = scratch / f"phase{number}"
        folders = [self.folder, *(self.folder / name for name in ("temporary", "sockets", "secrets"))]
        self.foreign = [Foreign(folder) for folder in folders]
        self.born = Counter[str]()
        """descriptors of the router before its first client, all of its replicas joined"""
        self.more_fds: dict[str, int] = {}
        """of the router at its end than at birth, by what they are"""
        os.environ[FOLDER_VARIABLE] = str(self.folder / "secrets")  # for this process and all that it starts
        config = Config(
            engine=self.model.config(self.seed),
            service=ServiceConfig(
                endpoint=f"tcp://127.0.0.1:{free_port()}",
                journal=str(self.folder / "journal"),
                client_grace_s=10.0,
                ledger=str(self.folder / "ledger"),
            ),
            fleet=FleetConfig(
                replicas=REPLICAS,
                replica_grace_s=WAIT,
                listen_replicas=f"tcp://127.0.0.1:{free_port()}",
                verify=VERIFIED,
                trust=(f"local-{number % 2}",),
                verify_wait_s=WAIT / 4,
            ),
        )
        self.router = Router(config, self.folder)
        self.router.environment = {"TMPDIR": str(self.folder / "temporary")}
        self.watcher = leaks.Watcher()
        self.longest_turn_s = self.longest_turn_cpu_s = 0.0
        self.malformed = Counter[int]()
        """told by the service, by life of the router"""
        self.verified = Counter[int]()
        """samples, by life of the router"""
        self.growths: list[leaks.Growth] = []

    def run(self) -> None:
        with ExitStack() as stack:
            self.router.start()
            stack.callback(self.router.stop)
            self._look_at_birth()
            proxies = [stack.enter_context(proxy_of(self.router.endpoint, self.seed + i)) for i in range(2)]
            self.adversary = Adversary(self.account, self.router, proxies, f"local-{self.number % 2}", self.seed)
            stack.callback(self.settled.set)
            stack.callback(self.over.set)
            jobs = self._jobs([proxy.address for proxy in proxies])
            attackers = self._attackers(stack)
            began = time.monotonic()
            self.adversary.torment(began + (1 - STORM) * self.seconds, False, self._alive)
            self._judge_growth()
            self.adversary.torment(began + self.seconds, True, self._alive)
            for attacker in attackers:
                attacker.terminate()
            self.over.set()
            self._join([job for job in jobs if job.name.startswith("trainer")])
            self.settled.set()
            self._join(jobs)
            self.account.finish()
            self._quiet()
        self._closed()

    def _join(self, jobs: list[threading.Thread]) -> None:
        for job in jobs:
            job.join(2 * WAIT)
            if job.is_alive():
                self.account.found("lost", f"{job.name} does not come to its end; waiting: {self.account.waiting}")

    def _jobs(self, proxied: list[str]) -> list[threading.Thread]:
        """Start whoever asks and looks."""
        pushing = Pushing(self.account, self.router.endpoint, self.seed, self.scratch, self.over, self.settled)
        judge = Judge(self.account, self.seed)
        addresses = [*proxied, self.router.endpoint]
        jobs = [threading.Thread(target=pushing.run, name="pusher"), threading.Thread(target=self._look, name="watcher")]
        for number in range(self.trainers):
            address = addresses[number % len(addresses)]
            trainer = KINDS[number % len(KINDS)](number, self.seed, address, self.account, self.over)
            jobs.append(threading.Thread(target=trainer.run, name=f"trainer {number}"))
        jobs.append(threading.Thread(target=judge.run, args=(self.settled,), name="judge"))
        self.remembering = Remembering(
            self.trainers + 1, self.seed, self.router.endpoint, self.account, self.over, memo=self.folder / "memo"
        )
        jobs.append(threading.Thread(target=self.remembering.run, name="trainer with a memo"))
        http = HttpTrainer(self.trainers, self.seed, self.router.endpoint, self.account, self.over, self.folder)
        jobs.append(threading.Thread(target=http.run, name="trainer over HTTP"))
        numberless = Numberless(self.account, self.seed, self.folder / "numberless", self.over)
        jobs.append(threading.Thread(target=numberless.run, name="refreshes without a number"))
        self.facade = http.process.pid
        for job in jobs:
            job.daemon = True
            job.start()
        return jobs

    def _attackers(self, stack: ExitStack) -> list[subprocess.Popen[bytes]]:
        found = []
        for number in range(ATTACKERS):
            words = [str(self.seed + number), str(GARBAGE_A_SECOND), str(self.folder / f"garbage{number}")]
            command = [sys.executable, "-m", "tests.support.endurance.garbage", self.router.endpoint, *words]
            child = subprocess.Popen(command, cwd=ROOT)
            stack.callback(child.wait, 60)
            stack.callback(child.terminate)
            found.append(child)
        return found

    # looking

    def _alive(self) -> None:
        if not self.router.alive:
            self.account.found("crashes", f"the router ended by itself; its log ends with {self.router.failures()[-5:]}")
            self.router.start()

    def _look(self) -> None:
        """Note what the processes hold, and what the service says of itself. For a thread."""
        try:
            with RolloutClient(self.router.endpoint, name="watcher", connect_timeout_s=WAIT, link_timeout_s=WAIT) as client:
                while not self.over.wait(LOOK_S):
                    life = self.account.life
                    self.watcher.look({"router": self.router.pid, "facade": self.facade, **self._named_replicas()})
                    try:
                        self._note(client.status(timeout=WAIT), life)
                    except RolloutError:
                        self.account.count("status_again")
        except Exception as error:
            self.account.found("crashes", f"the watcher failed: {error!r}")

    def _named_replicas(self) -> dict[str, int]:
        return {f"replica {name}": pid for name, pid in self.router.replicas().items()}

    def _note(self, status: dict[str, Any], life: int) -> None:
        if life != self.account.life:
            return
        self.router.told = {each["name"]: each["pid"] for each in status["replicas"] if each["pid"] is not None}
        self.verified[life] = max(self.verified[life], int(status["fleet"]["verified"]))
        for ban in status["fleet"]["bans"]:  # liars send what is impossible, which needs no verdict
            self.account.found("alarms", f"{ban['owner']} is banned: {ban['why']}")
        self.malformed[life] = max(self.malformed[life], int(status["service"]["malformed"]))
        loops = {"router": status["loop"]}
        for replica in status["replicas"]:
            if replica["pid"] not in self.adversary.ever_stopped and "loop" in replica:
                loops[f"replica {replica['name']}"] = replica["loop"]
        for name, loop in loops.items():
            if loop["longest_turn_s"] > max(0.1, self.longest_turn_s):
                self.account.note(f"{name}: a turn of {loop}")
            self.longest_turn_s = max(self.longest_turn_s, loop["longest_turn_s"])
            self.longest_turn_cpu_s = max(self.longest_turn_cpu_s, loop["longest_turn_cpu_s"])

    def _judge_growth(self) -> None:
        self.growths = self.watcher.judge()
        for growth in self.growths:
            if growth.leaks:
                self.account.found("leaks", f"{growth.who}: {growth.more:+.1f} {growth.what}, {growth.per_hour:+.1f} an hour")

    def show_memory(self) -> None:
        """Print what each process held, at a few times of its life, of those that lived for long."""
        print(f"  router at its end, descriptors more than at birth: {self.more_fds}")
        for who, series in self.watcher.series.items():
            some = series[:: max(1, len(series) // 12)]
            if len(series) >= leaks.LEAST_POINTS:
                print(f"  {who}: MiB {[round(each.rss_mib) for _, each in some]}, descriptors {[each.fds for _, each in some]}")

    # the end

    def _look_at_birth(self) -> None:
        """Note the descriptors of a router that all of its replicas have joined, with one client, as it has at the end."""
        deadline = time.monotonic() + WAIT
        with RolloutClient(self.router.endpoint, name="first", connect_timeout_s=WAIT) as client:
            while client.status(timeout=WAIT)["fleet"]["serving"] < REPLICAS:
                if time.monotonic() > deadline:
                    raise RuntimeError(f"fewer than {REPLICAS} replicas have joined after {WAIT} s")
                time.sleep(0.2)
            self.born = leaks.descriptors(self.router.pid)

    def _quiet(self) -> None:
        """Wait until nothing is left after all clients have gone, and all replicas are back; note what stays."""
        deadline = time.monotonic() + QUIET_S
        left = "it does not answer"
        while time.monotonic() < deadline:
            try:
                with RolloutClient(self.router.endpoint, name="last", connect_timeout_s=WAIT) as client:
                    status = client.status(timeout=60)
                    more = leaks.descriptors(self.router.pid)
            except RolloutError as error:
                left = repr(error)
                continue
            more.subtract(self.born)
            clients = [each["name"] for each in status["service"]["clients"] if each["name"] != "last"]
            running = {name: status[name] for name in ("running", "waiting", "groups") if status.get(name)}
            back = status["fleet"]["serving"] == REPLICAS == len(status["replicas"])
            self.more_fds = {what: count for what, count in more.items() if count}
            if (
                not clients
                and not running
                and not status["service"]["parked_groups"]
                and more.total() <= leaks.LEFT_FDS
                and back
            ):
                return
            replicas = {each["name"]: each["state"] for each in status["replicas"]}
            left = f"clients {clients}, {running}, replicas {replicas}, descriptors more than at birth: {self.more_fds}"
            time.sleep(1.0)
        self.account.found("leaks", f"after the end there is left: {left}")

    def _closed(self) -> None:
        ledgers.check(self.account, self.folder / "ledger")
        remembered = self.remembering.foreign
        if remembered is None:
            self.account.found("harmed", "no memo was opened")
        for each in [*self.foreign, *([remembered] if remembered else [])]:
            self.account.count("foreign", len(each))
            for name in each.harmed():
                self.account.found("harmed", f"{each.folder / name} is gone or changed")
        code = self.router.process.returncode if self.router.process is not None else None
        if code != 0:
            self.account.found("crashes", f"the router ended with exit status {code}")
        for line in self.router.failures():
            self.account.found("crashes", line[-800:])
        if left := self.router.left():
            self.account.found("orphans", f"replicas outlive their router: {left}")

    def totals(self) -> Counter[str]:
        """Return everything that was counted, under the names of the last line."""
        counts = Counter(self.account.counts)
        counts["kills"] = sum(number for name, number in counts.items() if name.startswith("kills_of_"))
        counts["malformed"] = sum(self.malformed.values())
        counts["verified"] = sum(self.verified.values())
        for path in self.folder.glob("garbage*"):
            counts.update({f"sent_{name}": number for name, number in json.loads(path.read_text()).items()})
        counts["believed"] = counts["sent_believed"]
        counts["older"] = counts["sent_pages"] + counts["sent_older_peers"]
        return counts


PROMISES = [
    ("P1, P13", "weights that break never serve", "broken_pushes", ("mixed",)),
    ("P2, P3", "each token is its version's", "samples", ("mixed",)),
    ("P10", "adapters pushed", "adapters", ("mixed", "leaks")),
    ("P2, P5", "services killed behind a journal; versions that they chose", "numberless_kills", ("mixed", "lost")),
    ("P4, P5, P6", "each sample that is owed comes, once", "owed", ("lost", "doubled")),
    ("P7, P14", "links cut, processes stopped: nobody waits in vain", "cuts", ("lost",)),
    ("P8", "trainers killed: others go on", "kills_of_trainers", ("lost", "crashes")),
    ("P12", "log-probs judged again, to the bit", "judged", ("mixed",)),
    ("P6, P15", "samples made again alone, to the bit, wherever they ran", "remade", ("unequal",)),
    ("P15", "log-probs scored by the service, to the bit", "scored", ("mixed",)),
    ("P5, P6", "replicas killed", "kills_of_replicas", ("lost", "doubled")),
    ("P5, P6", "routers killed, with a journal", "kills_of_routers", ("lost", "doubled")),
    ("P25", "replicas left behind by their router", "kills_of_routers", ("orphans",)),
    ("P5, P24", "routers whose disk is full: they end, and go on", "full_disks", ("lost", "doubled")),
    ("P4, P20", "routers without descriptors", "descriptors_exhausted", ("lost", "crashes")),
    ("P5", "samples over HTTP", "http_samples", ("lost",)),
    ("P20", "requests over HTTP that are none", "http_broken", ("crashes",)),
    ("P3, P15", "turns of agents", "turns", ("lost", "mixed")),
    ("P16, P20", "messages that are none", "malformed", ("crashes",)),
    ("P17", "half handshakes, bytes that are no ZMTP", "sent_half_handshakes", ("crashes",)),
    ("P17", "web pages and peers of ZMTP 1 and 2, at every port", "older", ("believed",)),
    ("P13", "replicas that lie", "liars", ("mixed", "lost")),
    ("P13", "replicas of another configuration refused by name", "others_refused", ("mixed",)),
    ("P13", "folders whose headers lie, read by the client", "hostile_headers", ("mixed",)),
    ("P13, P20", "the same over the wire", "hostile_offers", ("mixed", "crashes")),
    ("P17", "strangers where ranks over hosts meet", "strangers", ("crashes",)),
    ("P3", "groups that a memo answered", "memo_hits", ("mixed", "unequal")),
    ("receipts", "ledger: every sample that came, and a whole chain", "ledger_records", ("unrecorded",)),
    ("receipts", "samples of one replica verified by the other", "verified", ("alarms",)),
    ("P17", "files of the user beside ours", "foreign", ("harmed",)),
    ("P21", "questions whose answers nobody reads", "sent_deaf", ("crashes",)),
    ("P10, P25", "memory, descriptors, threads, shared memory flat", "looks", ("leaks",)),
]


def table(totals: Counter[str], growths: list[leaks.Growth], longest: float, longest_cpu: float) -> None:
    console = Console(width=110)
    shown = Table("promise", "", "count", "violations")
    for promise, words, counted, violations in PROMISES:
        bad = sum(totals[name] for name in violations)
        shown.add_row(promise, words, f"{totals[counted]:,}", f"[red]{bad}" if bad else "0")
    shown.add_row("", "longest turn of a loop besides its step, wall", f"{longest:.3f} s", "")
    shown.add_row("", "the same, computed", f"{longest_cpu:.3f} s", "[red]1" if longest_cpu > TURN_S else "0")
    console.print(shown)
    grown = Table("process", "holds", "more in its second half", "an hour")
    for growth in growths:
        grown.add_row(growth.who, growth.what, f"{growth.more:+.2f}", f"{growth.per_hour:+.1f}")
    console.print(grown)
    console.print({name: number for name, number in sorted(totals.items())})


def commit() -> str:
    shown = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True)
    return shown.stdout.strip()


def run(hours: float, seed: int, kinds: list[Kind], trainers: int = 4, phase_s: float = PHASE_S) -> dict[str, Any]:
    """Run phases for so many hours. Returns what the last line says."""
    torch.set_num_threads(1)
    shared = leaks.shared_memory()
    rounds = max(1, round(3600 * hours / phase_s / len(kinds)))
    seconds = 3600 * hours / rounds / len(kinds)
    totals, growths, longest, longest_cpu = Counter[str](), list[leaks.Growth](), 0.0, 0.0
    with (
        tempfile.TemporaryDirectory(prefix="rollout-endurance-") as scratch,
        patch.dict(os.environ),
    ):
        for number, kind in enumerate(kinds * rounds):
            print(f"phase {number}: {kind}, {seconds:.0f} s", flush=True)
            phase = Phase(kind, seconds, seed, number, Path(scratch), trainers)
            try:
                phase.run()
            except Exception:  # what comes after it is worth to be seen as well
                phase.account.found("crashes", traceback.format_exc())
            phase.show_memory()
            totals += phase.totals()
            totals["looks"] += sum(map(len, phase.watcher.series.values()))
            growths += phase.growths
            longest, longest_cpu = max(longest, phase.longest_turn_s), max(longest_cpu, phase.longest_turn_cpu_s)
            print(json.dumps({name: totals[name] for name in ("samples", "kills", "malformed", "broken_pushes", *FOUND)}))
        totals += ranks.met_among_strangers(Path(scratch), seed)
    left = leaks.shared_memory() - shared
    if left := left - leaks.mapped(left):
        print(f"left in /dev/shm: {left}")
        totals["leaks"] += len(left)
    table(totals, growths, longest, longest_cpu)
    names = ("samples", "kills", "malformed", "broken_pushes", *FOUND)
    return {
        **{name: totals[name] for name in names},
        "longest_turn_s": round(longest, 4),
        "longest_turn_cpu_s": round(longest_cpu, 4),
        "seed": seed,
        "commit": commit(),
        "hours": hours,
    }


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--hours", type=float, default=0.1)
    parser.add_argument("--seconds", type=float, help="in place of --hours")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--models", nargs="+", default=["tiny", "smollm2"])
    args = parser.parse_args()
    args.hours = args.hours if args.seconds is None else args.seconds / 3600
    found = run(args.hours, args.seed, args.models)
    bad = any(found[name] for name in FOUND) or found["longest_turn_cpu_s"] > TURN_S
    if bad:
        print(f"to see that again: make endurance HOURS={args.hours} SEED={args.seed}")
    print(json.dumps(found))
    return int(bad)


if __name__ == "__main__":
    sys.exit(main())
