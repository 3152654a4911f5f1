"""Configurations that must give the same samples to the bit, and the groups that show it."""

from __future__ import annotations

from typing import Any

import numpy as np

from rollout.engine.values import Group, Sample
from tests.support.toy import group

ROOMY: dict[str, Any] = {"kv_tokens": 16_384}

CLASSES: dict[str, dict[str, Any]] = {
    "small chunks": {**ROOMY, "max_batch_tokens": 64},
    "one at a time": {**ROOMY, "max_num_seqs": 1},
    "few at a time": {**ROOMY, "max_num_seqs": 5},
    "preemptions by recompute": {"kv_tokens": 320, "prefix_cache": False},
    "preemptions by recompute and prefix cache": {"kv_tokens": 320},
    "offload": {"kv_tokens": 320, "cpu_offload_gib": 0.01},
    "offload, host memory for little": {"kv_tokens": 320, "cpu_offload_gib": 0.0002},
    "no prefix cache": {**ROOMY, "prefix_cache": False},
    "prefix not shared": {**ROOMY, "share_prefix": False},
    "overlapped": {**ROOMY, "overlap_steps": True},
    "overlapped, offload": {"kv_tokens": 320, "cpu_offload_gib": 0.01, "overlap_steps": True, "max_batch_tokens": 64},
}

MIXED = ("small chunks", "few at a time", "preemptions by recompute and prefix cache", "offload", "overlapped, offload")
"""those in which a token is computed beside others, by steps of other sizes and over KV that was moved"""


def groups(seed: int = 0) -> list[Group]:
    r = np.random.default_rng(3)
    made = [
        group(f"g{i}", r.integers(3, 199, int(r.integers(1, 60))), n=3, max_tokens=20, seed=seed + i, ignore_eos=True)
        for i in range(5)
    ]
    greedy = {"temperature": 0.0, "n": 2, "max_tokens": 24, "ignore_eos": True}
    cut = {"temperature": 0.8, "top_p": 0.9, "top_k": 50, "min_p": 0.01, "max_tokens": 15, "seed": 5, "top_logprobs": 4}
    changed = {"n": 3, "max_tokens": 12, "seed": 6, "repetition_penalty": 1.2, "frequency_penalty": 0.5, "logit_bias": {7: 2.0}}
    made.append(group("changed", r.integers(3, 199, 18), ignore_eos=True, **changed))
    return [*made, group("greedy", r.integers(3, 199, 21), **greedy), group("cut", r.integers(3, 199, 33), n=3, **cut)]


Samples = dict[tuple[str, int], Sample]
"""by group id and index, as `tests.support.toy.run` gives them"""


def assert_same(one: Samples, other: Samples) -> None:
    """Assert that samples are the same to the bit, and end the same way."""
    assert one.keys() == other.keys()
    for key, sample in one.items():
        theirs = other[key]
        np.testing.assert_array_equal(sample.token_ids, theirs.token_ids, err_msg=f"{key}")
        assert sample.logprobs.tobytes() == theirs.logprobs.tobytes(), f"{key}: log-probs differ in some bit"
        for mine, other_s in ((sample.top_ids, theirs.top_ids), (sample.top_logprobs, theirs.top_logprobs)):
            assert (mine is None) == (other_s is None), f"{key}: only one of them has its most probable tokens"
            assert mine is None or (mine.shape, mine.tobytes()) == (other_s.shape, other_s.tobytes()), key
        assert (sample.finish_reason, sample.weight_versions) == (theirs.finish_reason, theirs.weight_versions), key


def same(one: Samples, other: Samples) -> bool:
    """Whether tokens and log-probs are the same to the bit, whatever the number of the weights that made them."""
    return one.keys() == other.keys() and all(
        np.array_equal(sample.token_ids, other[key].token_ids) and sample.logprobs.tobytes() == other[key].logprobs.tobytes()
        for key, sample in one.items()
    )
