"""Who kills, stops and cuts, at random times, by a seed."""

from __future__ import annotations

import os
import random
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable

from tests.support.endurance.account import Account
from tests.support.endurance.serving import LIAR, OTHER, Router
from tests.support.faulty_link import Proxy
from tests.support.lasting import ROOT

PACE_S = {"tiny": 5.0, "smollm2": 8.0}
"""mean seconds between two acts"""
KINDS = {"replica": 3, "stop": 2, "cut": 3, "mayfly": 4, "descriptors": 1, "liar": 1, "other": 1}
"""how often each, of the acts"""
STOPS_S = (0.5, 2.0, 6.0)
MAYFLY_S = 60.0
LIAR_S = 40.0
"""that a replica that lies lives, its start among them"""
OTHER_S, OTHER_MORE_S = 120.0, 3.0
"""that a replica of another configuration may take to join and be refused, and stays after that"""
EXHAUSTED_S = 3.0
SPARE_FDS = 2
"""descriptors that an exhausted process may still open"""
FULL = 0.3
"""share of the ends of a router that come of a full disk"""
FULL_S = 20.0
"""for a router that cannot write its journal to end, which it does with its next commit"""


class Nothing(bytearray):
    """What a proxy has recorded in hours would fill the memory."""

    def __iadd__(self, more: object) -> Nothing:  # type: ignore[override, misc]
        return self


def proxy_of(endpoint: str, seed: int) -> Proxy:
    proxy = Proxy(endpoint, seed)
    proxy.recorded = Nothing()
    return proxy


class Adversary:
    """survivor: name of the replica that is left alone, so that what it holds can be watched for long."""

    def __init__(self, account: Account, router: Router, proxies: list[Proxy], survivor: str, seed: int) -> None:
        self.account, self.router, self.proxies, self.survivor = account, router, proxies, survivor
        self.rng = random.Random(seed)
        self.stopped: dict[int, float] = {}
        """until when, by pid"""
        self.ever_stopped: set[int] = set()
        """their turns of the loop say nothing of the service"""
        self.liar = threading.Thread()
        self.other = threading.Thread()

    def torment(self, until: float, storm: bool, alive: Callable[[], None]) -> None:
        """Kill, stop and cut until a time of the monotonic clock. storm: nobody is spared, nor the router. alive: is called
        again and again."""
        pace = PACE_S[self.account.model.kind]
        router_at = time.monotonic() + self.rng.uniform(1.0, 4.0)
        act_at = time.monotonic() + self.rng.uniform(0.5, 1.5) * pace
        while (now := time.monotonic()) < until:
            time.sleep(0.2)
            alive()
            self._go_on(now)
            if storm and now > router_at:
                self._kill_router(full=self.rng.random() < FULL)
                router_at = time.monotonic() + self.rng.uniform(2.0, 6.0) * pace
            if now > act_at:
                act_at = now + self.rng.uniform(0.5, 1.5) * pace
                self._act(self.rng.choices(list(KINDS), list(KINDS.values()))[0], storm)
        self._go_on(float("inf"))

    def _go_on(self, now: float) -> None:
        for pid in [pid for pid, until in self.stopped.items() if now >= until]:
            del self.stopped[pid]
            send(pid, signal.SIGCONT)

    def _act(self, kind: str, storm: bool) -> None:
        replicas = {name: pid for name, pid in self.router.replicas().items() if storm or name != self.survivor}
        name = self.rng.choice(sorted(replicas)) if replicas else None
        if kind == "cut" and self.proxies:
            self.rng.choice(self.proxies).cut()
            self.account.count("cuts")
        elif kind == "mayfly":
            seed = self.rng.randrange(2**31)
            threading.Thread(target=self._mayfly, args=(seed, self.rng.uniform(0.0, 1.0)), daemon=True).start()
        elif kind == "liar" and not self.liar.is_alive():
            self.liar = threading.Thread(target=self._liar, args=(self.rng.randrange(2**31),), daemon=True)
            self.liar.start()
        elif kind == "other" and not self.other.is_alive() and not storm:
            self.other = threading.Thread(target=self._other, daemon=True)
            self.other.start()
        elif kind == "replica" and name is not None:
            self.account.count("kills_of_replicas", send(replicas[name], signal.SIGKILL))
        elif kind == "descriptors":
            self._exhaust(self.router.pid)
        elif kind == "stop" and name is not None:
            pid = replicas[name]
            self.ever_stopped.add(pid)
            self.account.count("stops", send(pid, signal.SIGSTOP))
            self.stopped[pid] = time.monotonic() + self.rng.choice(STOPS_S)

    def _exhaust(self, pid: int) -> None:
        """Leave a process no descriptors to open for a while."""
        try:
            soft, hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)
            few = len(os.listdir(f"/proc/{pid}/fd")) + SPARE_FDS
            self.account.exhausted = True
            resource.prlimit(pid, resource.RLIMIT_NOFILE, (few, hard))
            time.sleep(EXHAUSTED_S)
            resource.prlimit(pid, resource.RLIMIT_NOFILE, (soft, hard))
            self.account.count("descriptors_exhausted")
        except (OSError, ProcessLookupError):
            pass  # gone meanwhile
        finally:
            self.account.exhausted = False

    def _fill_disk(self) -> None:
        """Let the router write no more to any file. It must end by itself: what it cannot keep it may not promise."""
        self.router.excuse()
        resource.prlimit(self.router.pid, resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
        deadline = time.monotonic() + FULL_S
        while self.router.alive and time.monotonic() < deadline:
            time.sleep(0.1)
        self.account.count("full_disks", not self.router.alive)

    def _kill_router(self, full: bool) -> None:
        self._go_on(float("inf"))
        self.account.version = 0  # it comes back with older weights, if its replicas were killed as well
        self.account.life += 1
        if full:
            self._fill_disk()
        self.router.kill()
        self.account.life += 1  # what began while it was ending is cut by its end as well
        self.account.count("kills_of_routers")
        self.router.start()

    def _liar(self, seed: int) -> None:
        """Let a replica join that sends what is none of its groups' samples, and kill it after a while."""
        told = self.router.folder / f"lies{seed}"
        words = [sys.executable, "-m", "tests.support.endurance.liar", str(seed), str(told), *self.router.joining(LIAR)]
        with (self.router.folder / "liar.log").open("ab") as log:
            child = subprocess.Popen(words, cwd=ROOT, stdout=log, stderr=log)
        try:
            child.wait(LIAR_S)
            self.account.count("liars_ended")
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
        self.account.count("liars", told.exists())

    def _other(self) -> None:
        """Let a replica join that has the fleet's weights and another configuration, so that it computes something else. The
        router must refuse it."""
        life, number = self.router.lives, self.account.counts["others"]
        words = [sys.executable, "-P", "-m", "rollout", "serve", *self.router.joining(OTHER)]
        words += ["--engine.model", str(self.account.model.other_folder())]
        words += ["--service.endpoint", f"ipc://{self.router.folder}/sockets/other{number}"]
        with (self.router.folder / "other.log").open("ab") as log:
            child = subprocess.Popen(words, cwd=ROOT, stdout=log, stderr=log)
        deadline = time.monotonic() + OTHER_S
        while child.poll() is None and time.monotonic() < deadline and not self.router.refused_configuration(life):
            time.sleep(0.2)
        time.sleep(OTHER_MORE_S)  # it would be given groups now
        refused = self.router.refused_configuration(life)
        child.kill()
        child.wait()
        self.account.count("others")
        self.account.count("others_refused", bool(refused))
        if refused is False and life == self.router.lives:
            self.account.found("mixed", "a replica of another configuration has joined")

    def _mayfly(self, seed: int, live_s: float) -> None:
        words = [sys.executable, "-m", "tests.support.endurance.mayfly", self.router.endpoint, str(seed)]
        child = subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        assert child.stdout is not None
        timer = threading.Timer(MAYFLY_S, child.kill)
        timer.start()
        try:
            child.stdout.readline()  # "submitted", or its end
            time.sleep(live_s)
            self.account.count("kills_of_trainers", child.poll() is None)
        finally:
            timer.cancel()
            child.kill()
            child.wait()
            child.stdout.close()


def send(pid: int, number: int) -> bool:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True
