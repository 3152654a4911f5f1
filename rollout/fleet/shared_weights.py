"""The router's copy of the live weights, in shared memory that replicas read.

live = base, or base + adapter     base: None (the replicas' checkpoint), whole tensors, or some tensors over the checkpoint
refresh of whole tensors  → base, no adapter          of some → written into base          of an adapter → replaces the last one
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import msgspec
import numpy as np

from rollout.engine.values import Adapter, KVPolicy, TensorInfo
from rollout.transport.errors import WeightsRefused, WrongBase
from rollout.transport.weights.files import DTYPES
from rollout.transport.weights.offers import ShmOffer
from rollout.transport.weights.shm import Segment

WIDTHS = dict(DTYPES.values())
"""bytes of an element, by dtype"""
MAX_VERSIONS = 1024
"""stored versions: running groups may have them"""


class SharedWeights(msgspec.Struct, frozen=True, eq=False):
    """Weights in a segment of the router."""

    version: int
    partial: bool
    """tensors that are not in the manifest stay as they were"""
    manifest: list[TensorInfo]
    offer: ShmOffer
    memory: np.ndarray
    """[bytes] uint8: the offered segment"""
    kv: KVPolicy = "keep"
    adapter: Adapter | None = None
    """the manifest lists the matrices of an adapter, and the weights are base + adapter"""

    def pieces(self) -> Iterator[tuple[str, np.ndarray]]:
        """Yield the name and the [bytes] uint8 of each tensor."""
        at = 0
        for info in self.manifest:
            yield info.name, self.memory[at : at + bytes_of(info)]
            at += bytes_of(info)


class Versions:
    """The MAX_VERSIONS newest versions that are or were live; of older ones nothing is known, so each may have been. Read by
    any thread: the set is replaced, never changed."""

    def __init__(self, version: int) -> None:
        self._known = frozenset((version,))

    def __contains__(self, version: int) -> bool:
        return version in self._known or version < min(self._known)

    @property
    def newest(self) -> int:
        """Return the newest version that a replica may have."""
        return max(self._known)

    def add(self, version: int) -> None:
        """Add a version that replicas are about to get."""
        self._known = frozenset(sorted(self._known | {version})[-MAX_VERSIONS:])


class LiveContent:
    """The live weights, for replicas that join later and for deltas. Also `LiveTensors`: the bytes as they were sent."""

    def __init__(self) -> None:
        self.base: SharedWeights | None = None
        """weights that were refreshed since the checkpoint; None: none, or only replicas have them"""
        self.since = 0
        """if `base` is None: the first version with the weights to which the adapter is added; 0: the checkpoint"""
        self.adapter: SharedWeights | None = None
        self._borrowed = False
        """the base is in the memory of a replica"""
        self._segments = [Segment(), Segment()]
        """one with the base, and one to stage into"""
        self._adapter_segments = [Segment(), Segment()]
        """likewise"""
        self._tensors: dict[str, tuple[TensorInfo, np.ndarray]] = {}
        """of the base, by name"""

    @property
    def whole(self) -> bool:
        """Whether this gives any replica the live weights."""
        return self.base is not None or (self.adapter is not None and self.since == 0)

    def spare(self, adapter: bool) -> Segment:
        """Return memory to stage into, without changing the live weights."""
        return (self._adapter_segments if adapter else self._segments)[1]

    def keep(self, content: SharedWeights) -> None:
        """Store weights that have become live."""
        if self._borrowed and (content.partial or content.adapter is not None):
            self.give_back()  # the replica changes it
        if content.adapter is not None:
            self._adapter_segments.reverse()
            self.adapter = content
            return
        self.adapter, self._borrowed = None, False
        if not content.partial or (self.base is None and self.since == 0):
            self._segments.reverse()
            self.base = content
        elif self.base is None:
            self.since = content.version  # only replicas have the other tensors
        else:
            self.base = self._laid_over(self.base, content)
        infos = {info.name: info for info in self.base.manifest} if self.base is not None else {}
        self._tensors = {name: (infos[name], piece) for name, piece in self.base.pieces()} if self.base is not None else {}

    def borrow(self, base: SharedWeights) -> None:
        """Use weights in the memory of a replica as the base."""
        self.base, self._borrowed = base, True

    def give_back(self) -> None:
        """Drop a borrowed base."""
        if self._borrowed and self.base is not None:
            self.since = max(self.since, self.base.version)
            self.base, self._borrowed = None, False

    def next_for(self, version: int) -> SharedWeights | None:
        """Return what a replica of this version needs next; None: nothing here gives it the live weights."""
        if self.base is not None and version < self.base.version:
            return self.base
        if self.adapter is None or not self.since <= version < self.adapter.version:
            return None
        return self.adapter

    def close(self) -> None:
        for segment in (*self._segments, *self._adapter_segments):
            segment.close()

    def _laid_over(self, base: SharedWeights, content: SharedWeights) -> SharedWeights:
        """Replace some tensors of the base."""
        old, new = dict(base.pieces()), dict(content.pieces())
        infos = {info.name: info for info in (*base.manifest, *content.manifest)}
        memory, offer = base.memory, base.offer
        if all(name in old and len(old[name]) == len(piece) for name, piece in new.items()):
            for name, piece in new.items():
                old[name][:] = piece  # a replica that is reading them finds another digest, and retries
        else:
            kept = np.concatenate([new.get(name, old.get(name)) for name in infos])
            memory = self._segments[0].reserve(len(kept))
            memory[:] = kept
            offer = self._segments[0].offer(len(kept))
        return SharedWeights(content.version, base.partial, list(infos.values()), offer, memory, content.kv)

    # as `LiveTensors`

    def dtype(self, name: str) -> str:
        """Return the dtype in which a tensor was sent. Raises WrongBase for a tensor that is not stored here."""
        if self.adapter is not None or name not in self._tensors:
            raise WrongBase(f"the router has no copy of tensor {name!r:.200}: send whole tensors")
        return self._tensors[name][0].dtype

    def skips(self, name: str) -> bool:
        """Return False: a router stores all that it gets."""
        return False

    def size(self, name: str) -> tuple[int, int]:
        info, piece = self._tensors[name]
        return len(piece), WIDTHS[info.dtype]

    def read_slice(self, name: str, start: int, size: int) -> np.ndarray:
        return self._tensors[name][1][start : start + size].copy()


def bytes_of(info: TensorInfo) -> int:
    """Return the size of a tensor in bytes, as it is sent. Raises WeightsRefused for an unknown dtype."""
    if info.dtype not in WIDTHS:
        raise WeightsRefused(f"tensor {info.name!r:.200} is {info.dtype!r:.40}: must be one of {', '.join(WIDTHS)}")
    return math.prod(info.shape) * WIDTHS[info.dtype]
