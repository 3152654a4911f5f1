"""Batches of draws for the samplers, and ways to truncate a distribution."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import numpy as np
import torch

from rollout.engine.forward.sampling import SamplingBatch, uniform
from rollout.engine.values import Sampling
from rollout.engine.values.sampling import DRAW_COLUMNS, TRUNCATIONS


def cuts_of(samplings: list[Sampling]) -> dict[str, np.ndarray]:
    """Return the truncations of draws by name."""
    return {name: np.array([getattr(each, name) for each in samplings], DRAW_COLUMNS[name]) for name in TRUNCATIONS}


def batch(samplings: list[Sampling], position: int = 0) -> SamplingBatch:
    """Make one draw from one row of logits for each sampling; draw i is child i."""
    n = len(samplings)
    u = uniform(*(np.array(x, np.uint64) for x in ([s.seed or 0 for s in samplings], range(n), [position] * n)))
    return SamplingBatch(
        logits_row=np.arange(n),
        temperature=np.array([s.temperature for s in samplings], np.float32),
        cuts=cuts_of(samplings),
        uniform=u,
        forbidden=[],
        raw=any(s.raw_logprobs for s in samplings),
        top=np.array([s.top_logprobs for s in samplings], np.int64) if any(s.top_logprobs for s in samplings) else None,
    )


CUTS = [
    Sampling(top_k=1),
    Sampling(top_k=50),
    Sampling(top_k=700, temperature=0.7),
    Sampling(top_p=0.3),
    Sampling(top_p=0.95),
    Sampling(top_p=0.9999, temperature=1.4),
    Sampling(min_p=0.05),
    Sampling(top_k=30, top_p=0.8, min_p=0.02, temperature=0.8),
    Sampling(),
    Sampling(temperature=0.0),
]


def far_logits(vocabulary: int) -> torch.Tensor:
    """Logits [9, V] that fall by 60 from a token to the next: the weights of most underflow."""
    return (-60.0 * torch.arange(vocabulary)).expand(9, -1).contiguous()


def far_draws(vocabulary: int) -> tuple[SamplingBatch, list[bool]]:
    """Return nine draws that are given a token whose weight underflows, and whether each may be sampled. A top_k that reaches
    weights of 0 keeps all of them, since they are equal."""
    kinds = [Sampling(), Sampling(top_k=vocabulary), Sampling(top_k=vocabulary - 1), Sampling(top_k=8), Sampling(), Sampling()]
    kinds += [Sampling(top_k=2), Sampling(min_p=1e-30), Sampling(top_p=0.999999)]
    kinds = [msgspec.structs.replace(kind, seed=i, top_logprobs=20) for i, kind in enumerate(kinds)]
    token = vocabulary - 2
    asked = replace(batch(kinds), uniform=np.full(9, -1.0 - token), forbidden=[(4, [2, 7]), (5, [token])])
    return asked, [True, True, True, True, True, False, False, False, False]
