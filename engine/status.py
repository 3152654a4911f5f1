"""Builds the status report of an engine, from which `rollout.metrics.meters` computes the metrics of docs/metrics.md."""

from __future__ import annotations

import time
from dataclasses import fields
from typing import Any, Protocol

import msgspec

from rollout.engine.scheduling.counters import Counters, stale_token_ratio
from rollout.engine.scheduling.scheduler import Scheduler
from rollout.engine.values import Mode, Refreshed
from rollout.engine.worker import ModelKernels, Worker

WINDOW_COUNTS = (
    "window_tokens", "window_layers", "block_bytes", "device_blocks", "device_used", "device_cached", "host_blocks",
    "host_used", "host_cached",
)  # fmt: skip
COUNTED = (*(field.name for field in fields(Counters)), "uptime_seconds", "weights.refreshes", "states.copied_bytes")
"""what only grows while the engine lives, as paths in the report, which names them in `counted`: a router still adds them up
when a replica is lost"""


class StatusSources(Protocol):
    """The parts of an engine that the status report reads."""

    worker: Worker
    scheduler: Scheduler
    counters: Counters
    started_at: float
    overlap: bool
    refreshes: int
    refreshed: Refreshed | None

    @property
    def version(self) -> int: ...
    @property
    def mode(self) -> Mode: ...


def status(engine: StatusSources) -> dict[str, Any]:
    """Return the status report of an engine, as JSON types."""
    scheduler, version, worker = engine.scheduler, engine.version, engine.worker
    size, dtype = worker.kv.block_size, str(worker.model.geometry.dtype).removeprefix("torch.")
    sequences = [seq for state in scheduler.state.groups.values() for seq in state.sequences.values()]
    return {
        "model": worker.model.name,
        "version": version,
        "attention": worker.backend.name,
        "arithmetic": worker.kernels.arithmetic,
        "isa": worker.device.isa,
        "isa_reason": worker.device.isa_reason,
        **_computes(worker.kernels),
        "dtype": dtype,
        "weight_dtype": dtype if worker.config.weight_dtype == "auto" else worker.config.weight_dtype,
        "overlap": engine.overlap,
        "graphs": worker.graphs is not None,
        "state": engine.mode.value,
        "asleep": sorted(worker.asleep),
        "groups": len(scheduler.state.groups),
        "running": len(scheduler.state.running),
        "waiting": len(scheduler.state.waiting),
        "offloaded": sum(any(b.device is None and not b.lost for b in seq.blocks) for seq in scheduler.state.waiting),
        "clients": dict(scheduler.state.table.of_client),
        "credit_s": {client: round(seconds, 3) for client, seconds in scheduler.state.credit.credits().items()},
        "weights": _weights(engine),
        "ranks": worker.ranks(),
        "kv": {
            "block_size": size,
            "block_bytes": worker.kv.block_bytes,
            "dtype": worker.kv.dtype_name,
            "stale_token_ratio": stale_token_ratio(sequences, size, version),
            **_block_counts(scheduler),
            "kept_children": len(scheduler.state.pinned),
            "kept_blocks": len(scheduler.state.pinned.blocks),
            "held_bytes": sum(
                store.used * size for store, size in zip(scheduler.state.kv_stores, _block_bytes(worker), strict=True)
            ),
        },
        "windows": _windows(engine),
        "states": _states(engine),
        **{name: count for name, count in msgspec.to_builtins(engine.counters).items()},
        "counted": COUNTED,
        "uptime_seconds": time.perf_counter() - engine.started_at,
        "copy_blocks_per_second": scheduler.state.rates.copy_blocks_per_second,
        "prefill_tokens_per_second": scheduler.state.rates.prefill_tokens_per_second,
    }


def _computes(kernels: ModelKernels) -> dict[str, Any]:
    """Return what runs the layers, why nothing better does, whether plain torch has the same bits, and whether a token's bits
    are the same in every batch (None: not compared)."""
    computes = kernels.path
    if computes is None:
        return {"computed_by": "module", "torch_bits": None, "batch_invariant": None, "computed_by_reason": ""}
    return {
        "computed_by": "module" if computes.decoder is None else type(computes.decoder).__name__,
        "torch_bits": computes.torch_bits,
        "batch_invariant": computes.batch_invariant,
        "computed_by_reason": computes.why,
    }


def _weights(engine: StatusSources) -> dict[str, Any]:
    last, weights = engine.refreshed, engine.worker.weights
    return {
        "version": engine.version,
        "refreshes": engine.refreshes,
        "stage_s": last.staged_seconds if last else 0.0,
        "pause_s": last.paused_seconds if last else 0.0,
        "bytes": last.bytes if last else 0,
        "base_bytes": weights.base.nbytes,
        "resident_bytes": weights.resident_bytes,
        "offloaded_bytes": weights.offloaded_bytes,
    }


def _states(engine: StatusSources) -> dict[str, int]:
    """Return the slots of recurrent state and their bytes; all 0 for a model without it."""
    slots, pages, counters = engine.scheduler.state.states, engine.worker.kv.states, engine.counters
    size = 0 if pages is None else pages.geometry.nbytes
    return {
        "bytes": size,
        "slots": 0 if slots is None else slots.store.device.size,
        "used": 0 if slots is None else slots.store.used,
        "snapshots": 0 if slots is None else len(slots.store.index),
        "host_slots": 0 if slots is None else slots.store.host.size,
        "host_used": 0 if slots is None else slots.store.host.used,
        "copied_bytes": counters.copied_states * size,
    }


def _block_bytes(worker: Worker) -> list[int]:
    """Return the bytes of a block in each store of KV."""
    return [pages.block_bytes for pages in (worker.kv, worker.kv.window) if pages is not None]


def _windows(engine: StatusSources) -> dict[str, int]:
    """Return the blocks of layers with a sliding window; all 0 for a model without them."""
    windows, pages = engine.scheduler.state.windows, engine.worker.kv.window
    if windows is None or pages is None:
        return dict.fromkeys(WINDOW_COUNTS, 0)
    store = windows.store
    return {
        "window_tokens": windows.tokens,
        "window_layers": pages.geometry.layers,
        "block_bytes": pages.block_bytes,
        "device_blocks": store.device.size,
        "device_used": store.used,
        "device_cached": len(store.cached),
        "host_blocks": store.host.size,
        "host_used": store.host.used - len(store.cached_host),
        "host_cached": len(store.cached_host),
    }


def _block_counts(scheduler: Scheduler) -> dict[str, int]:
    """Count blocks. total = free + used + cached in each pool."""
    store = scheduler.state.store
    mirrored = sum(block is not None and block.device is not None for block in store.host.holder)
    host_cached = sum(block is not None and block.owners == 0 for block in store.host.holder)
    return {
        "device_blocks": store.device.size,
        "device_free": store.device.free,
        "device_used": store.used,
        "device_cached": len(store.cached),
        "device_idle": len(store.idle),
        "host_blocks": store.host.size,
        "host_free": store.host.free,
        "host_used": store.host.used - host_cached,
        "host_cached": host_cached,
        "mirrored": mirrored,
        "indexed": len(store.index),
    }
