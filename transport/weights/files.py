"""Sends tensors in a folder of safetensors: a checkpoint, on a file system that both ends can read.

    file.safetensors   ┌ length of the header, 8 bytes ┬ JSON header: name → dtype, shape, [start, end) ┬ tensors … ┐

Both ends read the headers themselves; the trainer's end takes the digests, so a file that the service sees differently (a stale
cache, a save that is still under way) is refused. Format: https://github.com/huggingface/safetensors
"""

from __future__ import annotations

import math
import os
import stat
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Annotated, NamedTuple

import msgspec
import numpy as np
import xxhash

from rollout.engine.model_files import MAX_INDEX_BYTES, Checkpoint, checkpoint_of
from rollout.engine.values import TensorInfo
from rollout.transport.errors import InvalidRequest, SourceUnreachable
from rollout.transport.weights.ends import Expected, Payload, Sender, WeightTransport
from rollout.transport.weights.manifest import ENTRY_BYTES, MAX_DIMENSIONS
from rollout.transport.weights.offers import FilesOffer
from rollout.transport.weights.tensors import Tensors

DTYPES = {
    "F64": ("float64", 8),
    "F32": ("float32", 4),
    "F16": ("float16", 2),
    "BF16": ("bfloat16", 2),
    "F8_E4M3": ("float8_e4m3fn", 1),
    "F8_E5M2": ("float8_e5m2", 1),
    "I64": ("int64", 8),
    "I32": ("int32", 4),
    "I16": ("int16", 2),
    "I8": ("int8", 1),
    "U8": ("uint8", 1),
    "BOOL": ("bool", 1),
}
MAX_HEADER_BYTES = 1 << 24
"""of a file: the names of a hundred thousand tensors. The format allows 100 MB, which take seconds to parse"""
METADATA_BYTES = 1 << 16
"""that a service allows in headers beside the tensors of the manifest"""
OTHER_TENSORS = 2048
"""that a folder may have beside the tensors of the manifest and as many again"""
Length = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
READ_BYTES = 4 << 20


class Entry(msgspec.Struct):
    """A tensor in a header."""

    dtype: str
    shape: Annotated[list[Length], msgspec.Meta(max_length=MAX_DIMENSIONS)]
    data_offsets: tuple[Length, Length]


_header = msgspec.json.Decoder(dict[str, msgspec.Raw])
_entry = msgspec.json.Decoder(Entry)


class Span(NamedTuple):
    """Place of a tensor in a folder."""

    path: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    size: int


def read_folder(folder: Path, header_bytes: int | None = None, tensors: int = MAX_HEADER_BYTES) -> dict[str, Span]:
    """Find every tensor of the model in a folder: in the files of its index, in model.safetensors, or else in all
    *.safetensors.

    Args:
        header_bytes: most that the headers of all files, and the index, may have; None: MAX_HEADER_BYTES each, and
            MAX_INDEX_BYTES.
        tensors: most that all files may have.

    Raises SourceUnreachable, InvalidRequest naming file and tensor."""
    if not folder.is_absolute():
        raise InvalidRequest(f"folder {str(folder)!r}: give an absolute path")
    try:
        index_bytes = MAX_INDEX_BYTES if header_bytes is None else header_bytes
        checkpoint = checkpoint_of(folder, index_bytes) or Checkpoint(sorted(folder.glob("*.safetensors")), {})
    except OSError as error:
        raise SourceUnreachable(str(error)) from None
    except ValueError as error:
        raise InvalidRequest(str(error)) from None
    if not checkpoint.files:
        raise SourceUnreachable(f"{folder} has no *.safetensors file that can be seen from here")
    found: list[tuple[str, Span]] = []
    left = len(checkpoint.files) * MAX_HEADER_BYTES if header_bytes is None else header_bytes
    for path in checkpoint.files:
        length, spans = _read_header(path, left, tensors - len(found))
        left -= length
        found += spans
    try:
        checkpoint.check((span.path.name, name) for name, span in found)
    except ValueError as error:
        raise InvalidRequest(f"{folder}: {error}") from None
    return dict(found)


def _read_header(path: Path, most: int, tensors: int) -> tuple[int, list[tuple[str, Span]]]:
    """Return the length of a file's header, of at most `most` bytes, and the tensors in it, at most `tensors`."""
    fd = _open(path)
    try:
        size = os.fstat(fd).st_size
        length = int.from_bytes(os.pread(fd, 8, 0), "little")
        if not 0 < length <= size - 8:
            raise InvalidRequest(f"{path} is not a safetensors file, or not a whole one")
        if length > min(most, MAX_HEADER_BYTES):
            raise InvalidRequest(
                f"{path} has a header of {length} bytes: at most {min(most, MAX_HEADER_BYTES)} for these tensors"
            )
        try:
            header = _header.decode(os.pread(fd, length, 8))
            header.pop("__metadata__", None)
            if len(header) > tensors:
                raise ValueError(f"{len(header)} tensors: at most {tensors} here, by the tensors that were announced")
            return length, [(name, _span(path, _entry.decode(raw), 8 + length, size)) for name, raw in header.items()]
        except (ValueError, KeyError, RecursionError) as error:
            raise InvalidRequest(f"{path} is not a safetensors file: {type(error).__name__}: {str(error)[:200]}") from None
    finally:
        os.close(fd)


def _span(path: Path, entry: Entry, base: int, size: int) -> Span:
    start, end = entry.data_offsets
    dtype, width = DTYPES[entry.dtype]
    if not start <= end <= size - base or end - start != math.prod(entry.shape) * width:
        raise ValueError(f"a tensor at bytes {start} to {end} of {size - base}")
    return Span(path, dtype, tuple(entry.shape), base + start, end - start)


def _open(path: Path) -> int:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise SourceUnreachable(f"{path}: {error.strerror}") from None
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise InvalidRequest(f"{path} is no regular file")
    return fd


# the trainer's end


class Files(WeightTransport):
    via = "files"

    def offer_folder(self, folder: Path) -> Sender:
        return Sender(self.via, FilesOffer(str(folder)), describe_folder(folder), [])

    def offer_tensors(self, tensors: Tensors, capabilities: Collection[str]) -> Sender:
        raise InvalidRequest('via="files" takes the path of a folder of safetensors: save the model and give its folder')


def describe_folder(folder: Path) -> list[TensorInfo]:
    """Make the manifest of a folder; reads all bytes for the digests. Raises as `read_folder`."""
    manifest = []
    memory = np.empty(READ_BYTES, np.uint8)
    for name, span in read_folder(folder).items():
        payload, digest = FilesPayload([span]), xxhash.xxh3_128()
        while count := payload.read(memory):
            digest.update(memory[:count].data)
        payload.close()
        manifest.append(TensorInfo(name, span.dtype, span.shape, digest.hexdigest()))
    return manifest


# the service's end


def opened(offer: FilesOffer, expected: Expected) -> Payload:
    """Open the service's end of an offer. Raises InvalidRequest, SourceUnreachable."""
    return FilesPayload(matching(offer, expected.manifest))


def matching(offer: FilesOffer, manifest: Sequence[TensorInfo]) -> list[Span]:
    """Find the tensors of the manifest. Raises SourceUnreachable, InvalidRequest if the folder does not match it."""
    listed = len(manifest)
    spans = read_folder(Path(offer.folder), METADATA_BYTES + listed * ENTRY_BYTES, OTHER_TENSORS + 2 * listed)
    for info in manifest:
        span = spans.get(info.name)
        if span is None or (span.dtype, span.shape) != (info.dtype, info.shape):
            raise InvalidRequest(f"tensor {info.name!r:.200} is not in {offer.folder} as the manifest says")
    return [spans[info.name] for info in manifest]


class FilesPayload(Payload):
    via = "files"

    def __init__(self, spans: Sequence[Span]) -> None:
        self._spans = list(reversed(spans))
        self._done = 0
        """of the last one of them"""
        self._fd: int | None = None
        self._path: Path | None = None

    def read(self, memory: np.ndarray) -> int:
        while self._spans and self._done == self._spans[-1].size:
            self._spans.pop()
            self._done = 0
        if not self._spans or not len(memory):
            return 0
        span = self._spans[-1]
        if span.path != self._path:
            self.close()
            self._fd, self._path = _open(span.path), span.path
        assert self._fd is not None
        count = os.preadv(self._fd, [memory[: span.size - self._done].data], span.start + self._done)
        if not count:
            raise SourceUnreachable(f"{span.path} has become shorter while it was read")
        self._done += count
        return count

    def close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
        self._fd = self._path = None
