"""Memory of a device that is host memory in truth: room that can run out, addresses that stay, streams, digests by the kernels
(in Triton's interpreter)."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import xxhash

from rollout.engine.cuda.digests import DeviceHashes
from rollout.engine.cuda.regions import Driver, MappedRegion
from rollout.engine.memory import Hashes, HostMemory, MemoryRegion
from tests.support.fake_cuda import FakeCuda


class HostHashes:
    """`rollout.engine.memory.Hashes` by xxhash."""

    def __init__(self, rows: int) -> None:
        self._rows = [xxhash.xxh3_128() for _ in range(rows)]

    def cuts(self, size: int) -> list[tuple[int, int]]:
        return [(at, min(at + (1 << 19), size)) for at in range(0, max(size, 1), 1 << 19)]

    def update(self, row: int, data: torch.Tensor, last: bool) -> None:
        self._rows[row].update(data.numpy().data)

    def add(self, row: int, data: torch.Tensor) -> None:
        self.update(row, data, True)

    def read(self) -> Callable[[], list[str]]:
        return lambda: [row.hexdigest() for row in self._rows]


class EagerStreams:
    """torch.cuda with streams that run at once, and say so when they are asked again."""

    class Stream:
        def __init__(self, device: Any = None) -> None:
            self.asked = 0

        def wait_stream(self, other: Any) -> None:
            pass

        def record_event(self) -> Any:
            return self

        def query(self) -> bool:
            self.asked += 1
            return self.asked > 2

        def synchronize(self) -> None:
            pass

    def current_stream(self, device: Any = None) -> Stream:
        return self.Stream()

    def stream(self, stream: Any) -> Any:
        return nullcontext()


class FakeDeviceMemory(HostMemory):
    """driver: of regions; None: without. rooms: bytes that there are for a while."""

    is_host = False

    def __init__(
        self,
        driver: Driver | None = None,
        rooms: int = 1 << 40,
        streams: Any = None,
        hashes: Callable[[int], Hashes] | None = None,
    ) -> None:
        self.streams: Any = streams or FakeCuda(random.Random(0))
        self.hashes: Callable[[int], Hashes] = hashes or (lambda rows: DeviceHashes(rows, torch.device("cpu")))
        self.rooms = rooms
        self.taken_rooms: list[int] = []
        self.trims = 0
        self._driver = driver

    def region(self, size: int) -> MemoryRegion | None:
        return None if self._driver is None else MappedRegion(self._driver, size)

    def room(self, size: int) -> torch.Tensor | None:
        if size > self.rooms:
            return None
        self.taken_rooms.append(size)
        return torch.empty(size, dtype=torch.uint8)

    def trim(self) -> None:
        self.trims += 1

    def settle(self) -> None:
        """Let the streams run to their ends."""
        self.streams.work(1 << 20)


def eager_memory(driver: Driver | None = None) -> FakeDeviceMemory:
    """Make the memory of an engine, whose streams run at once."""
    return FakeDeviceMemory(driver, streams=EagerStreams(), hashes=HostHashes)
