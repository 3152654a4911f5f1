"""What an engine says about itself; the metrics of docs/metrics.md are made of it (`rollout.metrics.meters`)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from engine.scheduling.counters import stale_token_frac

if TYPE_CHECKING:
    from engine.engine import Engine


def status(engine: Engine) -> dict[str, Any]:
    """JSON-able."""
    scheduler, version, size = engine.scheduler, engine.version, engine.config.block_size
    sequences = [seq for state in scheduler.groups.values() for seq in state.sequences.values()]
    return {
        "model": engine.model.name,
        "version": version,
        "attention": engine.backend.name,
        "arithmetic": engine.arithmetic,
        "isa": engine.chosen.isa if engine.chosen else engine.model.device.type,
        "isa_reason": engine.chosen.why if engine.chosen else "",
        **_computes(engine),
        "dtype": str(engine.model.geometry.dtype).removeprefix("torch."),
        "overlap": engine.overlap,
        "graphs": engine.graphs is not None,
        "state": _state(engine),
        "groups": len(scheduler.groups),
        "running": len(scheduler.running),
        "waiting": len(scheduler.waiting),
        "offloaded": sum(any(b.device is None and not b.lost for b in seq.blocks) for seq in scheduler.waiting),
        "clients": dict(scheduler.running_of),
        "credit_s": {client: round(seconds, 3) for client, seconds in scheduler.shares.credits().items()},
        "weights": _weights(engine),
        "kv": {
            "block_size": size,
            "block_bytes": engine.kv.block_bytes,
            "stale_token_frac": stale_token_frac(sequences, size, version),
            **scheduler.store.counts(),
        },
        **{name: count for name, count in msgspec.to_builtins(engine.counters).items() if not name.startswith("_")},
    }


def _computes(engine: Engine) -> dict[str, Any]:
    """Who runs the layers, whether plain torch has the same bits (None: nobody looked), and why nothing better."""
    computes = getattr(engine.model, "computes", None)
    if computes is None:
        return {"computed_by": "module", "torch_bits": None, "computed_by_reason": ""}
    by = "module" if computes.decoder is None else type(computes.decoder).__name__
    return {"computed_by": by, "torch_bits": computes.torch_bits, "computed_by_reason": computes.why}


def _state(engine: Engine) -> str:
    if engine.asleep:
        return "asleep"
    if engine.weights.dropped:
        return "without weights"
    return "paused" if engine.paused else "running" if engine.scheduler.admitting else "draining"


def _weights(engine: Engine) -> dict[str, Any]:
    last = engine.refreshed
    return {
        "version": engine.version,
        "refreshes": engine.refreshes,
        "stage_s": last.staged_seconds if last else 0.0,
        "pause_s": last.paused_seconds if last else 0.0,
        "bytes": last.bytes if last else 0,
        "resident_bytes": engine.weights.resident_bytes,
        "offloaded_bytes": engine.weights.offloaded_bytes,
    }
