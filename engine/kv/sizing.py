"""Sizes of the two KV pools, from the configuration and the free memory."""

from __future__ import annotations

from typing import NamedTuple

from rollout.engine.config import EngineConfig
from rollout.engine.kv.block import SlotCounts, WindowCounts
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


STATES_RATIO = 0.4
"""most of the memory of both kinds of pools, KV and states, that the default sizes give to states"""


def state_sizes(
    config: EngineConfig, bytes_per_slot: int, sizes: PoolSizes, bytes_per_block: int, memory: DeviceMemory
) -> tuple[SlotCounts, PoolSizes]:
    """Divide the memory of the KV pools between KV and recurrent states. On the device: a slot for each of max_num_seqs
    sequences and an eighth more, at most STATES_RATIO of the memory, unless kv_tokens asks for KV of a size; then states come
    on top. In host memory: two slots for each of those, in the same way. Returns the slots, and the sizes of the KV pools.

    Raises ValueError if two states do not fit, or if states on top of kv_tokens exceed the free memory."""
    wanted = config.most_seqs + -(-config.most_seqs // 8) + 2
    room = sizes.device * bytes_per_block * STATES_RATIO
    device = wanted if config.kv_tokens is not None else min(wanted, int(room // bytes_per_slot))
    if device < 2:
        raise ValueError(
            f"two recurrent states of {bytes_per_slot / 2**20:.1f} MiB do not fit into {STATES_RATIO:.0%} of "
            f"{sizes.device * bytes_per_block / 2**30:.3f} GiB; raise kv_gib"
        )
    if config.kv_tokens is not None:
        on_top = -(-device * bytes_per_slot // bytes_per_block)
        total, free = (sizes.device + on_top) * bytes_per_block, memory.free()
        if memory.is_host and total > free:
            raise ValueError(
                f"{device} recurrent states of {bytes_per_slot / 2**20:.1f} MiB and the KV pool take {total / 2**30:.1f} GiB, "
                f"more than the {free / 2**30:.1f} GiB of free memory; lower max_num_seqs={config.most_seqs}, or kv_tokens"
            )
        sizes = sizes._replace(host=blocks_in_host_memory(config, bytes_per_block, sizes.device + on_top, memory))
    host = min(2 * device, int(sizes.host * bytes_per_block * STATES_RATIO // bytes_per_slot))
    blocks = sizes.device if config.kv_tokens is not None else sizes.device - -(-device * bytes_per_slot // bytes_per_block)
    if blocks < 1:
        raise ValueError(f"{device} recurrent states leave no room for a KV block of {bytes_per_block} bytes; raise kv_gib")
    on_host = sizes.host - -(-host * bytes_per_slot // bytes_per_block)
    return SlotCounts(device, host), sizes._replace(device=blocks, host=on_host)


MOST_LOGICAL = 1 << 20
"""most blocks of a pool without bytes, of a model all of whose layers have a window: a block takes some 100 bytes of
bookkeeping"""


class BlockBytes(NamedTuple):
    """Bytes of a block of each kind of layer."""

    full: int
    """layers with full attention; 0: there are none"""
    window: int


def window_sizes(
    config: EngineConfig, sizes: PoolSizes, each: BlockBytes, tokens: int, longest: int
) -> tuple[WindowCounts, PoolSizes]:
    """Divide the memory of the KV pools between layers with full attention and those with a window. Windows get the blocks that
    max_num_seqs sequences hold and those of the largest step, with an eighth more for prefixes, but no more blocks than the
    other layers. So windows of running sequences never run out before the others do. With kv_tokens, the pool of the other
    layers has the size asked for. Host memory is divided in the same way, for twice as many sequences. Returns the blocks of
    windows, and of the other layers.

    Args:
        sizes: blocks for all layers together.
        tokens: width of the widest window.
        longest: blocks of the longest sequence.
    """
    held = config.most_seqs * (WindowCounts(tokens, 0, 0).most_held(config.block_tokens) + 1)
    wanted = held + held // 8 - (-config.most_tokens // config.block_tokens)

    def divided(blocks: int, wanted: int, fixed: bool) -> tuple[int, int]:
        """Return blocks of full attention and of windows."""
        if blocks <= wanted or fixed:
            return blocks, min(blocks, wanted)
        if not each.full:
            return max(wanted, min(config.most_seqs * longest, MOST_LOGICAL)), wanted
        return (blocks * (each.full + each.window) - wanted * each.window) // each.full, wanted

    device, window = divided(sizes.device, wanted, config.kv_tokens is not None)
    host, window_host = divided(sizes.host, 2 * wanted, False)
    return WindowCounts(tokens, window, window_host), sizes._replace(device=device, host=host)


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
