"""Memory of a CUDA device, and transfers of a step's small arrays between it and the host. The host does not wait for the
device to receive arrays, and waits for results only when it reads them. Works on CPU tensors too, for tests."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from rollout.engine.cuda.pinning import pinned_rows
from rollout.engine.cuda.regions import Driver, MappedRegion
from rollout.engine.memory import Hashes, HostRows, MemoryRegion, split_like

SPARE_BYTES = 1 << 30
"""bytes that temporary memory leaves free for others"""
AT_ONCE_BYTES = 16 << 30
"""host memory of pools that is pinned before a start ends: the rest follows while steps run"""


class CudaMemory:
    """`rollout.engine.memory.DeviceMemory` of a CUDA device."""

    is_host = False
    pool_share = 0.8
    streams: Any = torch.cuda

    def __init__(
        self, device: torch.device, hashes: Callable[[int], Hashes] | None = None, driver: Driver | None = None
    ) -> None:
        """hashes: computes digests on the device; driver: provides fixed addresses (`rollout.engine.cuda.regions`); None: not
        available."""
        self.device = device
        self.hashes = hashes
        self._driver = driver
        self._at_once = AT_ONCE_BYTES

    def region(self, size: int) -> MemoryRegion | None:
        return None if self._driver is None else MappedRegion(self._driver, size)

    def room(self, size: int) -> torch.Tensor | None:
        if self.free() < size + SPARE_BYTES:
            self.trim()
        if self.free() < size + SPARE_BYTES:
            return None
        return torch.empty(size, dtype=torch.uint8, device=self.device)

    def free(self) -> int:
        return int(torch.cuda.mem_get_info(self.device)[0])

    def taken(self) -> int:
        free, total = torch.cuda.mem_get_info(self.device)
        return int(total - free)

    def trim(self) -> None:
        torch.cuda.empty_cache()

    def send(self, arrays: Sequence[np.ndarray]) -> list[torch.Tensor]:
        return to_device(arrays, self.device)

    def receive(self, tensor: torch.Tensor) -> Callable[[], np.ndarray]:
        return to_host(tensor)

    def host_rows(self, rows: int, row_bytes: int) -> HostRows:
        at_once = min(self._at_once, rows * row_bytes)
        self._at_once -= at_once
        device = torch.cuda.current_device() if self.device.index is None else self.device.index
        return pinned_rows(rows, row_bytes, at_once, partial(torch.cuda.set_device, device))

    def own(self, tensors: Iterable[torch.Tensor]) -> None:
        pass


def to_device(arrays: Sequence[np.ndarray], device: torch.device) -> list[torch.Tensor]:
    """Copy 1-D arrays of one dtype to the device, as views of one tensor. A copy from pageable memory would block the host
    until all earlier work has run; torch keeps pinned memory until it was read."""
    whole = torch.from_numpy(np.concatenate(arrays))
    if device.type == "cuda":
        whole = whole.pin_memory().to(device, non_blocking=True)
    return split_like(whole, arrays)


def to_host(tensor: torch.Tensor) -> Callable[[], np.ndarray]:
    """Start a copy to the host. Returns a function that waits for this copy, but not for later work."""
    if tensor.device.type == "cpu":
        return tensor.numpy
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    host.copy_(tensor, non_blocking=True)
    done: Any = torch.cuda.Event()
    done.record()

    def read() -> np.ndarray:
        done.synchronize()
        return host.numpy()

    return read
