"""A fleet of two replicas of two ranks each under an adversary:

    python -m tests.support.rank_chaos [--minutes 10] [--seed 0] [--name qwen3_5_moe_text]

Ranks are killed, stopped and delayed, and weights are refreshed, while a trainer submits groups. Each sample of one version is
compared with what one rank makes of the same weights. Prints one JSON object as its last line; the exit status is 1 if anything
was lost, doubled, mixed or unequal, or a process is left."""

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
from pathlib import Path

import numpy as np
import psutil
from transformers import PreTrainedModel

from rollout.client.api import RolloutClient
from rollout.config import Config, FleetConfig, ServiceConfig, dump
from rollout.engine.config import EngineConfig
from rollout.engine.engine import Engine
from rollout.engine.values import Sample, Sampling
from rollout.transport.errors import RolloutError
from tests.support.ranks import SHAPES, ranked_engine, saved, tiny_shared
from tests.support.toy import group, run
from tests.support.waiting import until

GONE_S = 20.0
"""within which all processes end"""
FOUND = ("lost", "doubled", "mixed", "unequal", "left")
FOLLOWER = "rollout.engine.parallel.follower"


def config(folder: str) -> Config:
    engine = EngineConfig(
        model=folder, dtype="float32", block_size=8, kv_tokens=1024, max_num_seqs=16, max_batch_tokens=64, cpu_offload_gib=0,
        tp=2, threads=1, tp_timeout_s=4.0,
    )  # fmt: skip
    fleet = FleetConfig(replicas=2, replica_grace_s=300.0)
    return Config(engine=engine, service=ServiceConfig(endpoint="tcp://127.0.0.1:*"), fleet=fleet)


class Reference:
    """One rank in this process, which makes the samples of a version. seeds: of the weights of each version."""

    def __init__(self, folder: str, name: str) -> None:
        self.engine: Engine = ranked_engine(folder, 1, "float32", kv_tokens=1024)
        self.name, self.seeds = name, {0: 0}
        self._at = 0

    def weights(self, seed: int) -> PreTrainedModel:
        return tiny_shared(self.name, seed=seed)

    def sample(self, prompt: list[int], seed: int, version: int) -> dict[int, bytes]:
        if self._at != version:
            self.engine.refresh(self.weights(self.seeds[version]))
            self._at = version
        asked = group("a", prompt, n=4, seed=seed, max_tokens=24, ignore_eos=True)
        return {index: bits_of(each) for (_, index), each in run(self.engine, [asked]).items()}


def bits_of(sample: Sample) -> bytes:
    return sample.token_ids.tobytes() + sample.logprobs.tobytes()


class Chaos:
    """The fleet, what is done to it and what was found. counts: by name."""

    def __init__(self, reference: Reference, endpoint: str, root: psutil.Process, r: random.Random) -> None:
        self.reference, self.endpoint, self.root, self.r = reference, endpoint, root, r
        self.counts: Counter[str] = Counter()
        self.seen: set[int] = set()
        """processes of the fleet"""
        self.over = threading.Event()

    def disturb(self) -> None:
        """Kill, stop or delay a rank every few seconds."""
        while not self.over.wait(self.r.uniform(2.0, 8.0)):
            processes = self.processes()
            ranks = [each for each in processes if FOLLOWER in " ".join(cmdline(each)) or "serve" in cmdline(each)]
            if not ranks:
                continue
            rank, what = self.r.choice(ranks), self.r.choice(["kills", "stops", "delays"])
            self.counts[what] += 1
            try:
                if what == "kills":
                    rank.kill()
                    continue
                rank.suspend()
                self.over.wait(0.5 if what == "delays" else 9.0)
                rank.resume()
            except psutil.Error:
                pass

    def processes(self) -> list[psutil.Process]:
        found: list[psutil.Process] = self.root.children(recursive=True)
        self.seen.update(each.pid for each in found)
        return found

    def train(self, until_s: float) -> None:
        """Submit groups and refresh, one after the other."""
        number = 0
        with RolloutClient(self.endpoint, name="trainer", connect_timeout_s=120.0) as client:
            while time.monotonic() < until_s:
                number += 1
                prompts = [[self.r.randrange(3, 199) for _ in range(self.r.randrange(2, 40))] for _ in range(4)]
                sampling = Sampling(n=4, seed=number, max_tokens=24, ignore_eos=True)
                handles = [client.submit(np.array(each, np.int32), sampling) for each in prompts]
                if number % 5 == 2:
                    self.refresh(client, number)
                for prompt, handle in zip(prompts, handles, strict=True):
                    self.check(prompt, number, list(handle.result(timeout=300.0)))

    def refresh(self, client: RolloutClient, number: int) -> None:
        try:
            applied = client.refresh(self.reference.weights(number))
        except RolloutError as error:
            print(f"refresh refused: {error}", flush=True)
            self.counts["refused_refreshes"] += 1
            return
        self.reference.seeds[applied.version] = number
        self.counts["refreshes"] += 1

    def check(self, prompt: list[int], seed: int, samples: list[Sample]) -> None:
        self.counts["samples"] += len(samples)
        indices = [each.index for each in samples]
        self.counts["doubled"] += len(indices) - len({*indices})
        self.counts["lost"] += 4 - len({*indices})
        for each in samples:
            versions = [version for _, version in each.weight_versions]
            if each.finish_reason != "length":
                print(f"lost: {each.finish_reason} {each.error}", flush=True)
                self.counts["lost"] += 1
            elif versions != sorted({*versions}) or not {*versions} <= self.reference.seeds.keys():
                self.counts["mixed"] += 1
            elif len(versions) == 1:
                self.counts["compared"] += 1
                self.counts["unequal"] += bits_of(each) != self.reference.sample(prompt, seed, versions[0])[each.index]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--name", choices=SHAPES, default="llama")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder, ready = saved(Path(name) / "model", "float32", asked.name), Path(name) / "ready"
        toml = Path(name) / "serve.toml"
        toml.write_text(dump(config(folder)))
        command = [sys.executable, "-m", "rollout", "serve", "--config", str(toml), "--ready-file", str(ready), "--quiet"]
        with subprocess.Popen(command, stdin=subprocess.DEVNULL) as router:
            until(lambda: ready.exists() or router.poll() is not None, "the fleet listens", 300.0)
            reference = Reference(folder, asked.name)
            chaos = Chaos(reference, ready.read_text(), psutil.Process(router.pid), random.Random(asked.seed))
            adversary = threading.Thread(target=chaos.disturb)
            adversary.start()
            try:
                chaos.train(time.monotonic() + 60 * asked.minutes)
            finally:
                chaos.over.set()
                adversary.join()
                chaos.processes()
                router.send_signal(signal.SIGTERM)
                router.wait(60.0)
        end = time.monotonic() + GONE_S
        while (left := [pid for pid in chaos.seen if psutil.pid_exists(pid)]) and time.monotonic() < end:
            time.sleep(0.2)
        chaos.counts["left"] = len(left)
    print(json.dumps({**chaos.counts, **{name: chaos.counts[name] for name in FOUND}}))
    return int(any(chaos.counts[name] for name in FOUND))


def cmdline(process: psutil.Process) -> list[str]:
    try:
        return list(process.cmdline())
    except psutil.Error:
        return []


if __name__ == "__main__":
    sys.exit(main())
