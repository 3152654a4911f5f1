"""Memory: how much there is to take, how it is taken, and how a step's small arrays get there."""

from __future__ import annotations

import mmap
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np
import psutil
import torch
from torch import nn

Map = TypeVar("Map", bound=mmap.mmap)
ALIGNMENT = 64
"""of a tensor, in bytes: a line of the cache"""
CGROUP = Path("/sys/fs/cgroup")
VERSIONS = (("", "memory.max", "memory.current", "inactive_file"),
            ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"))  # fmt: skip
"""(folder, limit, usage, the part of the usage that the kernel gives up first) of cgroups 2 and 1"""


def free_memory(cgroup: Path = CGROUP) -> int:
    """Bytes that this process can take: what the machine has left, or less where a container's limit is nearer."""
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
    """Memory of the device at addresses that stay while it is given back and taken again: `engine.cuda.regions`."""

    @property
    def data(self) -> torch.Tensor:
        """[bytes] uint8. Nothing may touch it after `release`, nor what `need` has not named."""

    def need(self, size: int) -> None:
        """Take the memory of the first `size` bytes, unless it is there. Raises torch.OutOfMemoryError."""

    def release(self) -> None:
        """Give the memory back; what lies in it is gone."""

    def restore(self) -> None:
        """Take as much as there was. Raises torch.OutOfMemoryError; nothing is taken then."""


class Hashes(Protocol):
    """xxh3-128 of several pieces of data, computed where they lie, on the current stream: `engine.cuda.digests`."""

    def cuts(self, size: int) -> list[tuple[int, int]]:
        """Cut `size` bytes into slices (begin, end) that `update` takes one after the other."""

    def update(self, row: int, data: torch.Tensor, last: bool) -> None:
        """Add the next [bytes] uint8 of a piece of data."""

    def add(self, row: int, data: torch.Tensor) -> None:
        """Add the whole of a piece of data."""

    def read(self) -> Callable[[], list[str]]:
        """Start the way of the results to the host. Returns what waits for them: the digests (hex) of all rows."""


class DeviceMemory(Protocol):
    """Where a model computes: memory of a device, and the host memory beside it. `HostMemory` and
    `engine.cuda.memory.CudaMemory` are the two there are."""

    @property
    def device(self) -> torch.device: ...

    @property
    def is_host(self) -> bool:
        """Tensors of the device lie in host memory. Where they do not, host memory that is copied from and to is pinned."""

    @property
    def pool_share(self) -> float:
        """Share of the free memory that the KV pool takes where the configuration gives no size."""

    @property
    def streams(self) -> Any:
        """`torch.cuda`, whose streams and events order copies beside the compute; None: all work runs in line."""

    @property
    def hashes(self) -> Callable[[int], Hashes] | None:
        """Makes the `Hashes` of so many rows; None: digests are taken on the host."""

    def region(self, size: int) -> MemoryRegion | None:
        """Reserve addresses for `size` bytes; None where there are none that stay."""

    def room(self, size: int) -> torch.Tensor | None:
        """Take [size] uint8 of the device for a while; None where that would leave too little."""

    def free(self) -> int:
        """Return the bytes that can be taken."""

    def taken(self) -> int:
        """Return the bytes in use: on a GPU by anybody, on the host by this process."""

    def trim(self) -> None:
        """Return to the device what the allocator keeps and nobody uses."""

    def send(self, arrays: Sequence[np.ndarray]) -> list[torch.Tensor]:
        """Copy 1-D arrays of one dtype to the device, as views of one tensor. The host does not wait for the device."""

    def host_map(self, size: int) -> mmap.mmap:
        """Take `size` bytes of host memory, pinned unless `is_host`. Raises OSError."""

    def own(self, parameters: Iterable[nn.Parameter]) -> None:
        """Move parameters that were loaded into host memory to where they can be written in place, if that is host memory."""


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

    def host_map(self, size: int) -> mmap.mmap:
        return anonymous(size)

    def own(self, parameters: Iterable[nn.Parameter]) -> None:
        own_parameters(parameters)


def split_like(whole: torch.Tensor, arrays: Sequence[np.ndarray]) -> list[torch.Tensor]:
    """Return views of `whole`, as long as the arrays one after the other."""
    return list(whole.split([len(array) for array in arrays]))


def anonymous(size: int, kind: type[Map] = mmap.mmap) -> Map:  # type: ignore[assignment]
    """Memory that costs nothing until it is written, is zero, page-aligned, and lies in huge pages if it can: with 4 KiB
    pages, reads that are scattered miss the TLB. Private: a shared map, Python's default, gets none. Raises OSError."""
    memory = kind(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def pinned(size: int, cudart: Any = None) -> mmap.mmap:
    """The same, locked in its place, so that a CUDA device copies from and to it by itself. torch's `pin_memory` would round up
    to a power of two, and keep what is given back. Raises OSError. `cudart`: torch.cuda.cudart(), tests have another one."""
    memory = anonymous(size, _Pinned)
    cudart = cudart or torch.cuda.cudart()
    address = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
    status = int(cudart.cudaHostRegister(address, size, 0))
    if status:
        if torch.cuda.is_available():
            with suppress(RuntimeError):  # CUDA keeps the error for the next launch to report: this one, and no step's
                torch.ones(1, device="cuda")
        raise OSError(f"CUDA cannot pin {size / 2**30:.1f} GiB of host memory (cudaHostRegister: error {status})")
    memory.unpin = partial(cudart.cudaHostUnregister, address)
    return memory


class _Pinned(mmap.mmap):
    """Unpinned before it is unmapped: a weak reference would only tell afterwards."""

    unpin: Callable[[], object] | None = None

    def __del__(self) -> None:
        if self.unpin is not None and not sys.is_finalizing():
            self.unpin()


def host_buffer(size: int, pin: bool) -> torch.Tensor:
    """[size] uint8 of zeros in host memory, pinned for CUDA if `pin`. Raises OSError."""
    if not size:
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(pinned(size) if pin else anonymous(size), dtype=torch.uint8)


def side_by_side(tensors: Iterable[torch.Tensor]) -> tuple[list[int], int]:
    """First byte of each tensor in one buffer, at multiples of ALIGNMENT, and the buffer's size."""
    starts, size = [], 0
    for tensor in tensors:
        starts.append(size)
        size += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
    return starts, size


def placed(memory: torch.Tensor, start: int, like: torch.Tensor) -> torch.Tensor:
    """The tensor of the shape and dtype of `like` at byte `start` of a buffer, [bytes] uint8."""
    return memory[start : start + like.nbytes].view(like.dtype).view(like.shape)


def storage_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of the memory that the tensors lie in, whole storages, each once."""
    storages = [tensor.untyped_storage() for tensor in tensors]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def own_parameters(parameters: Iterable[nn.Parameter]) -> None:
    """Move parameters on the CPU into memory of their own, side by side. transformers leaves them in the file that
    they were loaded from, mapped: then the first refresh copies page after page before it writes, and a machine that wants
    memory drops pages and reads them from the file again."""
    parameters = [parameter for parameter in parameters if parameter.nbytes]  # a module gives tied ones once
    starts, size = side_by_side(parameters)
    if not size:
        return
    memory = host_buffer(size, pin=False)
    for parameter, start in zip(parameters, starts, strict=True):
        parameter.data = placed(memory, start, parameter).copy_(parameter.data)
