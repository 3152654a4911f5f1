"""A manifest on the wire: one frame of its own, since a large model's is longer than a header may be."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from engine.request import TensorInfo
from transport.errors import InvalidRequest
from transport.frames import MALFORMED

_decoder = msgspec.msgpack.Decoder(list[TensorInfo])


def pack_manifest(manifest: Sequence[TensorInfo]) -> np.ndarray:
    """[bytes] uint8: MessagePack of [[name, dtype, [length …], digest] …]."""
    return np.frombuffer(msgspec.msgpack.encode(manifest), np.uint8)


def unpack_manifest(data: np.ndarray) -> list[TensorInfo]:
    """Raises InvalidRequest for anything else."""
    if data.dtype != np.uint8 or data.ndim != 1:
        raise InvalidRequest(f"the manifest is {data.dtype} of shape {data.shape}: must be uint8 [bytes]")
    try:
        manifest = _decoder.decode(data.data)
    except MALFORMED as error:
        raise InvalidRequest(f"not a manifest: {str(error)[:300]}") from None
    for info in manifest:
        if any(length < 0 for length in info.shape):
            raise InvalidRequest(f"tensor {info.name!r:.200}: a negative length in its shape")
    return manifest
