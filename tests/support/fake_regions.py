"""Virtual memory of the host in place of a device's: addresses that stay, and memory that really goes."""

from __future__ import annotations

import ctypes
import mmap
import weakref
from collections.abc import Callable

import torch

libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
NOTHING, PRIVATE, FIXED = 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, 0x10


class HostDriver:
    """`rollout.engine.cuda.regions.Driver`. What is not mapped cannot be touched: the process would end. `limit`: bytes there
    are."""

    grain = 1 << 16

    def __init__(self, limit: int = 1 << 40) -> None:
        self.limit = limit
        self.mapped: dict[int, int] = {}
        """bytes by handle"""
        self.reserved = 0
        self.settled = 0
        self._handles = 0

    def reserve(self, size: int) -> int:
        assert size % self.grain == 0
        self.reserved += size
        return int(libc.mmap(None, size, NOTHING, PRIVATE, -1, 0))

    def free(self, address: int, size: int) -> None:
        self.reserved -= size
        assert libc.munmap(address, size) == 0

    def map(self, address: int, size: int) -> int:
        assert size % self.grain == 0
        if sum(self.mapped.values()) + size > self.limit:
            raise torch.OutOfMemoryError("no memory is left")
        assert libc.mmap(address, size, mmap.PROT_READ | mmap.PROT_WRITE, PRIVATE | FIXED, -1, 0) == address
        self._handles += 1
        self.mapped[self._handles] = size
        return self._handles

    def unmap(self, address: int, size: int, handle: int) -> None:
        assert self.mapped.pop(handle) == size
        assert libc.mmap(address, size, NOTHING, PRIVATE | FIXED, -1, 0) == address

    def tensor(self, address: int, size: int, on_end: Callable[[], None]) -> torch.Tensor:
        memory = (ctypes.c_uint8 * size).from_address(address)
        weakref.finalize(memory, on_end).atexit = False
        return torch.frombuffer(memory, dtype=torch.uint8)

    def settle(self) -> None:
        self.settled += 1
