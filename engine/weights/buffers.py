"""Host and device buffers of a refresh: staged weights, and scratch memory to exchange them.

host       one buffer for all tensors, pinned for CUDA; used again by later refreshes, and by sleeps that keep the weights
staged     the buffer of the open staging: the host buffer, or temporary memory on the device
scratch    one slice for the exchange, on the device of the live tensors
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch

from rollout.engine.memory import DeviceMemory, host_buffer, placed, side_by_side
from rollout.engine.weights.staging import SLICE_BYTES

log = logging.getLogger(__name__)

DEVICE_SLICE_BYTES = 64 << 20
"""slice of the exchange with tensors on a device, where each copy has a latency of some 10 µs"""


class RefreshBuffers:
    """Buffers for a refresh of `tensors`, at fixed offsets.

    Args:
        offloaded: names of the tensors that are in host memory although the device is not.
        least: smallest size of the host buffer in bytes.
    """

    def __init__(
        self, tensors: Mapping[str, torch.Tensor], offloaded: Collection[str], memory: DeviceMemory, least: int
    ) -> None:
        self._tensors, self._offloaded, self._memory = tensors, offloaded, memory
        starts, self._size = side_by_side(tensors.values())
        self._places = dict(zip(tensors, starts, strict=True))
        """first byte of each tensor in a buffer"""
        self._host_size = max(self._size, least)
        self.host: torch.Tensor | None = None
        self.staged: torch.Tensor | None = None
        self.scratch = torch.empty(SLICE_BYTES, dtype=torch.uint8)
        self._device_scratch: torch.Tensor | None = None

    def host_memory(self) -> torch.Tensor:
        """Return the host buffer, [bytes] uint8; allocates it at the first call."""
        if self.host is None:
            self.host = host_buffer(self._host_size, pin=not self._memory.is_host)
        return self.host

    def use(self, memory: torch.Tensor) -> None:
        """Take [bytes] uint8 as the staged weights until `close`: another process has staged them there."""
        assert len(memory) >= self._size
        self.staged = memory

    def open_on_device(self) -> bool:
        """Allocate the memory of a staging on the device, if it has room. Returns whether it has."""
        self.staged = self._memory.room(self._size)
        if self.staged is None:
            log.info("the device has no room to stage a refresh mib=%.0f", self._size / 2**20)
        return self.staged is not None

    def open_in_host_memory(self) -> None:
        """Allocate the memory of a staging in host memory."""
        self.staged = self.host_memory()

    def close(self) -> None:
        """Free the memory of a staging on the device, or forget that of another process."""
        temporary, self.staged = self.staged is not self.host, None
        if temporary:
            self._memory.trim()

    def release(self, host: bool) -> None:
        """Free the scratch on the device; host: also the host buffer."""
        self._device_scratch = None
        if host:
            self.host = None

    def place(self, name: str) -> torch.Tensor:
        """Return the staged twin of a tensor."""
        assert self.staged is not None
        return placed(self.staged, self._places[name], self._tensors[name])

    def slices(self, name: str) -> Iterator[tuple[Any, Any, Any]]:
        """Yield [slice] uint8 views of a live tensor, its staged twin and the scratch. On the CPU they are numpy arrays, since
        numpy copies in one thread."""
        scratch: Any
        live: Any = self._tensors[name].detach().view(-1).view(torch.uint8)
        staged: Any = self.place(name).view(-1).view(torch.uint8)
        if self._memory.is_host or name in self._offloaded:
            live, staged, scratch = live.numpy(), staged.numpy(), self.scratch.numpy()
        else:
            scratch = self._scratch_on_device()
        for start in range(0, len(live), len(scratch)):
            end = min(start + len(scratch), len(live))
            yield live[start:end], staged[start:end], scratch[: end - start]

    def _scratch_on_device(self) -> torch.Tensor:
        if self._device_scratch is None:
            self._device_scratch = torch.empty(DEVICE_SLICE_BYTES, dtype=torch.uint8, device=self._memory.device)
        return self._device_scratch
