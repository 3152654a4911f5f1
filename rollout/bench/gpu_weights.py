"""Parts of `rollout.bench.gpu` about weights: refreshes while sequences run, and layers that live in host memory."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec
import numpy as np
import torch

from engine.config import WeightOffload
from engine.devices import device_of
from engine.engine import Engine
from engine.forward.model import Model
from engine.types import Group, Sampling
from engine.weights.offload import OffloadedModel
from rollout.bench.by_hand import batch_of, fill, forward_of, median_ms, own_blocks, prepared, release
from rollout.bench.gpu_bench import Bench, Rows
from rollout.bench.gpu_limit import ForwardCost, beside_limit
from rollout.bench.gpu_steps import SETTLE, blocks_of
from rollout.bench.inputs import lognormal

OFFLOAD = WeightOffload(group_size=4, num_in_group=1, prefetch_step=1)
GROUPS = 8
"""that run while weights are refreshed, with prompts of mixed lengths"""


def refresh(bench: Bench) -> Rows:
    """Measure refreshes from a state dict on the device, while sequences run."""
    engine = bench.engine(kv_tokens=bench.sizes.rows * 1024, max_num_seqs=bench.sizes.rows)
    new = {name: tensor.detach().clone() for name, tensor in bench.module.named_parameters()}
    plain = plain_copy_ms(bench.device, list(new.values()))
    lengths = lognormal(GROUPS, bench.sizes.prompt // 2, bench.sizes.prompt).tolist()
    for i, (ids, length) in enumerate(zip(bench.text.slices(0, GROUPS, bench.sizes.prompt), lengths, strict=True)):
        sampling = Sampling(n=bench.sizes.rows // GROUPS, max_tokens=256, ignore_eos=True, seed=i)
        engine.submit(Group(f"run{i}", ids[:length], sampling))
    for _ in range(SETTLE):
        engine.step()
    for turn in range(bench.sizes.refreshes):
        steady = step_ms(engine)
        refreshed = engine.refresh(new)
        after = step_ms(engine)
        assert engine.has_work, "no sequence was running"
        yield {
            "turn": turn,
            "bytes": refreshed.bytes,
            "seconds": refreshed.seconds,
            "staged_seconds": refreshed.staged_seconds,
            "paused_seconds": refreshed.paused_seconds,
            "copy_to_device_seconds": refreshed.bytes / bench.rates["to_device_per_second"],
            "plain_copy_seconds": plain / 1e3,
            "step_ms_before": steady,
            "step_ms_after": after,
        }


def step_ms(engine: Engine, steps: int = 8) -> float:
    """Return the mean milliseconds of the next steps, as they follow each other."""
    counters = engine.counters
    began, done = counters.step_seconds, counters.steps
    for _ in range(steps):
        engine.step()
    return 1e3 * (counters.step_seconds - began) / (counters.steps - done)


def plain_copy_ms(device: torch.device, tensors: list[torch.Tensor]) -> float:
    """Return the milliseconds of copying all tensors into others of the same kind, on the device."""
    targets = [torch.empty_like(tensor) for tensor in tensors]

    def work() -> None:
        for target, tensor in zip(targets, tensors, strict=True):
            target.copy_(tensor)

    return median_ms(device, work, 3)


def weights(bench: Bench) -> Rows:
    """Measure decode steps and prefills, of equal lengths and of mixed ones, with some layers in host memory. Beside them:
    what bounds them, the forward with all layers on the device or the copies, whichever takes longer."""
    rows, (prefills, tokens) = bench.sizes.rows, bench.sizes.prefill
    decodes = {"decode": np.full(rows, bench.sizes.contexts[0], np.int32), "decode, mixed lengths": bench.mixed(rows)}
    prompts = {
        "prefill": np.full(prefills, tokens, np.int32),
        "prefill, mixed lengths": lognormal(prefills, tokens // 2, tokens),
    }
    contexts = {**decodes, **prompts}
    room = max(int(blocks_of(each, 32).sum()) for each in contexts.values())
    config = {"max_num_seqs": rows, "kv_tokens": room * 32}

    def counts(name: str) -> np.ndarray:
        return np.ones(rows, np.int32) if name in decodes else prompts[name]

    def times(engine: Engine) -> dict[str, tuple[float, torch.Tensor]]:
        fill(engine.worker.kv)
        timed: dict[str, tuple[float, torch.Tensor]] = {}
        for name, each in contexts.items():
            batch = batch_of(engine, own_blocks(len(each), each, 32), each, count=counts(name))
            work: Callable[[], torch.Tensor] = partial(forward_of, engine, prepared(engine, batch))
            logits = work().clone()
            timed[name] = median_ms(bench.device, work, bench.sizes.turns), logits
        return timed

    resident = times(bench.engine(**config))
    limits = {
        name: beside_limit(bench, ForwardCost.of(counts(name), each), resident[name][0]) for name, each in contexts.items()
    }
    release(bench.device)
    try:
        yield from streamed_rows(bench, config, times, resident, limits)
    finally:
        bench.forget_module()  # its layers lie in the slots


def streamed_rows(
    bench: Bench,
    config: dict[str, Any],
    times: Callable[[Engine], dict[str, tuple[float, torch.Tensor]]],
    resident: dict[str, tuple[float, torch.Tensor]],
    limits: dict[str, dict[str, Any]],
) -> Rows:
    """Measure with layers in host memory. resident: milliseconds and logits with all on the device, limits: beside what the
    device allows."""
    streamed = OffloadedModel(bench.module, bench.name, OFFLOAD, device_of(bench.settings()).memory)
    assert len(streamed.indices) > streamed.ring.slots, "each layer has a slot of its own"
    engine = Engine(bench.settings(**config, weight_offload=OFFLOAD), Model(bench.module, bench.name, streamed))
    for name, (ms, logits) in times(engine).items():
        copies = 1e3 * streamed.offloaded_bytes / bench.rates["to_device_per_second"]
        limit = max(copies, resident[name][0])
        yield {
            "what": name,
            "ms": ms,
            "resident_ms": resident[name][0],
            "resident_limit_ms": limits[name]["limit_ms"],
            "copies_ms": copies,
            "limit_ms": limit,
            "fraction_of_limit": limit / ms,
            "same_logits": torch.equal(logits, resident[name][1]),
            "offloaded_bytes": streamed.offloaded_bytes,
            "resident_bytes": engine.weights.resident_bytes,
            **msgspec.to_builtins(OFFLOAD),
        }
