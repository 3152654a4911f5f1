"""Decoder layers through torch.compile: one compilation, whatever comes; weights refreshed in place reach it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch._dynamo.testing import CompileCounter

from engine.config import EngineConfig, WeightOffload
from engine.engine import Engine
from engine.forward.compiled import compile_layers
from engine.forward.model import Model
from engine.types import Sample
from engine.weights.offload import Streamed
from tests.support.tiny import tiny, tiny_engine
from tests.support.toy import group, run

OPTIONS = {"block_size": 8, "kv_tokens": 4096, "max_num_seqs": 64, "max_batch_tokens": 128, "cpu_offload_gib": 0}


@pytest.fixture(autouse=True)
def nothing_compiled() -> None:
    torch._dynamo.reset()


def compiled_engine(name: str, offload: WeightOffload | None = None) -> tuple[Engine, CompileCounter]:
    """Traced, with the graphs run as they are: what is compiled and when is dynamo's part, the speed inductor's."""
    counter = CompileCounter()
    module = tiny(name, torch.float32, num_hidden_layers=4)
    streamed = None if offload is None else Streamed(module, name, offload, torch.device("cpu"))
    model = Model(module, name, streamed, native=False)
    compile_layers(model, counter)
    config = EngineConfig(dtype="float32", attention="reference", weight_offload=offload, **OPTIONS)  # type: ignore[arg-type]
    return Engine(config, model), counter


def some(engine: Engine, round: int, n: int, prompt: int) -> dict[tuple[str, int], Sample]:
    return run(engine, [group(f"{round}-{n}-{prompt}", [1 + i % 40 for i in range(prompt)], n=n, max_tokens=4)])


def same(one: dict[tuple[str, int], Sample], other: dict[tuple[str, int], Sample]) -> bool:
    return all(
        np.array_equal(a.token_ids, b.token_ids) and np.array_equal(a.logprobs, b.logprobs)
        for a, b in zip(one.values(), other.values(), strict=True)
    )


@pytest.mark.parametrize("name", ["llama", "qwen3", "mixtral"])
def test_one_compilation_serves_all(name: str) -> None:
    engine, counter = compiled_engine(name)
    plain = tiny_engine(name, model=tiny(name, torch.float32, num_hidden_layers=4), attention="reference")
    made = counter.frame_count
    assert 2 <= made <= 6, "a layer has two parts, and each is compiled anew at most once"
    for n, prompt in ((3, 20), (1, 5), (16, 40), (2, 100), (5, 16), (32, 7)):
        assert same(some(engine, 0, n, prompt), some(plain, 0, n, prompt)), (n, prompt)
    assert counter.frame_count == made, "another number of tokens was compiled for"
    new = {name: tensor * 1.25 for name, tensor in engine.model.module.state_dict().items()}
    for each in (engine, plain):
        each.refresh(new)
    assert same(some(engine, 1, 3, 20), some(plain, 1, 3, 20)) and counter.frame_count == made


def test_with_layers_that_are_streamed() -> None:
    engine, counter = compiled_engine("llama", WeightOffload(group_size=2, num_in_group=1, prefetch_step=1))
    plain = tiny_engine("llama", model=tiny("llama", torch.float32, num_hidden_layers=4), attention="reference")
    made = counter.frame_count
    for n, prompt in ((3, 20), (16, 40)):
        assert same(some(engine, 0, n, prompt), some(plain, 0, n, prompt))
    assert counter.frame_count == made


@pytest.mark.long
@pytest.mark.timeout(300)
def test_by_inductor(smollm2: str) -> None:
    """Another rounding, but the same model: log-probs differ by what bf16 leaves."""
    made = {}
    for compiled in (False, True):
        config = EngineConfig(model=str(smollm2), kv_tokens=4096, cpu_offload_gib=0, compile_layers=compiled)
        made[compiled] = run(Engine(config), [group("a", range(100, 150), n=2, max_tokens=1, temperature=0.0)])
    assert np.abs(made[True]["a", 0].logprobs - made[False]["a", 0].logprobs).max() < 0.2
