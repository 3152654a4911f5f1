"""Sends only the elements that changed since the last refresh, in messages; any host.

    trainer's end    keeps a copy of what was sent last (host memory, as large as the model), and the version and digest that
                     the service then answered
    service's end    adds the differences to its live weights, and stages the sum like any payload: the manifest has the
                     digest of every whole tensor, so a wrong result is refused

    slice       at most SLICE_BYTES of one tensor; its elements as integers of their size, of which n have changed
                ┌ n ┬ wide ┬ bitmap? ┬ where ─────────────────┬ narrow ───────────────┬ wide ────────────┐
                │ 4 │ 4    │ 4       │ n gaps of a byte each, │ n differences of a    │ differences that │
                │   │      │         │ or a bit an element    │ byte; -128: see wide  │ need all bytes   │
    gap         unchanged elements before a changed one; where there are more than 255, a difference of 0 stands in between

AdamW with a step of 1e-6 leaves most bf16 weights as they are and moves others to their neighbour, so a change takes two bytes.
Sparse deltas against a version: slime, vLLM and verl send such; this coding is ours.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rollout.engine.values import Refreshed, TensorInfo
from rollout.transport.errors import InvalidRequest, SourceUnreachable, WrongBase
from rollout.transport.weights.ends import Expected, LiveTensors, Payload, Sender, WeightTransport
from rollout.transport.weights.files import DTYPES, FilesPayload, Span, read_folder
from rollout.transport.weights.inline import InlinePayload, InlineSender
from rollout.transport.weights.offers import DeltaOffer
from rollout.transport.weights.tensors import Tensors, digest

WIDTHS = dict(DTYPES.values())
"""bytes of an element of each dtype"""
SLICE_BYTES = 1 << 20
PAYS = 0.75
"""maximum size of the differences, relative to the whole tensors; above it the tensors are sent"""
HEAD_BYTES = 12
MOST_BYTES = HEAD_BYTES + 4 * SLICE_BYTES
"""of a coded slice: at worst every element is a byte, with its gap and both differences"""
MARK = -128
"""narrow difference that refers to the next wide one"""


class WithZeros:
    """Live tensors, and zeros for those that the model skips, whose sums have no reader."""

    def __init__(self, live: LiveTensors, manifest: Sequence[TensorInfo]) -> None:
        self._live = live
        self._skipped = {info.name: info for info in manifest if live.skips(info.name)}
        for info in self._skipped.values():
            if info.dtype not in WIDTHS:
                raise InvalidRequest(f"tensor {info.name!r:.200}: dtype {info.dtype!r:.40} must be one of {', '.join(WIDTHS)}")

    def dtype(self, name: str) -> str:
        return self._skipped[name].dtype if name in self._skipped else self._live.dtype(name)

    def skips(self, name: str) -> bool:
        return name in self._skipped

    def size(self, name: str) -> tuple[int, int]:
        if name not in self._skipped:
            return self._live.size(name)
        info = self._skipped[name]
        return math.prod(info.shape) * WIDTHS[info.dtype], WIDTHS[info.dtype]

    def read_slice(self, name: str, start: int, size: int) -> np.ndarray:
        return np.zeros(size, np.uint8) if name in self._skipped else self._live.read_slice(name, start, size)


# coding


def encode(old: np.ndarray, new: np.ndarray) -> bytes:
    """Encode the change of a slice. old, new: [elements] of one unsigned integer dtype."""
    at = np.flatnonzero(old != new)
    signed = np.dtype(f"i{new.itemsize}")
    differences = (new[at] - old[at]).view(signed)
    gaps = np.diff(at, prepend=-1) - 1
    fillers = gaps >> 8
    count = len(at) + int(fillers.sum())
    bitmap = len(new) < 8 * count
    if bitmap:
        mask = np.zeros(len(new), bool)
        mask[at] = True
        where = np.packbits(mask)
    else:
        real = np.arange(len(at)) + np.cumsum(fillers)
        where = np.full(count, 255, np.uint8)
        where[real] = gaps & 255
        spread = np.zeros(count, signed)
        spread[real] = differences
        differences = spread
    fits = (differences > MARK) & (differences <= 127)
    narrow, wide = np.where(fits, differences, MARK).astype(np.int8), differences[~fits]
    head = np.array([len(differences), len(wide), bitmap], "<u4")
    return b"".join(each.tobytes() for each in (head, where, narrow, wide))


def rest_bytes(head: np.ndarray, elements: int, itemsize: int) -> int:
    """Return how many bytes follow the head, [3] uint32, of a slice. Raises InvalidRequest for an invalid head."""
    count, wide, bitmap = map(int, head)
    if not wide <= count <= elements or bitmap > 1:
        raise InvalidRequest(f"a slice of {elements} elements with {count} differences, {wide} of them wide")
    return (-(-elements // 8) if bitmap else count) + count + wide * itemsize


def decode(head: np.ndarray, rest: np.ndarray, values: np.ndarray) -> None:
    """Add the differences of a slice to `values`, [elements] of an unsigned integer dtype. Raises InvalidRequest."""
    count, wide, bitmap = map(int, head)
    middle = -(-len(values) // 8) if bitmap else count
    where, narrow = rest[:middle], rest[middle : middle + count].view(np.int8)
    if bitmap:
        at = np.flatnonzero(np.unpackbits(where, count=len(values)))
    else:
        at = np.cumsum(where.astype(np.int64) + 1) - 1
    marked = np.flatnonzero(narrow == MARK)
    if len(at) != count or len(marked) != wide or (count and at[-1] >= len(values)):
        raise InvalidRequest("the differences of a slice do not fit it: damaged?")
    differences = narrow.astype(f"i{values.itemsize}")
    differences[marked] = np.frombuffer(rest[middle + count :].tobytes(), differences.dtype)
    values[at] += differences.view(values.dtype)


def integers(data: np.ndarray, itemsize: int) -> np.ndarray:
    """View [bytes] uint8 as unsigned integers."""
    return data.view(f"u{itemsize}")


def width(info: TensorInfo, size: int) -> int:
    """Return the bytes of an element of a tensor of `size` bytes."""
    elements = int(np.prod(info.shape, dtype=np.int64))
    return size // elements if elements else 1


# the trainer's end


class Delta(WeightTransport):
    """Sends differences if possible, else whole tensors; `Refreshed.reason` says why.

    Args:
        whole: the transport for whole tensors, "auto"."""

    via = "delta"

    def __init__(self, whole: WeightTransport) -> None:
        self._whole = whole
        self._copies: dict[tuple[str, str, tuple[int, ...]], np.ndarray] = {}
        """by name, dtype and shape [bytes] uint8, as they were offered last"""
        self._sent: tuple[int, str] | None = None
        """version and digest with these; None: the service may have others"""

    def offer_tensors(self, tensors: Tensors, capabilities: Collection[str]) -> Sender:
        arrays = tensors.on_host()

        def whole() -> Sender:
            return self._whole.offer_tensors(tensors, capabilities)

        return self._offer(tensors.infos, arrays, False, sum(map(len, arrays)), whole)

    def offer_folder(self, folder: Path) -> Sender:
        spans = read_folder(folder)
        infos = [TensorInfo(name, span.dtype, span.shape, "") for name, span in spans.items()]
        total = sum(span.size for span in spans.values())
        return self._offer(infos, read_tensors(spans.values()), True, total, lambda: self._whole.offer_folder(folder))

    def close(self) -> None:
        self._copies, self._sent = {}, None

    def _offer(
        self, infos: list[TensorInfo], arrays: Iterable[np.ndarray], ours: bool, total: int, whole: Callable[[], Sender]
    ) -> Sender:
        """Offer differences if the service has a usable base and they are small enough. In any case the copies become the
        offered tensors; `applied` tells whether the service has them.

        Args:
            arrays: of each tensor [bytes] uint8, read once.
            ours: only this class has the arrays, so they become the copies.
            total: their bytes.
        """
        sent, self._sent = self._sent, None
        keys = [(info.name, info.dtype, info.shape) for info in infos]
        if sent is None or not set(keys) <= self._copies.keys():
            reason = "delta: nothing is known to be live that this could be against" if sent is None else "delta: other tensors"
            self._copies = {key: array if ours else array.copy() for key, array in zip(keys, arrays, strict=True)}
            return self._tracked(whole(), reason)
        stream, digests = list[np.ndarray](), list[str]()
        for key, array, info in zip(keys, arrays, infos, strict=True):
            digests.append(digest(array))
            stream.append(self._differences(key, array, width(info, len(array))))
        size = sum(map(len, stream))
        if size > PAYS * total:
            return self._tracked(whole(), f"delta: does not pay, {size} bytes of differences for {total}")
        sender = InlineSender(self.via, DeltaOffer(*sent, size), Tensors(infos, []).manifest(digests), stream)
        sender.fallback_after = (SourceUnreachable, WrongBase)
        sender.fallback = lambda other: whole()
        return self._tracked(sender, sender.reason)

    def _tracked(self, sender: Sender, reason: str) -> Sender:
        sender.reason, sender.applied, following = reason, self._applied, sender.fallback
        if following is not None:
            sender.fallback = lambda other: self._tracked(following(other), other.reason)
        return sender

    def _applied(self, refreshed: Refreshed) -> None:
        self._sent = refreshed.version, refreshed.digest

    def _differences(self, key: Any, new: np.ndarray, itemsize: int) -> np.ndarray:
        """Encode the change of a tensor since its last offer, and update the copy. Returns [bytes] uint8."""
        old, coded = self._copies[key], []
        for start in range(0, len(new), SLICE_BYTES):
            before, after = old[start : start + SLICE_BYTES], new[start : start + SLICE_BYTES]
            coded.append(encode(integers(before, itemsize), integers(after, itemsize)))
            before[...] = after
        return np.frombuffer(b"".join(coded), np.uint8)


def read_tensors(spans: Iterable[Span]) -> Iterator[np.ndarray]:
    """Read tensors of files one after the other, [bytes] uint8 each. They are copies: mapped files that become shorter would
    kill the trainer. Raises SourceUnreachable."""
    for span in spans:
        data, payload, done = np.empty(span.size, np.uint8), FilesPayload([span]), 0
        try:
            while done < span.size:
                done += payload.read(data[done:])
        finally:
            payload.close()
        yield data


# the service's end


def opened(offer: DeltaOffer, expected: Expected) -> Payload:
    """Open the service's end of an offer. Raises InvalidRequest, SourceUnreachable, WrongBase."""
    live = expected.live
    if live is None:
        raise SourceUnreachable("this service has no weights of its own to add differences to: send whole tensors")
    if live.dropped or (offer.version, offer.digest) != (live.version, live.digest):
        raise WrongBase(
            f"the differences are against version {offer.version} with digest {offer.digest:.12}…, live is version "
            f"{live.version} with {live.digest:.12}…: send whole tensors"
        )
    tensors = WithZeros(live.inventory, expected.manifest)
    for info in expected.manifest:
        dtype = tensors.dtype(info.name)
        if info.dtype != dtype:
            raise WrongBase(f"tensor {info.name!r:.200} is sent as {info.dtype}, the live one is {dtype}: send that dtype")
    if not 0 <= offer.size <= expected.total + len(expected.manifest) * MOST_BYTES:
        raise InvalidRequest(f"{offer.size} bytes of differences for {expected.total} bytes of tensors")
    return DeltaPayload(offer.size, expected.manifest, tensors)


class DeltaPayload(Payload):
    """Decodes differences from messages and adds them to the live weights. size: bytes of the differences."""

    via = "delta"

    def __init__(self, size: int, manifest: Sequence[TensorInfo], live: LiveTensors) -> None:
        self.sent_bytes = size
        self._inner = InlinePayload(size)
        self._live = live
        self._slices = (part for info in manifest for part in slices(info, live))
        self._slice: tuple[TensorInfo, int, int, int] | None = next(self._slices, None)
        """tensor, first byte, bytes, bytes of an element"""
        self._coded = np.empty(MOST_BYTES, np.uint8)
        self._have = 0
        """bytes of the coded slice that are here"""
        self._left = np.zeros(0, np.uint8)
        """of the slice that was decoded last"""

    @property
    def window_bytes(self) -> int:  # type: ignore[override]
        return self._inner.window_bytes

    @property
    def read_bytes(self) -> int:  # type: ignore[override]
        return self._inner.read_bytes

    @property
    def ready(self) -> bool:
        return bool(len(self._left)) or self._inner.ready

    def put(self, offset: int, data: Sequence[np.ndarray]) -> int:
        return self._inner.put(offset, data)

    def check_sent(self) -> None:
        self._inner.check_sent()

    def read(self, memory: np.ndarray) -> int:
        if not len(self._left) and not self._decode():
            return 0
        piece = self._left[: len(memory)]
        memory[: len(piece)] = piece
        self._left = self._left[len(piece) :]
        return len(piece)

    def close(self) -> None:
        self._inner.close()
        self._left = np.zeros(0, np.uint8)

    def _decode(self) -> bool:
        """Decode the next slice if it is complete."""
        if self._slice is None or not self._fetch(HEAD_BYTES):
            return False
        info, start, size, itemsize = self._slice
        head = self._coded[:HEAD_BYTES].view("<u4")
        end = HEAD_BYTES + rest_bytes(head, size // itemsize, itemsize)
        if not self._fetch(end):
            return False
        values = self._live.read_slice(info.name, start, size)
        decode(head, self._coded[HEAD_BYTES:end], integers(values, itemsize))
        self._left, self._have, self._slice = values, 0, next(self._slices, None)
        return True

    def _fetch(self, size: int) -> bool:
        """Read until `size` bytes of the encoded slice have arrived. Returns whether they have."""
        while self._have < size:
            count = self._inner.read(self._coded[self._have : size])
            if not count:
                return False
            self._have += count
        return True


def slices(info: TensorInfo, live: LiveTensors) -> Iterator[tuple[TensorInfo, int, int, int]]:
    """Split a tensor as the trainer's end does: (tensor, first byte, bytes, bytes of an element) of each slice."""
    total, itemsize = live.size(info.name)
    return ((info, start, min(SLICE_BYTES, total - start), itemsize) for start in range(0, total, SLICE_BYTES))
