"""Storage of recurrent state: one slot holds the state of one sequence for all recurrent layers.

    slot   ┌ scan 0 fp32 ┬ scan 1 ┬ … ┬ convolution 0, model dtype ┬ convolution 1 ┬ … ┐

A slot is one contiguous row, so an offload or a restore copies one row. A step reads a row's state from one slot and writes it
to another one or to the same (`StateRows`), so that a fork copies nothing. The scheduler decides the slots
(`rollout.engine.scheduling.states`).
"""

from __future__ import annotations

import logging
from typing import NamedTuple

import msgspec
import numpy as np
import torch

from rollout.engine.config import EngineConfig
from rollout.engine.kv.block import BlockCopies, Copied, SlotCounts
from rollout.engine.kv.copies import ALL_SLOTS, SyncCopies
from rollout.engine.kv.pools import Pools
from rollout.engine.kv.sizing import PoolSizes, blocks_in_host_memory
from rollout.engine.memory import DeviceMemory

log = logging.getLogger(__name__)

ALIGNED = 64
"""bytes to which the parts of a slot are aligned"""


class StateLayer(NamedTuple):
    """State of one recurrent layer of one sequence."""

    conv: tuple[int, int]
    """channels, and columns: the inputs of the last k - 1 tokens of a convolution of width k"""
    scan: tuple[int, ...] | None
    """shape of the state of its scan, fp32; None: it has only a convolution"""


class StateGeometry(NamedTuple):
    """Shapes of the state of one sequence."""

    layers: tuple[StateLayer, ...]
    dtype: torch.dtype
    """of the columns of convolutions"""

    @property
    def parts(self) -> list[tuple[int, tuple[int, ...], torch.dtype]]:
        """List (first byte, shape, dtype) of each part of a slot: the scans, then the convolutions, each in order of layers."""
        shapes = [(layer.scan, torch.float32) for layer in self.layers if layer.scan is not None]
        parts, first = [], 0
        for shape, dtype in [*shapes, *((layer.conv, self.dtype) for layer in self.layers)]:
            parts.append((first, tuple(shape), dtype))
            first += -(-int(np.prod(shape)) * dtype.itemsize // ALIGNED) * ALIGNED
        return parts

    @property
    def nbytes(self) -> int:
        """Return the bytes of a slot, at least ALIGNED: convolutions over one token have no columns."""
        first, shape, dtype = self.parts[-1]
        return max(ALIGNED, first + -(-int(np.prod(shape)) * dtype.itemsize // ALIGNED) * ALIGNED)


class StatePages(Pools):
    """Both pools of states. The recurrent layers write the device pool, `move` both."""

    def __init__(
        self,
        geometry: StateGeometry,
        slots: SlotCounts,
        memory: DeviceMemory,
        commit: tuple[bool, bool] = (False, False),
    ) -> None:
        """Allocate the slots. commit: as for `Pools`. Raises ValueError if the memory cannot be allocated."""
        super().__init__((geometry.nbytes,), torch.uint8, slots, memory, commit)
        self.geometry, self.slots = geometry, slots
        self.copy_engine = SyncCopies()  # in order with compute: the step before may still write what is copied
        views = [
            self.data[:, first : first + int(np.prod(shape)) * dtype.itemsize].view(dtype).unflatten(1, shape)
            for first, shape, dtype in geometry.parts
        ]
        scans = iter(views)
        self.scans = [None if layer.scan is None else next(scans) for layer in geometry.layers]
        """for each layer: [slots, *shape] fp32, a view of the device pool"""
        self.convs = list(scans)
        """for each layer: [slots, channels, columns], a view of the device pool"""

    def move(self, moves: BlockCopies) -> Copied:
        """Run the copies of a step."""
        return self.copy_engine.run(moves, self.copy, ALL_SLOTS)


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


def fitted(config: EngineConfig, states: StatePages) -> EngineConfig:
    """Lower max_num_seqs to the sequences whose recurrent state fits into the pool."""
    slots, size = states.slots, states.geometry.nbytes
    log.info("recurrent state bytes=%d slots=%d host_slots=%d", size, slots.device, slots.host)
    if slots.sequences >= config.most_seqs:
        return config
    log.warning(
        "fewer sequences run, since each has a recurrent state of %.1f MiB: max_num_seqs=%d becomes %d; raise kv_gib for more",
        size / 2**20,
        config.most_seqs,
        slots.sequences,
    )
    return msgspec.structs.replace(config, max_num_seqs=slots.sequences)
