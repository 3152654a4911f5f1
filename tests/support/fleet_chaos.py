"""A fleet under an adversary:  python -m tests.support.fleet_chaos [--minutes 10] [--seed 0] [--replicas 4]

Replicas are killed and stopped, links are cut, the router is killed and starts again on its journal, weights are refreshed
every 2 s, a quarter of them broken on purpose, while trainers submit groups. Every sample that comes is compared with what one
service makes of the same weights. Prints notes, and as its last line one JSON object of what was done and what was found; the
exit status is 1 if anything was found.

    Router      the process under test and its replicas            Adversary  what is done to them
    Accounts   what was found                                     Pusher, Trainer  clients as they are
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch

from rollout.client.api import RolloutClient
from rollout.engine.values import Sample, Sampling, manifest_digest
from rollout.transport.errors import RolloutError, SourceUnreachable, WeightsRefused
from tests.support.chaos_router import WAIT
from tests.support.hash_engine import MARK, TENSORS, expected, key_of, manifest_of, weights_of
from tests.support.lasting import ROOT
from tests.support.ports import free_port
from tests.support.waiting import until

DONE = ("kills", "stops", "cuts", "refreshes", "broken_refreshes", "router_kills", "samples")
FOUND = ("lost", "doubled", "mixed", "unequal", "orphans", "alarms")
"""what must not be"""
REFRESH_EVERY_S = 2.0
ROUTER_LIVES_S = (20.0, 40.0)
"""between two kills of the router"""
MOST_NOTES = 20

Weights = dict[str, np.ndarray]


class Accounts:
    """What was done and what was found. For any thread."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.keys = {0: key_of(weights_of(0))}
        """by version, those that were refused as well: nobody may have them"""
        self.version = 0
        """that `refresh` returned last"""
        self.over = threading.Event()
        self._notes = 0
        self._lock = threading.Lock()

    def add(self, name: str, more: int = 1, note: str = "") -> None:
        with self._lock:
            self.counts[name] += more
            self._notes += bool(note)
            if note and self._notes <= MOST_NOTES:
                print(f"{name}: {note}", flush=True)

    def result(self) -> dict[str, int]:
        return {name: self.counts[name] for name in (*DONE, *FOUND)}

    def check(self, sample: Sample, prompt: np.ndarray, version: int) -> None:
        """Compare a sample with one service's. version: that was live when its group was submitted."""
        self.add("samples")
        spans = [made_by for _, made_by in sample.weight_versions]
        if sample.finish_reason != "length":
            self.add("lost", note=f"{sample.finish_reason} {sample.error}")
        elif spans != sorted(set(spans)) or spans[0] < version or not set(spans) <= set(self.keys):
            self.add("mixed", note=f"submitted at version {version}, spans {sample.weight_versions}")
        elif sample.token_ids.tolist() != expected(prompt, sample, self.keys):
            self.add("unequal", note=f"child {sample.index} of {sample.group_id}, spans {sample.weight_versions}")


class Router:
    """One life of the router after the other, at one address. `fault`: see `tests.support.chaos_router`."""

    def __init__(self, folder: Path, replicas: int, seed: int, fault: str = "") -> None:
        self.endpoint = f"tcp://127.0.0.1:{free_port()}"
        self.folder, self.replicas = folder, replicas
        self._words = [str(replicas), str(seed), fault]
        self._popen: subprocess.Popen[bytes] | None = None
        self.lives = self.kills = 0

    @property
    def listens(self) -> bool:
        return self._popen is not None and self._ready.exists()

    @property
    def _ready(self) -> Path:
        return self.folder / f"router-{self.lives}"

    def start(self) -> None:
        """Begin the next life; returns at once."""
        self.lives += 1
        words = [str(self.folder), self.endpoint, str(self._ready), *self._words]
        command = [sys.executable, "-m", "tests.support.chaos_router", *words]
        with (self.folder / "log").open("a") as log:
            self._popen = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stderr=log, bufsize=0)

    def wait(self) -> None:
        """Wait until it listens."""

        def look() -> bool:
            assert self._popen is not None and self._popen.poll() is None, f"the router has ended: {self.folder / 'log'}"
            return self.listens

        until(look, "the router listens", WAIT)

    def kill(self) -> None:
        assert self._popen is not None
        assert self._popen.poll() is None, f"the router has ended by itself: {self.folder / 'log'}"
        self.kills += 1
        self._end(signal.SIGKILL)

    def close(self) -> None:
        """Stop it in order, with its replicas."""
        if self._popen is not None:
            self._end(signal.SIGTERM)

    def _end(self, number: int) -> None:
        assert self._popen is not None and self._popen.stdin is not None
        self._popen.send_signal(number)
        self._popen.wait(WAIT)
        self._popen.stdin.close()
        self._popen = None

    def cut(self, name: str) -> bool:
        """Cut the link to a replica. Returns whether there is a router to be told."""
        if not self.listens:
            return False
        assert self._popen is not None and self._popen.stdin is not None
        try:
            self._popen.stdin.write(f"cut {name}\n".encode())
        except BrokenPipeError:
            return False
        return True

    def processes(self) -> dict[int, str]:
        """Return the processes of replicas with their names, whoever started them."""
        try:
            joins = (self.folder / "replicas").read_text().split()[0] + "/join"
        except (FileNotFoundError, IndexError):
            return {}
        found = {process.pid: words_of(process) for process in psutil.process_iter()}
        return {pid: words[4] for pid, words in found.items() if f"ipc://{joins}" in words}

    def signal(self, name: str, number: int) -> int | None:
        """Send a signal to a replica's process. Returns which one that was, None if there is none."""
        for pid, whose in self.processes().items():
            if whose == name and send(pid, number):
                return pid
        return None


class Adversary:
    """Kills, stops and cuts at random times: some 12 kills, 4 stops and 12 cuts a minute, and two kills of the router."""

    def __init__(self, accounts: Accounts, router: Router, rng: random.Random, router_lives_s: tuple[float, float]) -> None:
        self.accounts, self.router, self.rng = accounts, router, rng
        self._router_lives_s = router_lives_s
        self._router_at = time.monotonic() + rng.uniform(*router_lives_s)
        """when to kill the router, or to start it again"""
        self._stopped: list[tuple[float, int]] = []

    def torment(self, seconds: float, enough: str = "") -> None:
        """Kill, stop and cut for so many seconds. `enough`: the end comes as soon as this was found."""
        end = time.monotonic() + seconds
        while (now := time.monotonic()) < end and not self.accounts.counts[enough]:
            self.act(
                self.rng.choices(["kill", "stop", "cut"], [3, 1, 3])[0],
                f"local-{self.rng.randrange(self.router.replicas)}",
                now,
            )
            self.tend(now)
            time.sleep(self.rng.uniform(1.0, 3.0))
        for _, pid in self._stopped:
            send(pid, signal.SIGCONT)
        if not self.router.listens:
            self.restart()
            self.router.wait()

    def act(self, kind: str, name: str, now: float) -> None:
        if kind == "cut":
            self.accounts.add("cuts", self.router.cut(name))
        elif kind == "kill":
            self.accounts.add("kills", self.router.signal(name, signal.SIGKILL) is not None)
        elif (pid := self.router.signal(name, signal.SIGSTOP)) is not None:
            self.accounts.add("stops")
            self._stopped.append((now + self.rng.choice([0.5, 3.0, 12.0]), pid))

    def tend(self, now: float) -> None:
        """Let those go on that were stopped, and kill or start the router."""
        for wake_at, pid in list(self._stopped):
            if now > wake_at:
                self._stopped.remove((wake_at, pid))
                send(pid, signal.SIGCONT)
        if now > self._router_at:
            if self.router._popen is not None:
                self.kill_router()
            else:
                self.restart()

    def kill_router(self) -> None:
        """Kill it, and start it again at once or some seconds later."""
        self.router.kill()
        self.accounts.add("router_kills")
        self._router_at = 0.0
        if self.rng.random() < 0.7:
            self.restart()

    def restart(self) -> None:
        if self.router._popen is None:
            self.router.start()
            again = self.rng.random() < 0.2  # while it takes its replicas over
            self._router_at = time.monotonic() + (
                self.rng.uniform(0.5, 3.0) if again else self.rng.uniform(*self._router_lives_s)
            )


class Pusher:
    """Refreshes every 2 s: all tensors or some of them, one time in four with weights that must be refused."""

    def __init__(self, accounts: Accounts, router: Router, rng: random.Random) -> None:
        self.accounts, self.router, self.rng = accounts, router, rng
        self.weights = weights_of(0)
        """that are live"""
        self.whole = False
        """the next refresh must be of all tensors"""

    def run(self) -> None:
        content = 0
        with RolloutClient(self.router.endpoint, name="pusher", connect_timeout_s=WAIT, link_timeout_s=WAIT) as client:
            while not self.accounts.over.wait(REFRESH_EVERY_S):
                content += 1
                broken, partial = self.rng.random() < 0.25, self.rng.random() < 0.25 and not self.whole
                sent = broken_weights(self.rng, content) if broken else weights_of(content)
                if partial:
                    some = self.rng.sample(sorted(sent), 2)
                    sent = sent if broken else {name: sent[name] for name in some}
                self.push(client, sent, broken, partial)

    def push(self, client: RolloutClient, sent: Weights, broken: bool, partial: bool) -> None:
        accounts, rng, kills = self.accounts, self.rng, self.router.kills
        version, weights = accounts.version + 1, {**self.weights, **sent} if partial else sent
        doubtful = any((values == MARK).any() for values in sent.values())
        if doubtful or not broken:
            accounts.keys[version] = key_of(weights)
        named = {name: torch.from_numpy(values) for name, values in sent.items()}
        ways: Any = {"kv": rng.choice(["keep", "recompute"]), "via": rng.choice(["shm", "inline"])}
        try:
            client.refresh(named, version=version, partial=partial and not broken, timeout=WAIT, **ways)
        except (WeightsRefused, SourceUnreachable) as error:
            live = client.weights_status(timeout=WAIT)
            if live["version"] < version:
                self.refused(broken, error, self.router.kills > kills)
                return
            if self.router.kills == kills or live["digest"] != manifest_digest(manifest_of(weights)):
                accounts.add("mixed", note=f"a refresh that failed is live: {error}")
        except RolloutError as error:
            if not accounts.over.is_set():
                accounts.add("lost", note=f"a refresh has failed: {error}")
            return
        self.whole = False
        self.weights, accounts.version = weights, version
        accounts.add("refreshes")
        if broken and not doubtful:
            accounts.add("mixed", note="broken weights are live")

    def refused(self, broken: bool, error: Exception, killed: bool) -> None:
        """Judge a refusal. `killed`: the router was, meanwhile."""
        self.whole = "all tensors must come first" in str(error)
        self.accounts.add("broken_refreshes", broken)
        if not (broken or killed or self.whole):
            self.accounts.add("lost", note=f"a refresh was refused: {error}")


class Trainer:
    """Submits groups until it is over, waits for all of them, and compares each sample."""

    def __init__(self, accounts: Accounts, endpoint: str, number: int) -> None:
        self.accounts, self.endpoint, self.number = accounts, endpoint, number
        self._came: Counter[tuple[str, int]] = Counter()

    def run(self) -> None:
        rng, accounts = np.random.default_rng(self.number), self.accounts
        name = f"trainer {self.number}"
        with RolloutClient(self.endpoint, name=name, connect_timeout_s=WAIT, link_timeout_s=WAIT) as client:
            open_groups: list[tuple[Any, np.ndarray, int]] = []
            made = 0
            while not accounts.over.is_set() or open_groups:
                while not accounts.over.is_set() and len(open_groups) < 6:
                    made += 1
                    prompt = rng.integers(0, 900, rng.integers(1, 60)).astype(np.int32)
                    n, longest = int(rng.choice([1, 2, 4, 8, 40])), int(rng.integers(10, 200))
                    version = accounts.version
                    seed = made * 8 + self.number if made % 2 else None  # every other one is drawn at the other end
                    handle = client.submit(prompt, Sampling(n=n, max_tokens=longest, seed=seed))
                    handle.listen(self.came)
                    open_groups.append((handle, prompt, version))
                self.look(*open_groups.pop(0))

    def came(self, handle: Any, sample: Sample | None) -> None:
        if sample is not None:
            self._came[handle.group_id, sample.index] += 1
            if self._came[handle.group_id, sample.index] > 1:
                self.accounts.add("doubled", note=f"child {sample.index} of {handle.group_id} came to its trainer twice")

    def look(self, handle: Any, prompt: np.ndarray, version: int) -> None:
        try:
            samples = handle.result(WAIT)
        except (RolloutError, TimeoutError) as error:
            self.accounts.add("lost", handle.n, note=str(error))
            return
        if [sample.index for sample in samples] != list(range(handle.n)) or len({sample.seed for sample in samples}) != 1:
            self.accounts.add("lost", handle.n, note=f"children {[(one.index, one.seed) for one in samples]} of {handle.n}")
        for sample in samples:
            self.accounts.check(sample, prompt, version)


class Chaos:
    """All of it. `fault`: breaks a promise, which the accounts must show."""

    def __init__(
        self, seed: int, replicas: int, fault: str = "", router_lives_s: tuple[float, float] = ROUTER_LIVES_S, trainers: int = 3
    ) -> None:
        self.seed, self._trainers = seed, trainers
        self._folder = tempfile.TemporaryDirectory(prefix="rollout-chaos-")
        self.folder = Path(self._folder.name)
        self.accounts = Accounts()
        self.router = Router(self.folder, replicas, seed, fault)
        rng = random.Random(seed)
        self.pusher = Pusher(self.accounts, self.router, random.Random(rng.random()))
        self._rng, self._router_lives_s = random.Random(rng.random()), router_lives_s

    def run(self, seconds: float, enough: str = "") -> dict[str, int]:
        """Returns what was done and what was found. `enough`: it is over as soon as this was found."""
        try:
            self.router.start()
            self.router.wait()
            jobs = [Trainer(self.accounts, self.router.endpoint, i).run for i in range(self._trainers)]
            threads = [threading.Thread(target=job, daemon=True) for job in (*jobs, self.pusher.run)]
            for thread in threads:
                thread.start()
            Adversary(self.accounts, self.router, self._rng, self._router_lives_s).torment(seconds, enough)
            self.accounts.over.set()
            if not self.accounts.counts[enough]:
                until(lambda: not any(thread.is_alive() for thread in threads), "all groups have ended", WAIT)
        finally:
            replicas = self.router.processes()
            self.router.close()
            self._count_what_is_left(replicas)
        return self.accounts.result()

    def _count_what_is_left(self, replicas: Iterable[int]) -> None:
        for name, count in (("doubled", "doubled"), ("unprepared", "mixed"), ("alarms", "alarms")):
            if (file := self.folder / name).exists():
                self.accounts.add(count, len(file.read_text().splitlines()), note=f"{name}, as the router has seen")
        for pid in replicas:
            if send(pid, 0):
                self.accounts.add("orphans", note=f"process {pid} is still there")
        if any(self.accounts.counts[name] for name in FOUND):
            kept = Path(tempfile.gettempdir()) / f"rollout-chaos-{self.seed}.log"
            kept.write_text((self.folder / "log").read_text())
            print(f"replay: python -m tests.support.fleet_chaos --seed {self.seed}; log: {kept}", flush=True)
        self._folder.cleanup()


def broken_weights(rng: random.Random, content: int) -> Weights:
    """Make weights that must be refused: by all, or by one replica alone, if it is there."""
    weights, name = weights_of(content), f"w{rng.randrange(TENSORS)}"
    match rng.randrange(4):
        case 0:
            weights[name][rng.randrange(len(weights[name]))] = np.nan
        case 1:
            del weights[name]
        case 2:
            weights[name] = weights[name][:-1].copy()
        case _:
            weights[name][rng.randrange(len(weights[name]))] = MARK
    return weights


def send(pid: int, number: int) -> bool:
    """Send a signal to a replica's process, and to no other that has its number by now; 0: only look whether it is there."""
    try:
        process = psutil.Process(pid)
        if "tests.support.joined" not in words_of(process):
            return False  # a zombie has no words
        if number:
            process.send_signal(number)
    except psutil.NoSuchProcess:
        return False
    return True


def words_of(process: psutil.Process) -> list[str]:
    """Return the command line of a process; [] for one that is gone, and for a zombie."""
    try:
        return list(process.cmdline())
    except psutil.Error:
        return []


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--replicas", type=int, default=4)
    args = parser.parse_args()
    found = Chaos(args.seed, args.replicas).run(60 * args.minutes)
    print(json.dumps(found))
    return int(any(found[name] for name in FOUND))


if __name__ == "__main__":
    sys.exit(main())
