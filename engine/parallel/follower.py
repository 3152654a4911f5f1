"""A rank other than 0, as a process: `python -m rollout.engine.parallel.follower FD` follows what rank 0 sends over that
socket.

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

import torch

from rollout.engine.cpu.sums import shared_bytes
from rollout.engine.forward.shards import LoadedPart
from rollout.engine.parallel.messages import (
    ExchangeWeights,
    Failed,
    Follow,
    Order,
    RankAnswer,
    RankChannel,
    ReadElements,
    SleepRank,
    Start,
    WakeRank,
)
from rollout.engine.parallel.ranks import RankWorker, open_rank, open_ranks
from rollout.engine.parallel.weights import elements
from rollout.engine.scheduling.plan import Plan
from rollout.engine.types import RankLost
from rollout.engine.weights.cuts import Part, parts_of
from rollout.engine.weights.live import Weights
from rollout.engine.worker import no_report

PR_SET_PDEATHSIG = 1
ENDED, FAILED = 0, 3
"""exit statuses: with rank 0, and on its own"""


class Follower:
    """Follows the orders of rank 0. parts: of this rank, by names of tensors."""

    def __init__(self, channel: RankChannel, worker: RankWorker, parts: dict[str, Part], staged_fd: int) -> None:
        self._channel, self._worker, self._parts, self._staged_fd = channel, worker, parts, staged_fd

    def run(self) -> None:
        """Follow until rank 0 closes the channel. Raises what a plan raises."""
        while True:
            try:
                order = self._channel.recv()
            except (EOFError, OSError):
                return
            if isinstance(order, Follow):
                self._follow(Plan.decode(order.plan))
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
            case SleepRank():
                worker.sleep(order.level)
            case WakeRank():
                worker.wake(order.tags)
            case ReadElements():
                tensor = worker.weights.inventory.tensors[order.name]
                return RankAnswer(elements(self._parts[order.name], tensor, order.start, order.count))
            case ExchangeWeights():
                return self._exchange(order)
        return RankAnswer()

    def _exchange(self, order: ExchangeWeights) -> RankAnswer:
        if not order.names:
            return RankAnswer()
        try:
            staged = torch.frombuffer(mmap.mmap(self._staged_fd, order.size), dtype=torch.uint8)
            self._worker.weights.exchange_with(staged, order.names)
        except Exception as error:
            return RankAnswer(error=f"{type(error).__name__}: {error}")
        return RankAnswer()


def follow(channel: RankChannel, ready: Callable[[], None] = lambda: None) -> None:
    """Load, and follow rank 0 until it ends. ready: is called in between."""
    start = channel.recv()
    assert isinstance(start, Start)
    config = start.config
    shared = mmap.mmap(start.shared_fd, shared_bytes(config.tp, start.width))
    ranks = open_ranks(config, start.rank, start.width, shared)
    parts: dict[str, Part] = {}

    def weigh(loaded: LoadedPart) -> Weights:
        parts.update(parts_of(loaded.cuts, loaded.shapes, start.rank, config.tp))
        return Weights(loaded.module)

    worker = open_rank(config, ranks, no_report, weigh, RankWorker)
    ready()
    Follower(channel, worker, parts, start.staged_fd).run()


def end_with(end: socket.socket) -> None:
    """End this process when rank 0 has gone, also in the middle of a step."""
    gone = select.poll()
    gone.register(end, select.POLLRDHUP if hasattr(select, "POLLRDHUP") else select.POLLHUP)
    while not gone.poll():
        pass
    os._exit(ENDED)


def main() -> int:
    """Run a rank. Returns the exit status."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # rank 0 decides
    if sys.platform == "linux":  # also if this process is stopped then
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    end = socket.socket(fileno=int(sys.argv[1]))
    channel = RankChannel(end, Order)
    threading.Thread(target=end_with, args=(end,), daemon=True).start()
    try:
        follow(channel, gc.freeze)  # no garbage is looked for among all of torch, in the middle of a step
    except (EOFError, OSError):
        return ENDED
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
    sys.exit(main())
