"""The sampler on a device against the one on the CPU."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from rollout.engine.cuda.device import draw_kernel
from rollout.engine.forward.sampling import SamplingBatch, sample
from rollout.engine.scheduling.plan import SampledTokens
from rollout.engine.values import Sampling
from tests.support.draws import batch
from tests.support.on_device import DEVICE

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]
KINDS = [
    Sampling(seed=1, raw_logprobs=True), Sampling(temperature=0.5, seed=2), Sampling(temperature=0.0),
    Sampling(top_p=0.8, seed=3), Sampling(top_k=20, seed=4), Sampling(min_p=0.05, seed=5),
    Sampling(temperature=1.3, top_k=99, top_p=0.9, min_p=0.01, seed=6),
]  # fmt: skip
ROWS = 63


@pytest.fixture(params=[32_000, 50_257], ids=["aligned", "odd"])
def logits(request: pytest.FixtureRequest) -> torch.Tensor:
    """[ROWS, vocabulary] fp32 on the CPU."""
    return 3 * torch.randn(ROWS, request.param, generator=torch.Generator().manual_seed(0))


def sample_there(logits: torch.Tensor, asked: SamplingBatch) -> SampledTokens:
    """By the device's kernel."""
    return sample(logits.to(DEVICE), asked, draw_kernel() if DEVICE == "cuda" else None)


def samplings() -> list[Sampling]:
    return [KINDS[i % len(KINDS)] for i in range(ROWS)]


def test_draws_what_the_cpu_draws(logits: torch.Tensor) -> None:
    asked = batch(samplings())
    want, got = sample(logits, asked), sample_there(logits, asked)
    differ = want.tokens != got.tokens
    assert differ.sum() <= 1, "at most one number lies on an edge"
    np.testing.assert_allclose(got.logprobs[~differ], want.logprobs[~differ], atol=1e-4, rtol=0)
    assert want.raw_logprobs is not None and got.raw_logprobs is not None and got.finite.all()
    np.testing.assert_allclose(got.raw_logprobs[~differ], want.raw_logprobs[~differ], atol=1e-4, rtol=0)
    other = sample_there(logits, replace(asked, uniform=1 - asked.uniform))
    assert (other.tokens != want.tokens).sum() > ROWS // 2, "other numbers draw other tokens"


def test_a_draw_does_not_know_its_neighbours(logits: torch.Tensor) -> None:
    """To the bit, whatever it leaves out."""
    asked = batch(samplings())
    together = sample_there(logits, asked)
    for i, kind in enumerate(samplings()):
        one = replace(batch([kind]), uniform=asked.uniform[i : i + 1], raw=True)
        alone = sample_there(logits[i : i + 1], one)
        assert (alone.tokens[0], alone.logprobs[0]) == (together.tokens[i], together.logprobs[i])


def test_what_is_not_finite_is_flagged(logits: torch.Tensor) -> None:
    logits[3, 17], logits[9, -1] = float("nan"), float("inf")
    drawn = sample_there(logits, batch(samplings()))
    assert np.flatnonzero(~drawn.finite).tolist() == [3, 9]
    assert ((drawn.tokens >= 0) & (drawn.tokens < logits.shape[1])).all()
