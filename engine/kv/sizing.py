"""How many blocks the pools get."""

from __future__ import annotations

from engine.config import EngineConfig
from engine.memory import DeviceMemory, free_memory

PINNED_BYTES = 16 << 30
"""that are taken unasked: a GPU's driver pins some gigabytes a second"""


def blocks_on_device(config: EngineConfig, bytes_per_block: int, memory: DeviceMemory) -> int:
    """Return the blocks of the KV pool. Raises ValueError for a size that holds none, or more than the memory."""
    asked: float | None = None
    if config.kv_tokens is not None:
        asked = -(-config.kv_tokens // config.block_size) * bytes_per_block
    elif config.kv_gib is not None:
        asked = config.kv_gib * 2**30
    if asked is not None and memory.is_host and asked > (free := memory.free()):
        raise ValueError(
            f"a KV pool of {asked / 2**30:.1f} GiB is more than the {free / 2**30:.1f} GiB that are free; lower kv_gib or "
            "kv_tokens"
        )
    size = memory.free() * memory.pool_share if asked is None else asked
    blocks = int(size // bytes_per_block)
    if blocks < 1:
        raise ValueError(
            f"{size / 2**30:.4f} GiB hold no KV block of {bytes_per_block} bytes; raise kv_gib or lower block_size"
        )
    return blocks


def check_tables(config: EngineConfig, longest: int) -> None:
    """Check that the block tables of all that may run fit the host's memory. `longest`: blocks of the longest sequence. Raises
    ValueError."""
    size, free = config.most_seqs * longest * 4, free_memory()
    if size > free / 2:
        raise ValueError(
            f"max_num_seqs={config.most_seqs} block tables of {longest} blocks take {size / 2**30:.1f} GiB, more than half of "
            f"the {free / 2**30:.1f} GiB that are free: lower max_num_seqs, or raise block_size"
        )


def blocks_in_host_memory(config: EngineConfig, bytes_per_block: int, device_blocks: int, memory: DeviceMemory) -> int:
    """Return the blocks of the pool in host memory; 0 = offload is off. `device_blocks`: of the device pool, which may lie
    there too. Beside a GPU the pool is pinned, so all of it is taken at once: unless more is asked for, a quarter of what is
    free, PINNED_BYTES at most and what the device's pool has. Raises ValueError for a size that holds none, or more than the
    safety threshold of what is free."""
    if config.cpu_offload_gib == 0:
        return 0
    free = free_memory()
    taken = device_blocks * bytes_per_block if memory.is_host else 0
    most = max(0, free - taken) * config.cpu_offload_safety_threshold
    if config.cpu_offload_gib is not None:
        size = config.cpu_offload_gib * 2**30
    else:
        size = most if memory.is_host else min(most, free / 4, PINNED_BYTES, device_blocks * bytes_per_block)
    if size > most:
        raise ValueError(
            f"cpu_offload_gib={config.cpu_offload_gib}: at most {most / 2**30:.2f} can be had, "
            f"{config.cpu_offload_safety_threshold} of the memory that is free beside the KV pool; lower it, or leave it out"
        )
    blocks = int(size // bytes_per_block)
    if blocks < 1:
        raise ValueError(
            f"cpu_offload_gib={size / 2**30:.6f} holds no KV block of {bytes_per_block} bytes; raise it, or 0 turns offload off"
        )
    return blocks
