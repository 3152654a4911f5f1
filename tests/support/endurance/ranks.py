"""Ranks of one replica that meet over TCP, as those of several hosts do, among strangers at rank 0's door."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import psutil

from rollout.client.api import RolloutClient
from rollout.config import Config, ServiceConfig, dump
from rollout.engine.parallel.messages import LENGTH
from rollout.engine.values import Sampling
from tests.support.endurance.models import TestModel
from tests.support.lasting import ROOT
from tests.support.ports import free_port

START_S = 200.0
SILENT, HUGE = 20, 20
"""strangers that say nothing, and that announce 2**40 bytes; one more sends a byte every second"""
PROMPT = [5, 6, 7]


def met_among_strangers(scratch: Path, seed: int) -> Counter[str]:
    """Start two ranks, the second one once strangers hold rank 0's door, and sample. Returns what was counted; `crashes` if the
    replica does not come, or serves nothing."""
    counts = Counter[str]()
    with ExitStack() as stack:
        try:
            _meet(stack, scratch, seed, counts)
        except Exception as error:
            counts["crashes"] += 1
            log = (scratch / "ranks.log").read_text(errors="replace")[-2000:] if (scratch / "ranks.log").exists() else ""
            print(f"  ranks among strangers: {error!r}; their log:\n{log}", flush=True)
    return counts


def _meet(stack: ExitStack, scratch: Path, seed: int, counts: Counter[str]) -> None:
    config = TestModel("tiny", scratch).config(seed)
    toml, ready = scratch / "ranks.toml", scratch / "ranks.ready"
    toml.write_text(dump(Config(engine=config, service=ServiceConfig(endpoint="tcp://127.0.0.1:*"))))
    words = ["serve", "--config", str(toml), "--ready-file", str(ready), "--engine.tp", "2", "--engine.tp-launcher", "torchrun"]
    meeting = free_port()
    first = stack.enter_context(_rank(0, meeting, words, scratch / "ranks.log"))
    door = _door(first, meeting)
    over = threading.Event()
    stack.callback(over.set)
    for _ in range(SILENT):
        stack.enter_context(_stranger(door))
    for _ in range(HUGE):
        stack.enter_context(_stranger(door)).sendall(LENGTH.pack(1 << 40) + b"x" * 100)
    slow = stack.enter_context(_stranger(door))
    threading.Thread(target=_drip, args=(slow, over), daemon=True).start()
    counts["strangers"] += SILENT + HUGE + 1
    stack.enter_context(_rank(1, meeting, words, scratch / "ranks.log"))
    _wait(lambda: ready.exists(), first, "both ranks serve")
    with RolloutClient(ready.read_text().split()[0], connect_timeout_s=START_S) as client:
        samples = client.submit(PROMPT, Sampling(n=4, max_tokens=8, seed=seed, ignore_eos=True)).result(START_S)
    counts["samples_of_ranks"] += len(samples)
    if [len(sample.token_ids) for sample in samples] != [8] * 4:
        raise RuntimeError(f"the ranks made {samples}")


@contextmanager
def _rank(number: int, meeting: int, words: list[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    place = {"RANK": number, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 1, "LOCAL_RANK": 0, "MASTER_PORT": meeting}
    env = {**os.environ, **{name: str(value) for name, value in place.items()}, "MASTER_ADDR": "127.0.0.1"}
    with log.open("ab") as file:
        child = subprocess.Popen(
            [sys.executable, "-P", "-m", "rollout", *words],
            cwd=ROOT,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
        )
    try:
        yield child
    finally:
        child.terminate()
        try:
            child.wait(30)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()


def _door(rank: subprocess.Popen[bytes], meeting: int) -> tuple[str, int]:
    """Wait until rank 0 listens for the others, and return where."""
    found: list[tuple[str, int]] = []

    def listens() -> bool:
        ends = [each.laddr for each in psutil.Process(rank.pid).net_connections("tcp") if each.status == "LISTEN"]
        if any(end.port == meeting for end in ends):
            found.extend((end.ip, end.port) for end in ends if end.port != meeting)
        return bool(found)

    _wait(listens, rank, "rank 0 listens")
    return found[0]


def _wait(done: object, rank: subprocess.Popen[bytes], what: str) -> None:
    assert callable(done)
    deadline = time.monotonic() + START_S
    while not done():
        if rank.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"{what}: not after {START_S} s, exit status {rank.poll()}")
        time.sleep(0.1)


@contextmanager
def _stranger(door: tuple[str, int]) -> Iterator[socket.socket]:
    with socket.create_connection(door, START_S) as end:
        yield end


def _drip(end: socket.socket, over: threading.Event) -> None:
    """Send a byte every second until it is over, or the other end has had enough."""
    with suppress(OSError):
        end.sendall(LENGTH.pack(1000))
        while not over.wait(1.0):
            end.sendall(b"x")
