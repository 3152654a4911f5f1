"""Storage of recurrent state: one slot holds the state of one sequence for all recurrent layers.

    slot   ┌ scan 0 fp32 ┬ scan 1 ┬ … ┬ convolution 0, model dtype ┬ convolution 1 ┬ … ┐

A slot is one contiguous row, so an offload or a restore copies one row. A step reads a row's state from one slot and writes it
to another one or to the same (`StateRows`), so that a fork copies nothing. The scheduler decides the slots
(`rollout.engine.scheduling.states`).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from rollout.engine.kv.block import BlockCopies, SlotCounts
from rollout.engine.kv.copies import ALL_SLOTS, Copied, SyncCopies
from rollout.engine.kv.pools import Pools
from rollout.engine.memory import DeviceMemory

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
