"""BlockStore by example: owners and users of a block, and its homes on the device and in host memory."""

from __future__ import annotations

import numpy as np
import pytest

from rollout.engine.kv.block import Block, BlockPool, OutOfBlocks
from rollout.engine.kv.prefix import block_key, content_key
from rollout.engine.kv.store import BlockStore
from tests.support.invariants import check_store


def full_block(store: BlockStore, *tokens: int) -> Block:
    """A block in use by one sequence, full and known to the prefix index."""
    block = store.allocate(version=0)
    block.content = content_key(None, np.array(tokens, np.int32))
    block.key = block_key(block.content, block.versions)
    store.index.add(block)
    return block


# ── BlockPool ─────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_a_pool_hands_out_each_slot_once() -> None:
    pool = BlockPool(2)
    assert {pool.allocate(), pool.allocate()} == {0, 1} and pool.free == 0
    with pytest.raises(OutOfBlocks):
        pool.allocate()


def test_a_slot_is_released_by_its_holder_only_once() -> None:
    pool = BlockPool(2)
    slot = pool.allocate()
    pool.holder[slot] = Block(slot, version=0)
    pool.release(slot)
    assert pool.free == 2
    with pytest.raises(AssertionError, match="released twice"):
        pool.release(slot)


# ── fork and copy-on-write ────────────────────────────────────────────────────────────────────────────────────────────
def test_a_forked_block_is_the_same_block_with_another_owner() -> None:
    store = BlockStore(4, 0)
    block = store.allocate(version=0)
    store.share([block])
    store.activate(block, full=True)
    assert (block.owners, block.users, store.device.used) == (2, 2, 1)


def test_a_forked_block_is_copied_before_it_is_written() -> None:
    store = BlockStore(4, 0)
    shared = store.allocate(version=0)
    store.share([shared])
    store.activate(shared, full=False)
    mine = store.copy(shared)
    assert store.moves.copies == [(shared.device, mine.device)]
    assert (shared.owners, mine.owners) == (1, 1), "the writer gave its share up"


def test_without_a_free_slot_the_writer_takes_the_block_over() -> None:
    """The other owner, which waits, keeps the content in host memory."""
    store = BlockStore(1, 1)
    shared = store.allocate(version=0)
    store.share([shared])
    mine = store.take_over(shared)
    assert (mine.device, shared.device, shared.host) == (0, None, 0)
    assert store.moves.offloads == [(0, 0)] and not shared.lost


def test_a_block_taken_over_without_host_memory_is_lost_to_the_others() -> None:
    store = BlockStore(1, 0)
    shared = store.allocate(version=0)
    store.share([shared])
    store.take_over(shared)
    assert shared.lost and shared.owners == 1


# ── owners come and go ────────────────────────────────────────────────────────────────────────────────────────────────
def test_a_block_without_owners_is_freed() -> None:
    store = BlockStore(1, 0)
    store.release(store.allocate(version=0), used=True)
    assert store.device.free == 1


def test_an_indexed_block_without_owners_is_kept_until_its_slot_is_needed() -> None:
    store = BlockStore(1, 0)
    block = full_block(store, 1, 2)
    store.release(block, used=True)
    assert store.index.holds(block) and (store.device.free, store.available) == (0, 1)
    store.allocate(version=0)
    assert not store.index.holds(block) and block.lost


def test_the_block_that_was_used_longest_ago_goes_first() -> None:
    store = BlockStore(2, 0)
    first, second = full_block(store, 1), full_block(store, 2)
    store.release(second, used=True)
    store.release(first, used=True)
    store.allocate(version=0)
    assert store.index.holds(first) and not store.index.holds(second)


def test_a_kept_block_is_adopted_again() -> None:
    store = BlockStore(1, 0)
    block = full_block(store, 1)
    store.release(block, used=True)
    store.retain(block)
    store.activate(block, full=True)
    assert (block.owners, block.users, store.available) == (1, 1, 0)


def test_prefix_cache_off_keeps_nothing() -> None:
    store = BlockStore(1, 0, keep=False)
    store.release(full_block(store, 1), used=True)
    assert store.device.free == 1 and not len(store.index)


# ── offload and restore ───────────────────────────────────────────────────────────────────────────────────────────────
def test_an_idle_block_is_offloaded_and_restored() -> None:
    store = BlockStore(1, 1)
    block = store.allocate(version=0)
    store.deactivate(block)
    assert store.offload(block) and (block.device, block.host) == (None, 0)
    assert store.moves.offloads == [(0, 0)]
    store.moved()
    store.activate(block, full=True)
    assert store.moves.restores == [(0, 0)] and (block.device, block.host) == (0, 0), "a full block keeps its copy"


def test_the_host_copy_of_a_partial_block_goes_once_it_was_read() -> None:
    store = BlockStore(1, 1)
    block = store.allocate(version=0)
    store.deactivate(block)
    store.offload(block)
    store.moved()
    store.activate(block, full=False)
    assert block.host == 0, "the restore has to read it"
    store.moved()
    assert block.host is None and store.host.free == 1


def test_a_block_that_was_copied_before_is_offloaded_without_a_copy() -> None:
    store = BlockStore(1, 1)
    block = store.allocate(version=0)
    store.mirror(block)
    store.moved()
    store.deactivate(block)
    assert store.offload(block) and not store.moves.offloads and block.host == 0


def test_offload_fails_where_host_memory_is_full() -> None:
    store = BlockStore(2, 1)
    one, other = store.allocate(version=0), store.allocate(version=0)
    store.deactivate(one), store.deactivate(other)
    assert store.offload(one) and not store.offload(other)
    store.drop(other)
    assert other.lost and store.device.free == 2


def test_blocks_whose_copies_failed_are_not_found_again() -> None:
    store = BlockStore(1, 1)
    block = full_block(store, 1, 2)
    store.deactivate(block)
    store.offload(block)
    store.moved()
    store.activate(block, full=True)
    broken = store.move_failed()
    assert broken == {block} and not store.index.holds(block)


def test_an_outdated_copy_goes_although_other_copies_failed() -> None:
    """Its sequence goes on and writes the block on the device."""
    store = BlockStore(2, 2)
    partial, other = store.allocate(version=0), store.allocate(version=0)
    for block in (partial, other):
        store.deactivate(block)
        store.offload(block)
    store.moved()
    store.prefetch(partial)
    store.moved()
    store.activate(partial, full=False)
    store.activate(other, full=True)
    broken = store.move_failed()
    store.deactivate(other)
    store.discard(broken)
    assert broken == {other} and other.lost and partial.device is not None and partial.host is None and store.host.free == 2


def test_check_finds_a_block_with_an_owner_too_many() -> None:
    """The negative control."""
    store = BlockStore(1, 0)
    block = store.allocate(version=0)
    check_store(store, {block: 1}, {block: 1})
    with pytest.raises(AssertionError, match="owners"):
        check_store(store, {block: 2}, {block: 1})
