"""Rank 0: starts the other ranks as child processes, sends them every plan before it executes it, and ends when one of them
does.

Engine ── Plan ──► Leader ──┬─ Plan.encode ──► rank 1 … N - 1 (`follower.py`)
                            └─ executes it, too"""

from __future__ import annotations

import mmap
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec
import psutil
import torch

from rollout.engine.config import EngineConfig
from rollout.engine.cpu.sums import Exchange, shared_bytes
from rollout.engine.devices import device_of
from rollout.engine.forward.model import BrokenModel, in_one_line
from rollout.engine.forward.shards import LoadedPart, check_folder
from rollout.engine.kv.copies import Copied
from rollout.engine.parallel.messages import Failed, Follow, RankAnswer, RankChannel, Reply, SleepRank, Start, WakeRank
from rollout.engine.parallel.ranks import RankWorker, open_rank, open_ranks
from rollout.engine.parallel.weights import DividedWeights, divided_weights
from rollout.engine.scheduling.plan import Plan
from rollout.engine.types import RankLost, Tag
from rollout.engine.weights.cuts import NotCut
from rollout.engine.weights.live import Weights
from rollout.engine.worker import InFlight, Report, no_report

FOLLOWER = "rollout.engine.parallel.follower"
END_S = 5.0
"""how long a rank has to end by itself"""


class Followers:
    """The other ranks: their processes and channels."""

    def __init__(self, config: EngineConfig, width: int) -> None:
        self.shared_fd = memory("rollout-exchange", shared_bytes(config.tp, width))
        self.staged_fds: Sequence[int] = [memory("rollout-staged", 0) for _ in range(1, config.tp)]
        self.processes: list[subprocess.Popen[bytes]] = []
        self.channels: list[RankChannel] = []
        self.reasons: dict[int, str] = {}
        """what ranks have said of their end"""
        for rank, staged in enumerate(self.staged_fds, 1):
            self.channels.append(self.start(Start(config, rank, width, self.shared_fd, staged)))
        self.close = weakref.finalize(self, end, self.processes, self.channels, [self.shared_fd, *self.staged_fds])

    def start(self, order: Start) -> RankChannel:
        """Start the process of a rank."""
        ours, theirs = socket.socketpair()
        fds = theirs.fileno(), order.shared_fd, order.staged_fd
        with theirs:
            command = [sys.executable, "-m", FOLLOWER, str(theirs.fileno())]
            self.processes.append(subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=fds, start_new_session=True))
        channel = RankChannel(ours, Reply)
        channel.send(order)
        return channel

    @property
    def pids(self) -> list[int]:
        """Return the process of each."""
        return [process.pid for process in self.processes]

    def watch(self, exchange: Exchange) -> None:
        """Tell whoever waits in the exchange when a rank has ended."""
        threading.Thread(target=report_ends, args=([each.socket for each in self.channels], exchange), daemon=True).start()

    def tell(self, requests: Sequence[msgspec.Struct]) -> None:
        """Send one message to each. Raises RankLost."""
        for rank, (channel, request) in enumerate(zip(self.channels, requests, strict=True), 1):
            try:
                channel.send(request)
            except OSError:
                raise self.lost(rank) from None

    def answers(self) -> list[RankAnswer]:
        """Wait for an answer of each. Raises RankLost."""
        found = []
        for rank, channel in enumerate(self.channels, 1):
            try:
                answer = channel.recv()
            except (EOFError, OSError):
                raise self.lost(rank) from None
            if isinstance(answer, Failed):
                self.reasons[rank] = answer.reason
                raise self.lost(rank)
            found.append(answer)
        return found

    def lost(self, rank: int) -> RankLost:
        """Make the error for a rank that has ended, with what it said or its exit status."""
        if rank not in self.reasons:
            channel = self.channels[rank - 1]
            channel.socket.settimeout(1.0)
            try:
                while not isinstance(message := channel.recv(), Failed):
                    pass
                self.reasons[rank] = message.reason
            except (EOFError, OSError):
                self.reasons[rank] = self.status_of(rank)
        return RankLost(f"rank {rank} of {len(self.channels) + 1} has ended: {self.reasons[rank]}")

    def status_of(self, rank: int) -> str:
        """Describe how the process of a rank has ended."""
        try:
            status = self.processes[rank - 1].wait(1.0)
        except subprocess.TimeoutExpired:
            return "it does not answer"
        return f"exit status {status}" if status >= 0 else f"killed by {signal.Signals(-status).name}"


def memory(name: str, size: int) -> int:
    """Allocate shared memory without a name in the file system. Returns its descriptor."""
    fd = os.memfd_create(name, os.MFD_CLOEXEC)
    os.ftruncate(fd, size)
    return fd


def report_ends(ends: list[socket.socket], exchange: Exchange) -> None:
    """Wait until an end of a channel hangs up, and tell all ranks which one."""
    gone, ranks = select.poll(), {each.fileno(): rank for rank, each in enumerate(ends, 1)}
    for each in ends:
        gone.register(each, getattr(select, "POLLRDHUP", select.POLLHUP))
    while not (found := gone.poll()):
        pass
    exchange.lose(ranks[found[0][0]])


def end(processes: list[subprocess.Popen[bytes]], channels: list[RankChannel], fds: list[int]) -> None:
    """End the other ranks: by closing their channels, then by killing them."""
    for channel in channels:
        channel.socket.shutdown(socket.SHUT_RDWR)
        channel.close()
    for process in processes:
        try:
            process.wait(END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    for fd in fds:
        os.close(fd)


class Leader(RankWorker):
    """The worker of rank 0. What it or another rank raises in a step ends the replica: the ranks are no longer in step."""

    followers: Followers
    weights: DividedWeights

    def lead(self, followers: Followers) -> None:
        self.followers = followers

    def advance(self, plan: Plan) -> None:
        with self._one_fate():  # the other ranks do it when `move` sends the plan
            super().advance(plan)

    def move(self, plan: Plan) -> Copied:
        with self._one_fate():
            self._tell(Follow(plan.encode()))
            return super().move(plan)

    def execute(self, plan: Plan) -> InFlight:
        with self._one_fate():
            return super().execute(plan)

    @contextmanager
    def _one_fate(self) -> Iterator[None]:
        """Turn each error of a step into RankLost: the other ranks may have gone on."""
        try:
            yield
        except RankLost as error:
            lost = self.ranks_of.exchange.lost
            raise error if lost is None else self.followers.lost(lost) from error
        except Exception as error:
            raise RankLost(f"rank 0 failed in a step: {type(error).__name__}: {error}") from error

    def check(self) -> None:
        if (rank := self.ranks_of.exchange.lost) is not None:
            raise self.followers.lost(rank)

    def sleep(self, level: int) -> None:
        super().sleep(level)
        self._ask(SleepRank(level))

    def wake(self, tags: Collection[Tag] | None = None) -> None:
        super().wake(tags)
        self._ask(WakeRank(None if tags is None else list(tags)))

    def ranks(self) -> list[dict[str, Any]]:
        pids = [os.getpid(), *self.followers.pids]
        sizes = self.weights.rank_bytes
        return [
            {"rank": rank, "pid": pid, "rss_bytes": resident_bytes(pid), "weights_bytes": size}
            for rank, (pid, size) in enumerate(zip(pids, sizes, strict=True))
        ]

    def close(self) -> None:
        self.followers.close()

    def _tell(self, message: msgspec.Struct) -> None:
        self.followers.tell([message] * len(self.followers.channels))

    def _ask(self, request: msgspec.Struct) -> None:
        self._tell(request)
        self.followers.answers()


def resident_bytes(pid: int) -> int:
    """Return the resident memory of a process; 0 if it has ended."""
    try:
        return int(psutil.Process(pid).memory_info().rss)
    except psutil.Error:
        return 0


def open_leader(config: EngineConfig, report: Report = no_report) -> Leader:
    """Start the ranks of a replica and return rank 0's worker, when all have loaded. Raises ValueError; RankLost if another one
    has ended meanwhile. The other ranks end with the thread that calls this, as Linux counts it."""
    check(config)
    if config.threads is None:
        config = msgspec.structs.replace(config, threads=max(1, torch.get_num_threads() // config.tp))
    try:
        width = check_folder(config.model, config.tp)
    except NotCut:
        raise
    except Exception as error:
        raise BrokenModel(f"model folder {config.model!r} cannot be loaded: {in_one_line(error)}") from error
    report(f"starting {config.tp} ranks")
    followers = Followers(config, width)
    exchange: Exchange | None = None
    try:
        ranks = open_ranks(config, 0, width, mmap.mmap(followers.shared_fd, shared_bytes(config.tp, width)))
        exchange = ranks.exchange
        followers.watch(exchange)

        def weigh(loaded: LoadedPart) -> Weights:
            return divided_weights(loaded.module, loaded.cuts, loaded.shapes, followers)

        worker = open_rank(config, ranks, report, weigh, Leader)
    except BaseException as error:
        lost = None if exchange is None else exchange.lost
        reason = None if lost is None else followers.lost(lost)  # the error here followed from it
        followers.close()
        if reason is None:
            raise
        raise reason from error
    assert isinstance(worker, Leader)
    worker.lead(followers)
    return worker


def check(config: EngineConfig) -> None:
    """Raise ValueError for options that several ranks do not support."""
    others = {
        "weight_offload": config.weight_offload is not None,
        "latent_kv": config.latent_kv,
        "overlap_steps": bool(config.overlap_steps),
    }
    for name, on in others.items():
        if on:
            raise ValueError(f"{name} with tp={config.tp}: several ranks do not support it; leave one of them out")
    device_of(config)  # refuses a device that has no ranks yet
    if sys.platform != "linux":
        raise ValueError(f"tp={config.tp}: several ranks need Linux, for the memory that they share; leave tp out")
