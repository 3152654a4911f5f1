"""A fleet under an adversary:  python -m tests.support.fleet_chaos [--minutes 10] [--seed 0] [--replicas 4]

Replicas are killed and stopped, links are cut, weights are refreshed every 2 s, some of them broken on purpose, while trainers
submit seeded groups. Every sample that comes is compared with what one service makes of the same weights. Prints notes, and as
its last line one JSON object of what was done and what was found; the exit status is 1 if anything was found.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import threading
import time
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch

from engine.types import Sample, Sampling
from rollout.client.api import RolloutClient
from rollout.fleet.fleet import Fleet
from rollout.fleet.launcher import Event, Launcher, Place
from rollout.service.loop import Service
from tests.support.faulty_link import Proxy
from tests.support.hash_engine import expected, key_of, weights_of
from tests.support.waiting import until
from transport.errors import RolloutError, WeightsRefused

FOUND = ("lost", "doubled", "mixed", "unequal")
"""what must not be"""
REFRESH_EVERY_S = 2.0
STEP_S = 0.004
MOST_NOTES = 20
WAIT = 120.0
"""for what comes: a bound for hangs only"""


class Cut:
    """A launcher whose replicas are reached through a proxy, so that their links can be cut."""

    def __init__(self, launcher: Launcher, seed: int) -> None:
        self.launcher, self.seed = launcher, seed
        self.proxies: dict[str, Proxy] = {}

    @property
    def wanted(self) -> int:
        return self.launcher.wanted

    def tend(self) -> list[Event]:
        events = []
        for event in self.launcher.tend():
            if old := self.proxies.pop(event.name, None):
                old.__exit__(None, None, None)
            if event.address is not None:
                proxy = self.proxies[event.name] = Proxy(event.address, self.seed)
                event = event._replace(address=proxy.address)
            events.append(event)
        return events

    def __getattr__(self, name: str) -> Any:
        return getattr(self.launcher, name)

    def close(self) -> None:
        self.launcher.close()
        for proxy in self.proxies.values():
            proxy.__exit__(None, None, None)


class Watched(Fleet):
    """Counts children that come out of the front twice."""

    def __init__(self, launcher: Any, counts: Counter[str]) -> None:
        super().__init__(launcher)
        self._counts, self._given = counts, set[tuple[str, int]]()

    def step(self) -> list[Sample]:
        ended = super().step()
        for sample in ended:
            self._counts["doubled"] += (sample.group_id, sample.index) in self._given
            self._given.add((sample.group_id, sample.index))
        return ended


class Chaos:
    """`counts` is written by all threads, one name by one thread each."""

    def __init__(self, seed: int, replicas: int, fault: str = "") -> None:
        self.random = random.Random(seed)
        self.counts: Counter[str] = Counter()
        self.keys = {0: key_of(weights_of(0))}
        """by version, those that were refused as well: nobody may have them"""
        self.version = 0
        """that `refresh` returned last"""
        self.over = threading.Event()
        self.notes: list[str] = []
        self._lock = threading.Lock()

        def command(ready: Path) -> list[str]:
            words = [sys.executable, "-m", "tests.support.hash_engine", str(ready), str(STEP_S)]
            return [*words, fault] if fault and ready.name.startswith("ready-1-") else words

        self.launcher = Cut(Launcher(command, [Place()] * replicas), seed)
        self.fleet = Watched(self.launcher, self.counts)

    def note(self, text: str) -> None:
        with self._lock:
            self.notes.append(text)
            if len(self.notes) <= MOST_NOTES:
                print(text, flush=True)

    # trainers

    def train(self, number: int, address: str) -> None:
        """Submit groups until it is over, wait for all of them, and compare each sample."""
        rng = np.random.default_rng(number)
        with RolloutClient(address, name=f"trainer {number}", connect_timeout_s=WAIT, link_timeout_s=WAIT) as client:
            open_groups: list[tuple[Any, np.ndarray, int]] = []
            made = 0
            while not self.over.is_set() or open_groups:
                while not self.over.is_set() and len(open_groups) < 6:
                    made += 1
                    prompt = rng.integers(0, 900, rng.integers(1, 60)).astype(np.int32)
                    n, longest = int(rng.choice([1, 2, 4, 8, 40])), int(rng.integers(10, 200))
                    version = self.version
                    sampling = Sampling(n=n, max_tokens=longest, seed=made * 8 + number)
                    open_groups.append((client.submit(prompt, sampling), prompt, version))
                handle, prompt, version = open_groups.pop(0)
                self.look(number, handle, prompt, version)

    def look(self, number: int, handle: Any, prompt: np.ndarray, version: int) -> None:
        try:
            samples = handle.result(WAIT)
        except (RolloutError, TimeoutError) as error:
            self.note(f"lost: {error}")
            self._count("lost", handle.n)
            return
        for sample in samples:
            self._count("samples", 1)
            spans = [made_by for _, made_by in sample.weight_versions]
            if sample.finish_reason != "length":
                self.note(f"lost: {sample.finish_reason} {sample.error}")
                self._count("lost", 1)
            elif spans != sorted(set(spans)) or spans[0] < version or not set(spans) <= set(self.keys):
                self.note(f"mixed: submitted at version {version}, spans {sample.weight_versions}")
                self._count("mixed", 1)
            elif sample.token_ids.tolist() != expected(prompt, sample, self.keys):
                self.note(f"unequal: child {sample.index} of {handle.n}, spans {sample.weight_versions}")
                self._count("unequal", 1)

    def _count(self, name: str, more: int) -> None:
        with self._lock:
            self.counts[name] += more

    # weights

    def push(self, address: str) -> None:
        """Refresh every 2 s, one time in four with weights that must be refused."""
        rng = random.Random(self.random.random())
        content = 0
        with RolloutClient(address, name="pusher", connect_timeout_s=WAIT, link_timeout_s=WAIT) as client:
            while not self.over.wait(REFRESH_EVERY_S):
                content += 1
                broken = rng.random() < 0.25
                weights = broken_weights(rng, content) if broken else weights_of(content)
                version = self.version + 1
                if not broken:
                    self.keys[version] = key_of(weights)
                named = {name: torch.from_numpy(values) for name, values in weights.items()}
                kv = rng.choice(["keep", "recompute"])
                try:
                    client.refresh(named, version=version, kv=kv, via=rng.choice(["shm", "inline"]), timeout=WAIT)
                except WeightsRefused as error:
                    self._refused(broken, error)
                else:
                    self.version = version
                    self.counts["refreshes"] += 1
                    if broken:
                        self.note("mixed: broken weights are live")
                        self._count("mixed", 1)

    def _refused(self, broken: bool, error: Exception) -> None:
        self.counts["broken_refreshes"] += broken
        if not broken:
            self.note(f"lost: a refresh was refused: {error}")
            self._count("lost", 1)

    # the adversary

    def torment(self, seconds: float) -> None:
        """Kill, stop and cut, at random times: some 12 kills, 4 stops and 12 cuts a minute."""
        rng, end = random.Random(self.random.random()), time.monotonic() + seconds
        stopped: list[tuple[float, int]] = []
        while (now := time.monotonic()) < end:
            time.sleep(rng.uniform(1.0, 3.0))
            for wake_at, pid in list(stopped):
                if now > wake_at:
                    stopped.remove((wake_at, pid))
                    send(pid, signal.SIGCONT)
            kind, name = rng.choices(["kill", "stop", "cut"], [3, 1, 3])[0], str(rng.randrange(self.launcher.wanted))
            pid, proxy = self.launcher.pid(name), self.launcher.proxies.get(name)
            if kind == "cut" and proxy is not None:
                proxy.cut()
                self.counts["cuts"] += 1
            elif kind == "kill" and pid is not None:
                self.counts["kills"] += send(pid, signal.SIGKILL)
            elif kind == "stop" and pid is not None and proxy is not None:
                self.counts["stops"] += send(pid, signal.SIGSTOP)
                stopped.append((now + rng.choice([0.5, 3.0, 12.0]), pid))
        for _, pid in stopped:
            send(pid, signal.SIGCONT)

    def run(self, seconds: float, trainers: int = 3) -> dict[str, int]:
        """Returns what was done and what was found."""
        with ExitStack() as stack:
            stack.callback(self.fleet.close)
            self.fleet.open(WAIT)
            front = Service(self.fleet, "tcp://127.0.0.1:*", client_grace_s=WAIT)
            self.fleet.inbox.wake = front.wake
            serving = threading.Thread(target=front.run, daemon=True)
            serving.start()
            stack.callback(serving.join, WAIT)
            stack.callback(front.stop)
            jobs = [threading.Thread(target=self.train, args=(i, front.endpoint), daemon=True) for i in range(trainers)]
            jobs.append(threading.Thread(target=self.push, args=(front.endpoint,), daemon=True))
            for job in jobs:
                job.start()
            self.torment(seconds)
            self.over.set()
            until(lambda: not any(job.is_alive() for job in jobs), "all groups have ended", WAIT)
        names = ("kills", "stops", "cuts", "refreshes", "broken_refreshes", "front_kills", "samples", *FOUND)
        return {name: self.counts[name] for name in names}


def broken_weights(rng: random.Random, content: int) -> dict[str, np.ndarray]:
    weights, name = weights_of(content), f"w{rng.randrange(4)}"
    match rng.randrange(3):
        case 0:
            weights[name][rng.randrange(len(weights[name]))] = np.nan
        case 1:
            del weights[name]
        case _:
            weights[name] = weights[name][:-1].copy()
    return weights


def send(pid: int, number: int) -> bool:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True


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
