"""recipes/dapo.py against a service: groups without spread are not trained on, and end early; what is in flight goes on."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from rollout import RolloutClient
from rollout.engine.values import Sample
from rollout.exact import use_exact
from rollout.recipes import dapo
from rollout.transport.loopback import LoopbackService
from tests.support.tiny import tiny, tiny_engine
from tests.support.wire import serving

OPTIONS = dapo.Options(steps=15, groups=3, n=8, max_tokens=6, learning_rate=3e-3, over=2.0)


class Even:
    """Reward: whether most tokens are even. Every fourth question pays the same for any answer."""

    held_out = range(8, 8)

    def __len__(self) -> int:
        return 8

    def prompt(self, index: int) -> list[int]:
        return [3, 5, 7 + index]

    def reward(self, index: int, sample: Sample) -> float:
        return 1.0 if index % 4 == 3 else float((sample.token_ids % 2 == 0).mean() > 0.5)


@pytest.fixture
def client() -> Iterator[tuple[RolloutClient, torch.nn.Module]]:
    model, end = tiny("llama"), LoopbackService()
    engine = tiny_engine(model=copy.deepcopy(model))
    use_exact(model, engine.arithmetic, block_size=8)
    with serving(engine, end), RolloutClient(transport=end.connect()) as client:
        yield client, model


def test_it_learns_from_groups_with_spread_only(client: tuple[RolloutClient, torch.nn.Module]) -> None:
    connection, model = client
    rows = list(dapo.train(OPTIONS, connection, Even(), model))
    rewards = [row["train/reward"] for row in rows]
    assert all(0 < reward < 1 for reward in rewards), "a group without spread would have been all 0 or all 1"
    assert np.mean(rewards[-4:]) > np.mean(rewards[:4])
    assert sum(row["train/dropped_groups"] for row in rows) >= 3 and all(0 <= row["train/waste"] < 1 for row in rows)
    assert [row["train/version"] for row in rows] == list(range(1, 16))
    assert rows[0]["train/ratio"] == 1.0, "the first groups are of the trainer's own weights and arithmetic"
    status = connection.status()
    assert status["service"]["clients"][0]["groups"] <= round(OPTIONS.over * OPTIONS.groups), "what is left was cancelled"


def test_groups_that_teach_nothing_end_early(client: tuple[RolloutClient, torch.nn.Module]) -> None:
    """With children of different lengths: the rest is cancelled once four have the same reward. The control waits for all."""
    connection, _ = client
    tokens = {}
    for decide_after in (2, None):
        options = dataclasses.replace(OPTIONS, decide_after=decide_after, max_tokens=140, groups=1, over=1.0)
        sampler = dapo.Sampler(options, connection, OneInFour())
        (ready,) = sampler.take(1)
        assert ready.index == 3 and sampler.dropped == 3, "three questions pay the same for any answer"
        tokens[decide_after] = sampler.wasted
        assert sampler.sampled > sampler.wasted > 0
    assert tokens[2] < tokens[None]


@pytest.mark.parametrize(("reward", "advice"), [(0.0, "no sample scores: take an easier task"), (1.0, "take a harder task")])
def test_groups_without_spread_end_the_training(
    client: tuple[RolloutClient, torch.nn.Module], reward: float, advice: str
) -> None:
    """The control is `test_it_learns_from_groups_with_spread_only`, which drops as many in all, but never in one step."""
    connection, model = client

    class Same(Even):
        def reward(self, index: int, sample: Sample) -> float:
            return reward

    options, phases = dataclasses.replace(OPTIONS, max_num_gen_batches=4), list[str]()
    with pytest.raises(dapo.NothingToLearn, match=f"12 groups.*{reward:.2f} on average: {advice}"):
        next(dapo.train(options, connection, Same(), model, phases.append))
    assert "sampling: 0 of 3 groups, 11 dropped" in phases


class OneInFour(Even):
    def reward(self, index: int, sample: Sample) -> float:
        return float(len(sample.token_ids) % 2) if index % 4 == 3 else 1.0


def test_a_sample_that_failed_stops_the_training(client: tuple[RolloutClient, torch.nn.Module]) -> None:
    connection, _ = client
    sampler = dapo.Sampler(dataclasses.replace(OPTIONS, max_tokens=400), connection, Even())
    sampler.fill()
    connection.abort_all()
    with pytest.raises(RuntimeError, match="aborted"):
        sampler.take(1)
