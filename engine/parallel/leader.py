"""Rank 0: starts the other ranks or waits for them, sends them each plan before it executes it, and ends when one of them ends.

Engine ── Plan ──► Leader ──┬─ Plan.encode ──► rank 1 … N - 1 (`follower.py`)
                            └─ executes it, too"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import torch

from rollout.engine.build import device_of
from rollout.engine.config import EngineConfig
from rollout.engine.cpu.sums import SumKernels
from rollout.engine.forward.load import BrokenModel, in_one_line
from rollout.engine.forward.shards import LoadedPart, check_folder
from rollout.engine.forward.summed import RankExchange
from rollout.engine.kv.block import Copied
from rollout.engine.memory import DeviceMemory
from rollout.engine.parallel.followers import Followers, PlacedFollowers, RankProcess, resident_bytes
from rollout.engine.parallel.messages import Follow, SleepRank, WakeRank, WarmUpRank
from rollout.engine.parallel.placement import START_S, RankPosition, position_of
from rollout.engine.parallel.ranks import Met, RankWorker, open_rank, open_ranks, with_device_of
from rollout.engine.parallel.weights import DividedWeights, divided_weights
from rollout.engine.scheduling.plan import Plan
from rollout.engine.values import RankLost, Tag
from rollout.engine.weights.cuts import NotCut
from rollout.engine.weights.live import Weights
from rollout.engine.worker import InFlight, Report, no_report


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
            self.followers.failed.append(0)
            lost = self.ranks_of.exchange.lost
            raise error if lost is None else self.followers.lost(lost) from error
        except Exception as error:
            self.followers.failed.append(0)
            raise RankLost(f"rank 0 failed in a step: {type(error).__name__}: {error}") from error

    def check(self) -> None:
        if (rank := self.ranks_of.exchange.lost) is not None:
            raise self.followers.lost(rank)

    def warm_up(self, report: Report = no_report) -> None:
        """Run `Worker.warm_up` on all ranks. Raises ValueError, RankLost; the replica has ended then."""
        self.followers.patience(START_S)
        self._tell(WarmUpRank())
        try:
            super().warm_up(report)
            self.followers.answers()
            self.followers.patience(self.config.tp_timeout_s)
        except BaseException as error:
            self.followers.failed.append(0)
            lost = self.ranks_of.exchange.lost
            reason = None if lost is None else self.followers.lost(lost)
            self.close()
            raise error if reason is None else reason from error

    def sleep(self, level: int) -> None:
        super().sleep(level)
        self.followers.ask(SleepRank(level))

    def wake(self, tags: Collection[Tag] | None = None) -> None:
        super().wake(tags)
        self.followers.ask(WakeRank(None if tags is None else list(tags)))

    def ranks(self) -> list[dict[str, Any]]:
        where = [RankProcess(socket.gethostname(), os.getpid()), *self.followers.processes_of_ranks]
        silent = self.ranks_of.exchange.failed  # a rank that does not compute does not answer
        others = [0] * len(where[1:]) if silent else self.followers.resident_bytes()
        resident = [resident_bytes(os.getpid()), *others]
        return [
            {"rank": rank, **each._asdict(), "rss_bytes": rss, "weights_bytes": size}
            for rank, (each, rss, size) in enumerate(zip(where, resident, self.weights.rank_bytes, strict=True))
        ]

    def close(self) -> None:
        self.followers.close()
        self.ranks_of.exchange.close()

    def _tell(self, message: msgspec.Struct) -> None:
        self.followers.tell([message] * len(self.followers.channels))


def open_leader(config: EngineConfig, report: Report = no_report) -> Leader:
    """Start the ranks of a replica and return rank 0's worker, when all have loaded. Raises ValueError; RankLost if another one
    has ended meanwhile. The other ranks end with the thread that calls this, as Linux counts it."""
    check(config)
    position = position_of(os.environ, config.tp) if config.tp_launcher == "torchrun" else None
    with_device_of(config, 0, position)  # refuses too few, before others start
    local_ranks = config.tp if position is None else position.local_ranks
    threads = max(1, torch.get_num_threads() // local_ranks) if config.threads is None else config.threads
    config = msgspec.structs.replace(config, threads=threads, overlap_steps=False)  # whose default is on on some devices
    try:
        width = check_folder(config.model, config.tp)
    except NotCut:
        raise
    except Exception as error:
        raise BrokenModel(f"model folder {config.model!r} cannot be loaded: {in_one_line(error)}") from error
    report(f"starting {config.tp} ranks" if position is None else f"waiting for {config.tp - 1} other ranks")
    followers = Followers(config, width) if position is None else PlacedFollowers(config, width, position)
    return lead(config, followers, width, position, report)


def lead(config: EngineConfig, followers: Followers, width: int, position: RankPosition | None, report: Report) -> Leader:
    """Make rank 0's worker, when all ranks have loaded. Ends the others if it raises, as `open_leader`."""
    exchange: RankExchange | None = None

    def meet(kernels: SumKernels) -> Met:
        nonlocal exchange
        met = followers.meet(config, width, kernels)
        exchange = met.exchange
        followers.watch(exchange)
        return met

    def weigh(loaded: LoadedPart, moved: Callable[[], None], memory: DeviceMemory) -> Weights:
        return divided_weights(loaded.module, loaded.cuts, loaded.shapes, followers, moved, memory)

    try:
        config = with_device_of(config, 0, position)
        ranks = open_ranks(config, meet, position)
        exchange = ranks.exchange
        followers.watch(exchange)
        worker = open_rank(config, ranks, report, weigh, Leader)
    except BaseException as error:
        lost = None if exchange is None else exchange.lost
        reason = None if lost is None else followers.lost(lost)  # the error here followed from it
        followers.close()
        if exchange is not None:
            exchange.close()
        if reason is None:
            raise
        raise reason from error
    assert isinstance(worker, Leader)
    worker.lead(followers)
    followers.patience(config.tp_timeout_s)
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
    device_of(config)  # refuses one that is not there
    if sys.platform != "linux":
        raise ValueError(f"tp={config.tp}: several ranks need Linux, for the memory that they share; leave tp out")
