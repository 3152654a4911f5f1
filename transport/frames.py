"""Encodes messages as frames, and decodes frames to messages.

    frame 0        header: MessagePack of a tagged Struct; an array field is [frame, dtype, shape]
    frame 1 ...    one frame for each array: its elements, C order, little-endian, nothing else

                   {"type": "submit", "group_id": "g", "prompt": [1, "int32", [3]], "sampling": {...}}
                   01 00 00 00 2a 00 00 00 07 00 00 00

Neither end copies arrays: `pack` returns their memory, `Decoder.unpack` returns views of the received frames. Exactly one field
refers to each array frame.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Generic, TypeVar

import msgspec
import numpy as np

from rollout.engine.values import Limits
from rollout.transport.errors import InvalidRequest, ProtocolError

Frame = bytes | memoryview

DTYPES = {
    name: np.dtype(name).newbyteorder("<")
    for name in ("int8", "uint8", "int16", "uint16", "int32", "int64", "float16", "float32", "float64")
}
"""dtypes of arrays on the wire: numbers for which every bit pattern is valid"""

NAMES = {dtype: name for name, dtype in DTYPES.items()}
"""cached: numpy takes 4 microseconds for a name"""
MAX_DIMENSIONS = 8
MALFORMED = (msgspec.MsgspecError, RecursionError, MemoryError, OverflowError, ValueError, TypeError)
"""exceptions of decoding hostile bytes (UnicodeDecodeError is a ValueError)"""

M = TypeVar("M")


def pack(message: msgspec.Struct) -> list[Frame]:
    """Encode a message as frames. Arrays must stay unchanged until sent.

    Raises TypeError for a field that cannot travel, OverflowError for an integer beyond 64 bits, UnicodeEncodeError for text
    that is not Unicode."""
    frames: list[Frame] = [b""]

    def array(value: Any) -> tuple[int, str, tuple[int, ...]]:
        name = NAMES.get(value.dtype) or value.dtype.name if isinstance(value, np.ndarray) else ""
        if name not in DTYPES:
            what = f"array of {value.dtype}" if isinstance(value, np.ndarray) else type(value).__name__
            raise TypeError(f"cannot send {what}; arrays of {', '.join(DTYPES)} can travel")
        wire = np.ascontiguousarray(value, dtype=DTYPES[name])
        frames.append(wire.reshape(-1).view(np.uint8).data)
        return len(frames) - 1, name, value.shape

    frames[0] = msgspec.msgpack.encode(message, enc_hook=array)
    return frames


def frame_bytes(frames: Sequence[Frame]) -> int:
    """Count the bytes of a message on the wire, without ZMTP's own few."""
    return sum(frame.nbytes if isinstance(frame, memoryview) else len(frame) for frame in frames)


class _Named(msgspec.Struct):
    """What a message says of the group that it concerns."""

    group_id: str | None = None


def _group_id(header: Frame, limits: Limits) -> str | None:
    """Return the group id of a message that cannot be decoded as a whole; None if it has none, or too long a one."""
    try:
        group_id = msgspec.msgpack.decode(header, type=_Named).group_id
    except MALFORMED:
        return None
    return group_id if group_id is not None and len(group_id.encode()) <= limits.max_id_bytes else None


class Decoder(Generic[M]):
    """Decodes frames to messages of one union. One per receiving thread: it refers to the frames while it decodes."""

    def __init__(self, union: Any, limits: Limits) -> None:
        self._header = msgspec.msgpack.Decoder(union, dec_hook=self._array)
        self._limits = limits
        self._frames: Sequence[Frame] = ()
        self._used: set[int] = set()

    def unpack(self, frames: Sequence[Frame]) -> M:
        """Decode a message. Its arrays are views of `frames`, writable where the frame is. Raises ProtocolError; InvalidRequest
        for a group whose `Sampling` has a value that is not accepted: it concerns this group only."""
        self._check_sizes(frames)
        self._frames, self._used = frames, set()
        try:
            message: M = self._header.decode(frames[0])
        except ProtocolError:
            raise
        except MALFORMED as error:
            if isinstance(error.__cause__, ValueError) and (group_id := _group_id(frames[0], self._limits)) is not None:
                raise InvalidRequest(str(error.__cause__), group_id) from None
            raise ProtocolError(f"not a message of this protocol: {str(error)[:300]}") from None
        finally:
            self._frames = ()
        if len(self._used) != len(frames) - 1:
            raise ProtocolError(f"{len(frames) - 1} array frames came, the header names {len(self._used)}")
        return message

    def _check_sizes(self, frames: Sequence[Frame]) -> None:
        limits = self._limits
        if not 1 <= len(frames) <= limits.max_frames:
            raise ProtocolError(f"{len(frames)} frames: must be 1 to {limits.max_frames} (Limits.max_frames)")
        if len(frames[0]) > limits.max_header_bytes:
            raise ProtocolError(
                f"header of {len(frames[0])} bytes: at most {limits.max_header_bytes} (Limits.max_header_bytes)"
            )
        largest = max(len(frame) for frame in frames)
        if largest > limits.max_frame_bytes:
            raise ProtocolError(f"frame of {largest} bytes: at most {limits.max_frame_bytes} (Limits.max_frame_bytes)")

    def _array(self, kind: type, value: Any) -> np.ndarray:
        """Decode a reference to a frame. It comes from the peer, so it is checked before numpy uses it."""
        if not (isinstance(value, list) and len(value) == 3):
            raise ProtocolError("an array field must be [frame, dtype, shape]")
        number, name, shape = value
        if type(number) is not int or not 1 <= number < len(self._frames):
            raise ProtocolError(f"array names frame {number!r:.40}: the message has array frames 1 to {len(self._frames) - 1}")
        if number in self._used:
            raise ProtocolError(f"two arrays name frame {number}")
        if not isinstance(name, str) or name not in DTYPES:
            raise ProtocolError(f"dtype {name!r:.40}: must be one of {', '.join(DTYPES)}")
        if not (isinstance(shape, list) and len(shape) <= MAX_DIMENSIONS and all(type(x) is int and x >= 0 for x in shape)):
            raise ProtocolError(f"shape must be a list of at most {MAX_DIMENSIONS} non-negative integers")
        frame, dtype = self._frames[number], DTYPES[name]
        if math.prod(shape) * dtype.itemsize != len(frame):
            raise ProtocolError(f"{name} array of shape {shape} in a frame of {len(frame)} bytes")
        self._used.add(number)
        return np.frombuffer(frame, dtype).reshape(shape)
