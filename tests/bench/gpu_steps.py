"""Parts of `tests.bench.gpu` that measure single steps: decode, prefill, exact layers, shared prefixes, offloaded layers."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec
import numpy as np
import torch

from rollout.bench.inputs import lognormal
from rollout.engine.build import device_of
from rollout.engine.config import AdvancedConfig, WeightOffload
from rollout.engine.cuda.exact import make_plain
from rollout.engine.engine import Engine
from rollout.engine.forward.batch import Batch
from rollout.engine.forward.model import Model
from rollout.engine.values import Group, Sampling
from rollout.engine.weights.offload import OffloadedModel
from tests.bench import sharing as sharing_by_hand
from tests.bench.by_hand import batch_of, fill, forward_of, median_ms, own_blocks, prepared, release, replayed
from tests.bench.gpu_bench import FUSED, SETTLE, Bench, ForwardCost, Rows, beside_limit, kept

OFFLOADS = (
    WeightOffload(group_size=4, num_in_group=1, prefetch_step=1),
    WeightOffload(group_size=4, num_in_group=1, prefetch_step=2),
    WeightOffload(group_size=4, num_in_group=1, prefetch_step=1, part="mlp"),
)


def decode(bench: Bench) -> Rows:
    """Measure decode of many sequences: the forward alone at several lengths, and whole steps of the engine, with and without
    overlap. All rows have the device's limit."""
    for overlap in (True, False):
        engine = bench.engine(kv_tokens=pool_tokens(bench), overlap_steps=overlap)
        if overlap:
            yield from kept(forwards(bench, engine))
        yield from kept(whole_steps(bench, engine))
        del engine
        release(bench.device)


def contexts_of(bench: Bench) -> dict[int | str, np.ndarray]:
    """Return contexts [rows] of a decode step, by name: equal ones, and lognormal ones."""
    rows = bench.sizes.rows
    same: dict[int | str, np.ndarray] = {context: np.full(rows, context, np.int32) for context in bench.sizes.contexts}
    return {**same, bench.mixture: bench.mixed(rows)}


def pool_tokens(bench: Bench) -> int:
    """Return the size of a KV pool for any of these contexts."""
    return bench.tokens_in_blocks(contexts_of(bench).values())


def forwards(bench: Bench, engine: Engine) -> Rows:
    rows, size = bench.sizes.rows, engine.config.block_tokens
    fill(engine.worker.kv)
    for name, contexts in contexts_of(bench).items():
        batch = prepared(engine, batch_of(engine, own_blocks(rows, contexts, size), contexts))
        logits = forward_of(engine, batch)
        work, ms = (
            ForwardCost.of(np.ones(rows), contexts),
            median_ms(bench.device, partial(forward_of, engine, batch), bench.sizes.turns),
        )
        yield {
            "what": "forward",
            "context": name,
            **beside_limit(bench, work, ms),
            "prepare_ms": median_ms(bench.device, partial(prepared, engine, batch), bench.sizes.turns),
            "sample_ms": median_ms(bench.device, partial(sample_of, engine, logits, batch), bench.sizes.turns),
            "rows": rows,
            "tokens": int(contexts.sum()),
            "attention": engine.worker.backend.name,
            "graphs": replayed(engine, batch),
        }


def exact(bench: Bench) -> Rows:
    """Measure the cost of `exact`: the forwards of `decode` with transformers' own layers, fused ones, exact ones, and both, by
    the library's products, if they are proven, and by Triton's."""
    if bench.device.type == "cpu":
        yield {"left_out": "exact is an option of CUDA"}
        return
    times: dict[tuple[str, int | str], float] = {}
    variants: dict[str, dict[str, Any]] = {
        "plain": {"advanced": AdvancedConfig(fused_layers=False)},
        "fused": {"advanced": FUSED},
        "exact_unfused": {"advanced": AdvancedConfig(fused_layers=False), "exact": True},
        "exact_triton": {"advanced": AdvancedConfig(fused_layers=True, library_products=False), "exact": True},
        "exact": {"advanced": FUSED, "exact": True},
    }
    for variant, options in variants.items():
        try:
            engine = bench.engine(kv_tokens=pool_tokens(bench), **options)
            for row in kept(forwards(bench, engine)):
                if "ms" in row:
                    times[variant, row["context"]] = row["ms"]
                yield {"variant": variant, **row}
            del engine
        finally:
            make_plain(bench.module)
            release(bench.device)
    for context in contexts_of(bench):
        if all((variant, context) in times for variant in variants):
            own = times["exact", context]
            ratios = {f"ratio_to_{variant}": own / times[variant, context] for variant in variants if variant != "exact"}
            yield {"summary": True, "context": context, **ratios}


def sample_of(engine: Engine, logits: torch.Tensor, batch: Batch) -> object:
    """Sample as a step does, and wait for the tokens."""
    return engine.worker.device.sample(logits, batch.sampling).read()


def whole_steps(bench: Bench, engine: Engine) -> Rows:
    """Measure `steps` whole steps in which all sequences decode. Prompts have lognormal lengths, at most `prompt`."""
    rows, prompt, wanted = bench.sizes.rows, bench.sizes.prompt, bench.sizes.steps
    longest, lengths = max(bench.sizes.contexts) - prompt, lognormal(rows, prompt // 2, prompt)
    for i, (ids, length) in enumerate(zip(bench.text.slices(0, rows, prompt), lengths.tolist(), strict=True)):
        engine.submit(Group(f"decode{i}", ids[:length], Sampling(n=1, max_tokens=longest, ignore_eos=True, seed=i)))
    seconds: list[float] = []
    read, marks, decoding = [], [], 0
    drawn_before = engine.counters.generated_tokens
    try:
        while len(seconds) < wanted:
            before, held = msgspec.to_builtins(engine.counters), int(lengths.sum())
            held += engine.counters.generated_tokens - drawn_before
            started = time.perf_counter()
            if engine.step() or not engine.has_work:
                raise RuntimeError(f"samples ended after {len(seconds)} of {wanted} steps of {rows} sequences")
            elapsed = time.perf_counter() - started
            decoding += engine.counters.decode_tokens == before["decode_tokens"] + rows
            if decoding > SETTLE:
                seconds.append(elapsed)
                read.append(held)
                marks.append((before, msgspec.to_builtins(engine.counters)))
    finally:
        for i in range(rows):
            engine.abort(f"decode{i}")
        engine.step()  # finishes the step in flight
    parts = ("plan_seconds", "build_seconds", "commit_seconds", "model_seconds", "sample_seconds")
    figures = {
        name.replace("_seconds", "_ms"): 1e3 * statistics.median(after[name] - before[name] for before, after in marks)
        for name in parts
    }
    work = ForwardCost(rows, rows, statistics.mean(read), statistics.mean(read))
    yield {
        "what": "engine",
        "overlap": engine.overlap,
        **beside_limit(bench, work, 1e3 * statistics.median(seconds)),
        "host_ms": figures["plan_ms"] + figures["build_ms"] + figures["commit_ms"],
        **figures,
        "tokens_per_second": rows / statistics.median(seconds),
        "steps": len(seconds),
    }


def prefill(bench: Bench) -> Rows:
    """Measure forwards of whole prompts, of equal and lognormal lengths, with CUDA graphs and without."""
    prompts = {f"{rows} x {tokens}": np.full(rows, tokens, np.int32) for rows, tokens in bench.sizes.prompts}
    prompts[f"{bench.sizes.mixed_prompts} x {bench.mixture}"] = bench.mixed(bench.sizes.mixed_prompts)
    most = max(int(lengths.sum()) for lengths in prompts.values())
    room = {"kv_tokens": bench.tokens_in_blocks(prompts.values()), "max_batch_tokens": most}
    times: dict[tuple[str, str], float] = {}
    variants: dict[str, dict[str, Any]] = {"paged": {}, "without_graphs": {"cuda_graphs": False}}
    for variant, options in variants.items():
        for row in kept(prefills(bench, prompts, {**room, **options, "warm_up": False})):
            if "ms" in row:
                times[variant, row["prompts"]] = row["ms"]
            yield {"variant": variant, **row}
        release(bench.device)
    for name in prompts:
        if own := times.get(("paged", name)):
            others = {variant: times[variant, name] for variant in variants if (variant, name) in times and variant != "paged"}
            yield {"summary": True, "prompts": name, **{f"{each}_ratio_to_paged": own / ms for each, ms in others.items()}}


def prefills(bench: Bench, prompts: dict[str, np.ndarray], options: dict[str, Any]) -> Rows:
    engine = bench.engine(**options)
    fill(engine.worker.kv)
    for name, lengths in prompts.items():
        table = own_blocks(len(lengths), lengths, engine.config.block_tokens)
        batch = prepared(engine, batch_of(engine, table, lengths, count=lengths))
        ms = median_ms(bench.device, partial(forward_of, engine, batch), bench.sizes.turns)
        yield {
            "prompts": name,
            **beside_limit(bench, ForwardCost.of(lengths, lengths), ms),
            "tokens": int(lengths.sum()),
            "tokens_per_second": 1e3 * int(lengths.sum()) / ms,
            "graphs": replayed(engine, batch),
            "attention": engine.arithmetic.partition("+")[2],
        }


def sharing(bench: Bench) -> Rows:
    """Run `python -m tests.bench sharing` with these shapes. Each step has the device's limit."""
    for shape in bench.sizes.shapes:
        rows = sharing_by_hand.measure(bench.model(), bench.settings(), shape, bench.sizes.turns)
        prefixes, contexts = shape.lengths(bench.block)
        every = ForwardCost.of(np.ones(shape.rows), contexts)
        once = every._replace(read=every.read - bench.block * int(prefixes.sum()) * (shape.children - 1))
        for row in kept(rows):
            if "variant" in row:
                row |= beside_limit(bench, once if row["variant"] == "shared" else every, row["step_ms"])
            yield row
        release(bench.device)


def weights(bench: Bench) -> Rows:
    """Measure decode steps and prefills with some layers in host memory, of equal and lognormal lengths. Their limit is the
    forward with all layers on the device or the copies, whichever takes longer."""
    rows, (prefills, tokens) = bench.sizes.rows, bench.sizes.prefill
    decodes = {"decode": np.full(rows, bench.sizes.contexts[0], np.int32), "decode, mixed lengths": bench.mixed(rows)}
    prompts = {
        "prefill": np.full(prefills, tokens, np.int32),
        "prefill, mixed lengths": lognormal(prefills, tokens // 2, tokens),
    }
    contexts = {**decodes, **prompts}
    config = {"max_num_seqs": rows, "kv_tokens": bench.tokens_in_blocks(contexts.values())}

    def counts(name: str) -> np.ndarray:
        return np.ones(rows, np.int32) if name in decodes else prompts[name]

    def times(engine: Engine) -> dict[str, tuple[float, torch.Tensor]]:
        fill(engine.worker.kv)
        timed: dict[str, tuple[float, torch.Tensor]] = {}
        for name, each in contexts.items():
            batch = batch_of(engine, own_blocks(len(each), each, bench.block), each, count=counts(name))
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
        for offload in OFFLOADS:
            if offload.prefetch_step >= bench.config.num_hidden_layers // offload.group_size:
                yield {"left_out": f"prefetch_step={offload.prefetch_step}: each offloaded layer would have a slot of its own"}
                continue
            yield from streamed_rows(bench, config, offload, times, resident, limits)
    finally:
        bench.forget_module()  # its layers are views of the slots


def streamed_rows(
    bench: Bench,
    config: dict[str, Any],
    offload: WeightOffload,
    times: Callable[[Engine], dict[str, tuple[float, torch.Tensor]]],
    resident: dict[str, tuple[float, torch.Tensor]],
    limits: dict[str, dict[str, Any]],
) -> Rows:
    """Measure with layers in host memory. resident: milliseconds and logits with all layers on the device. limits: their rows
    from `beside_limit`."""
    bench.forget_module()  # the engine before has moved its tensors into one region: views of it would keep the layers
    streamed = OffloadedModel(bench.module, bench.name, offload, device_of(bench.settings()).memory)
    assert len(streamed.indices) > streamed.ring.slots, "each layer has a slot of its own"
    engine = Engine(bench.settings(**config, weight_offload=offload), Model(bench.module, bench.name, streamed))
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
            **{name: value for name, value in msgspec.to_builtins(offload).items() if name != "part"},
            "offload_part": offload.part,
        }
