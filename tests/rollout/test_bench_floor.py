"""The floor of a workload: by the peak and the memory rate of this machine, never above 1, whatever torch's products take."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from rollout import models
from rollout.bench.floor import LOOKS, Looks, MachineRates, matrices_of, shape_of, work_of
from rollout.bench.harness import BoundBroken
from rollout.bench.inputs import PromptText
from rollout.bench.runner import measure
from rollout.bench.target import open_engine
from rollout.bench.workloads import Workload
from rollout.engine.config import EngineConfig
from rollout.engine.cpu.isa import ISAS, here

TINY = Workload(name="tiny", prompts=2, prompt_tokens=32, n=2, new_tokens=8)
LAYERS, HEAD, KV = 4 * 32 * 32 + 4 * 16 * 32 + 4 * 64 * 32 + 2 * 32 * 64, 259 * 32, 2 * 2 * 2 * 8


@pytest.fixture
def engine(tiny_model: Path) -> EngineConfig:
    return EngineConfig(model=str(tiny_model), dtype="float32", cpu_offload_gib=0, threads=1)


def looks(rate: float) -> Looks:
    made = Looks()
    made.add(rate)
    return made


def still(machine: MachineRates, peak: float, rate: float) -> MachineRates:
    """A machine of these rates, however often it is looked at."""
    machine.peak = looks(peak)
    machine.rate = lambda size: looks(rate)  # type: ignore[method-assign]
    machine.look = lambda: None  # type: ignore[method-assign]
    return machine


def test_the_work_is_counted(tiny_model: Path) -> None:
    """2 layers of hidden 32, 4 query and 2 KV heads of 8, MLP 64, vocabulary 259 with an output layer of its own; 2
    prompts of 32 tokens with 2 children of 8."""
    assert matrices_of(tiny_model) == ({(32, 32): 4, (16, 32): 4, (64, 32): 4, (32, 64): 2}, (259, 32))
    shape = shape_of(tiny_model)
    assert (shape.layers, shape.head, shape.kv_numbers, shape.attention) == (LAYERS, HEAD, KV, 4 * 4 * 8 * 2)
    work = work_of(shape, TINY, 1e9, 1.0)
    seen = 4 * sum(32 + t for t in range(1, 8)) + 2 * sum(range(1, 33))
    assert work.flops == {"products": 2 * LAYERS * (64 + 28) + 2 * HEAD * 30, "attention": shape.attention * seen}
    numbers = {name: size * times for name, (size, times) in work.reads.items()}
    assert numbers == pytest.approx(
        {
            "weights": 8 * (LAYERS + HEAD),
            "prefix": 7 * 2 * 32 * KV,
            "suffix": 4 * sum(range(1, 8)) * KV,
            "logits": 30 * 259,
        }
    )
    windowed = work_of(shape._replace(window=10), TINY, 1e9, 1.0)
    among = 2 * (sum(range(1, 11)) + 22 * 10)
    assert windowed.flops["attention"] == shape.attention * (4 * 7 * 10 + among), "a window bounds what a query sees"
    halved = work_of(shape, TINY, 16, 0.5)
    assert halved.reads["weights"][1] == 4 and halved.flops["products"] == work.flops["products"] - 2 * LAYERS * 48, (
        "drafts save steps and nothing else, a prefix that was there is not computed"
    )
    cached = 2 * (sum(range(1, 33)) - sum(range(1, 9)))
    assert halved.flops["attention"] == work.flops["attention"] - shape.attention * cached, "the first 8 tokens of each prompt"


def test_the_larger_bound_is_the_floor(tiny_model: Path, engine: EngineConfig) -> None:
    machine = MachineRates(tiny_model, engine)
    work = work_of(machine.shape, TINY, 1e9, 1.0)
    by_compute = still(machine, 1e6, 1e30).floor(TINY)
    assert by_compute["floor_bound"] == "compute" and by_compute["floor_seconds"] == pytest.approx(
        sum(work.flops.values()) / 1e6
    )
    by_memory = still(machine, 1e30, 1e6).floor(TINY)
    numbers = sum(size * times for size, times in work.reads.values())
    assert by_memory["floor_bound"] == "memory" and by_memory["floor_seconds"] == pytest.approx(4 * numbers / 1e6)
    assert by_memory["floor_tokens_per_second"] == pytest.approx(32 / by_memory["floor_seconds"])


def test_a_run_is_below_the_floor(tiny_model: Path, engine: EngineConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Measured here, with every product of torch refused: they are no part of a bound."""
    text = PromptText(models.load_tokenizer(tiny_model))
    machine = MachineRates(tiny_model, engine)

    def bounded(workload: Workload, summary: dict[str, Any]) -> dict[str, Any]:
        with monkeypatch.context() as patch:
            patch.setattr(torch.nn.functional, "linear", None)
            return machine.bounded(workload, summary)

    summary = list(measure(TINY, text, engine, open_engine, 1, floor=bounded))[-1]
    assert 0 < summary["floor_fraction"] < 1
    assert summary["floor_seconds"] == max(summary["floor_compute_seconds"], summary["floor_memory_seconds"])
    assert 0 < summary["peak_flops_per_second_worst"] <= summary["peak_flops_per_second"]
    assert 0 < summary["bytes_per_second_worst"] <= summary["bytes_per_second"]


@pytest.mark.parametrize(
    ("peak", "rate", "says"),
    [(1e3, 1e30, "compute bound is wrong, the register peak of"), (1e30, 1e3, "memory bound is wrong")],
)
def test_above_the_floor_is_an_error(tiny_model: Path, engine: EngineConfig, peak: float, rate: float, says: str) -> None:
    """It names the bound; and with rates that are far too high the same run passes."""
    machine = MachineRates(tiny_model, engine)
    summary = {"tokens_per_second": 50.0, "tokens_per_second_max": 60.0, "prefill_tokens": 64, "accepted_tokens": 0}
    assert still(machine, 1e15, 1e15).bounded(TINY, summary)["floor_fraction"] < 1
    with pytest.raises(BoundBroken, match=f"tiny: a run reached .* of the floor.*{says}"):
        still(machine, peak, rate).bounded(TINY, summary)


def test_a_low_look_is_looked_at_again(tiny_model: Path, engine: EngineConfig) -> None:
    """A neighbour that held the cores while the peak was measured is no broken bound; the worst look is told."""
    machine = MachineRates(tiny_model, engine)
    machine.peak = looks(1.0)
    summary = {"tokens_per_second": 50.0, "tokens_per_second_max": 60.0, "prefill_tokens": 64, "accepted_tokens": 0}
    told = machine.bounded(TINY, summary)
    assert told["floor_fraction"] < 1 and told["peak_flops_per_second_worst"] == 1.0 and LOOKS > 1


def test_the_peak_is_of_the_running_set(tiny_model: Path, engine: EngineConfig) -> None:
    """By name, and the best of this CPU for a service that runs torch."""
    for isa in [*(each for each in here() if each in ISAS), "torch"]:
        machine = MachineRates(tiny_model, EngineConfig(model=str(tiny_model), dtype="float32", isa=isa, threads=1))  # type: ignore[arg-type]
        assert machine.kernels.isa == (here()[0] if isa == "torch" else isa)
        assert machine.peak.best > 0
