"""Devices: what differs between CPU and CUDA (kernels, memory, graphs, defaults), behind the interface `Device`.

    ┌ memory ──────── allocation, host maps, transfer of small arrays        used by kv/, weights/ and forward/
    │ copy_engine ─── runs the copies of a step                              used by kv/
    │ backend ─────── attention
    │ equip ───────── what runs the layers: the module or a decoder
    │ graphs ──────── captured steps
    └ sample, mark ── sampling without waiting; time stamps on the device

A new kind of device is a folder beside `cpu/` and `cuda/`, with a `device.py`, and an entry in `rollout.engine.build.DEVICES`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Protocol

import torch

from rollout.engine.config import EngineConfig
from rollout.engine.forward.attention import Backend, StepCapacity
from rollout.engine.forward.batch import Batch
from rollout.engine.forward.interface import ExecutionPath, ModelLike
from rollout.engine.forward.sampling import PendingTokens, SamplingBatch
from rollout.engine.kv.copies import CopyEngine
from rollout.engine.kv.pages import PagedKV
from rollout.engine.memory import DeviceMemory

if TYPE_CHECKING:
    from rollout.engine.forward.model import Model


class Graphs(Protocol):
    """Forwards that run as captured graphs; see `rollout.engine.cuda.graphs.StepGraphs`."""

    def warm_up_shapes(self, context: int) -> Iterator[tuple[int, int]]: ...
    def covers(self, batch: Batch) -> bool: ...
    def forward(self, batch: Batch, kv: PagedKV, backend: Backend) -> torch.Tensor: ...
    def warm(self, batch: Batch, kv: PagedKV, backend: Backend) -> torch.Tensor: ...
    def forget(self) -> None: ...


class Device(Protocol):
    """Operations that a CPU and a GPU implement differently."""

    isa: str
    """instruction set of the kernels, "torch" without kernels, "cuda" on a GPU"""
    isa_reason: str
    """why it is not a better one"""
    overlaps: bool
    """default of `overlap_steps`"""
    copies_ahead: bool
    """default of `copy_ahead`; whether `mirror_ahead` can be asked for"""
    fast_attention: str
    """backend of attention="auto" """
    sizes: tuple[int, int]
    """default sequences and tokens of a step"""
    warms_up: bool
    """whether it compiles and captures at first use"""
    falls_back: bool
    """whether attention="auto" takes the torch reference where the fast kernel is not available"""

    @property
    def memory(self) -> DeviceMemory: ...

    def check(self, model: ModelLike) -> None:
        """Raise ValueError if the model stores KV as this device cannot."""

    def copy_engine(self) -> CopyEngine:
        """Make the engine for KV copies."""

    def backend(self, name: str, capacity: StepCapacity) -> Backend:
        """Make the attention backend "native" or "triton". Raises CannotAttend if it is not available,
        ValueError if this device does not have it."""

    def equip(self, model: Model, config: EngineConfig, backend: Backend) -> ExecutionPath | None:
        """Choose what runs the layers of a model, and install it with `model.run_by`. Returns None for the unmodified module.
        Raises UnsupportedModel."""

    def graphs(self, model: ModelLike, config: EngineConfig, backend: Backend) -> Graphs | None:
        """Make the captured steps; None: every step is launched kernel by kernel."""

    def sample(self, logits: torch.Tensor, batch: SamplingBatch) -> PendingTokens:
        """Launch D draws from [S, vocabulary] logits."""

    def mark(self) -> Any:
        """Return a time stamp on the device, after all launched work."""

    def seconds(self, began: Any, ended: Any) -> float:
        """Return the seconds between two marks; waits for the second."""

    def settle(self) -> None:
        """Wait until the device has done all launched work."""

    def reached(self, mark: Any) -> bool:
        """Return whether the device has come to a mark. Does not wait."""

    def is_lost(self, error: BaseException) -> bool:
        """Return whether the device fails every call from now on, after a call that raised `error`."""
