"""KV blocks as integers: Block, BlockPool (the slots of one memory) and BlockCopies (the KV copies of one step)."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from rollout.engine.kv.versions import Versions


class OutOfBlocks(Exception):
    """No slot is free and no block can be evicted. The scheduler preempts a sequence, or waits."""


class Block:
    """One block of KV: its slots on the device and in host memory, its reference counts and its key. `rollout.engine.kv.store`
    lists the states."""

    __slots__ = ("device", "host", "owners", "users", "content", "key", "version", "later")

    def __init__(self, device: int, version: int) -> None:
        self.device: int | None = device
        self.host: int | None = None
        self.owners = 1
        self.users = 1
        self.content: bytes | None = None
        """hash of its tokens and of all tokens before it; None until the block is full"""
        self.key: bytes | None = None
        """hash of `content` and of the weight versions that computed its own tokens"""
        self.version = version
        """weight version that computed its first token, the oldest version in it"""
        self.later: Versions = ()
        """(first token in the block, version) of each later span that another version computed"""

    @property
    def lost(self) -> bool:
        return self.device is None and self.host is None

    @property
    def versions(self) -> Versions:
        """All spans of the block: (first token, weight version), ascending."""
        return (0, self.version), *self.later

    def write(self, first: int, version: int) -> None:
        """Record that `version` computes the block's tokens from `first` > 0 on."""
        before = tuple(span for span in self.later if span[0] < first)
        went_on = (before[-1][1] if before else self.version) == version
        self.later = before if went_on else (*before, (first, version))


class BlockPool:
    """Slots of one memory, on the device or on the host. `holder[slot]` is the block in a slot, or None."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.holder: list[Block | None] = [None] * size
        self._free = deque(range(size - 1, -1, -1))
        """free slots; allocated from the right end"""

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def used(self) -> int:
        return self.size - len(self._free)

    def grow(self, size: int) -> None:
        """Add slots, `size` in all from now on; they are allocated after those that are free."""
        self._free.extendleft(range(self.size, size))
        self.holder += [None] * (size - self.size)
        self.size = max(self.size, size)

    def allocate(self) -> int:
        """Allocate a slot. Raises OutOfBlocks."""
        if not self._free:
            raise OutOfBlocks
        return self._free.pop()

    def release(self, slot: int, read: bool = False) -> None:
        """Free a slot. read: a copy of this step still reads it, so it is allocated again only after all other free slots."""
        assert self.holder[slot] is not None, f"slot {slot} released twice"
        self.holder[slot] = None
        if read:
            self._free.appendleft(slot)
        else:
            self._free.append(slot)


class SlotCounts(NamedTuple):
    """Slots of both pools of recurrent state."""

    device: int
    host: int

    @property
    def sequences(self) -> int:
        """Most sequences that can run: the other slots are for snapshots and for states of waiting sequences."""
        return max(1, self.device * 8 // 9 - 1)


class WindowCounts(NamedTuple):
    """Blocks of both pools of the layers with a sliding window."""

    tokens: int
    """width of the widest window: a query attends to its own and the tokens - 1 previous positions"""
    device: int
    host: int

    def most_held(self, block_size: int) -> int:
        """Return the most blocks that a sequence holds which computes a token at a time."""
        return -(-self.tokens // block_size) + 1


class PoolCounts(NamedTuple):
    """Sizes of the pools that a scheduler divides among sequences."""

    device_blocks: int
    host_blocks: int
    max_blocks: int
    """blocks of the longest sequence of the model"""
    slots: SlotCounts | None = None
    """of recurrent state, at least two on the device; None: the model has none"""
    windows: WindowCounts | None = None
    """of layers with a sliding window; None: all layers hold the KV of all tokens"""


class Spans(NamedTuple):
    """Token positions that the rows of a step compute, and the device slots of their blocks."""

    block_table: np.ndarray
    """[R, M]: device slots of the blocks of each row"""
    starts: np.ndarray
    """[R]: first position that each row computes"""
    ends: np.ndarray
    """[R]: one past the last position that each row computes"""


@dataclass(slots=True)
class BlockCopies:
    """All KV copies of one step, as (source slot, destination slot). The result is as if the lists ran in this order, and each
    list read all of its sources before it wrote: offloads (device → host), restores (host → device), copies (device → device),
    mirrors (device → host), prefetches (host → device). So a restore or copy may write the slot that an offload of the same
    step frees, and a block may be restored and then copied. The step's compute does not depend on mirrors, whose blocks stay on
    the device, nor on prefetches, whose blocks only later steps read."""

    offloads: list[tuple[int, int]] = field(default_factory=list)
    restores: list[tuple[int, int]] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)
    mirrors: list[tuple[int, int]] = field(default_factory=list)
    prefetches: list[tuple[int, int]] = field(default_factory=list)

    def __bool__(self) -> bool:
        return self.blocks > 0

    @property
    def blocks(self) -> int:
        """Number of copied blocks."""
        return sum(map(len, (self.offloads, self.restores, self.copies, self.mirrors, self.prefetches)))


class Copied(NamedTuple):
    """Number and duration of finished copies."""

    blocks: int
    seconds: float
