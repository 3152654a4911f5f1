"""Tensors of several dtypes and shapes, and what their bytes are on the wire."""

from __future__ import annotations

import numpy as np
import torch
import xxhash

from rollout.engine.values import TensorInfo

TENSORS = {
    "embed": torch.randn(1000, 700).to(torch.bfloat16),
    "norm": torch.randn(3),
    "empty": torch.zeros(0, 4),
    "scalar": torch.tensor(2.5, dtype=torch.float64),
    "head": torch.randn(999, 333).to(torch.float16),
}


def raw(tensor: torch.Tensor) -> np.ndarray:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy()


ARRAYS = [raw(tensor) for tensor in TENSORS.values()]

WHOLE = b"".join(array.tobytes() for array in ARRAYS)

MANIFEST = [
    TensorInfo(name, str(t.dtype).removeprefix("torch."), tuple(t.shape), xxhash.xxh3_128_hexdigest(raw(t)))
    for name, t in TENSORS.items()
]
