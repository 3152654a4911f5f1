"""Two pools of rows of equal shape: one on the device, one in host memory. `release` and `restore` free and re-allocate the
device pool."""

from __future__ import annotations

import math
import mmap
from collections.abc import Callable

import numpy as np
import torch

from rollout.engine.kv.copies import Copy, CopyEngine, SyncCopies
from rollout.engine.memory import DeviceMemory

MADV_POPULATE_WRITE = 23
"""Linux 5.14; Python has no constant for it"""


class Pools:
    """A device pool and a host pool, and the copies between and within them."""

    def __init__(
        self,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        rows: tuple[int, int],
        memory: DeviceMemory,
        commit: tuple[bool, bool] = (False, False),
    ) -> None:
        """Allocate both pools.

        Args:
            shape: of one row.
            rows: of the device pool and of the host pool.
            commit: whether the memory of each pool is committed at once; otherwise pages are committed at their first use.

        Raises:
            ValueError: the memory cannot be allocated.
        """
        device, host = rows
        size = device * math.prod(shape) * dtype.itemsize
        self._region = None if memory.is_host else memory.region(size)
        """region that contains the pool; None: the pool is host memory, or its address changes with a sleep"""
        if self._region is not None:
            self._region.need(size)
            self.data, self._map = self._region.data.zero_().view(dtype).view(device, *shape), None
        elif memory.is_host:
            self.data, self._map, _ = _in_host_memory(shape, dtype, device, memory)
        else:
            self.data, self._map = torch.zeros((device, *shape), dtype=dtype, device=memory.device), None
        """[rows, *shape] on the device; zero at first, so that it contains no NaN"""
        self.host, host_map, self._host_ready = _in_host_memory(shape, dtype, host, memory)
        """[rows, *shape] in host memory, pinned for CUDA"""
        self._commit_device = commit[0]
        for mapped, now in ((self._map, commit[0]), (host_map, commit[1] and memory.is_host)):
            if now:
                _populate(mapped)
        self.memory = memory
        self.copy_engine: CopyEngine = SyncCopies()
        flat, host_flat = self.data.flatten(1), self.host.flatten(1)
        self.copy = Copy(
            out=lambda pairs: copy_rows(flat, host_flat, pairs),
            into=lambda pairs: copy_rows(host_flat, flat, pairs),
            within=lambda pairs: copy_within(flat, pairs, memory),
        )

    @property
    def host_ready(self) -> int:
        """Return how many of the first rows of the host pool may be used; it grows while memory is pinned."""
        return self._host_ready()

    @property
    def stays(self) -> bool:
        """Whether the pool keeps its address from `release` to `restore`."""
        return self._region is not None or self._map is not None

    def release(self) -> None:
        """Free the memory of the device pool; its contents are lost. Its shape stays, and its address if `stays`."""
        self.copy_engine.finish()
        if self._region is not None:
            self._region.release()
        elif self._map is not None:
            self._map.madvise(mmap.MADV_DONTNEED)
        else:
            self.data.untyped_storage().resize_(0)

    def restore(self) -> None:
        """Re-allocate the device pool, filled with zeros."""
        if self._region is not None:
            self._region.restore()
            self._region.data.zero_()
        elif self._map is not None:
            if self._commit_device:
                _populate(self._map)
        else:
            self.data.untyped_storage().resize_(self.data.nbytes)
            self.data.zero_()


def copy_within(rows: torch.Tensor, pairs: list[tuple[int, int]], memory: DeviceMemory) -> None:
    """Copy rows (from, to) of a [rows, width] tensor; all rows are read before any is written."""
    sources, targets = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    if set(sources).isdisjoint(targets):
        copy_rows(rows, rows, pairs)
    else:
        read, written = memory.send([np.array(sources), np.array(targets)])
        rows.index_copy_(0, written, rows.index_select(0, read))


def copy_rows(source: torch.Tensor, target: torch.Tensor, pairs: list[tuple[int, int]]) -> None:
    """Copy rows (from, to) between two [rows, width] tensors, or within one if no row is both read and written."""
    for row, place in pairs:  # rows are long, so one copy each is fast and needs no temporary
        target[place].copy_(source[row], non_blocking=True)


def _in_host_memory(
    shape: tuple[int, ...], dtype: torch.dtype, rows: int, memory: DeviceMemory
) -> tuple[torch.Tensor, mmap.mmap | None, Callable[[], int]]:
    """Allocate [rows, *shape] of zeros in host memory. Returns it, its mmap if it has one, and what tells how many rows may be
    used. Raises ValueError."""
    row_bytes = math.prod(shape) * dtype.itemsize
    if rows * row_bytes == 0:
        return torch.zeros((rows, *shape), dtype=dtype), None, lambda: rows
    try:
        mapped, ready = memory.host_rows(rows, row_bytes)
    except OSError as error:
        size = rows * row_bytes / 2**30
        raise ValueError(
            f"cannot allocate a KV pool of {size:.1f} GiB: {error}; lower kv_gib or kv_tokens, or cpu_offload_gib"
        ) from error
    return torch.frombuffer(mapped, dtype=dtype).view(rows, *shape), mapped, ready


def _populate(memory: mmap.mmap | None) -> None:
    if memory is not None:
        try:
            memory.madvise(MADV_POPULATE_WRITE)
        except OSError:  # not Linux 5.14 or later: pages are committed at their first use
            pass
