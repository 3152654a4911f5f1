"""Where blocks live: slots on the device and in host memory, and the copies between them that a step makes."""

from __future__ import annotations

from engine.kv.block import Block, BlockCopies, BlockPool


class BlockPlacement:
    """A part of `BlockStore`: both pools, and the copies of the step that is planned. Knows no owners."""

    def __init__(self, device_blocks: int, host_blocks: int) -> None:
        self.device = BlockPool(device_blocks)
        self.host = BlockPool(host_blocks)
        self.moves = BlockCopies()
        self.stale_hosts: dict[Block, None] = {}
        """blocks whose copy in host memory is outdated once this step has read it"""
        self.to_host: list[Block] = []
        """blocks that this step copies to host memory"""
        self.to_device: list[Block] = []
        """blocks whose bytes on the device this step writes"""

    def begin(self) -> None:
        """Start collecting the copies of a step."""
        assert not self.moves and not self.stale_hosts, "the copies of the last step were not closed"

    def clear(self) -> None:
        """Forget the copies of a step, which are done or void."""
        self.moves, self.stale_hosts, self.to_host, self.to_device = BlockCopies(), {}, [], []

    def settle(self, slot: int, block: Block) -> None:
        """Let a block live in a device slot that was taken."""
        block.device = slot
        self.device.holder[slot] = block

    def restore(self, block: Block, slot: int, ahead: bool = False) -> None:
        """Copy a block from host memory to a device slot that was taken. ahead: beside the step, for a later one."""
        assert block.host is not None and block.device is None
        (self.moves.prefetches if ahead else self.moves.restores).append((block.host, slot))
        self.to_device.append(block)
        self.settle(slot, block)

    def copy(self, block: Block, to: Block) -> None:
        """Copy a block to another one on the device."""
        assert block.device is not None and to.device is not None
        self.moves.copies.append((block.device, to.device))
        self.to_device.append(to)

    def offload(self, block: Block) -> None:
        """Copy a block to a free slot in host memory, before the step. Raises OutOfBlocks."""
        self.moves.offloads.append(self._into_host(block))

    def mirror(self, block: Block) -> None:
        """Copy a full block to a free slot in host memory, beside the step. Raises OutOfBlocks."""
        self.moves.mirrors.append(self._into_host(block))

    def release_device(self, block: Block) -> None:
        """Free the device slot of a block, which this step may copy to host memory."""
        assert block.device is not None
        offloads = self.moves.offloads
        self.device.release(block.device, read=bool(offloads) and offloads[-1][0] == block.device)
        block.device = None

    def release_host(self, block: Block) -> None:
        """Free the slot in host memory of a block, if it has one."""
        if block.host is not None:
            self.host.release(block.host)
            block.host = None

    def _into_host(self, block: Block) -> tuple[int, int]:
        """Give a block a slot in host memory. Returns (device slot, host slot)."""
        assert block.device is not None and block.host is None
        block.host = self.host.take()
        self.host.holder[block.host] = block
        self.to_host.append(block)
        return block.device, block.host
