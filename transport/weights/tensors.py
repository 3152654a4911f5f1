"""Tensors of one refresh as bytes, on any device. Imports torch only for tensors on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec
import numpy as np
import xxhash

from rollout.engine.values import TensorInfo
from rollout.transport.errors import WeightsRefused

DIGEST_BYTES = 4 << 20
"""bytes copied to the host at a time for a digest"""


class Tensors:
    """The payload of one refresh, at the trainer.

    Args:
        infos: manifest entries in the order of the payload; their digests are empty.
        data: the elements of each in C order, as a [bytes] uint8 torch tensor on its device."""

    def __init__(self, infos: list[TensorInfo], data: list[Any]) -> None:
        self.infos = infos
        self.data = data
        self.hashes: Callable[[list[Any]], list[str]] | None = None
        """digests tensors on their GPU; None: their bytes are copied to the host"""

    @property
    def on_gpus(self) -> bool:
        """Whether there are tensors and all of them are on CUDA devices."""
        return bool(self.data) and all(map(on_gpu, self.data))

    @property
    def devices(self) -> set[Any]:
        """The torch.device of each."""
        return {one.device for one in self.data}

    def on_host(self) -> list[np.ndarray]:
        """Return [bytes] uint8 arrays: views of tensors on the CPU, copies of others."""
        return on_host(self.data)

    def check_on_gpus(self, via: str) -> None:
        """Check that all are on GPUs. Raises WeightsRefused naming a tensor that is not."""
        for info, one in zip(self.infos, self.data, strict=True):
            if not on_gpu(one):
                raise WeightsRefused(
                    f'tensor {info.name!r} is on {one.device}: via="{via}" takes tensors on a CUDA device; use "shm" on one '
                    'host, "gloo" or "inline" on any'
                )

    def finished(self) -> list[Any]:
        """Return `data` after all work on GPUs that writes it has finished."""
        synchronize(self.devices)
        return self.data

    def digests(self) -> list[str]:
        """Return the digest of each."""
        return [digest(one) for one in self.data] if self.hashes is None else self.hashes(self.data)

    def manifest(self, digests: Iterable[str]) -> list[TensorInfo]:
        """Fill in the digest of each tensor."""
        return [msgspec.structs.replace(info, digest=one) for info, one in zip(self.infos, digests, strict=True)]


def on_gpu(tensor: Any) -> bool:
    """Whether a torch tensor lies on a CUDA device."""
    return bool(tensor.is_cuda)


def synchronize(devices: Iterable[Any]) -> None:
    """Wait for all streams of these CUDA devices."""
    import torch

    for device in devices:
        torch.cuda.synchronize(device)


def on_host(data: Sequence[Any]) -> list[np.ndarray]:
    """Copy [bytes] uint8 tensors to host memory; arrays are returned unchanged."""
    return [one if isinstance(one, np.ndarray) else one.cpu().numpy() for one in data]


def digest(data: Any) -> str:
    """Return the xxh3-128 (hex) of a [bytes] uint8 array, or of a tensor, which is copied to the host slice by slice."""
    if isinstance(data, np.ndarray):
        return xxhash.xxh3_128_hexdigest(data.data)
    state = xxhash.xxh3_128()
    for piece in data.split(DIGEST_BYTES):
        state.update(piece.cpu().numpy())
    return state.hexdigest()
