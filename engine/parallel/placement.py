"""Where the ranks of a replica are, when torchrun, Ray or SLURM has started them, and not rank 0. They have its variables:

RANK, WORLD_SIZE                  which of how many ranks this process is
LOCAL_WORLD_SIZE                  how many of them this host has. All: they share its memory. Fewer: they share none
LOCAL_RANK                        which of them this one is, for its CUDA device; it need not be set
MASTER_ADDR, MASTER_PORT          where ranks find each other, by torch's store

rank 0      listens at a socket ── address, secret ──► store
rank 1 …    connect to it, name their rank, and follow (`rollout.engine.parallel.follower`)"""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import tempfile
import time
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from rollout.engine.parallel.greeting import Reception
from rollout.engine.parallel.messages import Joining, RankChannel, Reply
from rollout.engine.values import RankLost

START_S = 600.0
"""how long a rank waits for another one until all have loaded"""
CONNECT_S = 10.0
"""how long a rank waits for its connection to rank 0"""
TCP_OPTIONS = (socket.TCP_NODELAY, 1), (socket.TCP_KEEPIDLE, 10), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 4)
KEY = "rollout/ranks"
NAMES = ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class RankPosition(NamedTuple):
    """Which of the ranks of a replica this process is."""

    rank: int
    ranks: int
    local_ranks: int
    """of them, on this host"""
    master: tuple[str, int]
    """host and port"""
    local_rank: int | None = None
    """of the ranks on this host, by LOCAL_RANK; None: it is not set"""

    @property
    def number_here(self) -> int:
        """Return the number of this rank on its host; without LOCAL_RANK, as if ranks were placed host by host."""
        return self.rank % self.local_ranks if self.local_rank is None else self.local_rank

    @property
    def one_host(self) -> bool:
        """Whether all ranks share the memory of a host."""
        return self.local_ranks == self.ranks

    def open_store(self) -> Any:
        """Connect to torch's store, or on rank 0 without torchrun's, open it. Raises RankLost."""
        from torch.distributed.rendezvous import rendezvous

        try:
            store, _, _ = next(rendezvous("env://", timeout=timedelta(seconds=START_S)))
        except (OSError, RuntimeError) as error:
            raise RankLost(f"ranks cannot meet at MASTER_ADDR={self.master[0]}: {str(error).splitlines()[0]}") from error
        return store

    def own_address(self) -> str:
        """Return the address of this host by which it reaches the master's. Sends nothing. Raises OSError."""
        family, kind, _, _, target = socket.getaddrinfo(*self.master, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(target)
            return str(probe.getsockname()[0])


def position_of(environment: Mapping[str, str], tp: int) -> RankPosition:
    """Read the variables. Raises ValueError."""
    start = f"torchrun --nproc-per-node {tp} -m rollout serve --engine.tp {tp} --engine.tp-launcher torchrun …"
    missing = [name for name in NAMES if name not in environment]
    if missing:
        raise ValueError(f"tp_launcher='torchrun': {', '.join(missing)} is not set; start all ranks with {start}")
    try:
        rank, ranks, local_ranks = (int(environment[name]) for name in NAMES[:3])
        local_rank = int(environment["LOCAL_RANK"]) if "LOCAL_RANK" in environment else None
        master = environment["MASTER_ADDR"], int(environment["MASTER_PORT"])
    except ValueError:
        values = ", ".join(f"{name}={environment[name]}" for name in (*NAMES, "LOCAL_RANK") if name in environment)
        raise ValueError(f"tp_launcher='torchrun': {values}: must be numbers; start all ranks with {start}") from None
    if ranks != tp or not 0 <= rank < ranks or not 1 <= local_ranks <= ranks:
        raise ValueError(f"RANK={rank}, WORLD_SIZE={ranks}, LOCAL_WORLD_SIZE={local_ranks} with tp={tp}: start {start}")
    if local_rank is not None and not 0 <= local_rank < local_ranks:
        raise ValueError(f"LOCAL_RANK={local_rank} with LOCAL_WORLD_SIZE={local_ranks}: start {start}")
    return RankPosition(rank, ranks, local_ranks, master, local_rank)


class Address(msgspec.Struct, frozen=True):
    """Where rank 0 listens, as it writes it into the store."""

    unix: str | None
    """path of its socket; None: it listens at `tcp`"""
    tcp: tuple[str, int] | None
    secret: str


class MeetingPlace:
    """Where the other ranks connect to rank 0. Raises RankLost, OSError."""

    def __init__(self, position: RankPosition) -> None:
        self._secret = secrets.token_hex(16)
        self._folder = tempfile.mkdtemp(prefix="rollout-") if position.one_host else None
        if self._folder is not None:  # a socket by which memory can be passed
            unix = str(Path(self._folder) / "ranks")
            self._listener = socket.socket(socket.AF_UNIX)
            self._listener.bind(unix)
            self._listener.listen(position.ranks)
            meeting = Address(unix, None, self._secret)
        else:
            address = position.own_address()
            self._listener = socket.create_server((address, 0), family=family_of(address))
            meeting = Address(None, (address, self._listener.getsockname()[1]), self._secret)
        self._reception = Reception(self._listener, self._secret)
        self._store = position.open_store()
        self._store.set(KEY, msgspec.json.encode(meeting))
        self._joined: dict[int, tuple[RankChannel, Joining]] = {}
        self._until = time.monotonic() + START_S

    @property
    def store(self) -> Any:
        """Return torch's store, which all ranks have."""
        return self._store

    def group(self, position: RankPosition) -> Any:
        """Make the process group of all ranks, when they do so, too."""
        return process_group(self._store, position)

    def channel(self, rank: int) -> tuple[RankChannel, Joining]:
        """Wait for a rank. Raises RankLost."""
        while rank not in self._joined:
            try:
                end, joining = self._reception.next(self._until)
            except TimeoutError:
                raise RankLost(f"rank {rank} has not come within {START_S:g} s") from None
            if joining.rank in self._joined:
                end.close()
            else:
                self._joined[joining.rank] = RankChannel(lasting(end), Reply), joining
        return self._joined[rank]

    def close(self) -> None:
        self._reception.close()
        self._listener.close()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)


def connect(position: RankPosition, store: Any) -> socket.socket:
    """Connect to rank 0. Raises RankLost."""
    try:
        meeting = msgspec.json.decode(store.get(KEY), type=Address)
        if meeting.unix is not None:
            end = socket.socket(socket.AF_UNIX)
            end.connect(meeting.unix)
        else:
            assert meeting.tcp is not None
            end = socket.create_connection(meeting.tcp, CONNECT_S)
    except (OSError, RuntimeError) as error:
        raise RankLost(f"rank 0 cannot be reached: {str(error).splitlines()[0]}") from error
    RankChannel(lasting(end), Joining).send(Joining(position.rank, os.getpid(), socket.gethostname(), meeting.secret))
    return end


def lasting(end: socket.socket) -> socket.socket:
    """Let a connection stay, without delays; a host that has gone is noticed within half a minute."""
    end.settimeout(None)
    if end.family != socket.AF_UNIX:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in TCP_OPTIONS:
            end.setsockopt(socket.IPPROTO_TCP, option, value)
    return end


def family_of(address: str) -> socket.AddressFamily:
    """Return the family of an IP address."""
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def process_group(store: Any, position: RankPosition) -> Any:
    """Make a gloo group of all ranks, without torch's default one. Raises RankLost."""
    import torch.distributed as dist
    from torch._C._distributed_c10d import PrefixStore

    options: Any = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout = timedelta(seconds=START_S)
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=position.own_address())]
    try:
        return dist.ProcessGroupGloo(PrefixStore("rollout/gloo", store), position.rank, position.ranks, options)
    except RuntimeError as error:
        raise RankLost(f"ranks cannot connect to each other: {str(error).splitlines()[0]}") from error
