"""A refresh from tensors of this process: what it sends, and a source of the bytes. Those on the model's device stay there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import torch

from rollout.engine.memory import DeviceMemory
from rollout.engine.values import WeightUpdate
from rollout.engine.weights.staging import Source, source_of
from rollout.engine.weights.tensors import describe, flat_bytes, info_of, with_digest


def update_from(
    pairs: Sequence[tuple[str, torch.Tensor]], memory: DeviceMemory, version: int | None, partial: bool
) -> tuple[WeightUpdate, Source]:
    """Return the update that (name, tensor) pairs make, and its source. If all tensors are on the device of `memory`, they are
    hashed and read there, and no copy goes to the host. Raises InvalidWeights naming the tensor."""
    infos = [info_of(name, tensor) for name, tensor in pairs]
    here = torch.empty(0, device=memory.device).device
    if memory.is_host or memory.hashes is None or any(tensor.device != here for _, tensor in pairs):
        described = [describe(name, tensor) for name, tensor in pairs]
        manifest = [with_digest(*each) for each in described]
        return WeightUpdate(manifest, version, partial), source_of(data for _, data in described)
    flat = [flat_bytes(tensor) for _, tensor in pairs]
    hashes = memory.hashes(len(flat))
    for row, data in enumerate(flat):
        hashes.add(row, data)
    manifest = [msgspec.structs.replace(info, digest=digest) for info, digest in zip(infos, hashes.read()(), strict=True)]
    return WeightUpdate(manifest, version, partial, on_device=True, stays=True), DeviceSource(flat)


class DeviceSource:
    """A `Source` of [bytes] uint8 tensors on a device, in order; begins again after the last byte."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._tensors = [tensor for tensor in tensors if len(tensor)]
        self._place = (0, 0)
        """tensor and byte that follow"""

    def __call__(self, buffer: Any) -> int:
        """Copy the next bytes into a tensor there, on the current stream, or into an array. Returns their number."""
        if not self._tensors or not len(buffer):
            return 0
        index, begin = self._place
        data = self._tensors[index][begin : begin + len(buffer)]
        target = buffer if isinstance(buffer, torch.Tensor) else torch.from_numpy(buffer)
        target[: len(data)].copy_(data)
        end = begin + len(data)
        self._place = (index, end) if end < len(self._tensors[index]) else ((index + 1) % len(self._tensors), 0)
        return len(data)
