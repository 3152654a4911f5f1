"""Memory that is pinned for a CUDA device, on a stand-in for its runtime."""

from __future__ import annotations

import ctypes
import gc

import pytest
import torch

from engine.config import EngineConfig
from engine.cuda.memory import CudaMemory
from engine.kv import sizing as sizes
from engine.kv.sizing import blocks_in_host_memory
from engine.memory import HostMemory, host_buffer, pinned


class FakeRuntime:
    def __init__(self, status: int = 0) -> None:
        self.status = status
        self.registered: dict[int, int] = {}

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        if not self.status:
            self.registered[address] = size
        return self.status

    def cudaHostUnregister(self, address: int) -> int:
        ctypes.string_at(address, 1)  # it is still mapped, or this process is gone
        del self.registered[address]
        return 0


def test_pinned_memory_is_given_back_with_its_last_view() -> None:
    runtime = FakeRuntime()
    memory = pinned(3 << 20, runtime)
    view = torch.frombuffer(memory, dtype=torch.uint8)[5:10]
    assert runtime.registered == {view.data_ptr() - 5: 3 << 20} and not view.any()
    del memory
    gc.collect()
    assert runtime.registered, "pinned memory was let go while it is in use"
    del view
    gc.collect()
    assert not runtime.registered


def test_memory_that_cannot_be_pinned() -> None:
    with pytest.raises(OSError, match="cannot pin 1.0 GiB.*error 2"):
        pinned(1 << 30, FakeRuntime(status=2))


def test_nothing_needs_no_memory() -> None:
    assert host_buffer(0, pin=True).nbytes == 0 and host_buffer(100, pin=False).tolist() == [0] * 100


@pytest.mark.parametrize(("device", "blocks"), [("cpu", 80), ("cuda", 25)])
def test_less_is_taken_where_it_is_pinned(device: str, blocks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of room for 100 blocks: the threshold of it, or a quarter; what is asked for is had on both."""
    monkeypatch.setattr(sizes, "free_memory", lambda: 100 << 20)
    memory = HostMemory() if device == "cpu" else CudaMemory(torch.device(device))
    assert blocks_in_host_memory(EngineConfig(), 1 << 20, 0, memory) == blocks
    assert blocks_in_host_memory(EngineConfig(cpu_offload_gib=60 / 1024), 1 << 20, 0, memory) == 60


def test_more_host_memory_than_can_be_had_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The message names the field, what could be had beside the KV pool, and what to do."""
    monkeypatch.setattr(sizes, "free_memory", lambda: 100 << 30)
    options = {"bytes_per_block": 1 << 20, "device_blocks": 50 << 10, "memory": HostMemory()}
    with pytest.raises(ValueError, match=r"cpu_offload_gib=60: at most 40.00 can be had.*lower it, or leave it out"):
        blocks_in_host_memory(EngineConfig(cpu_offload_gib=60), **options)
    assert blocks_in_host_memory(EngineConfig(cpu_offload_gib=39), **options) == 39 << 10
