"""The CPU as a device (`rollout.engine.devices.Device`)."""

from __future__ import annotations

import logging
import time
from typing import Any

import torch

from rollout.engine.config import EngineConfig
from rollout.engine.cpu.attention import NativeAttention
from rollout.engine.cpu.build import NativeUnavailable
from rollout.engine.cpu.exact_modules import NotServed
from rollout.engine.cpu.int8_modules import plain_weights, use_int8
from rollout.engine.cpu.kernels import choose
from rollout.engine.cpu.recurrence import RecurrenceKernels
from rollout.engine.cpu.select_path import decide
from rollout.engine.forward.arithmetic import torch_arithmetic
from rollout.engine.forward.attention import Backend, CannotAttend, StepCapacity
from rollout.engine.forward.interface import ExecutionPath, ModelLike
from rollout.engine.forward.load import in_one_line
from rollout.engine.forward.model import Model, UnsupportedModel
from rollout.engine.forward.sampling import PendingTokens, SamplingBatch, launch_draws
from rollout.engine.forward.summed import mark_sums
from rollout.engine.kv.copies import CopyEngine, SyncCopies
from rollout.engine.memory import HostMemory
from rollout.engine.values.arithmetic import BATCH

log = logging.getLogger(__name__)


class CpuDevice:
    """Runs the kernels of its instruction set, in host memory."""

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
        log.info("kernels isa=%s chosen=%r", self.isa, str(self.chosen))
        if self._without_native and config.attention == "auto":
            log.info("attention runs in plain torch, which is slow reason=%r", self._without_native)

    def check(self, model: ModelLike) -> None:
        pass

    def copy_engine(self) -> CopyEngine:
        return SyncCopies()

    def backend(self, name: str, capacity: StepCapacity) -> Backend:
        if name == "triton":  # in Triton's interpreter
            from rollout.engine.cuda.attention import triton_attention

            return triton_attention(self.memory.device, capacity)
        if self._without_native:
            raise ValueError(f'attention="native": {self._without_native}; attention="auto" selects the slow torch reference')
        try:
            return NativeAttention(self._threads, self.isa)
        except NativeUnavailable as error:
            raise CannotAttend(str(error)) from error

    def equip(self, model: Model, config: EngineConfig, backend: Backend) -> ExecutionPath | None:
        whole = model.streamed is None
        plain_weights(model.module)
        mark_sums(model.module, config)
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

    def graphs(self, model: ModelLike, config: EngineConfig, backend: Backend) -> None:
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


def scanned_in_chunks(computes: ExecutionPath) -> ExecutionPath:
    """Return the path of a recurrent model without kernels: torch scans a row in chunks, so bits depend on where it is cut."""
    named = computes.arithmetic if BATCH in computes.arithmetic else computes.arithmetic + BATCH
    return computes._replace(arithmetic=named, why=computes.why or "torch scans in chunks", batch_invariant=False)


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
