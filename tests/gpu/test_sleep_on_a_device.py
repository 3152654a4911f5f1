"""Sleep and wake on a device: memory that really goes, samples that go on, graphs that stay."""

from __future__ import annotations

import time
from typing import Any

import psutil
import pytest
import torch
from transformers import PreTrainedModel

from rollout.engine.engine import Engine
from tests.support.invariants import check
from tests.support.on_device import DEVICE, Samples, agree, captured_of, engine, lockstep, needs_cuda
from tests.support.tiny import tiny
from tests.support.toy import group, run

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]
MIB = 2**20
LARGE: dict[str, Any] = {
    "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 4, "num_attention_heads": 16, "num_key_value_heads": 4,
}  # fmt: skip


def large(seed: int = 0) -> PreTrainedModel:
    """240 MiB of weights."""
    return tiny("llama", seed=seed, **LARGE)


def run_with_naps(made: Engine, naps: set[int]) -> Samples:
    for i in range(3):
        made.submit(group(f"g{i}", range(5, 40 + 9 * i), n=4, max_tokens=30, seed=i, ignore_eos=True))
    samples: Samples = {}
    step = 0
    while made.has_work:
        if step in naps:
            assert made.sleep(1) >= 0 and made.status()["state"] == "asleep" and made.step() == []
            made.wake()
        samples |= {(sample.group_id, sample.index): sample for sample in made.step()}
        check(made.scheduler)
        step += 1
    return samples


@pytest.mark.parametrize("host", [0.01, 0], ids=["preempted", "prefilled again"])
def test_samples_do_not_notice(host: float) -> None:
    napping = engine(cpu_offload_gib=host, max_batch_tokens=64)
    agree(run_with_naps(engine(max_batch_tokens=64), set()), run_with_naps(napping, {0, 1, 3, 9, 10, 20}))
    assert (napping.counters.recomputed_tokens > 0) == (not host)


@needs_cuda
@pytest.mark.parametrize("level", [1, 2])
def test_the_memory_goes_and_comes_back(level: int) -> None:
    def free() -> int:
        torch.cuda.synchronize()
        return torch.cuda.mem_get_info()[0]

    made = engine(model=large(), kv_tokens=None, kv_gib=1.0, cpu_offload_gib=0, prefix_cache=False)
    weights = made.weights.resident_bytes
    assert weights > 200 * MIB
    first = run(made, lockstep())
    assert made.worker.graphs is not None and captured_of(made)
    before = free()
    freed = made.sleep(level)
    gone = free() - before
    assert gone > 1024 * MIB + 0.95 * weights and freed > 1024 * MIB + 0.95 * weights, "it is still held"
    assert made.weights.stays and made.worker.kv.stays and captured_of(made), "graphs stay, as addresses do"
    captured = dict(captured_of(made))
    made.wake()
    if level == 2:
        assert made.status()["state"] == "without weights" and not made.has_work
        made.refresh(dict(large().named_parameters()))
    assert abs(free() - before) < 256 * MIB, "more or less than it was before"
    assert not made.worker.kv.data.count_nonzero()
    again = run(made, lockstep("2"))
    assert captured_of(made) == captured, "none was captured anew"
    for (_, index), sample in first.items():
        assert sample.logprobs.tobytes() == again["lockstep2", index].logprobs.tobytes()
    made.sleep(level)
    assert free() - before > 1024 * MIB + 0.95 * weights, "the second time as well"


@needs_cuda
def test_twenty_naps_take_no_more_than_one() -> None:
    """Bytes of the device, pinned bytes and those of the process are flat, and so are the seconds."""
    made = engine(model=large(), kv_tokens=None, kv_gib=1.0, cpu_offload_gib=0.25, prefix_cache=False)
    first, taken = run(made, lockstep()), []
    for i in range(20):
        began = time.perf_counter()
        made.sleep(1)
        asleep_s = time.perf_counter() - began
        made.wake()
        torch.cuda.synchronize()
        awake_s = time.perf_counter() - began - asleep_s
        taken.append((torch.cuda.mem_get_info()[0], psutil.Process().memory_info().rss))
        print(f"nap {i}: asleep after {asleep_s:.3f} s, awake after {awake_s:.3f} s")
    free, resident = zip(*taken[2:], strict=True)
    assert max(free) - min(free) < 64 * MIB and max(resident) - min(resident) < 64 * MIB
    for (_, index), sample in first.items():
        assert sample.logprobs.tobytes() == run(made, lockstep("2"))["lockstep2", index].logprobs.tobytes()
        break


def test_dropped_weights_come_with_the_next_refresh() -> None:
    made = engine(cpu_offload_gib=0.01)
    made.submit(lockstep()[0])
    for _ in range(8):
        made.step()
    made.sleep(2)
    assert not made.weights.resident_bytes
    made.wake(["weights"])
    assert not made.has_work and made.step() == []
    made.refresh({name: tensor.to(DEVICE) for name, tensor in tiny("llama", seed=1).named_parameters()}, kv="recompute")
    assert not made.has_work
    made.wake(["kv"])
    assert made.weights.live_digest() == made.weights.digest
    assert {sample.weight_versions[-1][1] for sample in run(made).values()} == {1}
    agree(run(engine(model=tiny("llama", seed=1)), lockstep("2")), run(made, lockstep("2")))
