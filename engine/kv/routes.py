"""Storage of routes: which experts of a mixture each cached token chose.

    data [blocks, block_size, layers · chosen]      both pools, uint8 or int16

The routes of a block have the slots of its KV, on the device and in host memory, and every copy of KV copies them too. So
prefix hits, forks, turns and offload find the routes wherever they find the KV.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch

from rollout.engine.kv.block import BlockCopies
from rollout.engine.kv.copies import ALL_SLOTS
from rollout.engine.kv.pools import Pools
from rollout.engine.kv.sizing import PoolSizes
from rollout.engine.memory import DeviceMemory


class RouteGeometry(NamedTuple):
    """Shape of the routes of a model: the fields of `rollout.engine.values.Routing`."""

    layers: tuple[int, ...]
    """decoder layer of each row of a token's routes"""
    chosen: int
    experts: int
    decoder_layers: int

    @property
    def shape(self) -> tuple[int, int]:
        """Shape of the routes of one token."""
        return len(self.layers), self.chosen

    @property
    def stored(self) -> torch.dtype:
        """Dtype of ids on the device, of the size that they have on the host: torch indexes no uint16 on CUDA."""
        return torch.uint8 if self.experts <= 256 else torch.int16

    @property
    def dtype(self) -> np.dtype[Any]:
        """Dtype of ids on the host."""
        return np.dtype(f"uint{8 * self.stored.itemsize}")

    @property
    def bytes_per_token(self) -> int:
        return len(self.layers) * self.chosen * self.stored.itemsize


class RoutePages(Pools):
    """Both pools of routes. A step writes the device pool (`rollout.engine.forward.routes`), `move` both."""

    def __init__(self, geometry: RouteGeometry, sizes: PoolSizes, memory: DeviceMemory) -> None:
        """Allocate both pools. Raises ValueError if the memory cannot be allocated."""
        shape = sizes.block_size, len(geometry.layers) * geometry.chosen
        commit = sizes.commit_device, sizes.commit_host
        super().__init__(shape, geometry.stored, (sizes.device, sizes.host), memory, commit)
        self.geometry = geometry

    @property
    def by_token(self) -> torch.Tensor:
        """View the device pool as [blocks · block_size, layers, chosen]."""
        return self.data.view(-1, *self.geometry.shape)

    def move(self, moves: BlockCopies) -> None:
        """Run the copies of a step, in order with compute: the step before may still write what is copied."""
        self.copy_engine.run(moves, self.copy, ALL_SLOTS)
