"""A step's small arrays between host and device: the host does not wait for the device to take them, and waits for its answer
only when it asks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch


def to_device(arrays: Sequence[np.ndarray], device: torch.device) -> list[torch.Tensor]:
    """1-D arrays of one dtype as views of one tensor on the device, in one copy. From pageable memory the host would wait until
    everything before the copy has run; torch keeps the pinned one until it was read."""
    whole = torch.from_numpy(np.concatenate(arrays))
    if device.type == "cuda":
        whole = whole.pin_memory().to(device, non_blocking=True)
    return list(whole.split([len(array) for array in arrays]))


def to_host(tensor: torch.Tensor) -> Callable[[], np.ndarray]:
    """Starts a copy. What is returned waits for that copy, and for nothing that is launched after it."""
    if tensor.device.type == "cpu":
        return tensor.numpy
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    host.copy_(tensor, non_blocking=True)
    done: Any = torch.cuda.Event()
    done.record()

    def read() -> np.ndarray:
        done.synchronize()
        return host.numpy()

    return read
