"""Batches of draws for the samplers, and ways to truncate a distribution."""

from __future__ import annotations

import numpy as np

from rollout.engine.forward.sampling import SamplingBatch, uniform
from rollout.engine.types import Sampling


def batch(samplings: list[Sampling], position: int = 0) -> SamplingBatch:
    """Make one draw from one row of logits for each sampling; draw i is child i."""
    n = len(samplings)
    u = uniform(*(np.array(x, np.uint64) for x in ([s.seed or 0 for s in samplings], range(n), [position] * n)))
    return SamplingBatch(
        logits_row=np.arange(n),
        temperature=np.array([s.temperature for s in samplings], np.float32),
        top_k=np.array([s.top_k for s in samplings], np.int64),
        top_p=np.array([s.top_p for s in samplings], np.float32),
        min_p=np.array([s.min_p for s in samplings], np.float32),
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
