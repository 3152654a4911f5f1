"""A rank other than 0, as a process: `python -m rollout.engine.parallel.follower FD` follows what rank 0 sends over that
socket. One that torchrun has started meets rank 0 first (`follow_placed`).

It ends when rank 0 does: the socket closes, or on Linux the kernel kills it. What it raises ends the replica."""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
import select
import signal
import socket
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

import msgspec
import torch

from rollout.engine.cpu.sums import SumKernels
from rollout.engine.forward.shards import LoadedPart
from rollout.engine.memory import DeviceMemory
from rollout.engine.parallel.followers import resident_bytes
from rollout.engine.parallel.group_exchange import GroupExchange
from rollout.engine.parallel.messages import (
    ExchangeWeights,
    Failed,
    Follow,
    OpenStaged,
    Order,
    RankAnswer,
    RankChannel,
    ReadElements,
    ReadMemory,
    SleepRank,
    StageElements,
    Start,
    StopRank,
    WakeRank,
    WarmUpRank,
)
from rollout.engine.parallel.placement import RankPosition, connect, process_group
from rollout.engine.parallel.ranks import Met, RankWorker, open_rank, open_ranks, shared_exchange, shared_store, with_device_of
from rollout.engine.parallel.weights import elements, put_in_part
from rollout.engine.scheduling.plan import Plan
from rollout.engine.values import RankLost
from rollout.engine.weights.cuts import Part, parts_of
from rollout.engine.weights.live import Weights
from rollout.engine.worker import no_report

PR_SET_PDEATHSIG = 1
ENDED, FAILED = 0, 3
"""exit statuses: in order with rank 0, and otherwise"""
LAST_S = 1.0
"""how long it may take to read what rank 0 has said last"""


class Follower:
    """Follows the orders of rank 0.

    Args:
        parts: of this rank, by names of tensors.
        staged_fd: memory in which rank 0 stages this rank's weights; None: it sends them.
    """

    def __init__(self, channel: RankChannel, worker: RankWorker, parts: dict[str, Part], staged_fd: int | None) -> None:
        self._channel, self._worker, self._parts, self._staged_fd = channel, worker, parts, staged_fd
        self._place: Callable[[str], torch.Tensor] | None = None
        """returns where a tensor is staged that rank 0 sends"""

    def run(self) -> None:
        """Follow until rank 0 ends in order. Raises EOFError if it ends otherwise, OSError, and what a plan raises."""
        while not isinstance(order := self._channel.recv(), StopRank):
            if isinstance(order, Follow):
                self._follow(Plan.decode(order.plan))
            elif isinstance(order, StageElements):
                assert self._place is not None
                put_in_part(order.data, self._parts[order.name], self._place(order.name), order.start, order.count)
            else:
                self._channel.send(self._answer(order))

    def _follow(self, plan: Plan) -> None:
        if len(plan.state_advances):
            self._worker.advance(plan)
        self._worker.move(plan)
        if plan.num_rows:
            self._worker.execute(plan)

    def _answer(self, order: Order) -> RankAnswer:
        worker = self._worker
        match order:
            case WarmUpRank():
                worker.warm_up()
            case SleepRank():
                worker.sleep(order.level)
            case WakeRank():
                worker.wake(order.tags)
            case ReadElements():
                tensor = worker.weights.inventory.tensors[order.name]
                return RankAnswer(elements(self._parts[order.name], tensor, order.start, order.count))
            case OpenStaged():
                return self._open()
            case ExchangeWeights():
                return self._exchange(order)
            case ReadMemory():
                return RankAnswer(resident=resident_bytes(os.getpid()))
        return RankAnswer()

    def _open(self) -> RankAnswer:
        try:
            self._place = self._worker.weights.open_staged()
        except (MemoryError, RuntimeError) as error:
            return RankAnswer(error=f"{type(error).__name__}: {error}")
        return RankAnswer()

    def _exchange(self, order: ExchangeWeights) -> RankAnswer:
        if not order.names:
            return RankAnswer()
        try:
            if self._staged_fd is None:
                self._worker.weights.exchange(order.names)
            else:
                staged = torch.frombuffer(mmap.mmap(self._staged_fd, order.size), dtype=torch.uint8)
                self._worker.weights.exchange_with(staged, order.names)
        except Exception as error:
            return RankAnswer(error=f"{type(error).__name__}: {error}")
        return RankAnswer()


class Placed(NamedTuple):
    """What a rank knows that rank 0 has not started."""

    position: RankPosition
    store: Any
    """torch's, by which ranks meet"""
    model: str
    """folder of the model on this host"""


def follow(channel: RankChannel, ready: Callable[[], None] = lambda: None, placed: Placed | None = None) -> None:
    """Load, and follow rank 0 until it ends. ready: is called in between. placed: None: rank 0 has started this rank."""
    start = channel.recv()
    assert isinstance(start, Start)
    config, fds = start.config, channel.recv_memory(2) if start.shares_memory else []
    if placed is not None:
        config = msgspec.structs.replace(config, model=placed.model)
    position = None if placed is None else placed.position
    config = with_device_of(config, start.rank, position)
    parts: dict[str, Part] = {}

    def meet(kernels: SumKernels) -> Met:
        if start.shares_memory:
            exchange = shared_exchange(fds[0], config, start.rank, start.width, kernels)
            return Met(exchange, partial(shared_store, start.store, config.tp))
        assert placed is not None
        group, store = process_group(placed.store, placed.position), placed.store
        return Met(GroupExchange(start.width, start.rank, config.tp, group, kernels.library), lambda: store)

    def weigh(loaded: LoadedPart, moved: Callable[[], None], memory: DeviceMemory) -> Weights:
        parts.update(parts_of(loaded.cuts, loaded.shapes, start.rank, config.tp))
        return Weights(loaded.module, lay_out=moved, memory=memory)

    ranks = open_ranks(config, meet, position)
    try:
        worker = open_rank(config, ranks, no_report, weigh, RankWorker)
        ready()
        Follower(channel, worker, parts, fds[1] if fds else None).run()
    finally:
        ranks.exchange.close()
        for fd in fds:
            os.close(fd)


def end_with(end: socket.socket, in_order: threading.Event) -> None:
    """End this process when rank 0 has gone, also in the middle of a step. in_order: is set when rank 0 has said so before."""
    gone = select.poll()
    gone.register(end, select.POLLRDHUP if hasattr(select, "POLLRDHUP") else select.POLLHUP)
    while not gone.poll():
        pass
    os._exit(ENDED if in_order.wait(LAST_S) else FAILED)


def end_with_parent() -> None:
    """Let Linux kill this process when the thread that has started it ends, also while it is stopped."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def follow_placed(position: RankPosition, model: str) -> int:
    """Meet rank 0 and follow it until it ends. model: folder on this host. Returns the exit status. Raises RankLost where rank
    0 cannot be reached."""
    end_with_parent()
    store = position.open_store()
    return run(connect(position, store), Placed(position, store, model))


def run(end: socket.socket, placed: Placed | None = None) -> int:
    """Run a rank at the other end of a socket of rank 0. Returns the exit status."""
    for number in (signal.SIGINT, signal.SIGTERM) if placed else (signal.SIGINT,):
        signal.signal(number, signal.SIG_IGN)  # rank 0 decides, which gets it as well
    if placed is None:
        end_with_parent()
    channel = RankChannel(end, Order)
    in_order = threading.Event()
    threading.Thread(target=end_with, args=(end, in_order), daemon=True).start()
    try:
        follow(channel, gc.freeze, placed)  # no garbage is looked for among all of torch, in the middle of a step
        in_order.set()
    except (EOFError, OSError):
        return FAILED
    except Exception as error:
        known = isinstance(error, (RankLost, ValueError))
        with suppress(OSError):  # rank 0 may have found the same reason
            channel.send(Failed(str(error) if known else f"{type(error).__name__}: {error}"))
        if not known:
            raise
        return FAILED
    finally:
        gc.unfreeze()  # libraries report what is never collected as leaked
    return ENDED


if __name__ == "__main__":
    sys.exit(run(socket.socket(fileno=int(sys.argv[1]))))
