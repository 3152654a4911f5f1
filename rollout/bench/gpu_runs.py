"""Parts of `rollout.bench.gpu` that run whole workloads: beside another engine, and with KV for half of the need."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from engine.engine import Engine
from engine.kv.block import BlockCopies, Spans
from engine.kv.copies import Copied
from engine.types import Sampling
from rollout.bench.against import parse, peer
from rollout.bench.by_hand import release
from rollout.bench.errors import BenchFailed
from rollout.bench.gpu_bench import FUSED, Bench, Rows, kept
from rollout.bench.runner import one_run, peer_run, peer_setup
from rollout.bench.target import EngineTarget
from rollout.bench.workloads import Workload

PEER_START_S, PEER_RUN_S = 120.0, 150.0


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
        "not_ahead": {**tight, "advanced": msgspec.structs.replace(FUSED, mirror_ahead=False, copy_ahead=False)},
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
    move = engine.worker.kv.move

    def some(moves: BlockCopies, spans: Spans | None = None) -> Copied:
        return move(BlockCopies(copies=moves.copies), spans)

    engine.worker.kv.move = some  # type: ignore[method-assign]
