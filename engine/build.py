"""Builds the worker of a configuration: chooses its device, model, kernels and pools.

    device ─ model ─ attention ─ path of the layers ─ routes ─ pools ─ worker      in this order

The engine reaches what is chosen here through an interface (`rollout.engine.devices.Device`, `ModelLike`, `Backend`, …). So
this is the one file that names the optional parts, and it imports each where a configuration, or a model, asks for it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import torch

from rollout.engine.config import EngineConfig
from rollout.engine.devices import Device
from rollout.engine.forward.arithmetic import arithmetic_of
from rollout.engine.forward.attention import Backend, CannotAttend, StepCapacity
from rollout.engine.forward.interface import ModelLike, module_of, states_of, streamed_of, weights_moved, windows_of
from rollout.engine.forward.versions import check_versions
from rollout.engine.kv.block import SlotCounts
from rollout.engine.kv.pages import PagedKV
from rollout.engine.kv.sizing import PoolSizes, check_tables, pool_sizes
from rollout.engine.scheduling.stopping import StopTexts
from rollout.engine.values.arithmetic import RANKS, TREE
from rollout.engine.weights.live import Weights
from rollout.engine.weights.parts import WeightParts
from rollout.engine.worker import ModelKernels, RecordRoutes, Report, Worker, no_report

if TYPE_CHECKING:
    from rollout.engine.forward.model import Model
    from rollout.engine.kv.routes import RouteGeometry

DEVICES = {"cpu": "rollout.engine.cpu.device:CpuDevice", "cuda": "rollout.engine.cuda.device:CudaDevice"}
"""by `torch.device.type`; each takes the configuration, and raises ValueError if it is not available"""
LEADER = "rollout.engine.parallel.leader:open_leader"
"""opens the worker of rank 0, where several ranks run a replica; it opens its own through this file"""

log = logging.getLogger(__name__)
DRAFTS = 6
"""default of the most draft tokens per sequence and step"""


class WorkerParts(NamedTuple):
    """What differs between the worker of one device and those of several ranks (`rollout.engine.parallel`)."""

    make: Callable[[EngineConfig, Device, ModelKernels, PagedKV, Weights], Worker]
    weights: Callable[[EngineConfig, ModelLike, Device], Weights]
    agree: Callable[[PoolSizes], PoolSizes]
    """takes the sizes that this device has room for; returns those of all"""
    agree_with_states: Callable[[SlotCounts, PoolSizes], tuple[SlotCounts, PoolSizes]]
    """the same for a recurrent model, where slots of states are beside the blocks"""


def weights_of(config: EngineConfig, model: ModelLike, device: Device) -> Weights:
    """Make the weights of a model on one device, with the parts that the model and the device need."""
    from rollout.engine.weights.lora import AdapterBase

    parts = WeightParts(streamed_of(model), adapters=AdapterBase)
    if config.weight_dtype != "auto":
        from rollout.engine.weights.twins import Twins

        parts = parts._replace(twins=Twins)
    if device.memory.hashes is not None:
        from rollout.engine.weights.in_place import stage_on_device

        parts = parts._replace(on_device=stage_on_device)
    return Weights(module_of(model), parts, partial(weights_moved, model), device.memory)


ONE_DEVICE = WorkerParts(Worker, weights_of, lambda sizes: sizes, lambda slots, sizes: (slots, sizes))


def open_worker(
    config: EngineConfig, model: ModelLike | None = None, report: Report = no_report, parts: WorkerParts = ONE_DEVICE
) -> Worker:
    """Make the worker of a configuration: open the device, load the model unless one is given, choose its kernels, allocate the
    KV pools, in this order. `Worker.config` has the defaults that depend on the device. report: takes the name of each phase
    when it begins. Raises ValueError for a configuration that cannot work."""
    check_versions()
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    device, drafts = device_of(config), config.drafts
    config = resolved(config, device)
    if model is None:
        report(f"loading the weights as {config.dtype}")
        model = load(config, device)
    check_model_fits(config, device, model)
    report("comparing the kernels with transformers' forward")
    kernels = choose_kernels(config, device, model)
    if (opened := transformers_model(model)) is not None and opened.states is not None and not opened.takes_drafts_back:
        config = without_drafts(config, drafts)
    kernels, routes = with_routes(config, kernels)
    report("allocating the KV pools")
    weights = parts.weights(config, model, device)
    kv = take_kv(config, device, model, routes, parts)
    if kv.states is not None:
        from rollout.engine.kv.states import fitted

        config = fitted(config, kv.states)
    worker = parts.make(config, device, kernels, kv, weights)
    if routes is not None:
        worker.record_routes = recorder_of(config, kernels, routes, kv)
    return worker


def open_workers(config: EngineConfig, model: ModelLike | None, report: Report) -> Worker:
    """Make the worker of an engine: that of one device, or that of rank 0 when the others have theirs. As `open_worker`."""
    if config.tp == 1:
        return open_worker(config, model, report)
    if model is not None:
        raise ValueError(f"tp={config.tp} with a model: each rank loads its part of config.model; leave the model out")
    leader: Worker = part_of(LEADER)(config, report)
    return leader


def open_texts(config: EngineConfig) -> StopTexts:
    """Make what reads the texts of a model's tokens."""
    from rollout.engine.scheduling.stops import TokenTexts

    return TokenTexts(config.model)


def part_of(place: str) -> Any:
    """Import a module and return a name in it. place: "module:name"."""
    module, _, name = place.partition(":")
    return getattr(import_module(module), name)


def device_of(config: EngineConfig) -> Device:
    """Return the device of a configuration. Raises ValueError if it is not available, or an option is for another device."""
    device: Device = part_of(DEVICES[torch.device(config.device).type])(config)
    return device


def transformers_model(model: ModelLike) -> Model | None:
    """Return a model if it is one of transformers, whose kernels can be chosen and compared; None: another implementation."""
    from rollout.engine.forward.model import Model

    return model if isinstance(model, Model) else None


def load(config: EngineConfig, device: Device) -> ModelLike:
    """Load the model of a configuration. Raises ValueError if it cannot be loaded or is not supported."""
    from rollout.engine.forward.model import open_model

    return open_model(config, device.memory)


def check_model_fits(config: EngineConfig, device: Device, model: ModelLike) -> None:
    """Raise ValueError for a model on another kind of device, for one that this device cannot serve, and for one that was made
    with other options."""
    from rollout.engine.forward.latent import stores_latents

    if model.device.type != device.memory.device.type:
        raise ValueError(f"{model.name} is on {model.device}, but device={device.memory.device}: set device={model.device}")
    device.check(model)
    if config.weight_offload is not None and streamed_of(model) is None:
        raise ValueError(f"weight_offload: {model.name} was given without it; give Model(module, name, OffloadedModel(…))")
    if config.latent_kv != stores_latents(module_of(model)):
        raise ValueError(
            f"latent_kv={config.latent_kv}: {model.name} has the other setting; call use_latent_kv, or plain_kv, first"
        )


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
        return reference()
    try:
        backend = device.backend(kind, capacity)
        try_out(backend)
        return backend
    except CannotAttend as error:
        if not device.falls_back:
            raise ValueError(f'attention="{name}": {error}; "reference" runs everywhere, many times slower') from error
        if name == kind:
            raise ValueError(f'attention="{name}": {error}; "auto" falls back to the torch reference') from error
        log.warning("attention runs in plain torch, which is slow reason=%r", str(error))
        return reference()


def reference() -> Backend:
    """Make the torch reference of attention."""
    from rollout.engine.forward.reference import ReferenceAttention

    return ReferenceAttention()


def sums_of(config: EngineConfig) -> str:
    """Return `Arithmetic.sums`: those of slices do not depend on the ranks, those of the library's products do."""
    if torch.device(config.device).type == "cpu" or config.exact:
        return TREE if config.sums_in_tree else ""
    return RANKS.format(config.tp) if config.tp > 1 else ""


def choose_kernels(config: EngineConfig, device: Device, model: ModelLike) -> ModelKernels:
    """Choose the attention backend and the execution path of the layers, and compare both with the module's own forward. Raises
    ValueError."""
    from rollout.engine.forward.self_check import LoadedModel, check_model, try_out

    memory, opened = device.memory, transformers_model(model)
    capacity, kept = StepCapacity.of(config, model), model.geometry.kept_as(config.kv_dtype)
    tried = (lambda backend: None) if opened is None else partial(try_out, opened, kept, config.block_tokens, memory)
    backend = choose_backend(config.attention, device, capacity, tried)
    int8 = config.weight_dtype == "int8"
    if int8 and opened is None:
        raise ValueError(f'weight_dtype="int8": {model.name} has no module; leave it out')
    path = None if opened is None else device.equip(opened, config, backend)
    computed = arithmetic_of(path, backend, fp8=kept.fp8, latent=config.latent_kv, int8=int8, sums=sums_of(config))
    kernels = ModelKernels(model, backend, path, str(computed))
    log.info("engine model=%s backend=%r arithmetic=%s", model.name, str(backend), kernels.arithmetic)
    if opened is not None:
        check_model(LoadedModel(opened, backend, config.block_tokens, capacity.tokens, memory, kept))
    return kernels


def with_routes(config: EngineConfig, kernels: ModelKernels) -> tuple[ModelKernels, RouteGeometry | None]:
    """Return the shape of a model's routes if they are to be kept, and its kernels: the module runs its layers then, which has
    the bits of a decoder. Raises NoRoutes (a ValueError) for a model without routes."""
    if not config.routed_experts:
        return kernels, None
    from rollout.engine.forward.experts import NoRoutes
    from rollout.engine.forward.routes import routes_geometry

    model, path = transformers_model(kernels.model), kernels.path
    if model is None:
        raise NoRoutes(f"routed_experts: {kernels.model.name} has no module")
    try:
        routes = routes_geometry(model.module)
    except NoRoutes as error:
        raise NoRoutes(f"routed_experts: {error}; leave it out") from error
    if model.decoder is not None and path is not None:
        if config.advanced.fused_layers:
            raise NoRoutes("routed_experts: fused layers do not record routes; leave advanced.fused_layers out")
        model.run_by(None)
        kernels = kernels._replace(path=path._replace(decoder=None, why="routed_experts: the module records the routes"))
    size = routes.bytes_per_token
    log.info("routes layers=%d chosen=%d experts=%d bytes_per_token=%d", *routes.shape, routes.experts, size)
    return kernels, routes


def recorder_of(config: EngineConfig, kernels: ModelKernels, routes: RouteGeometry, kv: PagedKV) -> RecordRoutes:
    """Make what records the routes of each step beside its KV."""
    from rollout.engine.forward.routes import RouteRecorder

    model = transformers_model(kernels.model)
    assert model is not None and kv.routes is not None
    most = max(16, StepCapacity.of(config, model).tokens)
    return partial(RouteRecorder(model.module, routes, most, kv.memory).keep, pages=kv.routes)


def take_kv(
    config: EngineConfig,
    device: Device,
    model: ModelLike,
    routes: RouteGeometry | None = None,
    parts: WorkerParts = ONE_DEVICE,
) -> PagedKV:
    """Allocate both KV pools, and those of routes and of states. Raises ValueError if there is not enough memory
    for them, or for their block tables in host memory."""
    memory, kept = device.memory, model.geometry.kept_as(config.kv_dtype)
    block_bytes = (kept.bytes_per_token + (0 if routes is None else routes.bytes_per_token)) * config.block_tokens
    sizes, geometry, states = parts.agree(pool_sizes(config, block_bytes, memory)), states_of(model), None
    if geometry is not None:
        from rollout.engine.kv.states import StatePages, state_sizes

        slots, sizes = parts.agree_with_states(*state_sizes(config, geometry.nbytes, sizes, block_bytes, memory))
        states = StatePages(geometry, slots, memory, (config.kv_gib is not None, sizes.commit_host))
    windows = windows_of(model)
    longest = -(-model.context // config.block_tokens)
    if any(windows):
        from rollout.engine.kv.windows import windowed_pools

        kv, sizes = windowed_pools(config, device, kept, windows, model.context, sizes, block_bytes)
        kv.states = states
    else:
        kv = PagedKV(kept, sizes, memory, device.copy_engine(), states)
    if routes is not None:
        from rollout.engine.kv.routes import RoutePages

        kv.routes = RoutePages(routes, sizes, memory)
    check_tables(config, min(longest, len(kv.data)) * (2 if any(windows) else 1))
    return kv


def without_drafts(config: EngineConfig, asked: int | None) -> EngineConfig:
    """Turn drafts off, for a model whose recurrent layers have no kernels that keep the inputs of a row. asked:
    `EngineConfig.drafts` as the user set it. Raises ValueError."""
    if asked:
        raise ValueError(
            f"drafts={asked}: without the kernels of the CPU, rejected drafts cannot be removed from a recurrent state; set 0, "
            "or leave it out"
        )
    return msgspec.structs.replace(config, drafts=0)
