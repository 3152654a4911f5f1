"""Memory that is pinned for a CUDA device, on a stand-in for its runtime."""

from __future__ import annotations

import gc
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from rollout.engine.build import resolved
from rollout.engine.config import AdvancedConfig, EngineConfig
from rollout.engine.cuda.memory import CudaMemory
from rollout.engine.kv import sizing as sizes
from rollout.engine.kv.sizing import blocks_in_host_memory
from rollout.engine.memory import HostMemory, host_buffer, pinned
from tests.support.fake_runtime import FakeRuntime


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


@pytest.mark.parametrize(
    ("device", "pool", "free", "blocks"),
    [("cpu", 10, 100, 72), ("cuda", 90, 100, 25), ("cuda", 10, 100, 10), ("cuda", 10**6, 10**6, 16 << 10)],
)
def test_less_is_taken_where_it_is_pinned(
    device: str, pool: int, free: int, blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of so much that is free, in MiB: on the CPU the threshold of what the pool leaves; else a quarter, what the device's pool
    has, and 16 GiB at most. What is asked for is had on both."""
    monkeypatch.setattr(sizes, "free_memory", lambda: free << 20)
    memory = HostMemory() if device == "cpu" else CudaMemory(torch.device(device))
    assert blocks_in_host_memory(EngineConfig(), 1 << 20, pool, memory) == blocks
    assert blocks_in_host_memory(EngineConfig(cpu_offload_gib=60 / 1024), 1 << 20, pool, memory) == 60


class DeviceOf(SimpleNamespace):
    """As much of a `Device` as `resolved` asks."""

    overlaps = copies_ahead = True


@pytest.mark.parametrize(
    ("given", "chosen"),
    [
        ({}, (1024, 8192)),
        ({"max_num_seqs": 64}, (64, 8192)),
        ({"max_num_seqs": 9000}, (9000, 9000)),
        ({"max_batch_tokens": 512}, (512, 512)),
        ({"max_num_seqs": 300, "max_batch_tokens": 4096}, (300, 4096)),
    ],
)
def test_the_device_gives_the_sizes_of_a_step(given: dict[str, int], chosen: tuple[int, int]) -> None:
    """Where the configuration does not say; on the CPU 256 and 1,024, and tokens for all sequences either way."""
    config: EngineConfig = resolved(EngineConfig(**given), cast(Any, DeviceOf(sizes=(1024, 8192))))
    assert (config.max_num_seqs, config.max_batch_tokens) == (config.most_seqs, config.most_tokens) == chosen
    assert config.advanced.copy_ahead and not config.advanced.mirror_ahead
    asked = EngineConfig(advanced=AdvancedConfig(mirror_ahead=True), **given)
    assert resolved(asked, cast(Any, DeviceOf(sizes=(1024, 8192)))).advanced.mirror_ahead
    on_cpu = EngineConfig(**given)
    assert on_cpu.most_seqs == given.get("max_num_seqs", 256) and on_cpu.most_tokens >= on_cpu.most_seqs


def test_more_host_memory_than_can_be_had_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The message names the field, what could be had beside the KV pool, and what to do."""
    monkeypatch.setattr(sizes, "free_memory", lambda: 100 << 30)
    options = {"bytes_per_block": 1 << 20, "device_blocks": 50 << 10, "memory": HostMemory()}
    with pytest.raises(ValueError, match=r"cpu_offload_gib=60: must be at most 40.00.*lower it, or leave it out"):
        blocks_in_host_memory(EngineConfig(cpu_offload_gib=60), **options)
    assert blocks_in_host_memory(EngineConfig(cpu_offload_gib=39), **options) == 39 << 10
