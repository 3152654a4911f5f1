"""What rank 0 tells the other ranks of its replica, over a socket of each: a message is its length and msgpack.

A plan, and what changes memory, is followed in order. Only requests are answered, with one `RankAnswer` each. Ranks that rank 0
has not started itself are at the other end of a socket by their own choice, and say who they are first (`Joining`)."""

from __future__ import annotations

import socket
import struct
from collections.abc import Sequence
from typing import Any

import msgspec

from rollout.engine.config import EngineConfig
from rollout.engine.values import Tag

LENGTH = struct.Struct("<Q")
MOST_BYTES = 1 << 32


class Joining(msgspec.Struct, frozen=True):
    """What a rank that rank 0 did not start says first."""

    rank: int
    pid: int
    host: str
    secret: str
    """as rank 0 has written it into the store"""


class Start(msgspec.Struct, frozen=True, tag=True):
    """The first message: what the rank is."""

    config: EngineConfig
    rank: int
    width: int
    """numbers of the widest row that is summed"""
    shares_memory: bool
    """two descriptors of memory follow: of the `Exchange` of all ranks, and of what rank 0 stages for this one. Otherwise ranks
    exchange over a process group, and rank 0 sends what it stages"""
    store: str
    """file of torch's store, if ranks share memory and their devices exchange; "": there is none"""


class Follow(msgspec.Struct, frozen=True, tag=True):
    """Advance the states of a plan, make its copies and compute its rows. Not answered."""

    plan: bytes


class WarmUpRank(msgspec.Struct, frozen=True, tag=True):
    """Request: see `Worker.warm_up`."""


class SleepRank(msgspec.Struct, frozen=True, tag=True):
    """Request: see `Worker.sleep`."""

    level: int


class WakeRank(msgspec.Struct, frozen=True, tag=True):
    """Request: see `Worker.wake`."""

    tags: list[Tag] | None


class OpenStaged(msgspec.Struct, frozen=True, tag=True):
    """Request: make room for staged weights, for ranks that share no memory with rank 0."""


class StageElements(msgspec.Struct, frozen=True, tag=True):
    """Stage the rank's elements among `count` elements of a whole tensor from number `start` on. Not answered."""

    name: str
    start: int
    count: int
    data: bytes


class ExchangeWeights(msgspec.Struct, frozen=True, tag=True):
    """Request: swap live tensors with the staged ones; again: undo it."""

    names: list[str]
    size: int
    """bytes of the staged weights of this rank in memory that it shares with rank 0"""


class ReadElements(msgspec.Struct, frozen=True, tag=True):
    """Request: the rank's elements among `count` elements of a whole tensor from number `start` on."""

    name: str
    start: int
    count: int


class ReadMemory(msgspec.Struct, frozen=True, tag=True):
    """Request: the resident memory of the rank's process."""


class StopRank(msgspec.Struct, frozen=True, tag=True):
    """The last message of rank 0, if it ends in order. Not answered."""


class RankAnswer(msgspec.Struct, frozen=True, tag=True):
    """Ends a request."""

    data: bytes = b""
    resident: int = 0
    """bytes"""
    error: str = ""
    """why nothing has changed; "" if it was done"""


class Failed(msgspec.Struct, frozen=True, tag=True):
    """The last message of a rank that ends."""

    reason: str


Request = WarmUpRank | SleepRank | WakeRank | OpenStaged | ExchangeWeights | ReadElements | ReadMemory
Order = Start | Follow | StageElements | Request | StopRank
Reply = RankAnswer | Failed


class RankChannel:
    """One end of a socket between rank 0 and another rank. `recv` raises EOFError when the other end has gone, and
    for what is no message: the connection is of no use any more."""

    def __init__(self, end: socket.socket, kind: Any) -> None:
        self.socket = end
        self._decoder = msgspec.msgpack.Decoder(kind)

    def send(self, message: msgspec.Struct) -> None:
        """Raises OSError if the other end has gone."""
        data = msgspec.msgpack.encode(message)
        self.socket.sendall(LENGTH.pack(len(data)))
        self.socket.sendall(data)

    def recv(self) -> Any:
        (length,) = LENGTH.unpack(self._read(LENGTH.size))
        if length > MOST_BYTES:
            raise EOFError(f"a message of {length} bytes: a rank sends at most {MOST_BYTES}")
        return self._decoder.decode(self._read(length))

    def send_memory(self, fds: Sequence[int]) -> None:
        """Pass descriptors to a process of this host, after a message that says so. Raises OSError."""
        socket.send_fds(self.socket, [b"+"], list(fds))

    def recv_memory(self, count: int) -> list[int]:
        """Raises EOFError."""
        _, fds, _, _ = socket.recv_fds(self.socket, 1, count)
        if len(fds) < count:
            raise EOFError("the other rank has closed its end")
        return fds

    def _read(self, count: int) -> bytearray:
        data = bytearray(count)
        view, at = memoryview(data), 0
        while at < count:
            got = self.socket.recv_into(view[at:])
            if not got:
                raise EOFError("the other rank has closed its end")
            at += got
        return data

    def close(self) -> None:
        self.socket.close()
