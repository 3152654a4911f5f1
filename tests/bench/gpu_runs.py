"""Parts of `tests.bench.gpu` that run a whole engine: workloads, KV offload, refreshes, sleep."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import psutil
import torch
import transformers

from rollout.bench.against import parse, peer
from rollout.bench.harness import BenchFailed, Row
from rollout.bench.inputs import RandomText, lognormal
from rollout.bench.runner import one_run, peer_run, peer_setup
from rollout.bench.target import EngineTarget
from rollout.bench.workloads import Workload
from rollout.client.api import RolloutClient
from rollout.config import ServiceConfig
from rollout.engine.engine import Engine
from rollout.engine.forward.random_weights import draw
from rollout.engine.forward.shapes import configuration
from rollout.engine.kv.block import BlockCopies, Copied, Spans
from rollout.engine.processes import run_module
from rollout.engine.values import Group, Refreshed, Sampling
from rollout.service.build import open_service
from rollout.transport.weights import Via
from tests.bench.by_hand import free_on, median_ms, release, synchronize
from tests.bench.gpu_bench import FUSED, SETTLE, Bench, Rows, kept

PEER_START_S, PEER_RUN_S = 120.0, 150.0
TRAINER_S = 240.0
"""time limit of the trainer's process"""
GROUPS, LONGEST = 8, 512
"""groups that run during a refresh, and tokens of the trainer's longest prompt"""


def machine(bench: Bench) -> Rows:
    """Describe the device and the model."""
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


def workloads(bench: Bench) -> Rows:
    """Run workloads, with equal and lognormal lengths, in this engine and then in another one in its own process."""
    for workload in bench.sizes.workloads:
        yield from kept(in_turn(bench, [workload, workload.mixture()]))


def in_turn(bench: Bench, kinds: list[Workload]) -> Rows:
    """Run variants of one workload in this engine, then in the others."""
    speeds: dict[str, float] = {}
    for workload in kinds:
        at_once = min(bench.sizes.workload_rows, workload.prompts * workload.n)
        ours = run_workload(bench, workload, kv_tokens=workload.kv_tokens(bench.block), max_num_seqs=at_once)
        speeds[workload.name] = ours["tokens_per_second"]
        yield ours
    for name, python in parse(bench.against)[0].items():
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
    """Run variants of a workload in another engine. Yields (variant, row, version of the engine). Raises PeerFailed,
    BenchFailed for wrong samples, OSError."""
    settings = bench.settings(kv_tokens=kinds[0].kv_tokens(bench.block))
    with bench.folder() as folder:
        setup = peer_setup(kinds[0], msgspec.structs.replace(settings, model=folder))
        with peer(name, python, setup, min(PEER_START_S, max(1.0, bench.seconds_left))) as one:
            for workload in kinds:
                limit = min(PEER_RUN_S, max(1.0, bench.seconds_left))
                yield workload, peer_run(workload, bench.text, one, 0, limit), one.version


def run_workload(
    bench: Bench, workload: Workload, change: Callable[[Engine], None] = lambda engine: None, **config: Any
) -> dict[str, Any]:
    """Run a workload in a new, warmed-up engine, so that the figures include no graph capture. change: applied to the
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
    """Measure a KV pool of half the need, with offload. no_copies: without the copies, on arbitrary KV; if `steps` and
    `offloads` are equal, so is the schedule, and the difference is the cost of the copies. Then a large pool, no copies in
    advance, no offload, and on CUDA `mirror_ahead`. The first two also with lognormal lengths."""
    mirrored = ["mirrored"] if bench.device.type == "cuda" else []
    variants = ("offload", "no_copies", "roomy", "not_ahead", "no_offload", *mirrored)
    yield from offloaded(bench, bench.sizes.pressure, variants)
    yield from offloaded(bench, bench.sizes.pressure.mixture(), ("offload", "no_copies"))


def offloaded(bench: Bench, workload: Workload, variants: tuple[str, ...]) -> Rows:
    needed = bench.kv_bytes(workload.needed_kv_tokens(bench.block))
    tight: dict[str, Any] = {
        "drafts": 0,  # which depend on the tokens, and the schedule on them
        "kv_tokens": workload.kv_tokens(bench.block),
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
        "roomy": {**alone, "kv_tokens": workload.roomy().kv_tokens(bench.block)},
        "not_ahead": {**tight, "advanced": msgspec.structs.replace(FUSED, copy_ahead=False)},
        "mirrored": {**tight, "advanced": msgspec.structs.replace(FUSED, mirror_ahead=True)},
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
    """Drop all copies but those of forks. The sampled tokens mean nothing."""
    move = engine.worker.kv.move

    def some(moves: BlockCopies, spans: Spans | None = None) -> Copied:
        return move(BlockCopies(copies=moves.copies), spans)

    engine.worker.kv.move = some  # type: ignore[method-assign]


def refresh(bench: Bench) -> Rows:
    """Measure refreshes from a state dict on the device while sequences run."""
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
    """Return the mean milliseconds of the next steps."""
    counters = engine.counters
    began, done = counters.step_seconds, counters.steps
    for _ in range(steps):
        engine.step()
    return 1e3 * (counters.step_seconds - began) / (counters.steps - done)


def plain_copy_ms(device: torch.device, tensors: list[torch.Tensor]) -> float:
    """Return the milliseconds of copying all tensors on the device."""
    targets = [torch.empty_like(tensor) for tensor in tensors]

    def work() -> None:
        for target, tensor in zip(targets, tensors, strict=True):
            target.copy_(tensor)

    return median_ms(device, work, 3)


def ipc(bench: Bench) -> Rows:
    """Measure refreshes from another process by CUDA IPC: staged while sequences run, and in place after a sleep that dropped
    the weights. On a CPU they use shared memory, which only shows that the part runs."""
    sizes = bench.sizes
    engine = bench.engine(kv_tokens=sizes.rows * 1024, max_num_seqs=sizes.rows)
    service = open_service(engine, ServiceConfig(endpoint="tcp://127.0.0.1:*"))
    outputs: list[str] = []
    options = [service.endpoint, bench.name, bench.dtype, str(bench.device), str(sizes.refreshes), str(sizes.rows)]

    def run_trainer() -> None:
        try:
            done = subprocess.run(
                run_module("tests.bench.gpu_runs", *options), capture_output=True, text=True, timeout=TRAINER_S
            )
            outputs.append(done.stdout if done.returncode == 0 else f"error: {done.stderr[-2000:]}")
        except (OSError, subprocess.SubprocessError) as error:
            outputs.append(f"error: {error}")
        finally:
            service.stop()

    thread = threading.Thread(target=run_trainer)
    thread.start()
    service.run()
    thread.join()
    (output,) = outputs
    if output.startswith("error"):
        raise RuntimeError(f"the trainer's process failed: {output}")
    for line in output.splitlines():
        yield json.loads(line)


def naps(bench: Bench) -> Rows:
    """Measure the seconds of `sleep` and `wake`, and the memory of the device and the process after the first and last ones."""
    engine = bench.engine(kv_tokens=bench.sizes.rows * 1024, max_num_seqs=bench.sizes.rows)
    process, taken = psutil.Process(), []
    for _ in range(bench.sizes.naps):
        began = time.perf_counter()
        freed = engine.sleep(1)
        asleep = time.perf_counter()
        engine.wake()
        synchronize(bench.device)
        taken.append(
            {
                "sleep_seconds": asleep - began,
                "wake_seconds": time.perf_counter() - asleep,
                "freed_bytes": freed,
                "free_bytes": free_on(bench.device),
                "process_bytes": process.memory_info().rss,
            }
        )
    for number in sorted({0, 1, len(taken) - 1}):
        yield {"nap": number, "stays": engine.weights.stays and engine.worker.kv.stays, **taken[number]}


def refresh_row(what: str, refreshed: Refreshed, via: Via) -> Row:
    """Describe one refresh. via: the transport that was requested."""
    return {"what": what, "asked": via, **msgspec.to_builtins(refreshed)}


def trainer(endpoint: str, name: str, dtype: str, device: str, refreshes: str, rows: str) -> None:
    """Run the trainer of `ipc`, which needs a process of its own: CUDA cannot open memory in the process that exported it.
    Prints a JSON object per refresh: some while sequences run, of which the first warms up, and one after a sleep."""
    config = configuration(name)
    model = draw(config, getattr(torch, dtype)).to(device)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.neg_()  # other weights than the service's
    via: Via = "shm" if torch.device(device).type == "cpu" else "cuda_ipc"
    each = Sampling(n=max(1, int(rows) // GROUPS), max_tokens=256, ignore_eos=True)
    text, lengths = RandomText(config.vocab_size), lognormal(GROUPS, LONGEST // 4, LONGEST).tolist()
    with RolloutClient(endpoint, name="trainer") as client:
        for turn in range(int(refreshes) + 1):
            prompts = zip(text.slices(turn, GROUPS, LONGEST), lengths, strict=True)
            running = [client.submit(ids[:length], each) for ids, length in prompts]
            print(
                json.dumps({**refresh_row("beside steps", client.refresh(model, via=via), via), "warm": turn > 0}), flush=True
            )
            for handle in running:
                handle.cancel()
        client.sleep(level=2)
        client.wake(tags=("weights",))
        print(json.dumps(refresh_row("into place", client.refresh(model, via=via), via)), flush=True)
        client.wake(tags=("kv",))


if __name__ == "__main__":
    trainer(*sys.argv[1:])
