"""`rollout bench host`: milliseconds of the engine's own work in a decode step, without a model.

    step   plan │ copies: none │ build: batch, the attention's index arrays │ forward │ sample │ commit
           ──────────────────── host ──────────────────────────────────────           ──────────────────

The forward is a stand-in that costs nothing and is left out; so few logits come of it that the sampler's arithmetic does not
count either. Groups of 16 over 512 tokens decode; every sequence is there in each step that counts.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import numpy as np
import torch
from rich.console import Console

from engine.attention import Backend, NativeAttention
from engine.batch import Batch
from engine.config import EngineConfig
from engine.engine import Engine
from engine.kv import KVGeometry, PagedKV
from engine.request import Group, Sampling

NAME = "host"
SEQUENCES = (128, 256)
PROMPT_TOKENS, N, NEW_TOKENS = 512, 16, 256
PARTS = ("plan", "build", "sample", "commit")


class NoModel:
    """`engine.engine.ModelLike` with a forward of zeros. The attention's index arrays are made as for a model."""

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


def measure(sequences: int, scale: float = 1.0, threads: int | None = None) -> dict[str, Any]:
    """Medians over the steps in which all `sequences` decode. `scale`: factor on the tokens that each makes, at least 32."""
    config = EngineConfig(
        dtype="float32", kv_tokens=sequences * 1024, max_num_seqs=sequences, cpu_offload_gib=0, threads=threads
    )
    model = NoModel()
    engine = Engine(config, model)
    new = max(32, round(NEW_TOKENS * scale))  # enough that the first group still runs when the last one forks
    random = np.random.default_rng(0)
    for i in range(sequences // N):
        prompt = random.integers(0, model.vocab_size, PROMPT_TOKENS).astype(np.int32)
        engine.submit(Group(f"g{i}", prompt, Sampling(n=N, max_tokens=new, seed=i)))
    steps = []
    while engine.has_work:
        before, decoded = _seconds(engine, model), engine.counters.decode_tokens
        engine.step()
        if engine.counters.decode_tokens == decoded + sequences:
            steps.append({name: seconds - before[name] for name, seconds in _seconds(engine, model).items()})
    medians = {f"{name}_ms": round(1e3 * statistics.median(step[name] for step in steps), 4) for name in ("host", *PARTS)}
    return {"workload": NAME, "sequences": sequences, "steps": len(steps), **medians, "attention": engine.backend.name}


def _seconds(engine: Engine, model: NoModel) -> dict[str, float]:
    """What the engine has spent so far. `host` is more than the sum of the parts: `Engine.step` itself."""
    counters, index = engine.counters, model.index_seconds
    return {
        "host": counters.step_seconds - counters.model_seconds + index,
        "plan": counters.plan_seconds,
        "build": counters.build_seconds + index,
        "sample": counters.sample_seconds,
        "commit": counters.commit_seconds,
    }


def print_row(console: Console, row: dict[str, Any]) -> None:
    parts = ", ".join(f"{name} {row[f'{name}_ms']:.2f}" for name in PARTS)
    console.print(f"host: {row['host_ms']:.2f} ms a step of {row['sequences']} sequences ({parts}; {row['steps']} steps)")
