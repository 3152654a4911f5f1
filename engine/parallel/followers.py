"""The other ranks of a replica, as rank 0 has them: started as child processes, or met where something else has started them
(`rollout.engine.parallel.placement`)."""

from __future__ import annotations

import os
import select
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import weakref
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple

import msgspec
import psutil

from rollout.engine.config import EngineConfig
from rollout.engine.cpu.sums import SumKernels, shared_bytes
from rollout.engine.forward.summed import RankExchange
from rollout.engine.parallel.devices import exchanges_itself
from rollout.engine.parallel.group_exchange import GroupExchange
from rollout.engine.parallel.messages import Failed, Joining, RankAnswer, RankChannel, ReadMemory, Reply, Start, StopRank
from rollout.engine.parallel.placement import MeetingPlace, RankPosition
from rollout.engine.parallel.ranks import Met, shared_exchange, shared_store
from rollout.engine.processes import run_module
from rollout.engine.values import RankLost

FOLLOWER = "rollout.engine.parallel.follower"
END_S = 5.0
"""how long a rank has to end by itself"""


class RankProcess(NamedTuple):
    """Where a rank runs."""

    host: str
    pid: int


class Followers:
    """The other ranks: their channels, and the memory that all share. Raises RankLost.

    Args:
        width: numbers of the widest row that is summed.
        shares_memory: whether all ranks are on this host, and map each other's memory.
    """

    def __init__(self, config: EngineConfig, width: int, shares_memory: bool = True) -> None:
        self.shares_memory = shares_memory
        self.shared_fd = memory("rollout-exchange", shared_bytes(config.tp, width))
        self.folder = tempfile.mkdtemp(prefix="rollout-") if shares_memory and exchanges_itself(config) else ""
        """of torch's store, for this user alone; "": there is none"""
        self.staged_fds = [memory("rollout-staged", 0) for _ in range(1, config.tp)]
        self.processes: list[subprocess.Popen[bytes]] = []
        self.channels: list[RankChannel] = []
        self.reasons: dict[int, str] = {}
        """what ranks have said of their end"""
        self.failed: list[int] = []
        """ranks that have ended, do not answer, or differ; of several, the first"""
        self._watched: list[RankExchange] = []
        held = [self.shared_fd, *self.staged_fds], self.folder
        self.close = weakref.finalize(self, end, self.processes, self.channels, *held, self.failed, self._watched)
        try:
            for rank, staged in enumerate(self.staged_fds, 1):
                self.channels.append(self.start(rank))
                self._begin(Start(config, rank, width, shares_memory, self.store_path), staged)
        except BaseException:
            self.close()
            raise

    @property
    def store_path(self) -> str:
        """Return the path of torch's store; "": there is none."""
        return str(Path(self.folder) / "store") if self.folder else ""

    def start(self, rank: int) -> RankChannel:
        """Start the process of a rank."""
        ours, theirs = socket.socketpair()
        with theirs:
            command = run_module(FOLLOWER, theirs.fileno())
            fds = (theirs.fileno(),)
            self.processes.append(subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=fds, start_new_session=True))
        return RankChannel(ours, Reply)

    def _begin(self, order: Start, staged_fd: int) -> None:
        channel = self.channels[order.rank - 1]
        try:
            channel.send(order)
            if order.shares_memory:
                channel.send_memory([self.shared_fd, staged_fd])
        except OSError:
            raise self.lost(order.rank) from None

    def meet(self, config: EngineConfig, width: int, kernels: SumKernels) -> Met:
        """Open rank 0's exchange with the others. Raises RankLost."""
        exchange = shared_exchange(self.shared_fd, config, 0, width, kernels)
        return Met(exchange, partial(shared_store, self.store_path, config.tp))

    @property
    def processes_of_ranks(self) -> list[RankProcess]:
        """Return the process of each."""
        return [RankProcess(socket.gethostname(), process.pid) for process in self.processes]

    def resident_bytes(self) -> list[int]:
        """Return the resident memory of each. Raises RankLost."""
        if self.shares_memory:
            return [resident_bytes(each.pid) for each in self.processes_of_ranks]
        return [answer.resident for answer in self.ask(ReadMemory())]

    def watch(self, exchange: RankExchange) -> None:
        """Tell whoever waits in the exchange when a rank has ended. Called again with one that is made of it."""
        self._watched.append(exchange)
        if len(self._watched) == 1:
            ends = [each.socket for each in self.channels]
            threading.Thread(target=report_ends, args=(ends, self._watched, self.failed), daemon=True).start()

    def send(self, rank: int, message: msgspec.Struct) -> None:
        """Send a message to one. Raises RankLost."""
        try:
            self.channels[rank - 1].send(message)
        except TimeoutError:
            raise RankLost(self.late(rank)) from None
        except OSError:
            raise self.lost(rank) from None

    def tell(self, requests: Sequence[msgspec.Struct]) -> None:
        """Send one message to each. Raises RankLost."""
        assert len(requests) == len(self.channels)
        for rank, request in enumerate(requests, 1):
            self.send(rank, request)

    def ask(self, request: msgspec.Struct) -> list[RankAnswer]:
        """Send one request to all, and wait for their answers. Raises RankLost."""
        self.tell([request] * len(self.channels))
        return self.answers()

    def answers(self) -> list[RankAnswer]:
        """Wait for an answer of each. Raises RankLost."""
        found = []
        for rank, channel in enumerate(self.channels, 1):
            try:
                answer = channel.recv()
            except TimeoutError:
                raise RankLost(self.late(rank)) from None
            except (EOFError, OSError):
                raise self.lost(rank) from None
            if isinstance(answer, Failed):
                self.reasons[rank] = answer.reason
                raise self.lost(rank)
            found.append(answer)
        return found

    def patience(self, timeout_s: float) -> None:
        """Set how long each may take for a message or an answer, from now on."""
        for channel in self.channels:
            channel.socket.settimeout(timeout_s)

    def late(self, rank: int) -> str:
        """Describe a rank that has not taken a message or not answered in time."""
        self.failed.append(rank)
        timeout_s = self.channels[rank - 1].socket.gettimeout()
        return f"rank {rank} of {len(self.channels) + 1} did not answer within {timeout_s:g} s"

    def lost(self, rank: int) -> RankLost:
        """Make the error for a rank that has ended, with what it said or its exit status."""
        self.failed.append(rank)
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
        if not self.processes:
            return "its connection is closed"
        try:
            status = self.processes[rank - 1].wait(1.0)
        except subprocess.TimeoutExpired:
            return "it does not answer"
        return f"exit status {status}" if status >= 0 else f"killed by {signal.Signals(-status).name}"


def resident_bytes(pid: int) -> int:
    """Return the resident memory of a process; 0 if it has ended."""
    try:
        return int(psutil.Process(pid).memory_info().rss)
    except psutil.Error:
        return 0


def memory(name: str, size: int) -> int:
    """Allocate shared memory without a name in the file system. Returns its descriptor."""
    fd = os.memfd_create(name, os.MFD_CLOEXEC)
    os.ftruncate(fd, size)
    return fd


def report_ends(ends: list[socket.socket], exchanges: list[RankExchange], failed: list[int]) -> None:
    """Wait until an end of a channel hangs up, and tell all ranks which one."""
    gone, ranks = select.poll(), {each.fileno(): rank for rank, each in enumerate(ends, 1)}
    for each in ends:
        gone.register(each, getattr(select, "POLLRDHUP", select.POLLHUP))
    while not (found := gone.poll()):
        pass
    failed.append(ranks[found[0][0]])
    for exchange in list(exchanges):
        exchange.lose(ranks[found[0][0]])


class PlacedFollowers(Followers):
    """The other ranks, which torchrun, Ray or SLURM has started."""

    def __init__(self, config: EngineConfig, width: int, position: RankPosition) -> None:
        self._position, self._joined = position, dict[int, Joining]()
        self._place = MeetingPlace(position)
        try:
            super().__init__(config, width, position.one_host)
        except BaseException:
            self._place.close()
            raise

    def start(self, rank: int) -> RankChannel:
        channel, self._joined[rank] = self._place.channel(rank)
        return channel

    def meet(self, config: EngineConfig, width: int, kernels: SumKernels) -> Met:
        try:
            if self.shares_memory:
                return super().meet(config, width, kernels)
            store = self._place.store
            exchange = GroupExchange(width, 0, config.tp, self._place.group(self._position), kernels.library)
            return Met(exchange, lambda: store)
        finally:
            self._place.close()

    @property
    def processes_of_ranks(self) -> list[RankProcess]:
        return [RankProcess(each.host, each.pid) for _, each in sorted(self._joined.items())]


def end(
    processes: list[subprocess.Popen[bytes]],
    channels: list[RankChannel],
    fds: list[int],
    folder: str,
    failed: list[int],
    watched: list[RankExchange],
) -> None:
    """End the other ranks: by closing their channels, then by killing them. If one has failed, all do: what has started them
    starts them again."""
    in_order = not failed  # before closed channels are noticed
    watched.clear()  # no thread waits in an exchange any more
    for channel in channels:
        if in_order:
            with suppress(OSError):
                channel.send(StopRank())
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
    if folder:
        shutil.rmtree(folder, ignore_errors=True)
