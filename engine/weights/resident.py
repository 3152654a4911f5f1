"""Memory of the weights on the device: released by a sleep, and restored.

    region     [ storage │ storage │ … ]     fixed addresses; the physical memory behind them is released (CUDA)
    else       each tensor is empty meanwhile and has another address afterwards

With a region, captured CUDA graphs stay valid.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

import torch

from rollout.engine.memory import DeviceMemory, MemoryRegion, host_buffer, placed, side_by_side

STORAGE_ALIGNMENT = 256
"""of a storage in a region, in bytes: libraries choose the kernel of a product by the alignment of its matrices"""


class ResidentTensors:
    """Moves tensors (by name) into a region of `memory`, if it has regions, and releases and restores them."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], memory: DeviceMemory) -> None:
        self._tensors = tensors
        self._memory = memory
        self._shapes = {name: tensor.shape for name, tensor in tensors.items()}
        self._region = settle(tensors.values(), memory)
        self._kept: torch.Tensor | None = None
        """[bytes] uint8 in host memory: contents of the region"""
        self._away: dict[str, torch.Tensor] = {}
        self.asleep = False

    @property
    def stays(self) -> bool:
        """Whether the tensors keep their addresses."""
        return self._region is not None

    @property
    def size(self) -> int:
        """Bytes of host memory that a sleep with `keep` needs."""
        return side_by_side(self._tensors.values())[1] if self._region is None else len(self._region.data)

    def release(self, keep: bool, buffer: Callable[[], torch.Tensor]) -> None:
        """Release the memory until `restore`. keep: copy the contents to `buffer()`, [bytes] uint8 of at least `size` in host
        memory; tensors of the CPU stay in place. Otherwise the contents are lost."""
        assert not self.asleep
        if self._region is not None:
            self._kept = buffer()[: len(self._region.data)].copy_(self._region.data) if keep else None
            self._region.release()
        elif keep and not self._memory.is_host:
            starts, _ = side_by_side(self._tensors.values())
            away = buffer()
            for (name, tensor), start in zip(self._tensors.items(), starts, strict=True):
                self._away[name] = placed(away, start, tensor).copy_(tensor.data)
        elif not keep:
            self._away = {name: tensor.data.new_empty(0) for name, tensor in self._tensors.items()}
        for name in self._away:
            self._tensors[name].data = self._tensors[name].data.new_empty(0)
        self.asleep = True

    def restore(self) -> None:
        """Re-allocate the memory. Tensors that were not kept are zero on a device, and undefined on the CPU. If allocation
        fails, the error is raised and the tensors stay released."""
        if self._region is not None:
            self._region.restore()
            if self._kept is None:
                self._region.data.zero_()
            else:
                self._region.data.copy_(self._kept)
        self._kept = None
        dropped = {}
        for name, kept in self._away.items():
            tensor = self._tensors[name]
            if kept.numel():
                tensor.data = kept.to(tensor.device)
            elif not self._memory.is_host:
                tensor.data = tensor.data.new_zeros(self._shapes[name])
            else:
                dropped[name] = tensor.data.new_empty(self._shapes[name], device="meta")
        starts, size = side_by_side(dropped.values())
        memory = host_buffer(size, pin=False)  # in huge pages, as before
        for (name, like), start in zip(dropped.items(), starts, strict=True):
            self._tensors[name].data = placed(memory, start, like)
        self._away, self.asleep = {}, False


def settle(tensors: Collection[torch.Tensor], memory: DeviceMemory) -> MemoryRegion | None:
    """Move tensors into a region of `memory`. Tensors of one storage stay adjacent. Returns None, and moves nothing, if the
    memory has no regions."""
    lying: dict[int, list[torch.Tensor]] = {}
    for tensor in tensors:
        lying.setdefault(tensor.untyped_storage().data_ptr(), []).append(tensor)
    sizes = {
        at: -(-found[0].untyped_storage().nbytes() // STORAGE_ALIGNMENT) * STORAGE_ALIGNMENT for at, found in lying.items()
    }
    region = memory.region(sum(sizes.values()))
    if region is None:
        return None
    start = 0
    for at, found in lying.items():
        storage = found[0].untyped_storage()
        whole = torch.empty(0, dtype=torch.uint8, device=found[0].device).set_(storage)
        region.need(start + sizes[at])
        region.data[start : start + len(whole)].copy_(whole)
        for tensor in found:
            begin = start + int(tensor.storage_offset()) * tensor.element_size()
            tensor.data = placed(region.data, begin, tensor)
        start += sizes[at]
        del storage, whole
        memory.trim()  # so that the device never holds the model twice
    return region
