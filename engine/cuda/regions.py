"""Device memory at fixed addresses: a sleep releases the physical memory, and CUDA graphs stay valid.

    addresses   reserved once ├──────────────────────────────────────┤     cuMemAddressReserve
    memory      mapped        ├── piece ──┼── piece ──┤                    cuMemCreate, cuMemMap; as much as `need` asked for
    release     unmapped                                                   cuMemUnmap, cuMemRelease: free for others
    restore     mapped again  ├── piece ──┼── piece ──┤                    other memory, the same addresses

torch's allocator does not know this memory. vLLM's CuMemAllocator and torch_memory_saver do the same with an allocator plugged
into torch.
"""

from __future__ import annotations

import ctypes
import logging
import weakref
from collections.abc import Callable
from typing import Any, Protocol

import torch

log = logging.getLogger(__name__)

PIECE_BYTES = 256 << 20
"""largest piece of memory that is mapped at once"""
OUT_OF_MEMORY = 2
PINNED, DEVICE, READ_AND_WRITE = 1, 1, 3


class Driver(Protocol):
    """Virtual memory of a device: `CudaDriver`, or a stand-in for tests. Each method may raise RuntimeError."""

    grain: int
    """sizes and addresses are multiples of this many bytes"""

    def reserve(self, size: int) -> int:
        """Reserve addresses. Returns the first one."""

    def free(self, address: int, size: int) -> None:
        """Release reserved addresses."""

    def map(self, address: int, size: int) -> int:
        """Map memory to addresses. Returns its handle. Raises torch.OutOfMemoryError."""

    def unmap(self, address: int, size: int, handle: int) -> None:
        """Unmap and release the memory."""

    def tensor(self, address: int, size: int, on_end: Callable[[], None]) -> torch.Tensor:
        """Return [size] uint8 at addresses of which the first are mapped. on_end: called when the last view is freed."""

    def settle(self) -> None:
        """Wait until the device is idle."""


class Addresses:
    """Reserved addresses, and the memory mapped to the first of them. Raises RuntimeError if the driver fails."""

    def __init__(self, driver: Driver, size: int) -> None:
        self._driver = driver
        self.size = _up(max(size, 1), driver.grain)
        self.first = driver.reserve(self.size)
        self._pieces: list[tuple[int, int, int]] = []
        """(address, bytes, handle) of mapped memory"""

    @property
    def mapped(self) -> int:
        """Number of mapped bytes."""
        return sum(size for _, size, _ in self._pieces)

    def map(self, size: int) -> None:
        """Map the first `size` bytes. Raises torch.OutOfMemoryError."""
        wanted = min(_up(size, self._driver.grain), self.size)
        while self.mapped < wanted:
            at, piece = self.first + self.mapped, min(_up(PIECE_BYTES, self._driver.grain), self.size - self.mapped)
            self._pieces.append((at, piece, self._driver.map(at, piece)))

    def unmap(self) -> None:
        """Release the memory."""
        if self._pieces:
            self._driver.settle()
        while self._pieces:
            self._driver.unmap(*self._pieces.pop())

    def close(self) -> None:
        """Release memory and addresses."""
        self.unmap()
        if self.first:
            self._driver.free(self.first, self.size)
        self.first = 0


class MappedRegion:
    """`rollout.engine.memory.MemoryRegion` of a driver. Memory and addresses are released with the last view of `data`. Raises
    RuntimeError if the driver fails, torch.OutOfMemoryError."""

    def __init__(self, driver: Driver, size: int) -> None:
        self._addresses = Addresses(driver, size)
        self._had = 0
        """bytes mapped before `release`"""
        try:
            self._addresses.map(1)
            self.data: torch.Tensor = driver.tensor(self._addresses.first, self._addresses.size, self._addresses.close)[:size]
        except BaseException:
            self._addresses.close()
            raise

    @property
    def mapped(self) -> int:
        """Number of mapped bytes."""
        return self._addresses.mapped

    def need(self, size: int) -> None:
        self._addresses.map(size)

    def release(self) -> None:
        self._had = self.mapped
        self._addresses.unmap()

    def restore(self) -> None:
        try:
            self.need(self._had)
        except BaseException:
            self._addresses.unmap()
            raise


def _up(size: int, grain: int) -> int:
    return -(-size // grain) * grain


def open_driver(device: torch.device) -> Driver | None:
    """Open the virtual memory of a CUDA device. Returns None, and logs it, if it is not available: then a sleep moves tensors
    to other addresses."""
    try:
        driver = CudaDriver(torch.cuda.current_device() if device.index is None else device.index)
        try_grain(driver)
        return driver
    except (OSError, RuntimeError) as error:
        log.info("no virtual memory, CUDA graphs are captured again after a sleep device=%s reason=%r", device, str(error))
        return None


def try_grain(driver: Driver) -> None:
    """Write and read one grain of memory. Raises RuntimeError, in sandboxes and shared devices that report virtual memory and
    then refuse to map it."""
    region = MappedRegion(driver, driver.grain)
    region.need(driver.grain)
    if int(region.data.fill_(1).sum(dtype=torch.int64)) != driver.grain:
        raise RuntimeError("mapped memory does not keep what is written")
    region.release()


class _Location(ctypes.Structure):
    _fields_ = [("type", ctypes.c_int), ("id", ctypes.c_int)]


class _Flags(ctypes.Structure):
    _fields_ = [
        ("compression", ctypes.c_ubyte), ("rdma", ctypes.c_ubyte), ("usage", ctypes.c_ushort), ("reserved", ctypes.c_ubyte * 4),
    ]  # fmt: skip


class _Properties(ctypes.Structure):
    """CUmemAllocationProp"""

    _fields_ = [
        ("type", ctypes.c_int), ("handle_types", ctypes.c_int), ("location", _Location), ("metadata", ctypes.c_void_p),
        ("flags", _Flags),
    ]  # fmt: skip


class _Access(ctypes.Structure):
    """CUmemAccessDesc"""

    _fields_ = [("location", _Location), ("flags", ctypes.c_int)]


class _Interface:
    """`__cuda_array_interface__` for torch."""

    def __init__(self, address: int, size: int) -> None:
        self.__cuda_array_interface__ = {"shape": (size,), "typestr": "|u1", "data": (address, False), "version": 3}


class CudaDriver:
    """CUDA's driver API by ctypes, in torch's context. index: of the device. Raises OSError without a driver."""

    def __init__(self, index: int, library: Any = None) -> None:
        self._library = ctypes.CDLL("libcuda.so.1") if library is None else library
        self._index = index
        here = _Location(DEVICE, index)
        self._properties = _Properties(type=PINNED, location=here)
        self._access = _Access(here, READ_AND_WRITE)
        torch.cuda.synchronize(index)  # creates the context
        grain = ctypes.c_size_t()
        self._call("cuMemGetAllocationGranularity", ctypes.byref(grain), ctypes.byref(self._properties), ctypes.c_int(0))
        self.grain = grain.value

    def reserve(self, size: int) -> int:
        address = ctypes.c_uint64()
        numbers = ctypes.c_size_t(size), ctypes.c_size_t(0), ctypes.c_uint64(0), ctypes.c_ulonglong(0)
        self._call("cuMemAddressReserve", ctypes.byref(address), *numbers)
        return int(address.value)

    def free(self, address: int, size: int) -> None:
        self._call("cuMemAddressFree", ctypes.c_uint64(address), ctypes.c_size_t(size))

    def map(self, address: int, size: int) -> int:
        handle, at, length = ctypes.c_uint64(), ctypes.c_uint64(address), ctypes.c_size_t(size)
        none = ctypes.c_ulonglong(0)
        self._call("cuMemCreate", ctypes.byref(handle), length, ctypes.byref(self._properties), none)
        try:
            self._call("cuMemMap", at, length, ctypes.c_size_t(0), handle, none)
            self._call("cuMemSetAccess", at, length, ctypes.byref(self._access), ctypes.c_size_t(1))
        except RuntimeError:
            self._library.cuMemUnmap(at, length)
            self._library.cuMemRelease(handle)
            raise
        return int(handle.value)

    def unmap(self, address: int, size: int, handle: int) -> None:
        self._call("cuMemUnmap", ctypes.c_uint64(address), ctypes.c_size_t(size))
        self._call("cuMemRelease", ctypes.c_uint64(handle))

    def tensor(self, address: int, size: int, on_end: Callable[[], None]) -> torch.Tensor:
        interface = _Interface(address, size)  # torch keeps it as long as a view exists
        weakref.finalize(interface, on_end).atexit = False
        return torch.as_tensor(interface, device=torch.device("cuda", self._index))

    def settle(self) -> None:
        torch.cuda.synchronize(self._index)

    def _call(self, name: str, *arguments: Any) -> None:
        status = int(getattr(self._library, name)(*arguments))
        if status == OUT_OF_MEMORY:
            raise torch.OutOfMemoryError(f"{name}: no memory is left on cuda:{self._index}")
        if status:
            raise RuntimeError(f"{name}: CUDA error {status} on cuda:{self._index}")
