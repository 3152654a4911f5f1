"""Encodes long lists, such as a manifest or the targets of an adapter, as a separate frame: a header has a bounded length."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import msgspec
import numpy as np

from rollout.engine.values import LoraTarget, TensorInfo
from rollout.transport.errors import InvalidRequest
from rollout.transport.frames import MALFORMED

_tensors = msgspec.msgpack.Decoder(list[TensorInfo])
_targets = msgspec.msgpack.Decoder(list[LoraTarget])
T = TypeVar("T")

MAX_DIMENSIONS = 8
"""of a tensor; the product of more lengths than a few takes time that grows with the square of their number"""
ENTRY_BYTES = 1024
"""most that one entry may take, on average"""


def _length(head: bytes) -> int:
    """Count the entries of the MessagePack array that begins so; 0 for anything that is none."""
    if head and head[0] >> 4 == 0x9:
        return head[0] & 0xF
    wide = {0xDC: 2, 0xDD: 4}.get(head[0] if head else 0, 0)
    return int.from_bytes(head[1 : 1 + wide], "big")


def pack_manifest(manifest: Sequence[TensorInfo]) -> np.ndarray:
    """Encode a manifest as [bytes] uint8: MessagePack of [[name, dtype, [length …], digest] …]."""
    return np.frombuffer(msgspec.msgpack.encode(manifest), np.uint8)


def unpack_manifest(data: np.ndarray, most: int) -> list[TensorInfo]:
    """Decode a manifest. Raises InvalidRequest for anything else, and for more than `most` entries or ENTRY_BYTES for each of
    these, before any of it is decoded."""
    manifest = _unpack(data, most, _tensors, "manifest")
    for info in manifest:
        if len(info.shape) > MAX_DIMENSIONS:
            raise InvalidRequest(f"tensor {info.name!r:.200}: {len(info.shape)} dimensions; at most {MAX_DIMENSIONS}")
        if any(length < 0 for length in info.shape):
            raise InvalidRequest(f"tensor {info.name!r:.200}: a negative length in its shape")
    return manifest


def pack_targets(targets: Sequence[LoraTarget]) -> np.ndarray:
    """Encode the targets of an adapter as [bytes] uint8: MessagePack of [[weight, a, b, scale, transposed] …]."""
    return np.frombuffer(msgspec.msgpack.encode(targets), np.uint8)


def unpack_targets(data: np.ndarray, most: int) -> list[LoraTarget]:
    """Decode the targets of an adapter. Raises as `unpack_manifest`."""
    return _unpack(data, most, _targets, "list of targets")


def _unpack(data: np.ndarray, most: int, decoder: msgspec.msgpack.Decoder[list[T]], what: str) -> list[T]:
    if data.dtype != np.uint8 or data.ndim != 1:
        raise InvalidRequest(f"the {what} is {data.dtype} of shape {data.shape}: must be uint8 [bytes]")
    if len(data) > 5 + most * ENTRY_BYTES:
        raise InvalidRequest(f"a {what} of {len(data)} bytes: at most {ENTRY_BYTES} for each of the model's {most} tensors")
    entries = _length(data[:5].tobytes())
    if entries > most:
        raise InvalidRequest(
            f"the {what} lists {entries} tensors, the model has {most} (of experts, all in one tensor: to send one for each, "
            "see rollout.models.stacked_experts; a folder needs save_pretrained(…, save_original_format=False))"
        )
    try:
        return decoder.decode(data.data)
    except MALFORMED as error:
        raise InvalidRequest(f"not a {what}: {str(error)[:300]}") from None
