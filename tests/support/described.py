"""Weights of the watermark model as a trainer describes them."""

from __future__ import annotations

import numpy as np

from rollout.engine.values import TensorInfo, manifest_digest
from rollout.engine.weights.tensors import describe, with_digest
from tests.support.watermark import weights_of


def described(version: int) -> tuple[list[TensorInfo], list[np.ndarray]]:
    each = [describe(name, tensor) for name, tensor in weights_of(version).items()]
    return [with_digest(*one) for one in each], [data for _, data in each]


def digest_of(version: int) -> str:
    return manifest_digest(described(version)[0])
