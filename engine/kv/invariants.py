"""Invariants of a `BlockStore`, checked by tests and while the engine is idle."""

from __future__ import annotations

from engine.kv.block import Block
from engine.kv.placement import BlockPlacement
from engine.kv.store import BlockStore


def check(store: BlockStore, owners: dict[Block, int], users: dict[Block, int]) -> None:
    """Assert all invariants. owners, users: number of sequences that hold and that use each block."""
    living = check_homes(store.homes)
    for block in living | owners.keys():
        assert block.owners == owners.get(block, 0), "wrong number of owners"
        assert block.users == users.get(block, 0), "wrong number of users"
        assert block.users == 0 or block.device is not None, "a block in use is not on the device"
        cached = block.owners == 0
        assert (block in store.cached) == (cached and block.device is not None)
        assert (block in store.cached_host) == (cached and block.device is None)
        assert (block in store.idle) == (not cached and block.users == 0 and block.device is not None)
        assert not cached or store.index.holds(block), "a block has no owners and is not in the index: leaked"
    assert not store.index.keys() - {block.key for block in living}, "the index has a freed block"


def check_homes(homes: BlockPlacement) -> set[Block]:
    """Assert that slots and blocks agree. Returns all blocks that have a slot."""
    living: set[Block] = set()
    for pool, where in ((homes.device, "device"), (homes.host, "host")):
        blocks = [block for block in pool.holder if block is not None]
        assert len(blocks) + pool.free == pool.size and len(set(blocks)) == len(blocks)
        for slot, block in enumerate(pool.holder):
            assert block is None or getattr(block, where) == slot
        living.update(blocks)
    return living
