"""Steps built by hand: a batch of any rows over a KV pool of random numbers, computed by an engine's model and attention.

For batches that the scheduler would reach after minutes, or never: all sequences at one length, one batch with several tables.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Mapping
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from rollout.engine.cuda.graphs import cuda_capture
from rollout.engine.engine import Engine
from rollout.engine.forward.attention import Scores, located
from rollout.engine.forward.attention import prepared as with_metadata
from rollout.engine.forward.batch import Batch
from rollout.engine.kv.cells import keys_and_values
from rollout.engine.kv.pages import KVGeometry, PagedKV
from rollout.engine.memory import free_memory
from rollout.engine.scheduling.plan import SharedPrefix, plan_by_hand

PATTERN = 61
"""different blocks in a pool; a prime, so that neighbours in a table differ in every layout"""


def batch_of(
    engine: Engine,
    table: np.ndarray,
    context: int | np.ndarray,
    count: int | np.ndarray = 1,
    shared: np.ndarray | None = None,
    seed: int = 0,
) -> Batch:
    """Build a batch of R rows that compute the last `count` of their `context` tokens, with random ids, and the last one's
    logits.

    context, count: of all rows, or [R] of each. table: [R, M] int32, with M blocks for the longest row. shared: as in
    `Batch`."""
    rows, size = len(table), engine.config.block_tokens
    contexts, counts = np.broadcast_to(context, rows), np.broadcast_to(count, rows)
    assert table.shape[1] == -(-contexts.max() // size) and counts.min() >= 1 and (counts <= contexts).all()
    ids = np.random.default_rng(seed).integers(0, engine.model.vocab_size, (rows, counts.max()))
    groups = () if shared is None else tuple(SharedPrefix(*map(int, each)) for each in shared)
    plan = plan_by_hand(ids, contexts - counts, table, groups, seed)
    computed = ids[np.arange(ids.shape[1]) < counts[:, None]].astype(np.int32)
    plan = plan._replace(counts=counts.astype(np.int32), token_ids=computed)
    window = engine.worker.pools.windows
    if window is not None:
        plan = plan._replace(window_table=of_windows(table, (contexts - counts + 1 - window.tokens) // size, contexts, size))
    return Batch.build(plan, size, engine.worker.device.memory, engine.model.geometry.dtype)


def own_blocks(rows: int, context: int | np.ndarray, block_size: int) -> np.ndarray:
    """Make a table [rows, blocks] int32 without shared blocks, scattered over the first blocks of the pool. context: of all
    rows, or [rows] of each. Unused entries are 0."""
    blocks = -(-np.broadcast_to(context, rows) // block_size)
    table = np.zeros((rows, int(blocks.max())), np.int32)
    table[np.arange(table.shape[1]) < blocks[:, None]] = np.random.default_rng(0).permutation(int(blocks.sum()))
    return table


def of_windows(table: np.ndarray, behind: np.ndarray, contexts: np.ndarray, block_size: int) -> np.ndarray:
    """Return the block table of windows: the blocks of `table` that each row attends to, numbered anew, and 0 elsewhere.
    behind, contexts: [R] blocks that have left each window, and tokens."""
    column = np.arange(table.shape[1])
    held = (column >= behind[:, None]) & (column < -(-contexts // block_size)[:, None])
    made = np.zeros_like(table)
    made[held] = np.unique(table[held], return_inverse=True)[1]
    return made


@torch.inference_mode()
def prepared(engine: Engine, batch: Batch) -> Batch:
    """Return a batch with its attention metadata. On a GPU the next batch's metadata overwrites it."""
    return with_metadata(batch, engine.worker.backend, engine.worker.kv)


@torch.inference_mode()
def forward_of(engine: Engine, batch: Batch) -> torch.Tensor:
    """Compute the logits [S, vocabulary] of a prepared batch as a step of the engine does, from a CUDA graph if that would. The
    next call may overwrite them."""
    run = engine.worker.graphs if replayed(engine, batch) else engine.model
    assert run is not None
    return run.forward(batch, engine.worker.kv, engine.worker.backend)


def forward(engine: Engine, batch: Batch) -> torch.Tensor:
    return forward_of(engine, prepared(engine, batch))


def replayed(engine: Engine, batch: Batch) -> bool:
    """Whether a CUDA graph computes the forward of a batch."""
    return engine.worker.graphs is not None and engine.worker.graphs.covers(batch)


@torch.inference_mode()
def attention_alone(engine: Engine, batch: Batch) -> Callable[[Batch], torch.Tensor]:
    """Return a function that computes the attention of all layers for a prepared batch of this shape, from a CUDA graph if
    decode uses one."""
    geometry, device = engine.model.geometry, engine.model.device

    def random(heads: int, width: int) -> torch.Tensor:
        return torch.randn(batch.num_tokens, heads, width, dtype=geometry.dtype, device=device)

    kinds = {
        (q_heads, shape): (random(q_heads, shape.head_dim), random(*shape[:2]), random(shape.kv_heads, shape.value_dim))
        for (q_heads, *_), shape in zip(engine.model.heads, geometry.shapes, strict=True)
    }

    def layers(batch: Batch) -> torch.Tensor:
        for layer, ((q_heads, *_), shape) in enumerate(zip(engine.model.heads, geometry.shapes, strict=True)):
            query, key, value = kinds[q_heads, shape]
            at, of, pools = located(layer, batch, engine.worker.kv)
            window = engine.worker.pools.windows if pools.is_window else None
            scores = Scores(shape.head_dim**-0.5, 0 if window is None else window.tokens)
            out = engine.worker.backend.attend(at, query, key, value, of, pools, scores)
        return out

    if engine.worker.graphs is None:
        return torch.inference_mode()(layers)
    first = prepared(engine, batch)
    replay = cuda_capture(torch.cuda.Stream())(lambda: layers(first))
    # metadata of every batch is at the same addresses; `layers` keeps q, k and v alive for the graph
    return torch.inference_mode()(lambda _, layers=layers: replay())


def fill(kv: PagedKV) -> None:
    """Fill the pools with random numbers from a fixed seed."""
    if kv.window is not None:
        fill(kv.window)
    generator = torch.Generator(kv.data.device).manual_seed(0)
    if kv.geometry.fp8:
        base = _filled(kv.geometry, kv.block_size, kv.data.device, generator)
    else:
        base = kv.data.new_empty((PATTERN, *kv.data.shape[1:])).normal_(generator=generator)
    for start in range(0, len(kv.data), PATTERN):
        part = kv.data[start : start + PATTERN]
        part.copy_(base[: len(part)])


def _filled(geometry: KVGeometry, block_size: int, device: torch.device, generator: torch.Generator) -> torch.Tensor:
    """Return [PATTERN, ...] blocks of random numbers in fp8."""
    data = torch.zeros((PATTERN, *geometry.block_shape(block_size)), dtype=geometry.stored, device=device)
    slots = torch.arange(PATTERN * block_size, device=device)
    pool: Any = SimpleNamespace(data=data, geometry=geometry, block_size=block_size)
    for layer in range(geometry.layers):
        for cells in keys_and_values(pool, layer):
            shape = len(slots), cells.numbers.shape[1], cells.numbers.shape[3]
            cells.write(slots, torch.empty(shape, device=device).normal_(generator=generator))
    return data


def in_turn(
    engine: Engine, batches: Mapping[str, Batch], work: Callable[[Batch], object], repeat: int
) -> dict[str, list[float]]:
    """Time `work` for each batch, `repeat` times in turn. Returns milliseconds, without the preparation of the batch."""
    ready: dict[str, Batch] = {}

    def prepare(name: str) -> None:
        ready[name] = prepared(engine, batches[name])

    def run(name: str) -> None:
        work(ready[name])

    return milliseconds(engine.model.device, {name: partial(run, name) for name in batches}, repeat, prepare)


def milliseconds(
    device: torch.device,
    works: Mapping[str, Callable[[], object]],
    repeat: int,
    before: Callable[[str], object] = lambda name: None,
) -> dict[str, list[float]]:
    """Time each work `repeat` times in turn, after one round of warm-up. Returns milliseconds. before: called with the name
    before each timing."""
    times: dict[str, list[float]] = {name: [] for name in works}
    for turn in range(repeat + 1):
        for name, work in works.items():
            before(name)
            synchronize(device)
            started = time.perf_counter()
            work()
            synchronize(device)
            if turn:
                times[name].append(1e3 * (time.perf_counter() - started))
    return times


def median_ms(device: torch.device, work: Callable[[], object], repeat: int) -> float:
    return statistics.median(milliseconds(device, {"": work}, repeat)[""])


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def free_on(device: torch.device) -> int:
    """Return the free bytes for a pool on this device."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else free_memory()


def release(device: torch.device) -> None:
    """Free the memory of dropped engines, which contain reference cycles."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
