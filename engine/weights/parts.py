"""What weights may have besides tensors and a version, as `Weights` knows it. `rollout.engine.build` hands in the parts that a
model or a device asks for.

    streamed     decoder layers that are in host memory, and slots on the device      `rollout.engine.weights.offload`
    twins        another form of parameters, which the forward reads in their place      `rollout.engine.weights.twins`
    adapters     merges adapters into the tensors that they change                       `rollout.engine.weights.lora`
    on_device    stages a payload that is on the device, there                           `rollout.engine.weights.in_place`
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import NamedTuple, Protocol

import torch

from rollout.engine.memory import DeviceMemory
from rollout.engine.values import Adapter, TensorInfo, WeightUpdate
from rollout.engine.weights.inventory import Digests, Inventory
from rollout.engine.weights.staging import StagedTensor, Staging, TensorSlices


class LayerSlots(Protocol):
    """The slots of streamed layers, and the copies into them."""

    def settle(self) -> None:
        """Wait until no copy and no layer is in flight, so that masters can be written."""

    def fill(self) -> None:
        """Copy the first layers again: the slots are outdated."""

    def join(self) -> None:
        """Let compute wait until every slot holds its first layer, with no copy in flight, as captured steps need it."""


class StreamedLayers(Protocol):
    """Layers that are in host memory, and are copied to the device before they run."""

    offloaded_bytes: int

    @property
    def masters(self) -> Mapping[int, torch.nn.Parameter]:
        """Host tensor of each of their parameters, by the parameter's id: what a refresh writes."""

    @property
    def ring(self) -> LayerSlots: ...

    def release_memory(self, keep: bool) -> None:
        """Release the slots, and without `keep` the masters too."""

    def restore_memory(self) -> None:
        """Re-allocate what was released, at new addresses."""

    def check(self) -> None:
        """Assert that every parameter is in its slot."""


class TensorTwins(Protocol):
    """Another form of some parameters."""

    @property
    def tensors(self) -> Mapping[str, torch.Tensor]:
        """The tensors of all twins, by names of their own."""

    def beside(self, names: Iterable[str]) -> list[str]:
        """Return the names of the twins of these parameters, as far as they have some."""

    def staging(
        self, parts: Iterable[StagedTensor], place: Callable[[str], torch.Tensor], making: TensorSlices | None
    ) -> TensorSlices | None:
        """Return what fills staged twins as their parameters are staged, after `making`."""


class StagedTensors(Protocol):
    """Where merged tensors are staged."""

    def part(self, info: TensorInfo, name: str) -> StagedTensor:
        """Return the part of a payload that is sent whole."""

    def room(self, name: str) -> torch.Tensor:
        """Return memory for a whole tensor."""

    def wrote(self, name: str, whole: torch.Tensor) -> None:
        """Stage what was written there."""


class InOnePlace:
    """Tensors that are staged whole. place: returns the staged tensor of a name."""

    def __init__(self, place: Callable[[str], torch.Tensor]) -> None:
        self._place = place

    def part(self, info: TensorInfo, name: str) -> StagedTensor:
        return StagedTensor(info, getattr(torch, info.dtype), name, self._place(name).view(-1))

    def room(self, name: str) -> torch.Tensor:
        return self._place(name)

    def wrote(self, name: str, whole: torch.Tensor) -> None:
        """Do nothing: it is there."""


class Merging(TensorSlices, Protocol):
    """A refresh of an adapter."""

    parts: list[StagedTensor]
    """of its payload"""


class AdapterTensors(Protocol):
    """The tensors to which adapters are added."""

    @property
    def digest(self) -> str:
        """`manifest_digest` of all tensors without the live adapter."""

    @property
    def nbytes(self) -> int:
        """Host memory that they take, in bytes."""

    @property
    def changed(self) -> Collection[str]:
        """Names of the tensors that the live adapter changed."""

    def merging(self, adapter: Adapter, manifest: Sequence[TensorInfo], staged: StagedTensors) -> Merging:
        """Begin the refresh of an adapter. Raises InvalidWeights, BaseMismatch."""

    def commit(self, written: Collection[str], bases: Mapping[str, torch.Tensor]) -> None:
        """Record that these tensors were written, before their digests are. bases: of those that an adapter changed."""

    def clear(self) -> None:
        """Forget all, when the weights are dropped."""


class NoTwins:
    """No parameter has another form."""

    tensors: Mapping[str, torch.Tensor] = {}

    def beside(self, names: Iterable[str]) -> list[str]:
        return []

    def staging(
        self, parts: Iterable[StagedTensor], place: Callable[[str], torch.Tensor], making: TensorSlices | None
    ) -> TensorSlices | None:
        return making


class NoAdapters:
    """The weights of a rank that gets what another one has merged, or of a test."""

    nbytes = 0
    changed: Collection[str] = ()

    def __init__(self, inventory: Inventory, digests: Digests) -> None:
        self._digests = digests

    @property
    def digest(self) -> str:
        return self._digests.committed

    def merging(self, adapter: Adapter, manifest: Sequence[TensorInfo], staged: StagedTensors) -> Merging:
        raise NotImplementedError("these weights take no adapters")

    def commit(self, written: Collection[str], bases: Mapping[str, torch.Tensor]) -> None:
        pass

    def clear(self) -> None:
        pass


class StageOnDevice(Protocol):
    """Makes a staging in device memory."""

    def __call__(
        self,
        update: WeightUpdate,
        parts: list[StagedTensor],
        memory: DeviceMemory,
        on_close: Callable[[], None],
        in_place: bool,
    ) -> Staging:
        """Begin one. in_place: there is no room for a second copy; the places of the parts are the live tensors, and
        `Staging.write` writes them."""


class WeightParts(NamedTuple):
    """What the weights of one device have besides."""

    streamed: StreamedLayers | None = None
    """None: all layers are on the device"""
    twins: Callable[[torch.nn.Module | None, Mapping[str, torch.Tensor]], TensorTwins] = lambda module, tensors: NoTwins()
    """finds the twins of a module's parameters, given by name"""
    adapters: Callable[[Inventory, Digests], AdapterTensors] = NoAdapters
    on_device: StageOnDevice | None = None
    """None: payloads are staged in host memory"""


PLAIN = WeightParts()
"""nothing besides"""
