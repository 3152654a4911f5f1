"""Devices: what differs between CPU and CUDA (kernels, memory, graphs, defaults), behind the interface `Device`.

    ┌ memory ──────── allocation, host maps, transfer of small arrays        used by kv/, weights/ and forward/
    │ copy_engine ─── runs the copies of a step                              used by kv/
    │ backend ─────── attention
    │ equip ───────── what runs the layers: the module or a decoder
    │ graphs ──────── captured steps
    └ sample, mark ── sampling without waiting; time stamps on the device

A new kind of device is a folder beside `cpu/` and `cuda/`, with a `device.py`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import msgspec
import torch

from rollout.engine.config import EngineConfig
from rollout.engine.cpu.build import NativeUnavailable
from rollout.engine.cpu.device import CpuDevice
from rollout.engine.cpu.sums import Exchange
from rollout.engine.cuda.device import CudaDevice
from rollout.engine.cuda.reduce import DeviceExchange, check_apart, process_group
from rollout.engine.forward.arithmetic import RANKS, TREE
from rollout.engine.forward.attention import Backend, CannotAttend, StepCapacity
from rollout.engine.forward.batch import Batch
from rollout.engine.forward.model import ExecutionPath, Model, ModelLike
from rollout.engine.forward.reference import ReferenceAttention
from rollout.engine.forward.sampling import PendingTokens, SamplingBatch
from rollout.engine.forward.summed import RankExchange
from rollout.engine.kv.copies import CopyEngine
from rollout.engine.kv.pages import PagedKV
from rollout.engine.memory import DeviceMemory

DRAFTS = 6
"""default of the most draft tokens per sequence and step"""

log = logging.getLogger(__name__)


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
        """Make the attention backend "native" or "triton". Raises NativeUnavailable or CannotAttend if it is not available,
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


def device_of(config: EngineConfig) -> Device:
    """Return the device of a configuration. Raises ValueError if it is not available, or an option is for another device."""
    device = torch.device(config.device)
    return CpuDevice(config) if device.type == "cpu" else CudaDevice(config, device)


def check_device(device: Device, model: ModelLike) -> None:
    """Raise ValueError for a model on another kind of device, or one that this device cannot serve."""
    if model.device.type != device.memory.device.type:
        raise ValueError(f"{model.name} is on {model.device}, but device={device.memory.device}: set device={model.device}")
    device.check(model)


def choose_backend(
    name: str, device: Device, capacity: StepCapacity, try_out: Callable[[Backend], None] = lambda backend: None
) -> Backend:
    """Return the backend of `EngineConfig.attention`. "auto" selects the device's fast one if it is available; otherwise, on a
    device that may fall back, the torch reference, and logs the reason.

    Args:
        try_out: attends as the model will, and raises CannotAttend with the reason if the backend cannot.

    Raises:
        ValueError: a backend that was asked for by name is not available or does not support the model, or "auto" found none.
    """
    kind = device.fast_attention if name == "auto" else name
    if kind == "reference":
        return ReferenceAttention()
    try:
        backend = device.backend(kind, capacity)
        try_out(backend)
        return backend
    except (NativeUnavailable, CannotAttend) as error:
        if not device.falls_back:
            raise ValueError(f'attention="{name}": {error}; "reference" runs everywhere, many times slower') from error
        if name == kind:
            raise ValueError(f'attention="{name}": {error}; "auto" falls back to the torch reference') from error
        log.warning("attention runs in plain torch, which is slow reason=%r", str(error))
        return ReferenceAttention()


def resolved(config: EngineConfig, device: Device) -> EngineConfig:
    """Fill in the defaults that depend on the device. Raises ValueError for mirror_ahead or copy_ahead on a device that cannot
    copy while it computes."""
    tuning = config.advanced
    ahead = {"mirror_ahead": tuning.mirror_ahead, "copy_ahead": tuning.copy_ahead}
    for name, asked in ahead.items():
        if asked and not device.copies_ahead:
            raise ValueError(
                f"advanced.{name}=True with device={config.device}: it costs more than it saves there; leave it out"
            )
    overlaps = device.overlaps if config.overlap_steps is None else config.overlap_steps
    seqs, tokens = device.sizes
    if config.max_batch_tokens is not None:
        seqs = min(seqs, config.max_batch_tokens)
    copy_ahead = device.copies_ahead if tuning.copy_ahead is None else tuning.copy_ahead
    return msgspec.structs.replace(
        config,
        block_size=config.block_tokens,
        max_num_seqs=seqs if config.max_num_seqs is None else config.max_num_seqs,
        max_batch_tokens=max(tokens, config.most_seqs) if config.max_batch_tokens is None else config.max_batch_tokens,
        overlap_steps=overlaps,
        drafts=(0 if overlaps and not device.overlaps else DRAFTS) if config.drafts is None else config.drafts,
        advanced=msgspec.structs.replace(tuning, copy_ahead=copy_ahead),
    )


def sums_name(config: EngineConfig) -> str:
    """Return what sums of products add to the name of the arithmetic: those of slices do not depend on the ranks, those of the
    library's products do. "": they are whole."""
    if torch.device(config.device).type == "cpu" or config.exact:
        return TREE if config.sums_in_tree else ""
    return RANKS.format(config.tp) if config.tp > 1 else ""


def device_of_rank(config: EngineConfig, local_rank: int, local_ranks: int, placed: bool) -> str:
    """Return the device of a rank: of CUDA's, the one of its number on its host.

    Args:
        local_rank: of the ranks of its host.
        placed: whether something else has started it, which may let it see one device alone.

    Raises ValueError if there are too few."""
    kind, _, number = config.device.partition(":")
    if kind == "cpu":
        return config.device
    if number:
        raise ValueError(
            f"device={config.device} with tp={config.tp}: each rank has a device of its own; set device=cuda, and "
            "CUDA_VISIBLE_DEVICES to choose among them"
        )
    count = torch.cuda.device_count()
    if placed and count == 1:
        return "cuda:0"
    if count < local_ranks:
        raise ValueError(f"tp={config.tp}: {local_ranks} ranks of this host and {count} CUDA devices; lower tp")
    return f"cuda:{local_rank}"


def exchanges_itself(config: EngineConfig) -> bool:
    """Return whether the devices of several ranks exchange what layers compute, and need torch's store to meet."""
    return torch.device(config.device).type != "cpu"


def exchange_on(device: torch.device, host: Exchange, store: Callable[[], Any]) -> RankExchange:
    """Return the exchange of what the layers compute on a device. host: of the same ranks, in host memory. store: returns
    torch's, which all ranks have. Raises ValueError if two ranks have one device; RankLost."""
    if device.type == "cpu":
        return host
    if not torch.distributed.is_nccl_available():
        raise ValueError(f"several ranks with device={device}: torch {torch.__version__} has no NCCL; install one that has")
    torch.cuda.set_device(device)  # NCCL takes the current one
    check_apart(host, str(torch.cuda.get_device_properties(device).uuid))
    return DeviceExchange(host, process_group(store(), host.rank, host.ranks, device))
