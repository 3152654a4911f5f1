"""Turns of conversations: which children a group may continue, and KV that is pinned for them (`Sampling.kv_ttl_s`).

    turn 1   p p p p o o o o                         finished; its KV is pinned, or in the prefix index
    turn 2   p p p p o o o o t t t t o o o o o       a group with the whole of it as prompt; `Group.after` names turn 1
             └── turn 1 ───┘ └ tool ┘

`after` is a hint: it is ignored if the turn is unknown, was dropped from the index, or belongs to another client.

A pinned child owns its blocks like a waiting sequence, the partial last one included. Of all unused blocks, pinned ones are
offloaded first, a whole turn at once, and dropped last: after cached prefixes, and after KV of waiting sequences for which host
memory has no room. Dropped KV is found in the prefix index until its slots are needed.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterator
from heapq import heapify, heappop, heappush
from typing import Generic, NamedTuple, TypeVar

import msgspec
import numpy as np
import xxhash

from rollout.engine.kv.block import Block
from rollout.engine.kv.store import BlockStore
from rollout.engine.kv.versions import KVVersions
from rollout.engine.scheduling.block_tables import BlockTables
from rollout.engine.scheduling.sequence import Sequence
from rollout.engine.values import Group

MAX_TURNS = 65_536
"""most turns in the index, the newest ones"""
MAX_PINNED_RATIO = 0.5
"""largest fraction of the blocks of both pools that may be pinned"""

TurnId = tuple[str, int]
"""(group id, index) of a child"""
T = TypeVar("T")


class Timers(Generic[T]):
    """A heap of items by the time at which they expire. alive: whether an item still counts; other items are removed."""

    def __init__(self, alive: Callable[[T], bool]) -> None:
        self._alive = alive
        self._heap: list[tuple[float, int, T]] = []
        """(time, number, item); the number makes them comparable"""
        self._number = 0
        self._most = 64
        """number of entries at which items that do not count are removed"""

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, at: float, item: T) -> None:
        """Add an item that expires at a time."""
        self._number += 1
        heappush(self._heap, (at, self._number, item))
        if len(self._heap) > self._most:
            self._heap = [each for each in self._heap if self._alive(each[2])]
            heapify(self._heap)
            self._most = 2 * len(self._heap) + 64

    def due(self, now: float) -> bool:
        """Return whether an item may have expired at this time."""
        return bool(self._heap) and self._heap[0][0] <= now

    def take(self, now: float) -> Iterator[T]:
        """Yield the items that have expired, and remove them."""
        while self.due(now):
            item = heappop(self._heap)[2]
            if self._alive(item):
                yield item


class FinishedTurn(NamedTuple):
    """A child that finished and that a turn may continue."""

    client: str
    since: int
    """number of the group that its conversation began with"""
    kv: KVVersions | None
    """weight versions that computed its KV: a turn that continues it may read this KV, however old"""
    tokens: bytes
    """digest of the tokens that have KV"""


class ConversationIndex:
    """Finished turns by child, in a ring of packed records of about 110 bytes: hundreds of children finish per second, and few
    are continued."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self._keys = np.zeros(MAX_TURNS, np.uint64)
        self._packed: list[bytes | None] = [None] * MAX_TURNS
        self._noted = 0
        """turns so far, from which the place of the next one follows"""
        self._readable_from = 0

    def note(self, seq: Sequence) -> None:
        """Add a child that finishes and still holds its blocks."""
        state, known = seq.state, seq.num_prompt + len(seq.output)
        cached = min(seq.cached, known - 1)
        kv = KVVersions.of((block.versions for block in seq.blocks), cached, self.block_size)
        turn = FinishedTurn(state.client, state.age[0], kv, digest(seq.tokens(0, cached)))
        place = self._noted % MAX_TURNS
        self._keys[place] = _key((state.group.id, seq.index))
        self._packed[place] = msgspec.msgpack.encode(turn)
        self._noted += 1

    def find(self, group: Group, client: str) -> FinishedTurn | None:
        """Return the turn that a group of this client continues; None if this client had no such child. Without `kv` if a
        refresh has made that too old, or if neither the prompt nor a partial child begins with the tokens of the turn."""
        turn = self._newest(group.after) if group.after is not None else None
        if turn is None or turn.client != client:
            return None
        kv = turn.kv
        if kv is not None and kv.spans and kv.spans[0][1] >= self._readable_from:
            if any(len(known) > kv.tokens and digest(known[: kv.tokens]) == turn.tokens for known in _histories(group)):
                return turn
        return turn._replace(kv=None)

    def _newest(self, child: TurnId) -> FinishedTurn | None:
        """Search all records, in some 20 µs: an index would double the memory."""
        places = np.flatnonzero(self._keys == _key(child))
        ages = (self._noted - 1 - places) % MAX_TURNS
        packed = self._packed[places[ages.argmin()]] if len(places) else None
        return None if packed is None else msgspec.msgpack.decode(packed, type=FinishedTurn)

    def forget_kv(self, version: int) -> None:
        """Forget KV that weights before `version` computed, for a refresh with kv="recompute" or "abort"."""
        self._readable_from = version


def digest(tokens: np.ndarray) -> bytes:
    """Return 16 bytes that identify a sequence of int32 token ids (xxh3-128)."""
    return xxhash.xxh3_128_digest(tokens.tobytes())


def _histories(group: Group) -> Iterator[np.ndarray]:
    """Yield the tokens with which its children begin: the prompt, and that of each partial child with what it has."""
    yield group.prompt
    for child in () if group.score else group.partials:
        yield np.concatenate([group.prompt, child.token_ids])


def _key(child: TurnId) -> np.uint64:
    """Return 64 bits of the name of a child. On a collision, clients and tokens differ."""
    group_id, index = child
    return np.uint64(xxhash.xxh3_64_intdigest(f"{index}/{group_id}".encode()))


class PinnedKV:
    """Finished children that still own their blocks."""

    def __init__(self, tables: BlockTables) -> None:
        self.tables = tables
        self.blocks: Counter[Block] = Counter()
        """how many pinned children own each block, blocks of windows included"""
        self._children: OrderedDict[TurnId, Sequence] = OrderedDict()
        """oldest first"""
        self._of_group: dict[str, set[int]] = {}
        """their indices by group"""
        self._on_device: OrderedDict[TurnId, None] = OrderedDict()
        """children that were not offloaded"""
        self._ends: Timers[Sequence] = Timers(lambda seq: self._children.get(_id(seq)) is seq)

    def __len__(self) -> int:
        return len(self._children)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._children.values())

    # ── pinning ───────────────────────────────────────────────────────────────────────────────────────────────────────
    def pin(self, seq: Sequence, until: float, ran: bool) -> None:
        """Pin the KV of a child that finishes, of all its tokens but the last, which the next turn computes; of the last as
        well if its recurrent state has it, or if the window before it has left. until: time of the scheduler's clock. ran: it
        was running."""
        last = seq.num_prompt + len(seq.output) - 1
        if seq.state_in is None and self.tables.in_window(seq, last):
            seq.cached = min(seq.cached, last)
        end = -(-seq.cached // self.tables.block_size)
        for store, blocks in self.tables.held(seq):
            kept = max(0, end - (len(seq.blocks) - len(blocks)))  # both lists end with the same block
            for block in reversed(blocks[kept:]):
                store.release(block, used=ran)
            for block in blocks[:kept] if ran else ():
                store.deactivate(block)
        del seq.window[max(0, end - seq.window_first) :]
        seq.cut_blocks(end)
        key = _id(seq)
        assert key not in self._children, "two children of one name are pinned"
        self._children[key], self._on_device[key] = seq, None
        self._of_group.setdefault(key[0], set()).add(key[1])
        self.blocks.update([*seq.blocks, *seq.window])
        self._ends.add(until, seq)
        self._bound()

    def hand_over(self, key: TurnId | None, to: Sequence) -> None:
        """Unpin the KV of a child and give it to the sequence that continues it, if that begins with the same tokens."""
        if key is None or key not in self._children:
            return
        seq = self._remove(key)
        self.tables.cut_lost(seq)
        same = seq.cached < to.length and np.array_equal(seq.tokens(0, seq.cached), to.tokens(0, seq.cached))
        if not same:
            self.tables.truncate(seq, 0)
        to.blocks, seq.blocks = seq.blocks, []
        to.window, to.window_first, seq.window = seq.window, seq.window_first, []
        to.state_in, seq.state_in = seq.state_in, None
        to.cached = seq.cached

    def release(self, group_id: str, index: int | None = None) -> None:
        """Release the KV of a child, or of all children of a group."""
        some = self._of_group.get(group_id, set())
        for each in sorted(some) if index is None else some & {index}:
            self.tables.truncate(self._remove((group_id, each)), 0)

    def release_all(self) -> None:
        """Release the KV of all children."""
        for key in list(self._children):
            self.release(*key)

    def due(self, now: float) -> bool:
        """Return whether the KV of a child may have expired."""
        return self._ends.due(now)

    def expire(self, now: float) -> None:
        """Release the KV that has expired."""
        for seq in self._ends.take(now):
            self.release(*_id(seq))

    # ── eviction ──────────────────────────────────────────────────────────────────────────────────────────────────────
    def offload(self, store: BlockStore, need: int, but: Collection[Block]) -> None:
        """Offload children, oldest first, until `need` device slots of a store are available, host memory is full or a child's
        recurrent state has no place. but: blocks that stay."""
        while self._on_device and store.available < need:
            key = next(iter(self._on_device))
            if not self._has_place(self._children[key]):
                return
            for each, blocks in self.tables.held(self._children[key]):
                for block in blocks:
                    if block.users == 0 and block.device is not None and block not in but and not each.offload(block):
                        return
            del self._on_device[key]

    def evict_one(self, store: BlockStore, but: Collection[Block]) -> bool:
        """Offload an idle block of a store that is on the device, or release a child that owns it. but: blocks that stay.
        Returns whether there was such a block."""
        block = next((block for block in store.idle if block in self.blocks and block not in but), None)
        if block is None:
            return False
        owner = next(seq for seq in self._children.values() if block in seq.blocks or block in seq.window)
        if not self._has_place(owner) or not store.offload(block):
            self.release(*_id(owner))
        return True

    # ── private ───────────────────────────────────────────────────────────────────────────────────────────────────────
    def _has_place(self, seq: Sequence) -> bool:
        return self.tables.states is None or self.tables.states.has_place(seq.state_in)

    def _remove(self, key: TurnId) -> Sequence:
        seq = self._children.pop(key)
        self._on_device.pop(key, None)
        self._of_group[key[0]].remove(key[1])
        if not self._of_group[key[0]]:
            del self._of_group[key[0]]
        self.blocks.subtract([*seq.blocks, *seq.window])
        for block in [*seq.blocks, *seq.window]:
            if not self.blocks[block]:
                del self.blocks[block]
        return seq

    def _bound(self) -> None:
        """Release children while more than MAX_PINNED_RATIO is pinned: of the client that pins most, its oldest first."""
        most = MAX_PINNED_RATIO * self.tables.slots
        while self._children and max(len(self.blocks), len(self._children)) > most:
            greedy, _ = Counter(seq.state.client for seq in self).most_common(1)[0]
            self.release(*next(key for key, seq in self._children.items() if seq.state.client == greedy))


def _id(seq: Sequence) -> TurnId:
    return seq.state.group.id, seq.index
