"""Sizes of the two KV pools, from the configuration and the free memory."""

from __future__ import annotations

from typing import NamedTuple

from rollout.engine.config import EngineConfig
from rollout.engine.memory import DeviceMemory, free_memory

PINNED_BYTES = 16 << 30
"""largest default size of a pinned host pool: nothing else on the host can have this memory, not even by swapping"""


class PoolSizes(NamedTuple):
    """Sizes of the two KV pools."""

    block_size: int
    """tokens"""
    device: int
    """blocks of the device pool"""
    host: int
    """blocks of the host pool"""
    commit_device: bool = False
    """commit the memory of the device pool when it is allocated, so that no step waits for page faults; otherwise pages are
    committed at their first use"""
    commit_host: bool = False
    """the same, for the host pool"""


def pool_sizes(config: EngineConfig, bytes_per_block: int, memory: DeviceMemory) -> PoolSizes:
    """Return the sizes for a configuration. A pool whose size the user has set is committed at once. Raises ValueError as
    `blocks_on_device` and `blocks_in_host_memory`."""
    device = blocks_on_device(config, bytes_per_block, memory)
    host = blocks_in_host_memory(config, bytes_per_block, device, memory)
    device_set, host_set = (config.kv_tokens, config.kv_gib) != (None, None), config.cpu_offload_gib is not None
    return PoolSizes(config.block_tokens, device, host, device_set, host_set)


def blocks_on_device(config: EngineConfig, bytes_per_block: int, memory: DeviceMemory) -> int:
    """Return the number of blocks of the device pool. Raises ValueError if the size holds no block, or exceeds the free
    memory."""
    asked: float | None = None
    if config.kv_tokens is not None:
        asked = -(-config.kv_tokens // config.block_tokens) * bytes_per_block
    elif config.kv_gib is not None:
        asked = config.kv_gib * 2**30
    if asked is not None and memory.is_host and asked > (free := memory.free()):
        raise ValueError(
            f"a KV pool of {asked / 2**30:.1f} GiB is more than the {free / 2**30:.1f} GiB of free memory; "
            "lower kv_gib or kv_tokens"
        )
    size = memory.free() * memory.pool_share if asked is None else asked
    blocks = int(size // bytes_per_block)
    if blocks < 1:
        raise ValueError(
            f"{size / 2**30:.4f} GiB hold no KV block of {bytes_per_block} bytes; raise kv_gib or lower block_size"
        )
    return blocks


def check_tables(config: EngineConfig, longest: int) -> None:
    """Check that the block tables of max_num_seqs sequences fit into host memory. longest: blocks of the longest sequence.
    Raises ValueError."""
    size, free = config.most_seqs * longest * 4, free_memory()
    if size > free / 2:
        raise ValueError(
            f"max_num_seqs={config.most_seqs} block tables of {longest} blocks take {size / 2**30:.1f} GiB, more than half of "
            f"the {free / 2**30:.1f} GiB of free memory: lower max_num_seqs, or raise block_size"
        )


def blocks_in_host_memory(config: EngineConfig, bytes_per_block: int, device_blocks: int, memory: DeviceMemory) -> int:
    """Return the number of blocks of the host pool; 0: offload is off.

    The default is the safety threshold of the free memory. With a GPU, where the pool is pinned, it is at most a quarter of the
    free memory, PINNED_BYTES and the size of the device pool.

    Args:
        device_blocks: blocks of the device pool, which is in host memory on the CPU.

    Raises:
        ValueError: the size holds no block, or exceeds the safety threshold.
    """
    if config.cpu_offload_gib == 0:
        return 0
    free, threshold = free_memory(), config.advanced.cpu_offload_safety_threshold
    device_pool = device_blocks * bytes_per_block
    most = max(0, free - (device_pool if memory.is_host else 0)) * threshold
    if config.cpu_offload_gib is not None:
        size = config.cpu_offload_gib * 2**30
    else:
        size = most if memory.is_host else min(most, free / 4, PINNED_BYTES, device_pool)
    if size > most:
        raise ValueError(
            f"cpu_offload_gib={config.cpu_offload_gib}: must be at most {most / 2**30:.2f}, which is {threshold} of the memory "
            "that the KV pool leaves free; lower it, or leave it out"
        )
    blocks = int(size // bytes_per_block)
    if blocks < 1:
        raise ValueError(
            f"cpu_offload_gib={size / 2**30:.6f} holds no KV block of {bytes_per_block} bytes; raise it, or "
            "set 0 to turn offload off"
        )
    return blocks
