"""Sleep and wake: memory that really goes, samples that do not notice, and orders that make no sense."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from rollout.engine.config import WeightOffload
from rollout.engine.memory import HostMemory
from rollout.engine.values import Mode, WeightUpdate
from rollout.engine.weights.staging import source_of
from rollout.engine.weights.tensors import InvalidWeights, describe, with_digest
from tests.support.invariants import check
from tests.support.naps import groups, run_with_naps
from tests.support.tiny import tiny, tiny_engine
from tests.support.toy import group, run

CPU = torch.device("cpu")


@pytest.mark.some(4)
@pytest.mark.usefixtures("copies_pay")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("options", "recomputes"),
    [
        ({"cpu_offload_gib": 0.01}, False),
        ({"cpu_offload_gib": 0}, True),
        ({"cpu_offload_gib": 0.01, "kv_tokens": 256}, False),
        ({"cpu_offload_gib": 0.00005, "kv_tokens": 256}, True),
    ],
    ids=["preempted", "no host memory", "under pressure", "little host memory"],
)
def test_samples_do_not_notice(options: dict[str, Any], recomputes: bool, dtype: str) -> None:
    """Tokens and log-probs to the bit, whenever it slept: in the middle of a prefill, at the fork, in decode."""
    want = run(tiny_engine(dtype=dtype), groups())
    engine = tiny_engine(dtype=dtype, max_batch_tokens=64, **options)
    got = run_with_naps(engine, {0, 1, 2, 3, 9, 10, 25})
    assert got.keys() == want.keys()
    for key, sample in got.items():
        np.testing.assert_array_equal(sample.token_ids, want[key].token_ids)
        assert sample.logprobs.tobytes() == want[key].logprobs.tobytes()
    assert (engine.counters.recomputed_tokens > 0) == recomputes


def test_the_memory_goes() -> None:
    engine = tiny_engine(kv_tokens=None, kv_gib=0.5, cpu_offload_gib=0.01)
    run(engine, groups())
    before = HostMemory().taken()
    freed = engine.sleep()
    assert freed > 0.45 * 2**30 and before - HostMemory().taken() > 0.25 * 2**30
    engine.wake()
    assert HostMemory().taken() - before > -0.25 * 2**30, "the pool's memory is taken at once again"
    assert len(run(engine, [group("again", [5, 6, 7], n=2)])) == 2


def test_cached_prefixes_survive_in_host_memory() -> None:
    engine = tiny_engine(cpu_offload_gib=0.01)
    prompt = [3 + i % 190 for i in range(64)]
    run(engine, [group("first", prompt, n=1, max_tokens=1)])
    engine.sleep()
    engine.wake()
    run(engine, [group("second", prompt, n=1, max_tokens=1)])
    assert engine.counters.prefix_hit_tokens == 56


def test_dropped_weights_make_no_token_until_all_have_come() -> None:
    engine = tiny_engine(cpu_offload_gib=0.01)
    digest = engine.weights.digest
    for each in groups(2):
        engine.submit(each)
    for _ in range(6):
        engine.step()
    engine.sleep(2)
    assert all(not parameter.numel() for parameter in engine.model.module.parameters())  # type: ignore[attr-defined]
    assert engine.weights.digest == digest, "what was dropped is still known"
    engine.wake()
    generated = engine.counters.generated_tokens
    assert engine.status()["state"] == "without weights"
    assert not engine.has_work and engine.step() == [] and engine.counters.generated_tokens == generated
    new = dict(tiny("llama", seed=1).named_parameters())
    with pytest.raises(InvalidWeights, match="a refresh of all tensors must come first"):
        engine.refresh({"model.norm.weight": new["model.norm.weight"]}, partial=True)
    with pytest.raises(InvalidWeights, match="is missing"):
        engine.refresh({"model.norm.weight": new["model.norm.weight"]})
    assert not engine.has_work
    engine.refresh(new, kv="recompute")
    samples = run(engine)
    assert {sample.weight_versions[-1][1] for sample in samples.values()} == {1} and len(samples) == 8
    fresh = tiny_engine(model=tiny("llama", seed=1))
    late = group("late", [9, 8, 7, 6], n=3, max_tokens=12, ignore_eos=True)
    mine, theirs = run(engine, [late]), run(fresh, [late])
    assert all(mine[key].logprobs.tobytes() == theirs[key].logprobs.tobytes() for key in theirs)
    engine.refresh(dict(tiny("llama", seed=2).named_parameters()))  # the next one is an ordinary one
    assert engine.weights.live_digest() == engine.weights.digest


def test_a_copy_that_fails_on_the_way_to_bed() -> None:
    """What was to be preempted is prefilled again."""
    want = run(tiny_engine(), groups())
    engine = tiny_engine(cpu_offload_gib=0.01)
    move = engine.worker.kv.move
    for each in groups():
        engine.submit(each)
    for _ in range(5):
        engine.step()

    def broken(moves: Any, *spans: Any) -> Any:
        move(type(moves)(offloads=moves.offloads[:1]))
        raise MemoryError("injected failure of a copy")

    engine.worker.kv.move = broken  # type: ignore[method-assign]
    engine.sleep()
    engine.worker.kv.move = move  # type: ignore[method-assign]
    check(engine.scheduler)
    engine.wake()
    got = run(engine)
    assert all(got[key].logprobs.tobytes() == sample.logprobs.tobytes() for key, sample in want.items())
    assert engine.counters.failed_moves == 1 and engine.counters.recomputed_tokens > 0


def test_orders_that_make_no_sense() -> None:
    engine = tiny_engine()
    new = dict(tiny("llama", seed=1).named_parameters())
    with pytest.raises(ValueError, match="not asleep"):
        engine.wake()
    with pytest.raises(ValueError, match="level=3: must be 1"):
        engine.sleep(3)
    staging = engine.stage(WeightUpdate([with_digest(*describe(name, tensor)) for name, tensor in new.items()]))
    with pytest.raises(ValueError, match="a refresh is being staged"):
        engine.sleep()
    staging.close()
    engine.sleep()
    with pytest.raises(ValueError, match="asleep already"):
        engine.sleep()
    with pytest.raises(ValueError, match="weights are asleep: wake all"):
        engine.refresh(new)
    engine.submit(group("g", [3, 4, 5], n=2, max_tokens=3, ignore_eos=True))
    engine.submit(group("h", [3, 4, 5], n=2, max_tokens=3, ignore_eos=True))
    assert engine.abort("h")
    engine.wake()
    assert len(run(engine)) == 2


def weights(seed: int, dtype: str = "float32") -> dict[str, torch.Tensor]:
    return dict(tiny("llama", getattr(torch, dtype), seed).named_parameters())


@pytest.mark.some(4)
@pytest.mark.parametrize("sent", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "offload", [None, WeightOffload(group_size=2, num_in_group=1, prefetch_step=1)], ids=["resident", "offload"]
)
@pytest.mark.parametrize("level", [1, 2])
def test_a_refresh_between_the_weights_and_the_kv(level: int, offload: WeightOffload | None, sent: str) -> None:
    """What runs goes on under the new weights; new groups equal a fresh engine's. Dropped weights need no second copy."""
    engine = tiny_engine(cpu_offload_gib=0.01, weight_offload=offload)
    for each in groups(2):
        engine.submit(each)
    for _ in range(6):
        engine.step()
    engine.sleep(level)
    assert engine.status()["asleep"] == ["kv", "weights"]
    engine.wake(["weights"])
    assert engine.status()["asleep"] == ["kv"] and engine.mode is Mode.ASLEEP and engine.step() == []
    new = {name: tensor.to(getattr(torch, sent)) for name, tensor in weights(1).items()}
    engine.refresh(new, kv="recompute")
    assert (engine.weights._buffers.host is None) == (level == 2), "only what may have to be undone is staged beside"
    assert engine.weights.live_digest() == engine.weights.digest and engine.version == 1
    assert engine.step() == [] and not engine.has_work
    engine.wake(["kv"])
    assert {sample.weight_versions[-1][1] for sample in run(engine).values()} == {1}
    model = tiny("llama", seed=1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(new[name])
    late = group("late", [9, 8, 7, 6], n=3, max_tokens=12, ignore_eos=True)
    mine, theirs = run(engine, [late]), run(tiny_engine(model=model), [late])
    assert all(mine[key].logprobs.tobytes() == theirs[key].logprobs.tobytes() for key in theirs)
    engine.refresh(weights(2))
    assert engine.weights.live_digest() == engine.weights.digest


@pytest.mark.parametrize("fault", ["flipped bit", "NaN", "half"])
def test_a_refresh_into_place_that_breaks_makes_no_token(fault: str) -> None:
    """The live tensors hold a mixture then, which nothing is sampled from until a whole refresh has come."""
    engine = tiny_engine(cpu_offload_gib=0.01)
    engine.submit(groups(1)[0])
    for _ in range(4):
        engine.step()
    engine.sleep(2)
    engine.wake(["weights"])
    described = [describe(name, tensor) for name, tensor in weights(1).items()]
    data = [array.copy() for _, array in described]
    if fault == "NaN":
        data[-1].view(np.float32)[-1] = np.nan
    staging = engine.stage(WeightUpdate([with_digest(info, array) for (info, _), array in zip(described, data, strict=True)]))
    if fault == "flipped bit":
        data[-1][-1] ^= 1
    source = source_of(data[: len(data) // 2] if fault == "half" else data)
    if fault == "half":
        while staging.feed(source):
            pass
    else:
        with pytest.raises(InvalidWeights, match="NaN" if fault == "NaN" else "digest"):
            while not staging.complete:
                staging.feed(source)
    staging.close()
    engine.wake(["kv"])
    assert engine.version == 0 and engine.mode is Mode.WITHOUT_WEIGHTS and engine.step() == [] and not engine.has_work
    engine.refresh(weights(2), kv="recompute")
    assert {sample.weight_versions[-1][1] for sample in run(engine).values()} == {1}
    assert engine.weights.live_digest() == tiny_engine(model=tiny("llama", seed=2)).weights.digest


def test_parts_are_woken_once_and_by_their_names() -> None:
    engine = tiny_engine()
    engine.sleep(2)
    with pytest.raises(ValueError, match="tags=.'graphs',.: name weights, kv or both"):
        engine.wake(["graphs"])  # type: ignore[list-item]
    with pytest.raises(ValueError, match="tags=..: name"):
        engine.wake([])
    engine.wake(["kv"])  # the other way round does no harm
    with pytest.raises(ValueError, match="the weights are asleep"):
        engine.refresh(weights(1))
    with pytest.raises(ValueError, match="not asleep with its kv"):
        engine.wake(["kv", "weights"])
    with pytest.raises(ValueError, match="asleep already .weights."):
        engine.sleep()
    engine.wake()
    with pytest.raises(ValueError, match="not asleep"):
        engine.wake(["weights"])
    assert engine.mode is Mode.WITHOUT_WEIGHTS and engine.status()["asleep"] == []


def test_a_part_that_finds_no_memory_sleeps_on(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = tiny_engine(cpu_offload_gib=0.01)
    want = run(tiny_engine(), groups(1))
    engine.submit(groups(1)[0])
    engine.sleep()
    with monkeypatch.context() as patch:
        patch.setattr(engine.worker.kv, "restore", lambda: (_ for _ in ()).throw(MemoryError("the trainer has it")))
        with pytest.raises(MemoryError):
            engine.wake()
    assert engine.status()["asleep"] == ["kv"] and not engine.has_work
    engine.wake()
    got = run(engine)
    assert all(got[key].logprobs.tobytes() == sample.logprobs.tobytes() for key, sample in want.items())
