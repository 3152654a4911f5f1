"""`rollout bench host`: milliseconds of the engine's own work in a decode step, without a model.

    step   plan │ build: batch and index arrays of attention │ forward │ sample │ commit
           ───────────────────── host ────────────────────────           ───────────────

Groups of 16 (of fewer sequences: one group) over 512 tokens decode. Only steps in which all sequences decode count. The forward
is a stub that returns a few logits; its time is subtracted. `cpu_ms` is the CPU time of a whole step, the tenth percentile over
the steps: other work on the machine changes it least.

A second measurement adds a simulated device that is busy for DEVICE_MS per step: the length of a step without and with
overlapping (`rollout.engine.pipeline`).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import torch

from rollout.bench.harness import BenchSetup, Row
from rollout.bench.inputs import RandomText
from rollout.engine.config import EngineConfig
from rollout.engine.cpu.attention import NativeAttention
from rollout.engine.devices import Device
from rollout.engine.engine import Engine
from rollout.engine.forward.attention import Backend
from rollout.engine.forward.batch import Batch
from rollout.engine.forward.sampling import PendingTokens, SamplingBatch
from rollout.engine.kv.pages import KVGeometry, PagedKV
from rollout.engine.scheduling.plan import SampledTokens
from rollout.engine.values import Group, Sampling

SEQUENCES = (1, 8, 128, 256)
PROMPT_TOKENS, N, NEW_TOKENS = 512, 16, 256
PARTS = ("plan", "build", "sample", "commit")
DEVICE_MS = 2.0


class NoModel:
    """`rollout.engine.forward.model.ModelLike` with a forward of zeros. It builds the index arrays of attention like a real
    model."""

    name = "no model"
    vocab_size = 32
    context = 4096
    heads: Sequence[tuple[int, int, int, int]] = ((1, 1, 16, 16),)
    device = torch.device("cpu")
    geometry = KVGeometry(1, 1, 16, torch.float32)
    eos_token_ids: frozenset[int] = frozenset()

    def __init__(self) -> None:
        self.index_seconds = 0.0

    def forward(self, batch: Batch, kv: PagedKV, backend: Backend) -> torch.Tensor:
        started = time.perf_counter()
        if isinstance(backend, NativeAttention):
            starts, lens, table = batch.query_starts, batch.context_lens, batch.block_table
            backend.step(kv.data, starts, lens, table, batch.slots, 1, batch.shared)
        self.index_seconds += time.perf_counter() - started
        return torch.zeros(batch.num_logits, self.vocab_size)


class SimulatedDevice:
    """Samples like `device`, but each step takes DEVICE_MS, one after the other."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._free_at = 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._device, name)

    def sample(self, logits: torch.Tensor, batch: SamplingBatch) -> PendingTokens:
        pending = self._device.sample(logits, batch)
        ready = self._free_at = max(time.perf_counter(), self._free_at) + DEVICE_MS / 1e3

        def read() -> SampledTokens:
            while time.perf_counter() < ready:
                pass
            return pending.read()

        return PendingTokens(pending.tokens, read)


def with_device(config: EngineConfig) -> Engine:
    engine = Engine(config, NoModel())
    slow: Any = SimulatedDevice(engine.worker.device)
    engine.worker.device = slow
    return engine


def measure(setup: BenchSetup) -> Iterator[Row]:
    """Yield a row per number of sequences."""
    for sequences in SEQUENCES:
        yield measure_sequences(sequences, setup.scale, setup.threads)


def measure_sequences(sequences: int, scale: float = 1.0, threads: int | None = None) -> Row:
    """Return medians over the steps in which all `sequences` decode. scale: factor on their new tokens, at least 32."""
    config = EngineConfig(
        dtype="float32", kv_tokens=sequences * 1024, max_num_seqs=sequences, cpu_offload_gib=0, threads=threads, drafts=0
    )
    engine = Engine(config, NoModel())
    alone = _decode(engine, scale)
    beside = {
        overlap: _decode(with_device(msgspec.structs.replace(config, overlap_steps=overlap)), scale)
        for overlap in (False, True)
    }
    return {
        "sequences": sequences,
        "steps": len(alone),
        **{f"{name}_ms": _median_ms(alone, name) for name in ("host", *PARTS)},
        "cpu_ms": 1e3 * sorted(step["cpu"] for step in alone)[len(alone) // 10],
        "attention": engine.worker.backend.name,
        "device_ms": DEVICE_MS,
        "step_ms": _median_ms(beside[False], "step"),
        "overlapped_step_ms": _median_ms(beside[True], "step"),
    }


def _median_ms(steps: list[dict[str, float]], part: str) -> float:
    return 1e3 * statistics.median(step[part] for step in steps)


def _decode(engine: Engine, scale: float) -> list[dict[str, float]]:
    """Return the seconds of each part of each step in which all sequences decode."""
    sequences = engine.config.most_seqs
    new = max(32, round(NEW_TOKENS * scale))  # the first group must still run when the last one forks
    n = min(N, sequences)
    for i, prompt in enumerate(RandomText(engine.vocab_size).slices(0, sequences // n, PROMPT_TOKENS)):
        engine.submit(Group(f"g{i}", prompt, Sampling(n=n, max_tokens=new, seed=i)))
    steps = []
    while engine.has_work:
        before, decoded, began = _seconds(engine), engine.counters.decode_tokens, time.thread_time()
        engine.step()
        cpu = time.thread_time() - began
        if engine.counters.decode_tokens == decoded + sequences:
            steps.append({"cpu": cpu} | {name: seconds - before[name] for name, seconds in _seconds(engine).items()})
    return steps


def _seconds(engine: Engine) -> dict[str, float]:
    """Return the seconds spent so far. `host` also includes `Engine.step` itself."""
    model: Any = engine.model
    counters, index = engine.counters, model.index_seconds
    return {
        "step": counters.step_seconds,
        "host": counters.step_seconds - counters.model_seconds + index,
        "plan": counters.plan_seconds,
        "build": counters.build_seconds + index,
        "sample": counters.sample_seconds,
        "commit": counters.commit_seconds,
    }
