"""Slots of KV blocks on the device and in host memory, and the copies that a step makes between them."""

from __future__ import annotations

from rollout.engine.kv.block import Block, BlockCopies, BlockPool


class BlockPlacement:
    """Both pools, and the copies of the step being planned. It does not count owners; `BlockStore` does."""

    def __init__(self, device_blocks: int, host_blocks: int) -> None:
        self.device = BlockPool(device_blocks)
        self.host = BlockPool(host_blocks)
        self.moves = BlockCopies()
        self.stale_hosts: dict[Block, None] = {}
        """blocks whose host copy is outdated once this step has read it"""
        self.to_host: list[Block] = []
        """blocks that this step copies to host memory"""
        self.to_device: list[Block] = []
        """blocks that this step's copies write on the device"""

    def begin(self) -> None:
        """Start collecting the copies of a step."""
        assert not self.moves and not self.stale_hosts, "the copies of the last step were not closed"

    def clear(self) -> None:
        """Forget the copies of a step that are done or discarded."""
        self.moves, self.stale_hosts, self.to_host, self.to_device = BlockCopies(), {}, [], []

    def settle(self, slot: int, block: Block) -> None:
        """Put a block into an allocated device slot."""
        block.device = slot
        self.device.holder[slot] = block

    def restore(self, block: Block, slot: int, ahead: bool = False) -> None:
        """Copy a block from host memory to an allocated device slot. ahead: during the step's compute, for a later step."""
        assert block.host is not None and block.device is None
        (self.moves.prefetches if ahead else self.moves.restores).append((block.host, slot))
        self.to_device.append(block)
        self.settle(slot, block)

    def copy(self, block: Block, to: Block) -> None:
        """Copy a block to another block on the device."""
        assert block.device is not None and to.device is not None
        self.moves.copies.append((block.device, to.device))
        self.to_device.append(to)

    def offload(self, block: Block) -> None:
        """Copy a block to a free host slot before the step's compute. Raises OutOfBlocks."""
        self.moves.offloads.append(self._into_host(block))

    def mirror(self, block: Block) -> None:
        """Copy a full block to a free host slot during the step's compute. Raises OutOfBlocks."""
        self.moves.mirrors.append(self._into_host(block))

    def release_device(self, block: Block) -> None:
        """Free the device slot of a block, which a copy of this step may still read."""
        assert block.device is not None
        offloads = self.moves.offloads
        self.device.release(block.device, read=bool(offloads) and offloads[-1][0] == block.device)
        block.device = None

    def release_host(self, block: Block) -> None:
        """Free the host slot of a block, if it has one."""
        if block.host is not None:
            self.host.release(block.host)
            block.host = None

    def _into_host(self, block: Block) -> tuple[int, int]:
        """Allocate a host slot for a block. Returns (device slot, host slot)."""
        assert block.device is not None and block.host is None
        block.host = self.host.allocate()
        self.host.holder[block.host] = block
        self.to_host.append(block)
        return block.device, block.host
