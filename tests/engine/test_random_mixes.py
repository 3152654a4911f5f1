"""Random groups of models of every kind, in bf16: the same bits alone, in a crowd, offloaded, reset, cut and resumed elsewhere,
and scored."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
import torch

from rollout.engine.config import EngineConfig
from rollout.engine.cpu import isa
from rollout.engine.engine import Engine
from rollout.engine.forward.model import Model
from rollout.engine.values import Group, PartialSample, Sample, Sampling
from tests.support.equivalence import Samples, assert_same
from tests.support.families import build
from tests.support.nightly import Draw
from tests.support.samebits import ROOMY
from tests.support.toy import run

KINDS = ("qwen3_5_text", "nemotron_h", "lfm2", "falcon_h1", "gpt_oss", "gemma4_text", "deepseek_v3")
CROWD = 20
"""groups that run together"""
ELSEWHERE: dict[str, dict[str, Any]] = {
    "alone, in small chunks": {"max_batch_tokens": 17, "prefix_cache": False},
    "offloaded": {"kv_tokens": 360, "cpu_offload_gib": 0.01},
    "reset": {"kv_tokens": 240},
}
pytestmark = pytest.mark.skipif(bool(isa.lacking("avx2")), reason="no kernels for this CPU")


def random_groups(seed: int) -> list[Group]:
    r = np.random.default_rng(seed)
    groups = []
    for i in range(CROWD):
        sampling = Sampling(
            n=int(r.integers(1, 4)),
            max_tokens=int(r.integers(1, 24)),
            seed=int(r.integers(1 << 30)),
            temperature=float(r.choice([0.0, 0.7, 1.0, 1.3])),
            top_p=float(r.choice([1.0, 0.9])),
            ignore_eos=True,
        )
        groups.append(Group(f"g{seed}-{i}", r.integers(24, 99, int(r.integers(1, 90))).astype(np.int32), sampling))
    return groups


def some_of(sample: Sample, tokens: int) -> PartialSample:
    """Return the first tokens of a sample, as a client keeps those of an interrupted one."""
    return PartialSample(
        index=sample.index,
        token_ids=sample.token_ids[:tokens],
        logprobs=sample.logprobs[:tokens],
        weight_versions=[(0, 0)],
    )


def mixes(name: str, seeds: Iterable[int]) -> None:
    made = build(name, torch.bfloat16)

    def engine(**config: Any) -> Engine:
        return Engine(EngineConfig(dtype="bfloat16", threads=1, **{**ROOMY, **config}), Model(copy.deepcopy(made), name))

    crowded, others = engine(), {each: engine(**config) for each, config in ELSEWHERE.items()}
    assert "/batch" not in crowded.arithmetic, crowded.status()["computed_by_reason"]
    for seed in seeds:
        groups = random_groups(seed)
        crowd = run(crowded, groups)
        for each, other in others.items():
            together = [[group] for group in groups] if each.startswith("alone") else [groups]
            found: Samples = {}
            for part in together:
                found |= run(other, part)
            assert_same(crowd, found)
        for group in groups:
            ours = {index: crowd[group.id, index] for index in range(group.sampling.n)}
            cut = tuple(some_of(sample, len(sample.token_ids) // 2) for sample in ours.values() if len(sample.token_ids) > 1)
            resumed = run(others["reset"], [Group(f"{group.id}r", group.prompt, group.sampling, partials=cut)])
            assert_same(
                {(group.id, i): sample for i, sample in ours.items()}, {(group.id, i): s for (_, i), s in resumed.items()}
            )
            if group.sampling.temperature in (0.0, 1.0) and group.sampling.top_p == 1:
                given = tuple(some_of(sample, len(sample.token_ids)) for sample in ours.values())
                scored = run(
                    others["offloaded"], [Group(f"{group.id}s", group.prompt, group.sampling, partials=given, score=True)]
                )
                for index, sample in ours.items():
                    assert scored[f"{group.id}s", index].logprobs.tobytes() == sample.logprobs.tobytes()


@pytest.mark.parametrize("name", ["qwen3_5_text", pytest.param("gpt_oss", marks=pytest.mark.long)])
def test_a_crowd(name: str) -> None:
    mixes(name, range(1))


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", KINDS)
def test_two_hundred_random_groups(name: str, new_seeds: Draw) -> None:
    mixes(name, new_seeds(10))
