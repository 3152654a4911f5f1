"""A SamplingBatch for a single draw, for computing by hand what an engine must draw."""

from __future__ import annotations

import numpy as np

from rollout.engine.forward.sampling import SamplingBatch, uniform
from rollout.engine.values import Sampling
from tests.support.draws import cuts_of


def one_draw(sampling: Sampling, index: int, position: int) -> SamplingBatch:
    assert sampling.seed is not None
    return SamplingBatch(
        logits_row=np.zeros(1, np.int64),
        temperature=np.array([sampling.temperature], np.float32),
        cuts=cuts_of([sampling]),
        uniform=uniform(*(np.array([x], np.uint64) for x in (sampling.seed, index, position))),
        forbidden=[],
        raw=False,
    )
