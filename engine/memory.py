"""Interface to the memory of a device and of the host: size, allocation, transfers of small arrays."""

from __future__ import annotations

import copy
import mmap
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
import psutil
import torch

Map = TypeVar("Map", bound=mmap.mmap)
ALIGNMENT = 64
"""of a tensor in bytes: a cache line"""
CGROUP = Path("/sys/fs/cgroup")
VERSIONS = (("", "memory.max", "memory.current", "inactive_file"),
            ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"))  # fmt: skip
"""(folder, limit, usage, entry of memory.stat with the memory that the kernel frees first) of cgroups 2 and 1"""


def free_memory(cgroup: Path = CGROUP) -> int:
    """Return the bytes that this process can allocate: the machine's free memory, or what a container's limit leaves if that is
    less."""
    free = int(psutil.virtual_memory().available)
    for folder, limit, usage, spare in VERSIONS:
        try:
            most, used, stat = ((cgroup / folder / name).read_text().strip() for name in (limit, usage, "memory.stat"))
        except OSError:
            continue
        if most != "max":
            counts = dict(line.split() for line in stat.splitlines())
            free = min(free, max(0, int(most) - int(used) + int(counts.get(spare, 0))))
    return free


class MemoryRegion(Protocol):
    """Device memory whose addresses stay while it is released and restored: `rollout.engine.cuda.regions`."""

    @property
    def data(self) -> torch.Tensor:
        """[bytes] uint8. Nothing may access it after `release`, nor bytes beyond those passed to `need`."""

    def need(self, size: int) -> None:
        """Allocate the first `size` bytes, unless they are allocated. Raises torch.OutOfMemoryError."""

    def release(self) -> None:
        """Release the memory; its contents are lost."""

    def restore(self) -> None:
        """Allocate the same amount again. Raises torch.OutOfMemoryError, with nothing allocated."""


class Hashes(Protocol):
    """xxh3-128 of several pieces of data, computed on their device, on the current stream: `rollout.engine.cuda.digests`."""

    def cuts(self, size: int) -> Iterable[tuple[int, int]]:
        """Cut `size` bytes into slices (begin, end) for `update`, in order."""

    def update(self, row: int, data: torch.Tensor, last: bool) -> None:
        """Add the next [bytes] uint8 of a piece of data."""

    def add(self, row: int, data: torch.Tensor) -> None:
        """Add a whole piece of data."""

    def read(self) -> Callable[[], list[str]]:
        """Start copying the results to the host. Returns a function that waits for them and returns the digests (hex) of all
        rows."""


class HostRows(NamedTuple):
    """Host memory of a pool of rows."""

    memory: mmap.mmap
    ready: Callable[[], int]
    """returns how many of the first rows may be used; it grows while memory is pinned"""


class DeviceMemory(Protocol):
    """Memory of a model's device, and host memory for transfers. Implemented by `HostMemory` and
    `rollout.engine.cuda.memory.CudaMemory`."""

    @property
    def device(self) -> torch.device: ...

    @property
    def is_host(self) -> bool:
        """Whether the device's memory is host memory. If not, host memory for copies is pinned."""

    @property
    def pool_share(self) -> float:
        """Default size of the KV pool, as a fraction of the free memory."""

    @property
    def streams(self) -> Any:
        """`torch.cuda`, whose streams and events let copies overlap with compute; None: all work runs in order."""

    @property
    def hashes(self) -> Callable[[int], Hashes] | None:
        """Makes `Hashes` with the given number of rows; None: digests are computed on the host."""

    def region(self, size: int) -> MemoryRegion | None:
        """Reserve fixed addresses for `size` bytes; None if the device has none."""

    def room(self, size: int) -> torch.Tensor | None:
        """Allocate [size] uint8 on the device temporarily; None if too little would be left."""

    def free(self) -> int:
        """Return the number of bytes that can be allocated."""

    def taken(self) -> int:
        """Return the number of bytes in use: on a GPU by all processes, on the host by this process."""

    def trim(self) -> None:
        """Return unused memory of the allocator to the device."""

    def send(self, arrays: Sequence[np.ndarray]) -> list[torch.Tensor]:
        """Copy 1-D arrays of one dtype to the device, as views of one tensor. The host does not wait for the device."""

    def receive(self, tensor: torch.Tensor) -> Callable[[], np.ndarray]:
        """Start a copy of a tensor to the host. Returns a function that waits for it."""

    def host_rows(self, rows: int, row_bytes: int) -> HostRows:
        """Allocate the host memory of a pool, filled with zeros, pinned unless `is_host`. Raises OSError."""

    def own(self, tensors: Iterable[torch.Tensor]) -> None:
        """Move tensors that were loaded into mapped files to writable memory, if the device's memory is host memory."""


class HostMemory:
    """`DeviceMemory` of a CPU."""

    device = torch.device("cpu")
    is_host = True
    pool_share = 0.25
    streams: Any = None
    hashes: Callable[[int], Hashes] | None = None

    def region(self, size: int) -> MemoryRegion | None:
        return None

    def room(self, size: int) -> torch.Tensor | None:
        return None

    def free(self) -> int:
        return free_memory()

    def taken(self) -> int:
        return int(psutil.Process().memory_info().rss)

    def trim(self) -> None:
        pass

    def send(self, arrays: Sequence[np.ndarray]) -> list[torch.Tensor]:
        return split_like(torch.from_numpy(np.concatenate(arrays)), arrays)

    def receive(self, tensor: torch.Tensor) -> Callable[[], np.ndarray]:
        return tensor.numpy

    def host_rows(self, rows: int, row_bytes: int) -> HostRows:
        return HostRows(anonymous(rows * row_bytes), lambda: rows)

    def own(self, tensors: Iterable[torch.Tensor]) -> None:
        own_tensors(tensors)


def without_hashes(memory: DeviceMemory) -> DeviceMemory:
    """Return a device's memory for tensors whose digests are computed on the host."""
    made: Any = copy.copy(memory)
    made.hashes = None
    return made  # type: ignore[no-any-return]


def split_like(whole: torch.Tensor, arrays: Sequence[np.ndarray]) -> list[torch.Tensor]:
    """Return views of `whole` with the lengths of the arrays."""
    return list(whole.split([len(array) for array in arrays]))


def anonymous(size: int, kind: type[Map] = mmap.mmap) -> Map:  # type: ignore[assignment]
    """Allocate memory that is zero, page-aligned, committed at its first use, and in huge pages if possible: with 4 KiB pages,
    scattered reads miss the TLB. The map is private: Python's default, a shared map, gets no huge pages. Raises OSError."""
    memory = kind(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def pinned(size: int, cudart: Any = None) -> mmap.mmap:
    """Allocate the same, page-locked, so that a CUDA device copies asynchronously. torch's `pin_memory` would round up to a
    power of two and keep freed memory. Raises OSError. cudart: torch.cuda.cudart(), or a stand-in for tests."""
    memory = anonymous(size, PinnedMap)
    cudart = cudart or torch.cuda.cudart()
    address = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
    status = int(cudart.cudaHostRegister(address, size, 0))
    if status:
        raise pin_failed(size, status)
    memory.unpin = partial(cudart.cudaHostUnregister, address)
    return memory


def pin_failed(size: int, status: int) -> OSError:
    """Return the error of memory that cannot be pinned, once CUDA has reported it."""
    if torch.cuda.is_available():
        with suppress(RuntimeError):  # CUDA reports the error at the next launch: here, not in a step
            torch.ones(1, device="cuda")
    return OSError(f"CUDA cannot pin {size / 2**30:.1f} GiB of host memory (cudaHostRegister: error {status})")


class PinnedMap(mmap.mmap):
    """Unpins before it unmaps; a weak reference would be notified too late."""

    unpin: Callable[[], object] | None = None

    def __del__(self) -> None:
        if self.unpin is not None and not sys.is_finalizing():
            self.unpin()


def host_buffer(size: int, pin: bool) -> torch.Tensor:
    """Allocate [size] uint8 of zeros in host memory, pinned for CUDA if `pin`. Raises OSError."""
    if not size:
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(pinned(size) if pin else anonymous(size), dtype=torch.uint8)


def side_by_side(tensors: Iterable[torch.Tensor]) -> tuple[list[int], int]:
    """Return the first byte of each tensor in one buffer, at multiples of ALIGNMENT, and the size of the buffer."""
    starts, size = [], 0
    for tensor in tensors:
        starts.append(size)
        size += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
    return starts, size


def placed(memory: torch.Tensor, start: int, like: torch.Tensor) -> torch.Tensor:
    """Return a tensor with the shape and dtype of `like` at byte `start` of a buffer, [bytes] uint8."""
    return memory[start : start + like.nbytes].view(like.dtype).view(like.shape)


def storage_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Return the bytes of the storages of tensors, each counted once."""
    storages = [tensor.untyped_storage() for tensor in tensors]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def own_tensors(tensors: Iterable[torch.Tensor]) -> None:
    """Move CPU tensors, each given once, into one buffer. transformers leaves them mapped to the file that they were loaded
    from: whoever writes or cuts that file would change the live weights or end the process, the first refresh would copy page
    after page before it writes, and under memory pressure pages would be dropped and read from the file again."""
    tensors = [tensor for tensor in tensors if tensor.nbytes]
    starts, size = side_by_side(tensors)
    if not size:
        return
    memory = host_buffer(size, pin=False)
    for tensor, start in zip(tensors, starts, strict=True):
        tensor.data = placed(memory, start, tensor).copy_(tensor.data)
