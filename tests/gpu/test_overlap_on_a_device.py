"""Steps that overlap on a device: the host is ahead of it, launches without waiting, and the samples are the same."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from rollout.engine.engine import Engine
from tests.support.equivalence import assert_same
from tests.support.on_device import agree, engine, lockstep, needs_cuda
from tests.support.toy import group, run

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

GRAPHS = pytest.mark.parametrize("graphs", [False, True], ids=["eager", "graphs"])
CYCLES = 20_000_000
"""some ten milliseconds of a GPU"""


@GRAPHS
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_overlapped_is_one_by_one_to_the_bit(dtype: str, graphs: bool) -> None:
    options = {"dtype": dtype, "cuda_graphs": graphs}
    plain, over = engine(**options, overlap_steps=False), engine(**options, overlap_steps=True)
    for tag, seed in (("", 0), ("again", 1)):
        assert_same(run(plain, lockstep(tag, seed)), run(over, lockstep(tag, seed)))


@GRAPHS
@pytest.mark.parametrize("pressure", [False, True], ids=["roomy", "offload"])
def test_mixtures_agree(pressure: bool, graphs: bool) -> None:
    some = [group(f"g{i}", range(5, 15 + 17 * i), n=4, max_tokens=6 + 7 * i, seed=i) for i in range(7)]
    options = {
        "cuda_graphs": graphs,
        "max_batch_tokens": 64,
        **({"kv_tokens": 320, "cpu_offload_gib": 0.01} if pressure else {}),
    }
    over = engine(**options, overlap_steps=True)
    agree(run(engine(**options, overlap_steps=False), some), run(over, some))
    assert not pressure or over.counters.offloads + over.counters.recompute_preemptions > 0


def slow_engine(graphs: bool, overlap: bool, **sampling: Any) -> Engine:
    """Every child decodes; before each forward the device is busy for a while."""
    made, first = engine(cuda_graphs=graphs, overlap_steps=overlap), lockstep()[0]
    made.submit(replace(first, sampling=replace(first.sampling, **sampling)))
    for _ in range(6):
        made.step()  # kernels are compiled and graphs captured
    run_of: Any = made.worker.graphs if made.worker.graphs is not None else made.model
    forward = run_of.forward

    def slow(*args: Any) -> torch.Tensor:
        torch.cuda._sleep(CYCLES)
        logits: torch.Tensor = forward(*args)
        return logits

    run_of.forward = slow
    return made


@needs_cuda
@GRAPHS
@pytest.mark.parametrize("overlap", [True, False], ids=["overlapped", "one by one"])
def test_the_host_is_ahead_of_the_device(overlap: bool, graphs: bool) -> None:
    """After a step the device is still busy with it. The negative control is a step whose draws have been read."""
    made = slow_engine(graphs, overlap)
    made.step()
    for _ in range(5):
        made.step()
        time.sleep(0.001)  # what was read is given back, for which torch records an event
        assert torch.cuda.current_stream().query() != overlap


@needs_cuda
@GRAPHS
@pytest.mark.parametrize("sampling", [{}, {"presence_penalty": 0.5, "logit_bias": {7: 1.0}}], ids=["plain", "adjusted"])
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_a_launch_waits_for_nothing(graphs: bool, sampling: dict[str, Any]) -> None:
    """torch raises where it knows that the host would wait for the device. (It does not know of copies from pageable memory
    that are told not to wait, nor of events: what the test above sees.)"""
    made = slow_engine(graphs, True, **sampling)
    launch: Any = made.worker.execute

    def strict(*args: Any) -> Any:
        torch.cuda.set_sync_debug_mode("error")
        try:
            return launch(*args)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    vars(made.worker)["execute"] = strict
    for _ in range(5):
        made.step()
    assert made.counters.failed_steps == 0, "a launch waited: see the log"
