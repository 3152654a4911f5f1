"""Staging: receives the bytes of a refresh slice by slice, and hashes, casts and checks them, while generation continues.

    payload    the bytes of the tensors in the manifest's order, in the dtype in which they are sent
               ┌ embed ──────┬ q ───┬ k ─┬ … ┐
    slice      at most SLICE_BYTES of one tensor, the unit of work: copied, then read again while it is in the CPU cache
    staged     the same tensors in the model's dtype, in host memory; a slice that must be cast goes through a scratch buffer

Every transport provides a `Source`, which fills the given memory: one copy from the trainer's memory to the staging buffer. The
digest is taken of that copy, so later changes of the original have no effect. Hashing each tensor with xxh3-128 follows slime's
delta refresh.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Generator, Iterable, Mapping
from typing import Any, Protocol

import numpy as np
import torch
import xxhash

from rollout.engine.values import TensorInfo, WeightUpdate, manifest_digest
from rollout.engine.weights.rounding import Roundings
from rollout.engine.weights.tensors import InvalidWeights, tensor_bytes

SLICE_BYTES = 1 << 20
GRAIN = 32_768
"""largest number of elements that torch processes in the calling thread alone (at::internal::GRAIN_SIZE)"""
_INTS = {2: torch.int16, 4: torch.int32, 8: torch.int64}

Source = Callable[[Any], int]
"""fills the beginning of [bytes] uint8 (an array; a tensor if staging on a device) with the next bytes of the payload. Returns
the number of bytes; 0: none are available yet"""


class StagedTensor:
    """A tensor of the payload.

    Args:
        target: the model's name of the tensor that it writes; None: it repeats a tied tensor, is a factor of an adapter, or is
            not the model's.
        place: [elements] where it is staged; of dropped weights, the live tensor itself. None: nowhere.
    """

    __slots__ = ("info", "dtype", "target", "place", "nbytes", "checked")

    def __init__(self, info: TensorInfo, dtype: torch.dtype, target: str | None, place: torch.Tensor | None) -> None:
        self.info = info
        self.dtype = dtype
        self.target = target
        self.place = place
        self.nbytes = math.prod(info.shape) * dtype.itemsize
        self.checked = True
        """False: its bytes are dropped without a look, since nothing depends on them"""

    def elements(self, start: int, count: int) -> torch.Tensor:
        """Return the staged elements of `count` payload bytes from byte `start` of the tensor."""
        assert self.place is not None
        return self.place[start // self.dtype.itemsize : (start + count) // self.dtype.itemsize]

    def land(self, staged: torch.Tensor, start: int) -> None:
        """Copy checked elements to their place, if that is on a device."""
        assert self.place is not None
        if not self.place.is_cpu:
            self.elements(start, len(staged) * self.dtype.itemsize).copy_(staged)


class TensorSlices(Protocol):
    """Computes staged tensors from others that arrived: `rollout.engine.weights.lora.AdapterMerge`,
    `rollout.engine.weights.twins.TwinStaging`."""

    @property
    def bases(self) -> Mapping[str, torch.Tensor]: ...
    @property
    def stands_for(self) -> int: ...
    def landed(self, part: StagedTensor, end: int) -> None: ...
    def arrived(self, part: StagedTensor) -> dict[str, str]: ...


class Staging:
    """Receives a payload. Made by `Weights.stage`, ended by `Weights.commit` or `close`. in_place: the places of its parts are
    the live tensors, which `write` writes at the commit.

    Args:
        update: with its version.
        scratch: [SLICE_BYTES] uint8, for slices that are cast or not staged.
        on_close: called once, by `close`.
        making: computes further tensors from the parts.
    """

    in_place = False

    def __init__(
        self,
        update: WeightUpdate,
        parts: list[StagedTensor],
        scratch: np.ndarray,
        on_close: Callable[[], None],
        making: TensorSlices | None = None,
    ) -> None:
        assert update.version is not None
        self.version = update.version
        self.manifest_digest = manifest_digest(update.manifest)
        self.total = sum(part.nbytes for part in parts)
        """bytes of the payload"""
        self.received = 0
        self.complete = False
        """all bytes have arrived and match the manifest"""
        self.digests: dict[str, str] = {}
        """digest of each staged tensor, in the model's dtype"""
        self.rounded = Roundings()
        """what casts to the model's dtype have rounded"""
        self.seconds = 0.0
        """from `Weights.stage` to the last byte"""
        self._started = time.perf_counter()
        self.stands_for = self.total if making is None else making.stands_for
        """bytes of the model's tensors that change with this refresh"""
        self._parts = parts
        self._making = making
        self._scratch = scratch
        self._on_close = on_close
        self._closed = False
        self._failure: str | None = None
        self._work = self._work_through()
        self._advance(None)  # up to its first request for bytes

    @property
    def names(self) -> list[str]:
        """Names of the tensors that a commit writes, known once staging is complete."""
        return list(self.digests)

    @property
    def bases(self) -> Mapping[str, torch.Tensor]:
        """Base tensor of each tensor that an adapter changes."""
        return {} if self._making is None else self._making.bases

    def feed(self, source: Source) -> int:
        """Read the next bytes of the payload, at most a slice. Returns their number; 0: the source has none yet.

        Raises InvalidWeights if bytes do not match the manifest or are NaN or infinity, and any error of `source`. After an
        error, every further call fails."""
        if self._failure is not None:
            raise InvalidWeights(f"this refresh has failed: {self._failure}")
        before = self.received
        try:
            self._advance(source)
        except BaseException as error:
            self._failure = str(error)
            raise
        return self.received - before

    def feed_all(self, source: Source) -> None:
        """Read the whole payload from a source that has all of it. Raises as `feed`."""
        while not self.complete:
            self.feed(source)

    def write(self) -> None:
        """Copy the payload into the live tensors, with no step in flight. Raises InvalidWeights and what the source raises; the
        weights are lost then."""
        raise NotImplementedError("what is staged beside the live tensors is exchanged with them")

    def close(self) -> None:
        """Free the staging memory; counters and digests stay. May be called again."""
        self._failure = self._failure or "it was closed"
        if not self._closed:
            self._closed = True
            self._work.close()
            self._parts, self._making = [], None
            self._on_close()

    def _advance(self, source: Source | None) -> None:
        if not self.complete:
            self.complete = self._work.send(source)
            self.seconds = time.perf_counter() - self._started

    def _work_through(self) -> Generator[bool, Source | None, None]:
        """Process all slices in order. Yields False to request a source, and True at the end."""
        for part in self._parts:
            sent, cast = xxhash.xxh3_128(), xxhash.xxh3_128()
            for start in range(0, part.nbytes, SLICE_BYTES):
                raw, staged = self._slice(part, start)
                yield from self._fill(raw)
                sent.update(raw.data)
                if staged is None:
                    continue
                if staged.dtype != part.dtype:
                    values = torch.from_numpy(raw).view(part.dtype)
                    cast_into(staged, values)
                    cast.update(tensor_bytes(staged).data)
                    self.rounded.add(part.target or part.info.name, math.prod(part.info.shape), values, staged)
                if staged.is_floating_point() and not finite(staged):
                    raise _not_finite(part, raw)
                part.land(staged, start)
                if self._making is not None:
                    self._making.landed(part, start + len(raw))
            if part.checked and sent.hexdigest() != part.info.digest:
                raise InvalidWeights("the bytes do not match the manifest's digest", part.info.name)
            if part.target is not None:
                assert part.place is not None
                self.digests[part.target] = (sent if part.place.dtype == part.dtype else cast).hexdigest()
            if self._making is not None:
                self.digests |= self._making.arrived(part)
        assert self.received == self.total
        yield True

    def _slice(self, part: StagedTensor, start: int) -> tuple[np.ndarray, torch.Tensor | None]:
        """Return the memory for the payload from byte `start` of a tensor on, [slice] uint8, and the staged elements that it
        becomes."""
        count = min(SLICE_BYTES, part.nbytes - start)
        if part.place is None:
            return self._scratch[:count], None
        staged = part.elements(start, count)
        if not staged.is_cpu:
            staged = torch.empty_like(staged, device="cpu")
        return (tensor_bytes(staged) if staged.dtype == part.dtype else self._scratch[:count]), staged

    def _fill(self, raw: Any) -> Generator[bool, Source | None, None]:
        filled = 0
        while filled < len(raw):
            source = yield False
            assert source is not None
            count = source(raw[filled:])
            del source  # its payload may be closed before the next request
            assert 0 <= count <= len(raw) - filled
            filled += count
            self.received += count


def cast_into(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy `source` to `target` in pieces so small that torch uses one thread: with a busy trainer on the same cores, threads
    that wait for each other take many times as long."""
    for start in range(0, len(source), GRAIN):
        target[start : start + GRAIN].copy_(source[start : start + GRAIN])


def finite(values: torch.Tensor) -> bool:
    """Return whether [elements] floats of 2, 4 or 8 bytes on the CPU contain no NaN and no infinity.

    As signed integers, +infinity and positive NaN are the largest values; as unsigned integers, -infinity and negative NaN are.
    So two maxima decide, without a temporary."""
    if not values.numel():
        return True
    size = values.dtype.itemsize
    infinity = torch.tensor(math.inf, dtype=values.dtype).view(_INTS[size]).item()
    raw = values.view(_INTS[size]).numpy()
    return bool(raw.max() < infinity and raw.view(f"u{size}").max() < infinity + (1 << (8 * size - 1)))


def _not_finite(part: StagedTensor, raw: np.ndarray) -> InvalidWeights:
    sent = torch.from_numpy(raw).view(part.dtype).double()
    if torch.isfinite(sent).all():
        return InvalidWeights(f"a value of {sent.abs().max():.3g} overflows the model's dtype", part.info.name)
    return InvalidWeights(f"it holds {'NaN' if sent.isnan().any() else 'infinity'}", part.info.name)


def source_of(arrays: Iterable[np.ndarray]) -> Source:
    """Make a source of [bytes] uint8 arrays, read in order."""
    left = iter(arrays)
    current = np.zeros(0, np.uint8)

    def read(buffer: np.ndarray) -> int:
        nonlocal current
        while not len(current):
            following = next(left, None)
            if following is None:
                return 0
            current = following
        count = min(len(buffer), len(current))
        buffer[:count] = current[:count]
        current = current[count:]
        return count

    return read
