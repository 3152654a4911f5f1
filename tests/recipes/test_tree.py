"""recipes/tree.py: branching a sample, its values, and that the branches find the sample's KV."""

from __future__ import annotations

import numpy as np
import pytest

from rollout.client.api import RolloutClient
from rollout.engine.values import Sampling
from rollout.recipes.tree import Vine, grow, otherwise, positions


@pytest.mark.parametrize(("length", "branches", "where"), [(8, 4, [0, 2, 4, 6]), (3, 4, [0, 1, 2]), (1, 4, [0]), (10, 1, [0])])
def test_positions(length: int, branches: int, where: list[int]) -> None:
    assert positions(length, branches).tolist() == where


def test_advantages_sum_to_the_reward_beyond_the_first_value() -> None:
    vine = Vine(None, np.array([0, 2, 4]), np.array([0.25, 0.5, 1.0]), reward=1.0)  # type: ignore[arg-type]
    assert vine.advantages.tolist() == [0.25, 0.5, 0.0]
    assert vine.values[0] + vine.advantages.sum() == vine.reward


def test_branches_find_the_kv_of_the_sample(tiny_service: str) -> None:
    prompt = [int(token) for token in np.random.default_rng(5).integers(3, 250, 64)]
    sampling = Sampling(n=1, max_tokens=64, ignore_eos=True, seed=1)
    endings: list[int] = []

    def reward(tokens: np.ndarray) -> float:
        endings.append(len(tokens))
        return float(tokens[-1] % 2)

    with RolloutClient(tiny_service) as client:
        (sample,) = client.submit(prompt, sampling).result(30)
        before = client.status()
        rolled = Sampling(n=6, max_tokens=16, ignore_eos=True, seed=2)
        vine = grow(client, prompt, sample, positions(64, 4), rolled, reward)
        after = client.status()
    assert vine.positions.tolist() == [0, 16, 32, 48]
    assert vine.values.shape == (4,) and np.isin(vine.values * 6, range(7)).all()
    assert endings == [*[16] * 6, *[32] * 6, *[48] * 6, *[64] * 6, 64]  # prefix and new ending together, then the sample
    # of 64, 80, 96 and 112 prompt tokens all full blocks of 32 but the one that holds the last token, which must be computed
    assert after["prefix_hit_tokens"] - before["prefix_hit_tokens"] == 32 + 64 + 64 + 96
    assert after["prefill_tokens"] - before["prefill_tokens"] == 32 + 16 + 32 + 16


def test_a_branch_of_other_tokens_finds_nothing(tiny_service: str) -> None:
    prompt = [int(token) for token in np.random.default_rng(6).integers(3, 250, 64)]
    with RolloutClient(tiny_service) as client:
        (sample,) = client.submit(prompt, Sampling(max_tokens=64, ignore_eos=True, seed=1)).result(30)
        before = client.status()
        grow(client, prompt[::-1], sample, np.array([32]), Sampling(n=2, max_tokens=2), lambda tokens: 0.0)
        after = client.status()
    assert after["prefix_hit_tokens"] == before["prefix_hit_tokens"]


def test_a_sample_with_another_seed_from_a_token_on(tiny_service: str) -> None:
    prompt, sampling = [5, 6, 7, 8], Sampling(n=2, max_tokens=32, ignore_eos=True, seed=1)
    with RolloutClient(tiny_service) as client:
        sample = client.submit(prompt, sampling).result(30)[1]
        other = otherwise(client, prompt, sample, sampling, 12, 2)
        same = otherwise(client, prompt, sample, sampling, 12, 1)
    assert np.array_equal(other.token_ids[:12], sample.token_ids[:12])
    assert other.logprobs[:12].tobytes() == sample.logprobs[:12].tobytes()
    assert not np.array_equal(other.token_ids, sample.token_ids)
    assert np.array_equal(same.token_ids, sample.token_ids), "the negative control: its own seed"
