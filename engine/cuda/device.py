"""A CUDA GPU as a device (`rollout.engine.devices.Device`)."""

from __future__ import annotations

import logging
from functools import partial
from typing import Any

import torch
from torch.nn.functional import linear

from rollout.engine.config import EngineConfig
from rollout.engine.cuda.attention import TritonAttention, TritonByShape, TritonByWindow, triton_attention
from rollout.engine.cuda.copies import StreamCopies
from rollout.engine.cuda.digests import device_hashes
from rollout.engine.cuda.exact import FUSED_LAYERS, make_exact, sum_of_slices
from rollout.engine.cuda.fused import FusedDecoder, NotFused, SummedProduct
from rollout.engine.cuda.graphs import StepGraphs, cuda_capture
from rollout.engine.cuda.library_products import choose_products
from rollout.engine.cuda.memory import CudaMemory
from rollout.engine.cuda.norms import fuse_norms
from rollout.engine.cuda.proofs import Linear
from rollout.engine.cuda.recurrence import TritonMixers
from rollout.engine.cuda.reduce import sum_of_ranks, sum_over_ranks
from rollout.engine.cuda.regions import open_driver
from rollout.engine.forward.arithmetic import torch_arithmetic
from rollout.engine.forward.attention import Backend, StepCapacity
from rollout.engine.forward.interface import ExecutionPath, ModelLike, module_of, states_of, streamed_of
from rollout.engine.forward.latent import stores_latents
from rollout.engine.forward.model import Model
from rollout.engine.forward.sampling import DrawKernel, PendingTokens, SamplingBatch, launch_draws
from rollout.engine.forward.summed import mark_sums
from rollout.engine.kv.copies import CopyEngine

LARGE_BYTES = 64 << 30
"""memory of a device that needs many rows to be busy and has room for their KV"""

log = logging.getLogger(__name__)

TRITON = TritonAttention, TritonByShape, TritonByWindow
"""backends whose arrays have addresses that a captured step can read"""


class CudaDevice:
    """Runs Triton's kernels, or torch's, and replays captured steps."""

    isa, isa_reason = "cuda", ""
    overlaps = copies_ahead = warms_up = True
    falls_back = False
    fast_attention = "triton"

    def __init__(self, config: EngineConfig) -> None:
        device = torch.device(config.device)
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
        self.memory = CudaMemory(device, device_hashes(device), open_driver(device))
        self._kernel = draw_kernel()
        large = torch.cuda.get_device_properties(device).total_memory >= LARGE_BYTES
        self.sizes = (1024, 8192) if large else (256, 2048)

    def check(self, model: ModelLike) -> None:
        if stores_latents(module_of(model)):
            raise ValueError(f"latent_kv=True with device={self.memory.device}: it needs the CPU; leave it out")

    def copy_engine(self) -> CopyEngine:
        return StreamCopies(self.memory.device)

    def backend(self, name: str, capacity: StepCapacity) -> Backend:
        if name == "native":
            raise ValueError(f'attention="native" runs on the CPU only, not on {self.memory.device}: use "auto"')
        return triton_attention(self.memory.device, capacity)

    def equip(self, model: Model, config: EngineConfig, backend: Backend) -> ExecutionPath | None:
        mark_sums(model.module, config)
        if config.tp > 1 and not config.exact:
            sum_over_ranks(model.module)
        mixed = "" if model.states is None else use_triton_mixers(model)
        fused = config.advanced.fused_layers
        fused = not config.routed_experts if fused is None else fused
        if config.exact or fused:
            library = config.advanced.library_products and not config.sums_in_tree
            path = equip_exact(model, backend, fused, library) if config.exact else fuse(model, backend)
            self.memory.trim()  # of what the checks have used
            return path._replace(arithmetic=path.arithmetic + mixed)
        return ExecutionPath(None, torch_arithmetic() + mixed, None, "") if mixed else None

    def graphs(self, model: ModelLike, config: EngineConfig, backend: Backend) -> StepGraphs | None:
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
