"""The parts of `rollout.bench.gpu`: each takes a `Bench` and yields rows."""

from __future__ import annotations

import statistics
import time
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import msgspec
import numpy as np
import torch
import transformers

from engine.config import WeightOffload
from engine.cuda.exact import make_plain
from engine.devices import device_of
from engine.engine import Engine
from engine.forward.batch import Batch
from engine.forward.model import Model
from engine.kv.block import Moves, Spans
from engine.kv.copies import Copied
from engine.types import Group, Sampling
from engine.weights.offload import Streamed
from rollout.bench import sharing as sharing_by_hand
from rollout.bench.against import parse, peer
from rollout.bench.by_hand import batch_of, fill, forward_of, median_ms, own_blocks, prepared, release, replayed
from rollout.bench.errors import BenchFailed
from rollout.bench.gpu_bench import Bench
from rollout.bench.gpu_limit import Work, beside_limit
from rollout.bench.gpu_memory import ipc, naps
from rollout.bench.lengths import lognormal
from rollout.bench.runner import one_run, peer_run, peer_setup
from rollout.bench.target import EngineTarget
from rollout.bench.workloads import Workload

Rows = Iterator[dict[str, Any]]
OFFLOAD = WeightOffload(group_size=4, num_in_group=1, prefetch_step=1)
GROUPS = 8
"""that run while weights are refreshed, with prompts of mixed lengths"""
SETTLE = 8
"""decode steps that do not count yet"""
PEER_START_S, PEER_RUN_S = 120.0, 150.0


def machine(bench: Bench) -> Rows:
    """Describe the machine and the model: what everything else is compared with."""
    cuda = bench.device.type == "cuda"
    yield {
        "device": torch.cuda.get_device_name(bench.device) if cuda else "cpu",
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "dtype": bench.dtype,
        "weight_bytes": sum(parameter.nbytes for parameter in bench.module.parameters()),
        "kv_dtype": bench.kv_dtype,
        "kv_bytes_per_token": bench.kv_bytes(1),
        **bench.rates,
    }


def decode(bench: Bench) -> Rows:
    """Measure a decode step of many sequences: the forward alone at some lengths, and whole steps of the engine, overlapped and
    one after the other; beside the time that reading the weights and the KV takes."""
    for overlap in (True, False):
        engine = bench.engine(kv_tokens=pool_tokens(bench), overlap_steps=overlap)
        if overlap:
            yield from kept(forwards(bench, engine))
        yield from kept(whole_steps(bench, engine))
        del engine
        release(bench.device)


def kept(rows: Rows) -> Rows:
    """Yield the rows. What goes wrong is one with an `error`, and ends nothing that comes after."""
    try:
        yield from rows
    except Exception as error:
        traceback.print_exc()
        yield {"error": f"{type(error).__name__}: {error}"}


def contexts_of(bench: Bench) -> dict[int | str, np.ndarray]:
    """Return contexts [rows] of a decode step, by name: all the same, and as rollouts have them."""
    rows = bench.sizes.rows
    same: dict[int | str, np.ndarray] = {context: np.full(rows, context, np.int32) for context in bench.sizes.contexts}
    return {**same, bench.mixture: bench.mixed(rows)}


def pool_tokens(bench: Bench) -> int:
    """Return the tokens of KV that hold the rows of any of these contexts."""
    return max(int(blocks_of(contexts, 32).sum()) for contexts in contexts_of(bench).values()) * 32


def blocks_of(contexts: np.ndarray, block_size: int) -> np.ndarray:
    return -(-contexts // block_size)


def forwards(bench: Bench, engine: Engine) -> Rows:
    rows, size = bench.sizes.rows, engine.config.block_size
    fill(engine.kv)
    for name, contexts in contexts_of(bench).items():
        batch = prepared(engine, batch_of(engine, own_blocks(rows, contexts, size), contexts))
        logits = forward_of(engine, batch)
        work, ms = (
            Work.of(np.ones(rows), contexts),
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
            "attention": engine.backend.name,
            "graphs": replayed(engine, batch),
        }


def exact(bench: Bench) -> Rows:
    """Measure what `exact` costs: the same forwards as in `decode`, by transformers' own layers, by fused ones and by exact
    ones."""
    if bench.device.type == "cpu":
        yield {"left_out": "exact is an option of CUDA"}
        return
    times: dict[tuple[str, int | str], float] = {}
    for variant, options in {
        "plain": {"fused_layers": False},
        "fused": {"fused_layers": True},
        "exact": {"fused_layers": False, "exact": True},
    }.items():
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
        if all((variant, context) in times for variant in ("plain", "fused", "exact")):
            own = times["exact", context]
            ratios = {f"ratio_to_{variant}": own / times[variant, context] for variant in ("plain", "fused")}
            yield {"summary": True, "context": context, **ratios}


def sample_of(engine: Engine, logits: torch.Tensor, batch: Batch) -> object:
    """Draw as a step does, and wait for the draws."""
    return engine.device.sample(logits, batch.sampling).read()


def whole_steps(bench: Bench, engine: Engine) -> Rows:
    """Measure whole steps: sequences with a prompt each, of lengths up to `prompt`, run until all decode, then `steps` of
    those."""
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
        engine.step()  # what is in flight lands
    parts = ("plan_seconds", "build_seconds", "commit_seconds", "model_seconds", "sample_seconds")
    figures = {
        name.replace("_seconds", "_ms"): 1e3 * statistics.median(after[name] - before[name] for before, after in marks)
        for name in parts
    }
    work = Work(rows, rows, statistics.mean(read), statistics.mean(read))
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
    """Measure forwards of whole prompts, alike and of mixed lengths: from graphs where these are, without graphs, and with the
    prompts of large steps left to `varlen_attn`."""
    prompts = {f"{rows} x {tokens}": np.full(rows, tokens, np.int32) for rows, tokens in bench.sizes.prompts}
    prompts[f"{bench.sizes.mixed_prompts} x {bench.mixture}"] = bench.mixed(bench.sizes.mixed_prompts)
    most = max(int(lengths.sum()) for lengths in prompts.values())
    room = {"kv_tokens": max(int(blocks_of(each, 32).sum()) for each in prompts.values()) * 32, "max_batch_tokens": most}
    times: dict[tuple[str, str], float] = {}
    variants: dict[str, dict[str, Any]] = {
        "paged": {}, "without_graphs": {"cuda_graphs": False}, "varlen": {"prefill_attention": "varlen"},
    }  # fmt: skip
    for variant, options in variants.items():
        if variant == "varlen" and bench.device.type == "cpu":
            yield {"left_out": "varlen_attn runs on CUDA only"}
            continue
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
    fill(engine.kv)
    for name, lengths in prompts.items():
        table = own_blocks(len(lengths), lengths, engine.config.block_size)
        batch = prepared(engine, batch_of(engine, table, lengths, count=lengths))
        ms = median_ms(bench.device, partial(forward_of, engine, batch), bench.sizes.turns)
        yield {
            "prompts": name,
            **beside_limit(bench, Work.of(lengths, lengths), ms),
            "tokens": int(lengths.sum()),
            "tokens_per_second": 1e3 * int(lengths.sum()) / ms,
            "graphs": replayed(engine, batch),
            "attention": engine.arithmetic.partition("+")[2],
        }


def sharing(bench: Bench) -> Rows:
    """Measure as `rollout bench sharing` does, for these shapes, each step beside its limit."""
    for shape in bench.sizes.shapes:
        rows = sharing_by_hand.measure(bench.model(), bench.settings(), shape, bench.sizes.turns)
        prefixes, contexts = shape.lengths(32)
        every = Work.of(np.ones(shape.rows), contexts)
        once = every._replace(read=every.read - 32 * int(prefixes.sum()) * (shape.children - 1))
        for row in kept(rows):
            if "variant" in row:
                row |= beside_limit(bench, once if row["variant"] == "shared" else every, row["step_ms"])
            yield row
        release(bench.device)


def workloads(bench: Bench) -> Rows:
    """Run named workloads through the engine, as they are and with mixed lengths, in turn with another one in a process of its
    own."""
    for workload in bench.sizes.workloads:
        yield from kept(in_turn(bench, [workload, workload.mixture()]))


def in_turn(bench: Bench, kinds: list[Workload]) -> Rows:
    """Run the kinds of one workload in our engine, then in the others."""
    speeds: dict[str, float] = {}
    for workload in kinds:
        at_once = min(bench.sizes.workload_rows, workload.prompts * workload.n)
        ours = run_workload(bench, workload, kv_tokens=workload.kv_tokens(32), max_num_seqs=at_once)
        speeds[workload.name] = ours["tokens_per_second"]
        yield ours
    for name, python in parse(bench.against).items():
        done = 0
        try:
            for workload, theirs, version in other_engine(bench, kinds, name, python):
                yield theirs
                speed = speeds[workload.name] / theirs["tokens_per_second"]
                yield {"workload": workload.name, "summary": True, f"ratio_to_{name}": speed, "peer": version}
                done += 1
        except (BenchFailed, OSError) as error:
            yield from ({"workload": workload.name, "error": f"{name}: {error}"} for workload in kinds[done:])


def other_engine(bench: Bench, kinds: list[Workload], name: str, python: str) -> Iterator[tuple[Workload, dict[str, Any], str]]:
    """Run a workload in another engine, and yield a row for each of its `kinds`, with the version of that engine. Raises
    PeerFailed; BenchFailed for samples that are not what was asked for; OSError."""
    settings = bench.settings(kv_tokens=kinds[0].kv_tokens(32))
    with bench.folder() as folder:
        setup = peer_setup(kinds[0], msgspec.structs.replace(settings, model=folder), random_weights=True)
        with peer(name, python, setup, min(PEER_START_S, max(1.0, bench.seconds_left))) as one:
            for workload in kinds:
                limit = min(PEER_RUN_S, max(1.0, bench.seconds_left))
                yield workload, peer_run(workload, bench.text, one, 0, limit), one.version


def run_workload(
    bench: Bench, workload: Workload, change: Callable[[Engine], None] = lambda engine: None, **config: Any
) -> dict[str, Any]:
    """Run a workload in a warm engine of its own: captures are no part of the figures. `change`: something else about the
    engine."""
    engine = bench.engine(**config)
    change(engine)
    target = EngineTarget(engine)
    for _ in target.generate(bench.text.slices(10**6, 1, 64), Sampling(n=2, max_tokens=8, ignore_eos=True)):
        pass
    row = one_run(workload, bench.text, target, 0)
    del engine, target
    release(bench.device)
    return row


def offload(bench: Bench) -> Rows:
    """Measure KV for half of the need, the rest in host memory. Beside it the same without the copies, over blocks that hold
    anything: if the schedule is the same, which `steps` and `offloads` show, the difference is what the copies cost. Then a
    roomy pool, no copies ahead of need, no offload. The first two with mixed lengths besides."""
    yield from offloaded(bench, bench.sizes.pressure, ("offload", "no_copies", "roomy", "not_ahead", "no_offload"))
    yield from offloaded(bench, bench.sizes.pressure.mixture(), ("offload", "no_copies"))


def offloaded(bench: Bench, workload: Workload, variants: tuple[str, ...]) -> Rows:
    needed = bench.kv_bytes(workload.needed_kv_tokens(32))
    tight: dict[str, Any] = {
        "kv_tokens": workload.kv_tokens(32),
        "max_num_seqs": workload.prompts * workload.n,
        "cpu_offload_gib": needed / 2**30,
    }
    alone = {**tight, "cpu_offload_gib": 0}
    speeds: dict[str, float] = {}

    def run(name: str, config: dict[str, Any]) -> Rows:
        row = run_workload(bench, workload, **config)
        speeds[name] = row["tokens_per_second"]
        yield row | {"variant": name}

    configs = {
        "offload": tight,
        "no_copies": {**tight, "change": without_copies},
        "roomy": {**alone, "kv_tokens": workload.roomy().kv_tokens(32)},
        "not_ahead": {**tight, "mirror_ahead": False, "copy_ahead": False},
        "no_offload": alone,
    }
    for name in variants:
        yield from kept(run(name, configs[name]))
    if own := speeds.pop("offload", None):
        yield {
            "workload": workload.name,
            "summary": True,
            **{f"ratio_to_{name}": own / speed for name, speed in speeds.items()},
        }


def without_copies(engine: Engine) -> None:
    """Let the pools move nothing but the copies of forks; what is drawn means nothing."""
    move = engine.kv.move

    def some(moves: Moves, spans: Spans | None = None) -> Copied:
        return move(Moves(copies=moves.copies), spans)

    engine.kv.move = some  # type: ignore[method-assign]


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
        fill(engine.kv)
        timed: dict[str, tuple[float, torch.Tensor]] = {}
        for name, each in contexts.items():
            batch = batch_of(engine, own_blocks(len(each), each, 32), each, count=counts(name))
            work: Callable[[], torch.Tensor] = partial(forward_of, engine, prepared(engine, batch))
            logits = work().clone()
            timed[name] = median_ms(bench.device, work, bench.sizes.turns), logits
        return timed

    resident = times(bench.engine(**config))
    limits = {name: beside_limit(bench, Work.of(counts(name), each), resident[name][0]) for name, each in contexts.items()}
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
    streamed = Streamed(bench.module, bench.name, OFFLOAD, device_of(bench.settings()).memory)
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


PARTS: dict[str, Callable[[Bench], Rows]] = {
    part.__name__: part for part in (machine, decode, prefill, exact, sharing, offload, weights, refresh, ipc, naps, workloads)
}
