"""Real CUDA graphs: replayed is eager, to the bit at the same padded size; a refresh keeps them, and they follow it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rollout.engine.config import WeightOffload
from rollout.engine.engine import Engine
from tests.support.equivalence import assert_same
from tests.support.on_device import agree, captured_of, engine, lockstep, module_of, needs_cuda, same_or_near
from tests.support.tiny import tiny
from tests.support.toy import group, run

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300), needs_cuda]


def sizes_of(replays: dict[Any, Any]) -> list[int]:
    """Of decode."""
    return sorted({shape.tokens for shape in replays if not shape.logits})


def addresses(made: Engine) -> list[int]:
    attention: Any = made.worker.backend
    tensors = [*module_of(made).parameters(), made.worker.kv.data, attention._arrays, attention.partial, attention.sums]
    return [tensor.data_ptr() for tensor in tensors]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_replayed_is_eager(dtype: str) -> None:
    eager, graphed = engine(dtype=dtype, cuda_graphs=False), engine(dtype=dtype)
    assert eager.worker.graphs is None and graphed.worker.graphs is not None
    compare = same_or_near(dtype)
    compare(run(eager, lockstep()), run(graphed, lockstep()))
    assert sizes_of(captured_of(graphed)) == [16]
    compare(run(eager, lockstep("again", 1)), run(graphed, lockstep("again", 1)))
    with pytest.raises(AssertionError):
        compare(run(eager, lockstep("other", 2)), run(graphed, lockstep("other", 3)))


def test_padded_sizes_agree() -> None:
    """Twenty-one rows at first, then fewer and fewer: graphs of several sizes take turns, each over the last one's arrays."""
    some = [group(f"g{i}", range(5, 15 + 7 * i), n=3, max_tokens=6 + 5 * i, seed=i, ignore_eos=True) for i in range(7)]
    graphed = engine(max_num_seqs=24)
    agree(run(engine(cuda_graphs=False, max_num_seqs=24), some), run(graphed, some))
    assert graphed.worker.graphs is not None and len(captured_of(graphed)) > 1


def test_a_forward_that_waits_in_prefill_alone_decodes_from_graphs() -> None:
    """A failed capture leaves nothing behind that a later one meets."""
    eager, graphed = engine(dtype="bfloat16", cuda_graphs=False), engine(dtype="bfloat16")
    graphs: Any = graphed.worker.graphs
    forward = graphs._forward

    def waits(batch: Any, *args: Any) -> torch.Tensor:
        logits: torch.Tensor = forward(batch, *args)
        if batch.num_logits != batch.num_tokens:
            logits.cpu()
        return logits

    graphs._forward = waits
    assert_same(run(eager, lockstep()), run(graphed, lockstep()))
    assert sizes_of(captured_of(graphed)) == [16] and not any(shape.logits for shape in captured_of(graphed))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_refresh_keeps_the_graphs_and_they_follow_it(dtype: str) -> None:
    made = [engine(dtype=dtype, cuda_graphs=False), engine(dtype=dtype)]
    samples = []
    for each in made:
        each.submit(lockstep()[0])
        for _ in range(8):
            each.step()
        before, replays = addresses(each), dict(captured_of(each)) if each.worker.graphs else {}
        each.refresh({name: tensor * 1.5 for name, tensor in module_of(each).state_dict().items()})
        samples.append(run(each))
        assert addresses(each) == before, "a refresh in place moved something"
        if each.worker.graphs is not None:
            assert captured_of(each) == replays and sizes_of(replays) == [16], "a refresh captured anew"
    same_or_near(dtype)(*samples)
    assert all([version for _, version in sample.weight_versions] == [0, 1] for sample in samples[1].values())
    with pytest.raises(AssertionError):
        same_or_near(dtype)(samples[1], run(engine(dtype=dtype), lockstep()))


@pytest.mark.parametrize("graphs", [False, True], ids=["eager", "graphs"])
@pytest.mark.parametrize("offload", [(1, 1, 1), (1, 1, 3), (3, 2, 2)])
def test_weight_offload_is_resident_to_the_bit(offload: tuple[int, int, int], graphs: bool) -> None:
    group_size, num_in_group, prefetch_step = offload
    settings = WeightOffload(group_size=group_size, num_in_group=num_in_group, prefetch_step=prefetch_step)
    options = {"cuda_graphs": graphs, "cpu_offload_gib": 0, "fused_layers": False}  # which layers that move are not
    # a layer is larger than a grain of virtual memory, 2 MiB
    sizes: dict[str, Any] = {"num_hidden_layers": 6, "hidden_size": 512, "intermediate_size": 1536}
    resident = engine(model=tiny("llama", **sizes), **options)
    streamed = engine(model=tiny("llama", **sizes), weight_offload=settings, **options)
    assert streamed.weights.resident_bytes < resident.weights.resident_bytes
    assert_same(run(resident, lockstep()), run(streamed, lockstep()))
    new = dict(tiny("llama", seed=1, **sizes).named_parameters())
    for each in (resident, streamed):
        each.refresh(new)
    assert_same(run(resident, lockstep("2")), run(streamed, lockstep("2")))
    for each in (resident, streamed):
        each.sleep(1)
        each.wake()
    assert_same(run(resident, lockstep("3")), run(streamed, lockstep("3")))
    assert streamed.weights.live_digest() == streamed.weights.digest == resident.weights.digest
    torch.cuda.synchronize()
    model: Any = streamed.model
    for master in model.streamed.masters.values():
        master.data.mul_(1.5)
    with pytest.raises(AssertionError):  # it is the masters that are computed with
        assert_same(run(resident, lockstep("4")), run(streamed, lockstep("4")))
