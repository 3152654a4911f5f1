"""Block, BlockPool (the slots of one memory) and Moves (the copies of KV of one step)."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from engine.kv.versions import Versions


class OutOfBlocks(Exception):
    """No free slot and nothing that may be evicted. The scheduler preempts a sequence, or waits."""


class Block:
    """One block of KV and its homes. `engine.kv.store` draws the states."""

    __slots__ = ("device", "host", "owners", "users", "content", "key", "version", "later")

    def __init__(self, device: int, version: int) -> None:
        self.device: int | None = device
        self.host: int | None = None
        self.owners = 1
        self.users = 1
        self.content: bytes | None = None
        """hash of its tokens and of all before it, set once it is full"""
        self.key: bytes | None = None
        """the same with the versions of its own tokens"""
        self.version = version
        """weights that computed its first token: the oldest ones"""
        self.later: Versions = ()
        """where others went on: (first token of theirs in the block, version)"""

    @property
    def lost(self) -> bool:
        return self.device is None and self.host is None

    @property
    def versions(self) -> Versions:
        """Weights that computed its tokens, by spans of them."""
        return (0, self.version), *self.later

    def write(self, first: int, version: int) -> None:
        """Note that `version` computes its tokens from `first` on, which is not the block's first one."""
        before = tuple(span for span in self.later if span[0] < first)
        went_on = (before[-1][1] if before else self.version) == version
        self.later = before if went_on else (*before, (first, version))


class BlockPool:
    """Slots of one memory: the device's or the host's. `holder[slot]` is the block that lives there."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.holder: list[Block | None] = [None] * size
        self._free = deque(range(size - 1, -1, -1))
        """the last one is taken next"""

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def used(self) -> int:
        return self.size - len(self._free)

    def take(self) -> int:
        """Allocate a slot. Raises OutOfBlocks."""
        if not self._free:
            raise OutOfBlocks
        return self._free.pop()

    def release(self, slot: int, read: bool = False) -> None:
        """Free a slot. read: this step still copies from it, so that all others are taken before."""
        assert self.holder[slot] is not None, f"slot {slot} released twice"
        self.holder[slot] = None
        if read:
            self._free.appendleft(slot)
        else:
            self._free.append(slot)


class Spans(NamedTuple):
    """Positions that the rows of a step compute, and where their blocks lie."""

    block_table: np.ndarray
    """[R, M]: device slots of each row's blocks"""
    starts: np.ndarray
    """[R]: of the first position of a row"""
    ends: np.ndarray
    """[R]: behind the last one"""


@dataclass(slots=True)
class BlockCopies:
    """Every copy of one step, as (source slot, destination slot). What they leave is as if they ran in this order, all sources
    of a list before its destinations: offloads device → host, restores host → device, copies device → device, mirrors device
    → host, prefetches host → device. So a slot that an offload gives up may be the destination of a restore or copy of the same
    step, and a block may be restored and then copied. The step's compute needs neither the mirrors, whose blocks stay on the
    device, nor the prefetches, whose blocks the next step may read."""

    offloads: list[tuple[int, int]] = field(default_factory=list)
    restores: list[tuple[int, int]] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)
    mirrors: list[tuple[int, int]] = field(default_factory=list)
    prefetches: list[tuple[int, int]] = field(default_factory=list)

    def __bool__(self) -> bool:
        return self.blocks > 0

    @property
    def blocks(self) -> int:
        """copied in all"""
        return sum(map(len, (self.offloads, self.restores, self.copies, self.mirrors, self.prefetches)))
