"""Weight offload: some decoder layers are in host memory and are prefetched to the device before they run.

Groups of layers whose last ones are offloaded and prefetched into static buffers follow vLLM's change #29941 (offloader v2).
Here 20 layers with group_size 4, num_in_group 1 and prefetch_step 2: layers 3, 7, 11, 15 and 19 are offloaded, and the k-th of
them always uses slot k mod 2:

    masters   │ 3 │ 7 │ 11 │ 15 │ 19 │    host memory (pinned for CUDA): one buffer per layer with adjacent tensors
    slots     │ 0 │ 1 │                   device memory, static: each as large as the largest of these layers, same layout; the
                                          `.data` of the parameters are views of them
    one forward and the beginning of the next, over time:

    compute   0 1 2 [ 3 ] 4 5 6 [ 7 ] 8 9 10 [ 11 ] 12 13 14 [ 15 ] 16 17 18 [ 19 ] head ┊ 0 1 2 [ 3 ] 4 5 6 [ 7 ] …
    slot 0    ────── 3 ───┤ ← 11 ├─────────── 11 ──┤ ← 19 ├────────────────── 19 ──┤ ← 3 ┊ ├────── 3 ───┤ ← 11 …
    slot 1    ──────────────── 7 ──────┤ ← 15 ├─────────────────────── 15 ──┤ ← 7 ├──────┊ ─────────────── 7 ─────┤ ← 15 …

When a layer has run, the next layer of its slot is copied into it: `prefetch_step` offloaded layers ahead, also across the end
of the forward. So between two forwards, slot k holds the k-th layer or its copy is in flight. On CUDA two waits order the work:

    compute   … │ wait(filled k) │ layer k ─ ran k │ …                         … │ wait(filled k + 2) │ layer k + 2 …
    copies                         wait(ran k) │ slot ← layer k + 2 ─ filled k + 2 │

A CUDA graph replays the captured addresses and copies, so it must begin and end with the same slots and no copy in flight: see
`SlotRing.join`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from rollout.engine.config import WeightOffload
from rollout.engine.memory import DeviceMemory, host_buffer, placed, side_by_side, storage_bytes
from rollout.engine.weights.tensors import checkpoint_tensors

log = logging.getLogger(__name__)
MLPS = ("mlp", "feed_forward", "block_sparse_moe")
"""names of the MLP of a decoder layer, the first that it has"""


class SlotRing:
    """Schedules the copies of layers into slots.

    Args:
        layers, slots: their numbers; layers are numbered among the offloaded ones.
        copy: `copy(k)` launches the copy of layer k into its slot.
        cuda: torch.cuda, or a stand-in for tests; None: copies run in line with the compute.
    """

    def __init__(self, layers: int, slots: int, copy: Callable[[int], None], device: torch.device, cuda: Any) -> None:
        assert 1 <= slots <= layers
        self.slots = slots
        self._next = [k + slots if k + slots < layers else k % slots for k in range(layers)]
        """next layer that uses the slot of layer k; k itself if it has the slot alone"""
        self._copy = copy
        self._device = device
        self._cuda = cuda
        self._stream: Any = None if cuda is None else cuda.Stream(device)
        self._holds: list[int | None] = [None] * slots
        """layer in each slot, or whose copy into it is in flight; None: unknown"""
        self._filled: list[Any] = [None] * slots
        """event after the copy into each slot, until the compute waits for it"""

    def before(self, k: int) -> None:
        """Let the compute launched from here on wait until layer k is in its slot. The copy is missing only if a forward was
        aborted or runs its layers in another order; then it is launched now."""
        slot = k % self.slots
        if self._holds[slot] != k:
            self._fetch(k)
        if self._filled[slot] is not None:
            self._cuda.current_stream(self._device).wait_event(self._filled[slot])
            self._filled[slot] = None

    def after(self, k: int) -> None:
        """Record that layer k was launched: launch the copy of the next layer of its slot."""
        if self._next[k] != k:
            self._fetch(self._next[k])

    def fill(self) -> None:
        """Copy the first layers again: the slots are outdated, or unknown after a failed CUDA graph capture."""
        for k in range(self.slots):
            self._fetch(k)

    def join(self) -> None:
        """Let the compute stream wait until every slot holds its first layer, with no copy in flight.

        For CUDA graphs: call it before a capture (captured work must not wait for outside events), at its end (every forked
        stream must join), and before each replay (a step without the graph may have left copies in flight). The recorded state
        is right for every replay, since the capture begins and ends in the same state. In these steps, the copies for the next
        forward do not overlap with sampling."""
        for k in range(self.slots):
            self.before(k)

    def settle(self) -> None:
        """Wait on the host until no copy and no layer is in flight, so that masters can be written and slots freed."""
        if self._cuda is not None:
            self._cuda.synchronize(self._device)

    def _fetch(self, k: int) -> None:
        slot = k % self.slots
        self._holds[slot] = None
        if self._cuda is None:
            self._copy(k)
        else:
            self._stream.wait_stream(self._cuda.current_stream(self._device))  # the layer that used the slot has run
            with self._cuda.stream(self._stream):
                self._copy(k)
            self._filled[slot] = self._stream.record_event()
        self._holds[slot] = k


class OffloadedLayer:
    """Parameters of a layer, and their masters in host memory, which `Weights` writes."""

    def __init__(self, module: nn.Module, pinned: bool) -> None:
        self.parameters = list(module.parameters())
        self._like = [parameter.data.to("meta") for parameter in self.parameters]
        """shapes and dtypes, known also while the parameters are released"""
        self.starts, self.size = side_by_side(self.parameters)
        self._pinned = pinned
        self.masters = [nn.Parameter(like.new_empty(0, device="cpu"), requires_grad=False) for like in self._like]
        self.allocate()
        for master, parameter in zip(self.masters, self.parameters, strict=True):
            master.data.copy_(parameter.data)

    def allocate(self) -> None:
        """Allocate masters, filled with zeros."""
        self.buffer = host_buffer(self.size, self._pinned)
        self.lay(self.masters, self.buffer)

    def drop(self) -> None:
        self.buffer = self.buffer.new_empty(0)
        self.empty(self.masters)

    def lay(self, tensors: list[nn.Parameter], memory: torch.Tensor) -> None:
        """Make the tensors views of [bytes] uint8."""
        for tensor, start, like in zip(tensors, self.starts, self._like, strict=True):
            tensor.data = placed(memory, start, like)

    def empty(self, tensors: list[nn.Parameter]) -> None:
        for tensor in tensors:
            tensor.data = tensor.data.new_empty(0)


class OffloadedModel:
    """A transformers module with offloaded decoder layers. Moves all other parameters to the device of `memory`.

    The hooks that order the copies run around each layer, so torch.compile may compile its inside.

    Args:
        cuda: module whose streams order the copies, for tests; None: that of `memory`.

    Raises:
        ValueError: the layers cannot be found or share parameters, or none would be offloaded. The module is unchanged.
    """

    def __init__(self, module: nn.Module, name: str, offload: WeightOffload, memory: DeviceMemory, cuda: Any = None) -> None:
        self._name = name
        path, layers = decoder_layers(module, name)
        self.indices = [i for i in range(len(layers)) if i % offload.group_size >= offload.group_size - offload.num_in_group]
        """indices of the offloaded layers among all layers"""
        if not self.indices:
            raise ValueError(
                f"{name}: weight_offload.group_size={offload.group_size} is more than its {len(layers)} layers, so that none "
                "would be offloaded; lower it, or leave weight_offload out"
            )
        self._inner = "" if offload.part == "layer" else f".{_name_of_mlp([layers[i] for i in self.indices], name)}"
        """path of what is offloaded in a layer"""
        for i in self.indices:
            _refuse_ties(module, f"{path}.{i}{self._inner}", name)
        self._memory, self._device = memory, memory.device
        before = side_by_side(module.parameters())[1]
        self._layers = [OffloadedLayer(each, pinned=not memory.is_host) for each in self._offloaded(layers)]
        self.masters = {id(p): m for layer in self._layers for p, m in zip(layer.parameters, layer.masters, strict=True)}
        """host tensor of each offloaded parameter, by the parameter's id"""
        self.offloaded_bytes = sum(layer.size for layer in self._layers)
        slots = min(offload.prefetch_step, len(self._layers))
        self.ring = SlotRing(len(self._layers), slots, self._copy, memory.device, cuda or memory.streams)
        self._slots: torch.Tensor
        """[slots, bytes of the largest layer] uint8 on the device"""
        self._take_slots()
        memory.own(each for each in checkpoint_tensors(module)[0].values() if id(each) not in self.masters)
        module.to(memory.device)
        resident = storage_bytes(module.parameters())
        assert resident <= before - self.offloaded_bytes + self._slots.nbytes, "weight offload left memory on the device"
        self._report(offload, before, resident)
        self.attach(module)

    def attach(self, module: nn.Module) -> None:
        """Register the hooks on a module with these parameters: this one, or another one made of the same parameters."""
        for k, each in enumerate(self._offloaded(decoder_layers(module, self._name)[1])):
            each.register_forward_pre_hook(lambda *_, k=k: self.ring.before(k))
            each.register_forward_hook(lambda *_, k=k: self.ring.after(k))

    def release_memory(self, keep: bool) -> None:
        """Release the slots, and without `keep` the masters too, until `restore_memory`."""
        self.ring.settle()
        for layer in self._layers:
            layer.empty(layer.parameters)
            if not keep:
                layer.drop()
        self._slots = self._slots.new_empty(0)

    def restore_memory(self) -> None:
        """Re-allocate the slots at new addresses; masters that were dropped are zero."""
        for layer in self._layers:
            if not layer.buffer.numel():
                layer.allocate()
        self._take_slots()

    def check(self) -> None:
        """Assert that every parameter is in its slot."""
        for k, layer in enumerate(self._layers):
            base = self._slots[k % self.ring.slots].data_ptr()
            for parameter, start in zip(layer.parameters, layer.starts, strict=True):
                assert parameter.data_ptr() == base + start, f"a parameter of layer {self.indices[k]} left its slot"

    def _offloaded(self, layers: nn.ModuleList) -> list[nn.Module]:
        """Return what is offloaded of each of these layers, in order: the layer, or its MLP."""
        return [layers.get_submodule(f"{i}{self._inner}") for i in self.indices]

    def _take_slots(self) -> None:
        largest = max(layer.size for layer in self._layers)
        self._slots = torch.empty((self.ring.slots, largest), dtype=torch.uint8, device=self._device)
        for k, layer in enumerate(self._layers):
            layer.lay(layer.parameters, self._slots[k % self.ring.slots])
        self.ring.fill()

    def _copy(self, k: int) -> None:
        layer = self._layers[k]
        self._slots[k % self.ring.slots, : layer.size].copy_(layer.buffer, non_blocking=True)

    def _report(self, offload: WeightOffload, before: int, resident: int) -> None:
        mib = 2**20
        log.info(
            "layers offloaded model=%r part=%s layers=%s host_mib=%.1f slots=%d slot_mib=%.1f device_mib_before=%.1f "
            "device_mib=%.1f",
            self._name, offload.part, self.indices, self.offloaded_bytes / mib, self.ring.slots,
            self._slots.nbytes / self.ring.slots / mib, before / mib, resident / mib,
        )  # fmt: skip
        if len(self.indices) <= offload.prefetch_step:
            log.warning(
                "weight_offload saves nothing, each layer has a slot: lower prefetch_step or offload more "
                "model=%r layers=%d prefetch_step=%d", self._name, len(self.indices), offload.prefetch_step,
            )  # fmt: skip
        elif self._memory.is_host:
            log.warning("weight_offload saves nothing on the CPU, where the slots are host memory as well model=%r", self._name)


def decoder_layers(module: nn.Module, name: str) -> tuple[str, nn.ModuleList]:
    """Return path and list of the decoder layers: the one outermost ModuleList with as many modules as the configuration has
    layers. Raises ValueError naming the model."""
    count = module.config.get_text_config().num_hidden_layers  # type: ignore[operator, union-attr]
    found: dict[str, nn.ModuleList] = {}
    for path, child in module.named_modules():
        inside = any(path.startswith(f"{outer}.") for outer in found)
        if isinstance(child, nn.ModuleList) and len(child) == count and not inside:
            found[path] = child
    if len(found) != 1:
        raise ValueError(
            f"{name} ({type(module).__name__}): weight_offload finds {len(found)} lists of {count} decoder layers in it, not "
            "one; leave weight_offload out"
        )
    return next(iter(found.items()))


def _name_of_mlp(layers: list[nn.Module], name: str) -> str:
    """Return the name of the MLP in each of these layers. Raises ValueError naming the model if they have none in common."""
    for each in MLPS:
        if all(isinstance(getattr(layer, each, None), nn.Module) for layer in layers):
            return each
    raise ValueError(
        f'{name}: weight_offload.part="mlp" finds no module {", ".join(MLPS)} in all of the layers to offload; set part="layer"'
    )


def _refuse_ties(module: nn.Module, path: str, name: str) -> None:
    """Check that no parameter of the layer at `path` is tied to another layer. Raises ValueError."""
    names: dict[int, list[str]] = {}
    for other, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(other)
    for mine, parameter in module.get_submodule(path).named_parameters():
        elsewhere = [other for other in names[id(parameter)] if not other.startswith(f"{path}.")]
        if elsewhere:
            raise ValueError(
                f"{name}: {path}.{mine} is tied to {elsewhere[0]}, and weight_offload cannot move one without the other; "
                f"choose group_size and num_in_group so that {path} stays on the device, or leave weight_offload out"
            )
