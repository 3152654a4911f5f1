"""Devices: what differs between CPU and CUDA (kernels, memory, graphs, defaults), behind the interface `Device`.

    ┌ memory ──────── allocation, host maps, transfer of small arrays        used by kv/, weights/ and forward/
    │ copy_engine ─── runs the copies of a step                              used by kv/
    │ backend ─────── attention
    │ equip ───────── what runs the layers: the module or a decoder
    │ graphs ──────── captured steps
    └ sample, mark ── sampling without waiting; time stamps on the device

A new kind of device is a class here and a folder beside `cpu/` and `cuda/`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Protocol

import msgspec
import torch
from torch.nn.functional import linear

from rollout.engine.config import EngineConfig
from rollout.engine.cpu.attention import NativeAttention
from rollout.engine.cpu.build import NativeUnavailable
from rollout.engine.cpu.exact_modules import NotServed
from rollout.engine.cpu.int8_modules import plain_weights, use_int8
from rollout.engine.cpu.kernels import choose
from rollout.engine.cpu.recurrence import RecurrenceKernels
from rollout.engine.cpu.select_path import BATCH, decide
from rollout.engine.cpu.sums import Exchange
from rollout.engine.cuda.attention import (
    TritonAttention,
    TritonByShape,
    TritonByWindow,
    TritonUnavailable,
    triton_attention,
)
from rollout.engine.cuda.digests import device_hashes
from rollout.engine.cuda.exact import FUSED_LAYERS, make_exact, sum_of_slices
from rollout.engine.cuda.fused import FusedDecoder, NotFused, SummedProduct
from rollout.engine.cuda.graphs import StepGraphs, cuda_capture
from rollout.engine.cuda.library_products import choose_products
from rollout.engine.cuda.memory import CudaMemory
from rollout.engine.cuda.norms import fuse_norms
from rollout.engine.cuda.prompts import NotTaken, cudnn_prompts
from rollout.engine.cuda.proofs import Linear
from rollout.engine.cuda.recurrence import TritonMixers
from rollout.engine.cuda.reduce import DeviceExchange, check_apart, process_group, sum_of_ranks, sum_over_ranks
from rollout.engine.cuda.regions import open_driver
from rollout.engine.forward.arithmetic import RANKS, TREE, torch_arithmetic
from rollout.engine.forward.attention import Backend, CannotAttend, StepCapacity, plain_scores
from rollout.engine.forward.batch import Batch
from rollout.engine.forward.latent import stores_latents
from rollout.engine.forward.model import (
    ExecutionPath,
    Model,
    ModelLike,
    UnsupportedModel,
    in_one_line,
    module_of,
    states_of,
    streamed_of,
)
from rollout.engine.forward.reference import ReferenceAttention
from rollout.engine.forward.sampling import DrawKernel, PendingTokens, SamplingBatch, launch_draws
from rollout.engine.forward.summed import SLICES, RankExchange, Summed, sum_slices, whole_sums
from rollout.engine.kv.copies import CopyEngine, StreamCopies, SyncCopies
from rollout.engine.kv.pages import PagedKV
from rollout.engine.memory import DeviceMemory, HostMemory
from rollout.engine.weights.layer_cuts import summed_products

__all__ = [
    "Backend", "CannotAttend", "StepCapacity", "CpuDevice", "CudaDevice", "Device", "NativeAttention", "NativeUnavailable",
    "ReferenceAttention", "TritonAttention", "TritonUnavailable", "choose_backend", "device_of",
]  # fmt: skip

LARGE_BYTES = 64 << 30
"""memory of a device that needs many rows to be busy and has room for their KV"""
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
    """default of `mirror_ahead` and `copy_ahead`"""
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
        """Raise ValueError if the model is on another device, or stores KV as this device cannot."""

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


class CpuDevice:
    overlaps = copies_ahead = warms_up = False
    falls_back = True
    sizes = EngineConfig().most_seqs, EngineConfig().most_tokens

    def __init__(self, config: EngineConfig) -> None:
        self.memory = HostMemory()
        self._threads = config.threads
        self.chosen = choose(config.isa)
        self.isa, self.isa_reason = self.chosen.isa, self.chosen.why
        self._without_native = without_native(config, self.isa)
        self.fast_attention = "reference" if self._without_native else "native"
        check_int8(config, self.isa, self.isa_reason)
        if config.advanced.prompt_attention == "cudnn":
            raise ValueError("advanced.prompt_attention='cudnn' with device=cpu: cuDNN is for CUDA; leave it out")
        log.info("kernels isa=%s chosen=%r", self.isa, str(self.chosen))
        if self._without_native and config.attention == "auto":
            log.info("attention runs in plain torch, which is slow reason=%r", self._without_native)

    def check(self, model: ModelLike) -> None:
        check_device(self.memory.device, model)

    def copy_engine(self) -> CopyEngine:
        return SyncCopies()

    def backend(self, name: str, capacity: StepCapacity) -> Backend:
        if name == "triton":  # in Triton's interpreter
            return triton_attention(self.memory.device, capacity)
        if self._without_native:
            raise ValueError(f'attention="native": {self._without_native}; attention="auto" selects the slow torch reference')
        return NativeAttention(self._threads, self.isa)

    def equip(self, model: Model, config: EngineConfig, backend: Backend) -> ExecutionPath | None:
        whole = model.streamed is None
        plain_weights(model.module)
        mark_sums(model, config)
        if config.weight_dtype == "int8":
            self._use_int8(model)
        if model.states is not None and self.isa != "torch":
            model.recurrence.kernels = RecurrenceKernels(self.isa, self._threads)
            model.recurrence.keeps_inputs = True
        try:
            computes = decide(model.module, model.name, model.asked, model.forward_transformers, self.isa, whole=whole)
        except Exception as error:
            raise UnsupportedModel(f"{model.name}: a step of the model failed: {in_one_line(error)}") from error
        if config.sums_in_tree and computes.arithmetic.startswith(torch_arithmetic()):
            raise UnsupportedModel(f"{model.name}: tree_sums needs the kernels of the CPU: {computes.why or self.isa_reason}")
        model.run_by(computes.decoder)
        if model.states is not None and model.recurrence.kernels is None:
            computes = scanned_in_chunks(computes)
        return computes

    def _use_int8(self, model: Model) -> None:
        try:
            use_int8(model.module, self.isa, kept=True)
        except NotServed as error:
            raise UnsupportedModel(f'{model.name}: weight_dtype="int8": {error}; leave it out') from error

    def graphs(self, model: ModelLike, config: EngineConfig, backend: Backend) -> Graphs | None:
        return None

    def sample(self, logits: torch.Tensor, batch: SamplingBatch) -> PendingTokens:
        return launch_draws(logits, batch, self.chosen.kernels)

    def mark(self) -> Any:
        return time.perf_counter()

    def seconds(self, began: Any, ended: Any) -> float:
        return float(ended - began)

    def reached(self, mark: Any) -> bool:
        return True

    def settle(self) -> None:
        pass

    def is_lost(self, error: BaseException) -> bool:
        return False


def mark_sums(model: Model, config: EngineConfig) -> None:
    """Mark the products of a whole model that are summed over slices. Those of several ranks are marked when they are
    loaded."""
    if config.tp == 1:
        whole_sums(model.module)
        if config.sums_in_tree:
            sum_slices(summed_products(model.module), Summed(SLICES, None))


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


def scanned_in_chunks(computes: ExecutionPath) -> ExecutionPath:
    """Return the path of a recurrent model without kernels: torch scans a row in chunks, so bits depend on where it is cut."""
    named = computes.arithmetic if BATCH in computes.arithmetic else computes.arithmetic + BATCH
    return computes._replace(arithmetic=named, why=computes.why or "torch scans in chunks", batch_invariant=False)


TRITON = TritonAttention, TritonByShape, TritonByWindow
"""backends whose arrays have addresses that a captured step can read"""


class CudaDevice:
    isa, isa_reason = "cuda", ""
    overlaps = copies_ahead = warms_up = True
    falls_back = False
    fast_attention = "triton"

    def __init__(self, config: EngineConfig, device: torch.device) -> None:
        if config.weight_dtype != "auto":
            raise ValueError(f"weight_dtype={config.weight_dtype!r} is for the CPU: leave it out with device={config.device}")
        if config.isa != "auto":
            raise ValueError(f"isa={config.isa!r} is for the CPU: leave it out with device={config.device}")
        if config.tree_sums and not config.exact:
            raise ValueError(f"tree_sums with device={config.device}: exact products alone are summed over slices; set exact")
        if not torch.cuda.is_available():
            raise ValueError(f"device={config.device}: torch {torch.__version__} finds no CUDA device here; device=cpu works")
        if device.index is not None:
            if device.index >= torch.cuda.device_count():
                raise ValueError(f"device={config.device}: the last one here is cuda:{torch.cuda.device_count() - 1}")
            torch.cuda.set_device(device.index)  # Triton and events take the current one
        self.memory = CudaMemory(device, device_hashes(), open_driver(device))
        self._kernel = draw_kernel()
        large = torch.cuda.get_device_properties(device).total_memory >= LARGE_BYTES
        self.sizes = (1024, 8192) if large else (256, 2048)

    def check(self, model: ModelLike) -> None:
        check_device(self.memory.device, model)
        if stores_latents(module_of(model)):
            raise ValueError(f"latent_kv=True with device={self.memory.device}: it needs the CPU; leave it out")

    def copy_engine(self) -> CopyEngine:
        return StreamCopies(self.memory.device)

    def backend(self, name: str, capacity: StepCapacity) -> Backend:
        if name == "native":
            raise ValueError(f'attention="native" runs on the CPU only, not on {self.memory.device}: use "auto"')
        return triton_attention(self.memory.device, capacity)

    def equip(self, model: Model, config: EngineConfig, backend: Backend) -> ExecutionPath | None:
        mark_sums(model, config)
        if config.tp > 1 and not config.exact:
            sum_over_ranks(model.module)
        mixed = "" if model.states is None else use_triton_mixers(model)
        if config.advanced.prompt_attention == "cudnn":
            use_cudnn_prompts(model, config, backend)
        fused = config.advanced.fused_layers
        fused = not config.routed_experts if fused is None else fused
        if config.exact or fused:
            library = config.advanced.library_products and not config.sums_in_tree
            path = equip_exact(model, backend, fused, library) if config.exact else fuse(model, backend)
            self.memory.trim()  # of what the checks have used
            return path._replace(arithmetic=path.arithmetic + mixed)
        return ExecutionPath(None, torch_arithmetic() + mixed, None, "") if mixed else None

    def graphs(self, model: ModelLike, config: EngineConfig, backend: Backend) -> Graphs | None:
        if not isinstance(backend, TRITON) or not config.cuda_graphs:
            return None
        if config.tp > 1:
            log.info("steps run without CUDA graphs model=%s reason='ranks exchange sums within a step'", model.name)
            return None
        if states_of(model) is not None and isinstance(model, Model) and model.recurrence.kernels is None:
            log.warning("steps run without CUDA graphs model=%s reason='torch scans recurrent layers row by row'", model.name)
            return None
        streamed = streamed_of(model)
        new_capture = partial(cuda_capture, torch.cuda.Stream())
        ring = None if streamed is None else streamed.ring
        return StepGraphs(model.forward, backend.capacity, self.memory.device, new_capture, ring)

    def sample(self, logits: torch.Tensor, batch: SamplingBatch) -> PendingTokens:
        return launch_draws(logits, batch, self._kernel, self.memory.send)

    def mark(self) -> Any:
        mark = torch.cuda.Event(enable_timing=True)
        mark.record()
        return mark

    def seconds(self, began: Any, ended: Any) -> float:
        ended.synchronize()
        return float(began.elapsed_time(ended)) / 1000

    def reached(self, mark: Any) -> bool:
        return bool(mark.query())

    def settle(self) -> None:
        torch.cuda.synchronize(self.memory.device)

    def is_lost(self, error: BaseException) -> bool:
        if not of_cuda(error):
            return False
        try:
            self.settle()
        except RuntimeError:
            return True
        return False


def of_cuda(error: BaseException | None) -> bool:
    """Return whether CUDA reported an error, or one that caused it; no memory left is none."""
    while error is not None:
        if isinstance(error, torch.AcceleratorError) or "CUDA error" in str(error) or "[CUDA]" in str(error):
            return not isinstance(error, torch.OutOfMemoryError)
        error = error.__cause__ or error.__context__
    return False


def use_triton_mixers(model: Model) -> str:
    """Let Triton's kernels compute the recurrent mixers of a model. Returns what that adds to the name of the arithmetic, ""
    without Triton: torch's functions stay."""
    try:
        model.recurrence.kernels = TritonMixers()
    except ImportError as error:
        log.warning("torch scans recurrent layers row by row, which is slow model=%s reason=%r", model.name, str(error))
        return ""
    return f"+{TritonMixers.arithmetic}"


def use_cudnn_prompts(model: Model, config: EngineConfig, backend: Backend) -> None:
    """Let cuDNN compute attention of long prompts, if it takes the model's heads and scores; otherwise log why tiles do."""
    try:
        if not isinstance(backend, TritonAttention):
            raise NotTaken(f"{backend.name} attention of layers of several kinds, or with windows")
        scores = plain_scores(model.asked)
        if scores is None or any(each.window for each in scores):
            raise NotTaken("layers with windows, soft caps or sinks")
        if config.kv_dtype != "auto":
            raise NotTaken(f"KV in {config.kv_dtype}")
        backend.use_prompts(cudnn_prompts(), model.geometry.dtype)
    except NotTaken as error:
        log.warning("prompts are computed by tiles, not by cuDNN model=%s reason=%r", model.name, str(error))


def check_device(device: torch.device, model: ModelLike) -> None:
    """Raise ValueError for a model on another kind of device."""
    if model.device.type != device.type:
        raise ValueError(f"{model.name} is on {model.device}, but device={device}: set device={model.device}")


def check_int8(config: EngineConfig, isa: str, isa_reason: str) -> None:
    """Raise ValueError if weights in eight bits were asked for and the CPU, or another option, does not allow them."""
    if config.weight_dtype != "int8":
        return
    if isa == "torch":
        raise ValueError(f'weight_dtype="int8" needs kernels, and there are none here: {isa_reason}')
    if config.weight_offload is not None:
        raise ValueError('weight_dtype="int8" with weight_offload: products read the codes, which stay in memory; leave it out')


def without_native(config: EngineConfig, isa: str) -> str:
    """Return why the CPU's attention kernel does not support a configuration; "" if it does."""
    if isa == "torch":
        return 'isa="torch" has no kernels'
    return "" if config.kv_dtype == "auto" else f"the kernel reads KV in the model's dtype, not in {config.kv_dtype}"


def draw_kernel() -> DrawKernel | None:
    """Return the module `rollout.engine.cuda.sampling`; None without Triton."""
    try:
        from rollout.engine.cuda import sampling
    except ImportError:
        return None
    return sampling


def fuse(model: Model, backend: Backend) -> ExecutionPath:
    """Run the layers of a model with `FusedDecoder`; if it does not support them, fuse only the norms. Either way, the last
    bits differ from the module's."""
    fused = f"{torch_arithmetic()}{FUSED_LAYERS}"
    decoder = _run_fused(model, backend, linear, sum_of_ranks)
    if isinstance(decoder, NotFused):
        fuse_norms(model.module)
        return ExecutionPath(None, fused, None, str(decoder))
    return ExecutionPath(decoder, fused, None, "")


def equip_exact(model: Model, backend: Backend, fused: bool, library: bool) -> ExecutionPath:
    """Let the products and norms of a model not depend on the batch. fused: run its layers with `FusedDecoder`, if it supports
    them. library: multiply by cuBLASLt, if its rows prove not to depend on their number. The arithmetic's name says what runs.
    Raises NotExact."""
    products = choose_products(model.module, library)
    make_exact(model.module, products.multiply)
    decoder = _run_fused(model, backend, products.multiply, sum_of_slices) if fused else None
    if isinstance(decoder, FusedDecoder):
        return ExecutionPath(decoder, products.name + FUSED_LAYERS, None, "")
    return ExecutionPath(None, products.name, None, str(decoder or ""))


def _run_fused(model: Model, backend: Backend, product: Linear, summed: SummedProduct) -> FusedDecoder | NotFused:
    """Let a decoder with such products, and such summed ones, run the layers of a model. Returns it, or why it does not support
    them."""
    try:
        if model.streamed is not None:
            raise NotFused("weight_offload moves its layers")
        if not isinstance(backend, TritonAttention) and not (isinstance(backend, TritonByWindow) and backend.even):
            raise NotFused(f"{backend.name} attention stores K and V itself")
        from rollout.engine.cuda import fused_kernels

        decoder = FusedDecoder(model.module, model.asked, fused_kernels, product, summed)
        with torch.inference_mode():
            decoder.check(model.forward_transformers, model.vocab_size)
    except NotFused as error:
        log.info("layers run through transformers, not fused model=%s reason=%r", model.name, str(error))
        return error
    model.run_by(decoder)
    return decoder


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
    chosen = {name: device.copies_ahead if asked is None else asked for name, asked in ahead.items()}
    return msgspec.structs.replace(
        config,
        block_size=config.block_tokens,
        max_num_seqs=seqs if config.max_num_seqs is None else config.max_num_seqs,
        max_batch_tokens=max(tokens, config.most_seqs) if config.max_batch_tokens is None else config.max_batch_tokens,
        overlap_steps=overlaps,
        drafts=(0 if overlaps and not device.overlaps else DRAFTS) if config.drafts is None else config.drafts,
        advanced=msgspec.structs.replace(tuning, **chosen),
    )
