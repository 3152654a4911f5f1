"""How many blocks the pools get."""

from __future__ import annotations

import logging

import torch

from engine.config import EngineConfig
from engine.memory import free_memory

log = logging.getLogger("rollout.engine")


def blocks_on_device(config: EngineConfig, bytes_per_block: int, device: torch.device) -> int:
    """Blocks of the KV pool. Raises ValueError for a size that holds none, or more than the memory."""
    asked: float | None = None
    if config.kv_tokens is not None:
        asked = -(-config.kv_tokens // config.block_size) * bytes_per_block
    elif config.kv_gib is not None:
        asked = config.kv_gib * 2**30
    if asked is not None and device.type == "cpu" and asked > (free := free_memory()):
        raise ValueError(
            f"a KV pool of {asked / 2**30:.1f} GiB is more than the {free / 2**30:.1f} GiB that are free; lower kv_gib or "
            "kv_tokens"
        )
    if asked is not None:
        size = asked
    elif device.type == "cuda":
        size = torch.cuda.mem_get_info(device)[0] * 0.8
    else:
        size = free_memory() / 4
    blocks = int(size // bytes_per_block)
    if blocks < 1:
        raise ValueError(
            f"{size / 2**30:.4f} GiB hold no KV block of {bytes_per_block} bytes; raise kv_gib or lower block_size"
        )
    return blocks


def blocks_in_host_memory(config: EngineConfig, bytes_per_block: int, taken: int) -> int:
    """Blocks of the pool in host memory; 0 = offload is off. `taken`: bytes of this memory that the device pool will have. On
    CUDA the pool is pinned, so all of it is taken at once: a quarter of what is free, unless more is asked for.
    Raises ValueError for a size that holds none; one that is too large is cut to the threshold, which the log says."""
    if config.cpu_offload_gib == 0:
        return 0
    free = free_memory()
    most = max(0, free - taken) * config.cpu_offload_safety_threshold
    if config.cpu_offload_gib is not None:
        size = config.cpu_offload_gib * 2**30
    else:
        size = most if config.device == "cpu" else min(most, free / 4)
    if size > most:
        log.warning(
            "cpu_offload_gib=%s is more than %s of the free memory; using %.2f GiB",
            config.cpu_offload_gib,
            config.cpu_offload_safety_threshold,
            most / 2**30,
        )
        size = most
    blocks = int(size // bytes_per_block)
    if blocks < 1:
        raise ValueError(
            f"cpu_offload_gib={size / 2**30:.6f} holds no KV block of {bytes_per_block} bytes; raise it, or 0 turns offload off"
        )
    return blocks
