"""`rollout bench host`: milliseconds of the engine's own work in a decode step, without a model.

    step   plan │ copies: none │ build: batch, the attention's index arrays │ forward │ sample │ commit
           ──────────────────── host ──────────────────────────────────────           ──────────────────

The forward is a stand-in that costs nothing and is left out; so few logits come of it that the sampler's arithmetic does not
count either. Groups of 16 over 512 tokens decode; every sequence is there in each step that counts.

Then the same beside a device that is busy for DEVICE_MS a step, of which the host only waits for the end: how long a whole step
takes, one after the other and overlapped (`engine.pipeline`).
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import msgspec
import numpy as np
import torch

from engine.config import EngineConfig
from engine.devices import Backend, Device, NativeAttention
from engine.engine import Engine
from engine.forward.batch import Batch
from engine.forward.sampling import PendingTokens, SamplingBatch
from engine.kv.pages import KVGeometry, PagedKV
from engine.scheduling.plan import SampledTokens
from engine.types import Group, Sampling

NAME = "host"
SEQUENCES = (128, 256)
PROMPT_TOKENS, N, NEW_TOKENS = 512, 16, 256
PARTS = ("plan", "build", "sample", "commit")
DEVICE_MS = 2.0


class NoModel:
    """`engine.forward.model.ModelLike` with a forward of zeros. The attention's index arrays are made as for a model."""

    name = "no model"
    vocab_size = 32
    context = 4096
    q_heads = 1
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


class BesideDevice:
    """Draws as `device` does, and takes DEVICE_MS for each step, one after the other."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._free_at = 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._device, name)

    def sample(self, logits: torch.Tensor, batch: SamplingBatch) -> PendingTokens:
        draws = self._device.sample(logits, batch)
        ready = self._free_at = max(time.perf_counter(), self._free_at) + DEVICE_MS / 1e3

        def read() -> SampledTokens:
            while time.perf_counter() < ready:
                pass
            return draws.read()

        return PendingTokens(draws.tokens, read)


def beside_device(config: EngineConfig) -> Engine:
    engine = Engine(config, NoModel())
    slow: Any = BesideDevice(engine.worker.device)
    engine.worker.device = slow
    return engine


def measure(sequences: int, scale: float = 1.0, threads: int | None = None) -> dict[str, Any]:
    """Return medians over the steps in which all `sequences` decode. `scale`: factor on the tokens that each makes, at least
    32."""
    config = EngineConfig(
        dtype="float32", kv_tokens=sequences * 1024, max_num_seqs=sequences, cpu_offload_gib=0, threads=threads, drafts=0
    )
    engine = Engine(config, NoModel())
    alone = _decode(engine, scale)
    beside = {
        overlap: _decode(beside_device(msgspec.structs.replace(config, overlap_steps=overlap)), scale)
        for overlap in (False, True)
    }
    return {
        "workload": NAME,
        "sequences": sequences,
        "steps": len(alone),
        **{f"{name}_ms": _median_ms(alone, name) for name in ("host", *PARTS)},
        "attention": engine.worker.backend.name,
        "device_ms": DEVICE_MS,
        "step_ms": _median_ms(beside[False], "step"),
        "overlapped_step_ms": _median_ms(beside[True], "step"),
    }


def _median_ms(steps: list[dict[str, float]], part: str) -> float:
    return round(1e3 * statistics.median(step[part] for step in steps), 4)


def _decode(engine: Engine, scale: float) -> list[dict[str, float]]:
    """Return the seconds of the parts of each step in which all sequences decode."""
    sequences = engine.config.most_seqs
    new = max(32, round(NEW_TOKENS * scale))  # enough that the first group still runs when the last one forks
    random = np.random.default_rng(0)
    for i in range(sequences // N):
        prompt = random.integers(0, engine.vocab_size, PROMPT_TOKENS).astype(np.int32)
        engine.submit(Group(f"g{i}", prompt, Sampling(n=N, max_tokens=new, seed=i)))
    steps = []
    while engine.has_work:
        before, decoded = _seconds(engine), engine.counters.decode_tokens
        engine.step()
        if engine.counters.decode_tokens == decoded + sequences:
            steps.append({name: seconds - before[name] for name, seconds in _seconds(engine).items()})
    return steps


def _seconds(engine: Engine) -> dict[str, float]:
    """Return the seconds that the engine has spent so far. `host` is more than the sum of the parts: `Engine.step` itself."""
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
