"""Samples that were not computed as they say, made of honest ones: for `python -m tests.bench verify` and for tests."""

from __future__ import annotations

import random
from collections.abc import Sequence

import msgspec
import numpy as np

from rollout.engine.values import Sample, Sampling

KINDS = ("token", "logprob", "seed", "best_of_8", "old_weights", "temperature")
TRIES = 7
"""groups beside the honest one from which the best sample is taken"""


def instead(kind: str, sampling: Sampling) -> list[Sampling]:
    """Return how the groups are sampled whose samples are presented as those of `sampling`; with other weights if the kind is
    "old_weights"."""
    seed = sampling.seed or 0
    match kind:
        case "seed":
            return [msgspec.structs.replace(sampling, seed=seed + 1)]
        case "best_of_8":
            return [msgspec.structs.replace(sampling, seed=seed + i) for i in range(1, 1 + TRIES)]
        case "old_weights":
            return [sampling]
        case "temperature":
            return [msgspec.structs.replace(sampling, temperature=0.9 * sampling.temperature or 0.9)]
    return []


def forged(kind: str, sample: Sample, others: Sequence[Sample], r: random.Random) -> Sample:
    """Return what is presented as an honest `sample` of at least one token. others: the samples of its index of the groups of
    `instead`."""
    if kind == "token":
        at, tokens = r.randrange(len(sample.token_ids)), sample.token_ids.copy()
        tokens[at] = (tokens[at] + 1) % max(2, int(tokens.max()))
        return msgspec.structs.replace(sample, token_ids=tokens)
    if kind == "logprob":
        at, logprobs = r.randrange(len(sample.token_ids)), sample.logprobs.copy()
        logprobs.view(np.uint32)[at] ^= 1
        return msgspec.structs.replace(sample, logprobs=logprobs)
    best = max(others, key=lambda each: each.mean_logprob)
    own = {"group_id": sample.group_id, "seed": sample.seed, "weight_versions": sample.weight_versions[:1]}
    return msgspec.structs.replace(best, **own)


def differ(one: Sample, other: Sample) -> bool:
    """Return whether two samples have other tokens or log-probs."""
    return (one.token_ids.tobytes(), one.logprobs.tobytes()) != (other.token_ids.tobytes(), other.logprobs.tobytes())
