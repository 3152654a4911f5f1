"""What an engine says about itself; the metrics of docs/metrics.md are made of it (`rollout.metrics.meters`)."""

from __future__ import annotations

from typing import Any, Protocol

import msgspec

from engine.kv.store import BlockStore
from engine.scheduling.counters import Counters, stale_token_frac
from engine.scheduling.scheduler import Scheduler
from engine.types import Mode, Refreshed, Tag


class StatusSources(Protocol):
    """What an engine shows; the status only reads it."""

    model: Any
    device: Any
    backend: Any
    computes: Any
    arithmetic: str
    overlap: bool
    scheduler: Scheduler
    counters: Counters
    weights: Any
    kv: Any
    refreshes: int
    refreshed: Refreshed | None

    @property
    def version(self) -> int: ...
    @property
    def graphs(self) -> Any: ...
    @property
    def mode(self) -> Mode: ...
    @property
    def asleep(self) -> set[Tag]: ...


def status(engine: StatusSources) -> dict[str, Any]:
    """Collect everything there is to know about an engine, JSON-able."""
    scheduler, version, size = engine.scheduler, engine.version, engine.kv.block_size
    sequences = [seq for state in scheduler.groups.values() for seq in state.sequences.values()]
    return {
        "model": engine.model.name,
        "version": version,
        "attention": engine.backend.name,
        "arithmetic": engine.arithmetic,
        "isa": engine.device.isa,
        "isa_reason": engine.device.isa_reason,
        **_computes(engine),
        "dtype": str(engine.model.geometry.dtype).removeprefix("torch."),
        "overlap": engine.overlap,
        "graphs": engine.graphs is not None,
        "state": engine.mode.value,
        "asleep": sorted(engine.asleep),
        "groups": len(scheduler.groups),
        "running": len(scheduler.running),
        "waiting": len(scheduler.waiting),
        "offloaded": sum(any(b.device is None and not b.lost for b in seq.blocks) for seq in scheduler.waiting),
        "clients": dict(scheduler.running_table.of_client),
        "credit_s": {client: round(seconds, 3) for client, seconds in scheduler.shares.credits().items()},
        "weights": _weights(engine),
        "kv": {
            "block_size": size,
            "block_bytes": engine.kv.block_bytes,
            "dtype": engine.kv.dtype_name,
            "stale_token_frac": stale_token_frac(sequences, size, version),
            **_block_counts(scheduler.store),
            "kept_children": len(scheduler.children.kept),
            "kept_blocks": len(scheduler.children.kept.blocks),
        },
        **{name: count for name, count in msgspec.to_builtins(engine.counters).items() if not name.startswith("_")},
    }


def _computes(engine: StatusSources) -> dict[str, Any]:
    """Tell who runs the layers, whether plain torch has the same bits and a token has them whatever stands beside it (None:
    nobody looked), and why nothing better."""
    computes = engine.computes
    if computes is None:
        return {"computed_by": "module", "torch_bits": None, "batch_invariant": None, "computed_by_reason": ""}
    return {
        "computed_by": "module" if computes.decoder is None else type(computes.decoder).__name__,
        "torch_bits": computes.torch_bits,
        "batch_invariant": computes.batch_invariant,
        "computed_by_reason": computes.why,
    }


def _weights(engine: StatusSources) -> dict[str, Any]:
    last = engine.refreshed
    return {
        "version": engine.version,
        "refreshes": engine.refreshes,
        "stage_s": last.staged_seconds if last else 0.0,
        "pause_s": last.paused_seconds if last else 0.0,
        "bytes": last.bytes if last else 0,
        "base_bytes": engine.weights.base.nbytes,
        "resident_bytes": engine.weights.resident_bytes,
        "offloaded_bytes": engine.weights.offloaded_bytes,
    }


def _block_counts(store: BlockStore) -> dict[str, int]:
    """Count blocks. total = free + used + cached in each pool."""
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
