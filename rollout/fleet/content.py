"""Weights as the front has them: payloads in its shared memory, and which of them make up what is live.

live = base, or base + adapter        base: None, the checkpoint of the replicas; whole tensors; or some over the checkpoint
refresh of whole tensors  → base, no adapter          of some → into base          of an adapter → in place of the last one
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import msgspec
import numpy as np

from engine.types import Adapter, KVPolicy, TensorInfo
from transport.errors import WeightsRefused, WrongBase
from transport.weights.files import DTYPES
from transport.weights.shm import Segment, ShmOffer

WIDTHS = dict(DTYPES.values())
"""bytes of an element, by dtype"""
MOST_VERSIONS = 1024
"""that are remembered: of groups that run"""


class SharedWeights(msgspec.Struct, frozen=True, eq=False):
    """Weights in a segment of the front's."""

    version: int
    partial: bool
    """tensors that are not in the manifest are the base checkpoint's, or those that were live before"""
    manifest: list[TensorInfo]
    offer: ShmOffer
    memory: np.ndarray
    """[bytes] uint8: what is offered"""
    kv: KVPolicy = "keep"
    adapter: Adapter | None = None
    """the manifest lists what an adapter is made of, and the weights are base + adapter"""

    def pieces(self) -> Iterator[tuple[str, np.ndarray]]:
        """Yield the name and the [bytes] uint8 of each tensor."""
        at = 0
        for info in self.manifest:
            yield info.name, self.memory[at : at + bytes_of(info)]
            at += bytes_of(info)


class Versions:
    """Versions of weights that are live, or were, as far back as MOST_VERSIONS. Read by any thread: the set is exchanged, and
    never changed."""

    def __init__(self, version: int) -> None:
        self._known = frozenset((version,))

    def __contains__(self, version: int) -> bool:
        return version in self._known

    def add(self, version: int) -> None:
        """Add one that replicas are about to have."""
        self._known = frozenset(sorted(self._known | {version})[-MOST_VERSIONS:])


class LiveContent:
    """What is live, for replicas that come later, and for refreshes that say what has changed. Also `LiveTensors`: the bytes
    as they were sent."""

    def __init__(self) -> None:
        self.base: SharedWeights | None = None
        """what was refreshed since the checkpoint; None: nothing, or only replicas have it"""
        self.since = 0
        """version from which on replicas have what the adapter is for, where `base` is None; 0: the checkpoint is that"""
        self.adapter: SharedWeights | None = None
        self._borrowed = False
        """the base lies in the memory of a replica"""
        self._segments = [Segment(), Segment()]
        """of the base, and the one to stage into"""
        self._adapter_segments = [Segment(), Segment()]
        """likewise"""
        self._tensors: dict[str, tuple[TensorInfo, np.ndarray]] = {}
        """of the base, by name"""

    @property
    def whole(self) -> bool:
        """Whether what is here makes the live weights of any replica's."""
        return self.base is not None or (self.adapter is not None and self.since == 0)

    def spare(self, adapter: bool) -> Segment:
        """Return memory to stage into; what is live stays as it is."""
        return (self._adapter_segments if adapter else self._segments)[1]

    def keep(self, content: SharedWeights) -> None:
        """Keep what has become live."""
        if self._borrowed and (content.partial or content.adapter is not None):
            self.give_back()  # it is not there any more
        if content.adapter is not None:
            self._adapter_segments.reverse()
            self.adapter = content
            return
        self.adapter, self._borrowed = None, False
        if not content.partial or (self.base is None and self.since == 0):
            self._segments.reverse()
            self.base = content
        elif self.base is None:
            self.since = content.version  # what it was laid over is the replicas'
        else:
            self.base = self._laid_over(self.base, content)
        infos = {info.name: info for info in self.base.manifest} if self.base is not None else {}
        self._tensors = {name: (infos[name], piece) for name, piece in self.base.pieces()} if self.base is not None else {}

    def borrow(self, base: SharedWeights) -> None:
        """Take for the base what a replica has in its memory."""
        self.base, self._borrowed = base, True

    def give_back(self) -> None:
        """Forget a base that was borrowed."""
        if self._borrowed and self.base is not None:
            self.since = max(self.since, self.base.version)
            self.base, self._borrowed = None, False

    def next_for(self, version: int) -> SharedWeights | None:
        """Find what a replica of this version needs next; None: nothing here makes its weights the live ones."""
        if self.base is not None and version < self.base.version:
            return self.base
        if self.adapter is None or not self.since <= version < self.adapter.version:
            return None
        return self.adapter

    def close(self) -> None:
        for segment in (*self._segments, *self._adapter_segments):
            segment.close()

    def _laid_over(self, base: SharedWeights, content: SharedWeights) -> SharedWeights:
        """Write some tensors over those of the base."""
        old, new = dict(base.pieces()), dict(content.pieces())
        infos = {info.name: info for info in (*base.manifest, *content.manifest)}
        memory, offer = base.memory, base.offer
        if all(name in old and len(old[name]) == len(piece) for name, piece in new.items()):
            for name, piece in new.items():
                old[name][:] = piece  # a replica that reads it just now finds another digest, and asks again
        else:
            kept = np.concatenate([new.get(name, old.get(name)) for name in infos])
            memory = self._segments[0].reserve(len(kept))
            memory[:] = kept
            offer = self._segments[0].offer(len(kept))
        return SharedWeights(content.version, base.partial, list(infos.values()), offer, memory, content.kv)

    # as `LiveTensors`

    def dtype(self, name: str) -> str:
        """Return the dtype that a tensor was sent in. Raises WrongBase for one that the front has not."""
        if self.adapter is not None or name not in self._tensors:
            raise WrongBase(f"the front of the fleet has not kept tensor {name!r:.200}: send whole tensors")
        return self._tensors[name][0].dtype

    def size(self, name: str) -> tuple[int, int]:
        info, piece = self._tensors[name]
        return len(piece), WIDTHS[info.dtype]

    def read_slice(self, name: str, start: int, size: int) -> np.ndarray:
        return self._tensors[name][1][start : start + size].copy()


def bytes_of(info: TensorInfo) -> int:
    """Count the bytes of a tensor as it is sent. Raises WeightsRefused for a dtype that no weights have."""
    if info.dtype not in WIDTHS:
        raise WeightsRefused(f"tensor {info.name!r:.200} is {info.dtype!r:.40}: must be one of {', '.join(WIDTHS)}")
    return math.prod(info.shape) * WIDTHS[info.dtype]
