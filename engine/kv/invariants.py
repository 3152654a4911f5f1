"""What is always true of a `BlockStore`. For tests and idle moments."""

from __future__ import annotations

from engine.kv.block import Block
from engine.kv.placement import BlockPlacement
from engine.kv.store import BlockStore


def check(store: BlockStore, owners: dict[Block, int], users: dict[Block, int]) -> None:
    """Asserts every invariant, given how many sequences hold and use each block."""
    living = check_homes(store.homes)
    for block in living | owners.keys():
        assert block.owners == owners.get(block, 0), "owners are not counted right"
        assert block.users == users.get(block, 0), "users are not counted right"
        assert block.users == 0 or block.device is not None, "a block in use is not on the device"
        cached = block.owners == 0
        assert (block in store.cached) == (cached and block.device is not None)
        assert (block in store.cached_host) == (cached and block.device is None)
        assert (block in store.idle) == (not cached and block.users == 0 and block.device is not None)
        assert not cached or store.index.holds(block), "a block without owners is not in the index: leaked"
    assert not store.index.keys() - {block.key for block in living}, "the index holds a block that is gone"


def check_homes(homes: BlockPlacement) -> set[Block]:
    """Asserts that slots and blocks agree. Returns the blocks that have a home."""
    living: set[Block] = set()
    for pool, where in ((homes.device, "device"), (homes.host, "host")):
        blocks = [block for block in pool.holder if block is not None]
        assert len(blocks) + pool.free == pool.size and len(set(blocks)) == len(blocks)
        for slot, block in enumerate(pool.holder):
            assert block is None or getattr(block, where) == slot
        living.update(blocks)
    return living
