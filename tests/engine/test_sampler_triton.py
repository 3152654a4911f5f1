"""The Triton sampler against plain torch: in the interpreter where there is no GPU."""

from __future__ import annotations

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from engine import sampler_triton  # noqa: E402
from engine.sampler_triton import draw  # noqa: E402

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
VOCABULARY = 300


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampler_triton, "BLOCK", 64)  # a row has five, the last one short


def plainly(logits: torch.Tensor, row: np.ndarray, temperature: np.ndarray, uniform: np.ndarray) -> tuple[np.ndarray, ...]:
    """(token, log-prob, log-prob at temperature 1) in double precision."""
    raw = logits.double()[torch.from_numpy(row)].log_softmax(-1)
    scale = torch.from_numpy(np.where(temperature == 0, 1, temperature))[:, None]
    logprobs = (logits.double()[torch.from_numpy(row)] / scale).log_softmax(-1)
    total = logprobs.exp().cumsum(-1)
    drawn = torch.searchsorted(total, torch.from_numpy(uniform)[:, None] * total[:, -1:], right=True)
    tokens = torch.where(torch.from_numpy(temperature)[:, None] == 0, logprobs.argmax(-1, keepdim=True), drawn)
    return tokens[:, 0].numpy(), logprobs.gather(-1, tokens)[:, 0].numpy(), raw.gather(-1, tokens)[:, 0].numpy()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_draws_what_torch_draws(dtype: torch.dtype) -> None:
    generator = np.random.default_rng(0)
    logits = (torch.randn(4, VOCABULARY, generator=torch.Generator().manual_seed(0)) * 3).to(dtype)
    row = np.arange(24) % 4
    temperature = np.array([1.0, 0.3, 0.0, 1.7], np.float32)[np.arange(24) // 6]
    uniform = generator.random(24)
    uniform[:2] = 0.0, 1 - 2**-53
    tokens, logprobs, raw, finite = draw(logits.to(DEVICE), row, temperature, uniform, raw=True)
    want, want_logprobs, want_raw = plainly(logits, row, temperature, uniform)
    assert raw is not None and finite.all()
    np.testing.assert_array_equal(tokens, want)
    np.testing.assert_allclose(logprobs, want_logprobs, atol=4e-6)
    np.testing.assert_allclose(raw, want_raw, atol=4e-6)
    assert len(set(tokens.tolist())) > 5
    assert draw(logits.to(DEVICE), row[:1], temperature[:1], uniform[:1], raw=False)[2] is None


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("at", [0, 150, VOCABULARY - 1])
def test_flags_what_is_not_finite(bad: float, at: int) -> None:
    logits = torch.zeros(2, VOCABULARY)
    logits[1, at] = bad
    tokens, _, _, finite = draw(logits.to(DEVICE), np.array([0, 1]), np.ones(2, np.float32), np.full(2, 0.5), raw=False)
    assert finite.tolist() == [True, False] and tokens[0] == VOCABULARY // 2
    assert ((tokens >= 0) & (tokens < VOCABULARY)).all()


def test_never_a_token_without_mass() -> None:
    """exp of what lies 200 below is zero: neither end of the unit interval reaches it."""
    logits = torch.full((1, VOCABULARY), -200.0)
    logits[0, [5, 280]] = 0.0
    uniform = np.array([0.0, 0.4999, 0.5001, 1 - 2**-53])
    tokens, logprobs, _, _ = draw(logits.to(DEVICE), np.zeros(4, np.int64), np.ones(4, np.float32), uniform, raw=False)
    assert tokens.tolist() == [5, 5, 280, 280]
    np.testing.assert_allclose(logprobs, np.log(0.5), atol=1e-6)
