"""Runs the KV copies of a step: before its forward (`SyncCopies`), or on two CUDA streams in parallel (`StreamCopies`).

Both give the result that `BlockCopies` defines: each step's copies before its compute.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cache
from typing import NamedTuple, Protocol

import numpy as np

from rollout.engine.kv.block import BlockCopies, Copied, Spans

Pairs = list[tuple[int, int]]
"""(source slot, destination slot) of each copy"""


class Copy(NamedTuple):
    """Functions that copy blocks on the current stream."""

    out: Callable[[Pairs], None]
    """device to host"""
    into: Callable[[Pairs], None]
    """host to device"""
    within: Callable[[Pairs], None]
    """device to device"""


class SlotClaims(NamedTuple):
    """Device slots that some compute uses, as functions that take [n] slots."""

    reads: Callable[[np.ndarray], bool]
    """returns whether the compute may read or write one of these slots"""
    writes: Callable[[np.ndarray], bool]
    """returns whether the compute may write one of these slots"""


ALL_SLOTS = SlotClaims(reads=lambda slots: True, writes=lambda slots: True)
"""conservative claims: the compute may write any slot"""


def step_claims(device_blocks: int, block_size: int, spans: Spans) -> SlotClaims:
    """Return the slots of a step: it reads the blocks of all positions before its ends, and writes those from its starts on."""
    table, first, end = spans.block_table, spans.starts // block_size, -(-spans.ends // block_size)

    @cache
    def used(written: bool) -> np.ndarray:
        """Return [device_blocks] bool. written: without the blocks that are only read."""
        slots, at = np.zeros(device_blocks, bool), np.arange(table.shape[1])
        begin = first if written else np.zeros_like(first)
        slots[table[(at >= begin[:, None]) & (at < end[:, None])]] = True
        return slots

    return SlotClaims(reads=lambda slots: bool(used(False)[slots].any()), writes=lambda slots: bool(used(True)[slots].any()))


class CopyEngine(Protocol):
    """Runs the copies of the steps, one step at a time."""

    def run(self, moves: BlockCopies, copy: Copy, uses: SlotClaims) -> Copied:
        """Run the copies of a step. Returns the copies that finished since the last call.

        Args:
            uses: slots of the compute that is launched after this call and before the next one.
        """
        ...

    def finish(self) -> None:
        """Wait on the host until all copies have finished."""
        ...


class SyncCopies:
    """Runs copies and compute one after the other."""

    def run(self, moves: BlockCopies, copy: Copy, uses: SlotClaims) -> Copied:
        started = time.perf_counter()
        copy.out(moves.offloads)
        copy.into(moves.restores)
        copy.within(moves.copies)
        copy.out(moves.mirrors)
        copy.into(moves.prefetches)
        return Copied(moves.blocks, time.perf_counter() - started if moves else 0.0)

    def finish(self) -> None:
        pass
