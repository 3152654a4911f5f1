"""CUDA's runtime as far as it pins host memory."""

from __future__ import annotations

import ctypes


class FakeRuntime:
    """Remembers what is registered. status: what every registration beyond `limit` bytes in all returns."""

    def __init__(self, status: int = 0, limit: int = 0) -> None:
        self.status, self.limit = status, limit
        self.registered: dict[int, int] = {}
        """bytes by address"""

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        ends = sorted((begin, begin + length) for begin, length in [*self.registered.items(), (address, size)])
        assert all(one[1] <= other[0] for one, other in zip(ends, ends[1:], strict=False)), "registered twice"
        if self.status and sum(self.registered.values()) + size > self.limit:
            return self.status
        self.registered[address] = size
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        ctypes.string_at(address, 1)  # it is still mapped, or this process is gone
        del self.registered[address]
        return 0
