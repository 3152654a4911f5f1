"""Pools of layers with a sliding window, beside those of the other layers: how large they are, and both together."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from rollout.engine.config import EngineConfig
from rollout.engine.kv.block import WindowCounts
from rollout.engine.kv.copies import CopyEngine
from rollout.engine.kv.pages import KVGeometry, PagedKV
from rollout.engine.kv.sizing import PoolSizes
from rollout.engine.memory import DeviceMemory

log = logging.getLogger(__name__)

MOST_LOGICAL = 1 << 20
"""most blocks of a pool without bytes, of a model all of whose layers have a window: a block takes some 100 bytes of
bookkeeping"""


class PoolDevice(Protocol):
    """Where pools are: `rollout.engine.devices.Device`."""

    @property
    def memory(self) -> DeviceMemory: ...
    def copy_engine(self) -> CopyEngine: ...


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


def windowed_pools(
    config: EngineConfig,
    device: PoolDevice,
    geometry: KVGeometry,
    windows: Sequence[int],
    context: int,
    sizes: PoolSizes,
    block_bytes: int,
) -> tuple[PagedKV, PoolSizes]:
    """Allocate pools for the layers with full attention and for those with a window. Returns them, and the size of the former.

    Args:
        geometry: of all of them, as it is stored.
        windows: of each layer that stores KV, in tokens; 0: full attention.
        context: tokens of the longest sequence.
        sizes: blocks for all of them together.
        block_bytes: of such a block, routes included.
    """
    windowed, longest = [window > 0 for window in windows], -(-context // config.block_tokens)
    layers = [[i for i, each in enumerate(windowed) if each == kind] for kind in (False, True)]
    full, window = (geometry.part(each) for each in layers)
    of_windows = window.bytes_per_token * config.block_tokens
    each = BlockBytes(block_bytes - of_windows, of_windows)
    counts, sizes = window_sizes(config, sizes, each, max(windows), longest)
    kv = PagedKV(full, sizes, device.memory, device.copy_engine())
    beside = sizes._replace(device=counts.device, host=counts.host)
    kv.join(PagedKV(window, beside, device.memory, device.copy_engine()), windowed)
    log.info(
        "windows tokens=%d layers=%d of=%d blocks=%d host_blocks=%d block_bytes=%d",
        counts.tokens, sum(windowed), len(windowed), counts.device, counts.host, each.window,
    )  # fmt: skip
    return kv, sizes
