"""Recurrent state of sequences: which slot a row reads, and which it writes.

The state after `Sequence.cached` tokens is stored in one slot. It cannot be truncated, and adding a token twice makes it wrong.
So a sequence that loses a block of its KV, or its state, loses both.

    waiting   state_in: the slot of its state; other sequences may share it
    running   state_out: a slot of its own, which its rows write
              state_in: the slot that its next row reads, if it is another one

    fork      n children share the parent's slot; the first row of each reads it and writes a slot of its own: nothing is copied
    snapshot  if the prefix index has KV for more tokens of a prompt than any state covers, the sequence stores its state at
              the end of this KV under a key, and continues in another slot. The next prompt with that prefix begins there
    shared    a slot that its only owner holds is written in place; a snapshot never is
    drafts    a row with draft tokens writes no state; the next plan advances it by the tokens that were accepted

Slots are blocks of a `BlockStore` of their own: they are evicted, offloaded and restored by its rules. A junction of prefixes
as the place of a snapshot is an idea of vLLM (`--enable-mamba-fine-grained-prefix-cache`).
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Sequences
from itertools import takewhile
from typing import NamedTuple

import numpy as np
import xxhash

from rollout.engine.kv.block import Block, OutOfBlocks, SlotCounts
from rollout.engine.kv.store import BlockStore
from rollout.engine.scheduling.sequence import Row, Sequence


class Advance(NamedTuple):
    """The state of a row with drafts, which the row did not write."""

    row: int
    """of the plan that computed it"""
    tokens: int
    """of the row that count"""
    read: int
    """slot of the state before the row; -1 for zeros"""
    slot: int
    """that gets it"""
    written: Block
    """the state in that slot"""


class StateSlots:
    """Writes `Sequence.state_in` and `Sequence.state_out`, for `SchedulerState`."""

    def __init__(self, slots: SlotCounts, block_size: int, keep: bool) -> None:
        """block_size: tokens of a KV block. keep: snapshots stay while there is room."""
        self.store = BlockStore(slots.device, slots.host, keep)
        self.block_size = block_size
        self._drafted: dict[Sequence, Advance] = {}
        """rows with drafts of the newest plan"""
        self._advances: list[Advance] = []
        """states that the next plan advances"""

    # ── transitions ───────────────────────────────────────────────────────────────────────────────────────────────────
    def start(self, seq: Sequence) -> None:
        """Give a sequence that starts to run a slot to write, and restore its state. Raises OutOfBlocks, having changed
        nothing."""
        state = seq.state_in
        if not self.make_room(self.needed(seq), state):
            raise OutOfBlocks
        if state is None:
            seq.state_out = self.store.allocate(0)
        elif self._own(state):
            self.store.activate(state, full=False)
            seq.state_in, seq.state_out = None, state
        else:
            self.store.activate(state, full=True)
            seq.state_out = self.store.allocate(0)

    def stop(self, seq: Sequence) -> None:
        """Take the slot of a sequence that stops, or that finished and is kept; its state stays."""
        if seq.state_in is not None:
            self.store.deactivate(seq.state_in)
            if seq.state_out is not None:
                self.store.release(seq.state_out, used=True)
        elif seq.cached:
            assert seq.state_out is not None
            self.store.deactivate(seq.state_out)
            seq.state_in = seq.state_out
        elif seq.state_out is not None:
            self.store.release(seq.state_out, used=True)
        seq.state_out = None

    def fork(self, seq: Sequence, others: Sequences[Sequence]) -> bool:
        """Share the state of a running sequence with others, which wait. Returns whether there was a slot in which the sequence
        itself can go on; otherwise it must stop."""
        if not others:
            return True
        assert seq.state_in is None and seq.state_out is not None, "a fork before the prompt was computed"
        seq.state_in, seq.state_out = seq.state_out, None
        for other in others:
            self.store.share([seq.state_in])
            other.state_in = seq.state_in
        if self.has_free:
            seq.state_out = self.store.allocate(0)
        return seq.state_out is not None

    def launched(self, rows: Iterable[Row]) -> None:
        """Record that rows are in flight: each sequence has its state in a slot of its own from here on."""
        for row in rows:
            if row.seq.state_in is not None:
                self.store.release(row.seq.state_in, used=True)
                row.seq.state_in = None

    def drop(self, seq: Sequence) -> None:
        """Drop the state of a sequence, which begins again with its first token. A running one keeps the slot that it
        writes."""
        if seq.state_in is not None:
            self.store.release(seq.state_in, used=seq.running)
            seq.state_in = None

    def release(self, seq: Sequence, used: bool) -> None:
        """Release all slots of a sequence that finished. used: it was running."""
        for block in (seq.state_in, seq.state_out):
            if block is not None:
                self.store.release(block, used=used)
        seq.state_in = seq.state_out = None

    # ── room ──────────────────────────────────────────────────────────────────────────────────────────────────────────
    @property
    def has_free(self) -> bool:
        """Whether a slot can be allocated without an eviction, which only a plan may make."""
        return self.store.device.free > 0

    def needed(self, seq: Sequence) -> int:
        """Return how many device slots a waiting sequence needs to start."""
        state = seq.state_in
        if state is None:
            return 1
        return (state.device is None) + (not self._own(state))

    def make_room(self, slots: int, keep: Block | None = None) -> bool:
        """Evict states of waiting sequences until so many device slots are available: to host memory, or if that is full for
        good, so that their owners are prefilled again. Those with the fewest owners first, of these the newest, as KV. keep: a
        state that stays. Returns whether there is room; if not, nothing is evicted."""
        short = slots - self.store.available
        if short <= 0:
            return True
        idle = [block for block in reversed(self.store.idle) if block is not keep]
        if short > len(idle):
            return False
        for block in sorted(idle, key=lambda block: block.owners)[:short]:
            if not self.store.offload(block):
                self.store.drop(block)
        return True

    def has_place(self, state: Block | None) -> bool:
        """Return whether the state of a waiting sequence, together with those of the others that wait, fits into the slots that
        are left, on the device or in host memory: else KV would be offloaded and restored without it, and could not be used."""
        if state is None or state.users or state.host is not None:
            return True
        moving = sum(block.host is None for block in self.store.idle)
        return moving <= self.store.host_available + self.store.available

    def _own(self, state: Block) -> bool:
        """Return whether the only owner of a state may write its slot."""
        return state.owners == 1 and not self.store.index.holds(state)

    # ── rows ──────────────────────────────────────────────────────────────────────────────────────────────────────────
    def slots_of(self, rows: Iterable[Row]) -> tuple[list[int], list[int]]:
        """Return the slots that the rows of a plan read, -1 for zeros, and those that they write, -1 for rows with drafts."""
        reads, writes = list[int](), list[int]()
        self._drafted.clear()
        for number, row in enumerate(rows):
            seq = row.seq
            source = seq.state_in or (seq.state_out if seq.cached else None)
            assert seq.state_out is not None and seq.state_out.device is not None
            slot = -1 if source is None else source.device
            assert slot is not None, "a running sequence whose state is not on the device"
            reads.append(slot)
            writes.append(-1 if row.drafted else seq.state_out.device)
            if row.drafted:
                self._drafted[seq] = Advance(number, 0, slot, seq.state_out.device, seq.state_out)
        return reads, writes

    # ── drafts ────────────────────────────────────────────────────────────────────────────────────────────────────────
    def accept(self, seq: Sequence, tokens: int) -> None:
        """Record that the first `tokens` tokens of a row with drafts count."""
        self._advances.append(self._drafted.pop(seq)._replace(tokens=tokens))

    @property
    def advances(self) -> np.ndarray:
        """Return [K, 4] int32 advances of the step being planned: see `Plan`. Nothing writes their slots before them."""
        return np.array([each[:4] for each in self._advances], np.int32).reshape(-1, 4)

    def advanced(self) -> None:
        """Record that the states of a plan have advanced."""
        self._advances.clear()

    def advances_failed(self) -> set[Block]:
        """Record that the states of a plan have not advanced. Returns those that are not what they must be."""
        broken = {each.written for each in self._advances if each.written.owners}
        self._advances.clear()
        return broken

    def pass_junction(self, seq: Sequence) -> None:
        """Leave a snapshot of a running sequence that has reached its junction. After it, a sequence has no junction."""
        if seq.junction and seq.junction == seq.cached:
            self._leave_snapshot(seq)
        if seq.junction <= seq.cached:
            seq.junction = 0

    # ── snapshots ─────────────────────────────────────────────────────────────────────────────────────────────────────
    def find(self, chain: Sequences[Block]) -> tuple[int, Block | None]:
        """Return the deepest snapshot along full KV blocks from the first one on, as (number of blocks before it, state); (0,
        None) if there is none."""
        keys = chained(chain)
        for i in range(len(keys), 0, -1):
            if (state := self.store.index.get(keys[i - 1])) is not None:
                return i, state
        return 0, None

    def adopt(self, seq: Sequence, state: Block) -> bool:
        """Let a running sequence that has computed nothing continue from a snapshot. Returns False if there is no slot for it
        on the device."""
        self.store.retain(state)
        if state.device is None and not self.make_room(1, state):
            self.store.release(state, used=False)
            return False
        self.store.activate(state, full=True)
        seq.state_in = state
        return True

    def forget_along(self, blocks: Iterable[Block]) -> None:
        """Remove the snapshots along these blocks, as far as they are full, from the index."""
        for key in chained(takewhile(lambda block: block.key is not None, blocks)):
            if (state := self.store.index.get(key)) is not None:
                self.store.forget(state)

    def _leave_snapshot(self, seq: Sequence) -> None:
        """Leave the state of a running sequence behind under the key of its blocks, unless no slot is free to go on in."""
        state, blocks = seq.state_out, seq.blocks[: seq.junction // self.block_size]
        if seq.state_in is not None or state is None or not self.store.available or any(b.key is None for b in blocks):
            return
        key = chained(blocks)[-1]
        if self.store.index.get(key) is None:
            state.content = state.key = key
            self.store.index.add(state)
            seq.state_in, seq.state_out = state, self.store.allocate(0)


def chained(blocks: Iterable[Block]) -> list[bytes]:
    """Return the 128-bit key of the state after each of these full KV blocks. It depends on the tokens and on the weight
    versions of all blocks up to it."""
    keys, digest = [], xxhash.xxh3_128()
    for block in blocks:
        assert block.key is not None
        digest.update(block.key)
        keys.append(digest.digest())
    return keys
