"""The KV block manager: reference counts, eviction and reuse of blocks. Works on integers; `rollout.engine.kv.pages` holds the
bytes.

A `Block` is `block_size` tokens of KV for all layers. It can have a slot on the device, in host memory, or in both:

    device slot   host slot   state
    ───────────   ─────────   ─────────────────────────────────────────────────────────────────────────────
    yes           –           in use, or cached for the prefix index
    yes           yes         the same, mirrored: a full block never changes, so evicting it from the device needs no copy
    –             yes         offloaded (its owners wait), or cached for the prefix index in host memory
    –             –           lost: its slot was needed and host memory was full; its owners prefill that part again

`owners` counts the sequences that hold the block, `users` those of them that run now. A block stays on the device while it has
users, and exists while it has owners. A block without owners stays in the prefix index until its slot is needed (with
`prefix_cache` off, it is freed at once). A prefix shared by n children is one list of blocks with n owners: it is offloaded
once, after the last running child has stopped, and restored once.

Slots are allocated in this order: free slots, cached blocks (no owners, least recently used first), idle blocks (owners but no
users), and then the scheduler preempts sequences.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from rollout.engine.kv.block import Block, BlockCopies, OutOfBlocks
from rollout.engine.kv.placement import BlockPlacement
from rollout.engine.kv.prefix import PrefixIndex


class BlockStore:
    """Both pools and the prefix index; the only code that changes the placement of blocks. Only the scheduler writes it."""

    def __init__(self, device_blocks: int, host_blocks: int, keep: bool = True) -> None:
        """keep: blocks without owners stay in the prefix index."""
        self.placement = BlockPlacement(device_blocks, host_blocks)
        self.device = self.placement.device
        self.host = self.placement.host
        self.index = PrefixIndex()
        self.keep = keep
        self.cached: OrderedDict[Block, None] = OrderedDict()
        """blocks on the device without owners, least recently used first"""
        self.cached_host: OrderedDict[Block, None] = OrderedDict()
        """blocks in host memory only, without owners, least recently used first"""
        self.idle: OrderedDict[Block, None] = OrderedDict()
        """blocks on the device with owners but no users, oldest first"""

    # ── counting ──────────────────────────────────────────────────────────────────────────────────────────────────────
    @property
    def moves(self) -> BlockCopies:
        """Copies of the step being planned."""
        return self.placement.moves

    @property
    def available(self) -> int:
        """Device slots that can be allocated without evicting a block that has owners."""
        return self.device.free + len(self.cached)

    @property
    def host_available(self) -> int:
        return self.host.free + len(self.cached_host)

    @property
    def used(self) -> int:
        """Device slots of blocks with owners."""
        return self.device.used - len(self.cached)

    # ── reference counts ──────────────────────────────────────────────────────────────────────────────────────────────
    def allocate(self, version: int) -> Block:
        """Allocate a block on the device with one owner, which uses it. Raises OutOfBlocks."""
        slot = self._allocate_device()
        block = Block(slot, version)
        self.placement.settle(slot, block)
        return block

    def retain(self, block: Block) -> None:
        """Add an owner that does not use the block yet."""
        assert not block.lost
        if block.owners == 0:
            self.cached.pop(block, None)
            self.cached_host.pop(block, None)
            if block.device is not None:
                self.idle[block] = None
        block.owners += 1

    def share(self, blocks: Iterable[Block]) -> None:
        """Add an owner that uses the blocks: a fork of a running sequence that uses them."""
        for block in blocks:
            block.owners += 1

    def activate(self, block: Block, full: bool) -> None:
        """Add a user, one of the owners; restore the block if needed. A partial block's host copy is freed after this step.
        Raises OutOfBlocks."""
        assert block.owners > block.users and not block.lost
        if block.device is None:
            self.placement.restore(block, self._allocate_device())
        if not full and block.host is not None:
            self.placement.stale_hosts[block] = None
        self.idle.pop(block, None)
        block.users += 1

    def deactivate(self, block: Block) -> None:
        """Remove a user, which stays an owner."""
        assert block.users > 0
        block.users -= 1
        if block.users == 0:
            self.idle[block] = None

    def release(self, block: Block, used: bool) -> None:
        """Remove an owner. used: also a user. Without owners, a full block stays in the prefix index, another one is freed."""
        assert block.owners > 0 and block.users >= used
        block.owners -= 1
        block.users -= used
        if block.owners:
            if used and block.users == 0:
                self.idle[block] = None
            return
        self.idle.pop(block, None)
        if self.keep and self.index.holds(block) and not block.lost:
            (self.cached if block.device is not None else self.cached_host)[block] = None
        else:
            self._destroy(block)

    def take_over(self, block: Block) -> Block:
        """Give the device slot of a shared block to its only user if there is no slot for a copy. The other owners keep a copy
        in host memory if there is room, and lose the block otherwise."""
        assert block.users == 1 and block.owners > 1 and block.device is not None
        if block.host is None and self._host_room():
            self.placement.offload(block)
        self.placement.stale_hosts.pop(block, None)
        mine = Block(block.device, block.version)
        mine.later = block.later
        self.placement.settle(block.device, mine)
        block.device = None
        block.users = 0
        block.owners -= 1
        if block.lost:
            self.index.remove(block)
        return mine

    def copy(self, block: Block) -> Block:
        """Copy a shared block for one of its users, which releases it. Returns the private copy. Raises OutOfBlocks."""
        assert block.users >= 1 and block.owners > 1
        mine = self.allocate(block.version)
        mine.later = block.later
        self.placement.copy(block, to=mine)
        self.release(block, used=True)
        return mine

    # ── eviction and offload ──────────────────────────────────────────────────────────────────────────────────────────
    def offload(self, block: Block) -> bool:
        """Move an idle block to host memory, without a copy if mirrored. Returns False if host memory is full."""
        assert block.users == 0 and block.device is not None
        if block.host is None:
            if not self._host_room():
                return False
            self.placement.offload(block)
        self._leave_device(block)
        return True

    def drop(self, block: Block) -> None:
        """Remove an idle block from the device. Without a host copy it is lost, which its owners notice later."""
        assert block.users == 0
        self._leave_device(block)
        if block.lost:
            self.index.remove(block)

    def prefetch(self, block: Block) -> None:
        """Restore a block whose owners wait, during the step's compute. It stays idle. Raises OutOfBlocks."""
        assert block.owners > block.users == 0
        self.placement.restore(block, self._allocate_device(), ahead=True)
        self.idle[block] = None

    def free_ahead(self, slots: int) -> None:
        """Evict cached blocks to host memory until `slots` device slots are free or host memory is full."""
        while self.device.free < slots and self.cached and (next(iter(self.cached)).host is not None or self.host_available):
            self._evict_cached()

    def mirror(self, block: Block) -> bool:
        """Copy a full block to host memory; it stays on the device. Returns False if host memory is full."""
        assert block.device is not None and block.host is None
        if room := self.host.free > 0:
            self.placement.mirror(block)
        return room

    def offload_all(self) -> None:
        """Empty the device while no block is in use: offload blocks, owned ones first; drop those that do not fit."""
        for block in list(self.idle):
            if not self.offload(block):
                self.drop(block)
        while self.cached:
            self._evict_cached()
        assert not self.device.used, "a block is in use"

    def forget(self, block: Block) -> None:
        """Remove a block from the prefix index; free it if it has no owners."""
        self.index.remove(block)
        if not block.owners:
            self._destroy(block)

    def forget_cached(self) -> None:
        """Free all blocks without owners."""
        for block in [*self.cached, *self.cached_host]:
            self._destroy(block)

    def forget_all(self) -> None:
        """Free all blocks without owners, and empty the prefix index."""
        self.forget_cached()
        self.index.clear()

    # ── the step's copies ─────────────────────────────────────────────────────────────────────────────────────────────
    def begin(self) -> None:
        """Start collecting the copies of a step."""
        self.placement.begin()

    def moved(self) -> None:
        """Record that the step's copies are done, and free the host copies that are outdated now."""
        for block in self.placement.stale_hosts:
            self._drop_host(block)
        self.placement.clear()

    def move_failed(self) -> set[Block]:
        """Record that the step's copies failed. Returns the blocks with invalid bytes on the device. The scheduler resets the
        sequences that use them, then calls `discard`."""
        for block in [*self.placement.to_host, *self.placement.stale_hosts]:  # incomplete or outdated
            self._drop_host(block)
            if block.owners == 0 and block.device is None:
                self._destroy(block)
            elif block.lost:
                self.index.remove(block)
        broken = {block for block in self.placement.to_device if block.device is not None}
        for block in broken:
            self.index.remove(block)
        self.placement.clear()
        return broken

    def discard(self, broken: Iterable[Block]) -> None:
        """Drop blocks with invalid bytes, which no running sequence uses. Owners that wait lose them."""
        for block in broken:
            assert block.users == 0
            self._drop_host(block)
            if block.device is not None:
                self._leave_device(block)

    # ── private ───────────────────────────────────────────────────────────────────────────────────────────────────────
    def _allocate_device(self) -> int:
        if not self.device.free:
            self._evict_cached()
        return self.device.allocate()

    def _evict_cached(self) -> None:
        if not self.cached:
            raise OutOfBlocks
        block, _ = self.cached.popitem(last=False)
        if block.host is None and self._host_room():
            self.placement.offload(block)
        if block.host is None:
            self._destroy(block)
        else:
            self._leave_device(block)
            self.cached_host[block] = None

    def _host_room(self) -> bool:
        """Return whether host memory has a free slot; evicts a cached block if necessary."""
        if not self.host.free and self.cached_host:
            block, _ = self.cached_host.popitem(last=False)
            self._destroy(block)
        return self.host.free > 0

    def _leave_device(self, block: Block) -> None:
        assert block.users == 0
        self.placement.release_device(block)
        self.idle.pop(block, None)
        self.cached.pop(block, None)

    def _drop_host(self, block: Block) -> None:
        self.placement.release_host(block)
        self.cached_host.pop(block, None)

    def _destroy(self, block: Block) -> None:
        assert block.owners == 0 and block.users == 0
        self.index.remove(block)
        self.cached.pop(block, None)
        self._drop_host(block)
        if block.device is not None:
            self._leave_device(block)
