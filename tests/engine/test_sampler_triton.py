"""The Triton sampler against plain torch: in the interpreter where there is no GPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from rollout.engine.cuda import sampling as sampler_triton  # noqa: E402
from rollout.engine.cuda.sampling import launch  # noqa: E402
from rollout.engine.forward import sampling as sampler
from rollout.engine.forward.adjust import NOT_ALLOWED  # noqa: E402
from rollout.engine.forward.sampling import SamplingBatch  # noqa: E402
from rollout.engine.scheduling.plan import SampledTokens  # noqa: E402
from rollout.engine.values import Sampling  # noqa: E402
from tests.support.draws import CUTS, batch, far_draws, far_logits  # noqa: E402

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
VOCABULARY = 300
FEW = 100
"""a vocabulary of seven blocks, for draws that look at it some sixty times"""


def draw(*asked: Any, **more: Any) -> SampledTokens:
    return launch(*asked, **more)[1]()


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("BLOCK", "LARGE_BLOCK"):
        monkeypatch.setattr(sampler_triton, name, 16)  # a row has nineteen, in two segments, the last one short


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
    tokens, logprobs, raw, finite, *_ = draw(logits.to(DEVICE), row, temperature, uniform, raw=True)
    want, want_logprobs, want_raw = plainly(logits, row, temperature, uniform)
    assert raw is not None and finite.all()
    np.testing.assert_array_equal(tokens, want)
    np.testing.assert_allclose(logprobs, want_logprobs, atol=4e-6)
    np.testing.assert_allclose(raw, want_raw, atol=4e-6)
    assert len(set(tokens.tolist())) > 5
    assert draw(logits.to(DEVICE), row[:1], temperature[:1], uniform[:1], raw=False)[2] is None


@pytest.mark.parametrize(
    ("at", "bad"),
    [
        (0, float("nan")),
        (150, float("inf")),
        (VOCABULARY - 1, float("-inf")),
        *(
            pytest.param(at, bad, marks=pytest.mark.long)
            for at, bad in [
                (0, np.inf),
                (0, -np.inf),
                (150, np.nan),
                (150, -np.inf),
                (VOCABULARY - 1, np.nan),
                (VOCABULARY - 1, np.inf),
            ]
        ),
    ],
)
def test_flags_what_is_not_finite(bad: float, at: int) -> None:
    logits = torch.zeros(2, VOCABULARY)
    logits[1, at] = bad
    tokens, _, _, finite, *_ = draw(logits.to(DEVICE), np.array([0, 1]), np.ones(2, np.float32), np.full(2, 0.5), raw=False)
    assert finite.tolist() == [True, False] and tokens[0] == VOCABULARY // 2
    assert ((tokens >= 0) & (tokens < VOCABULARY)).all()


def test_never_a_token_without_mass() -> None:
    """exp of what lies 200 below is zero: neither end of the unit interval reaches it."""
    logits = torch.full((1, VOCABULARY), -200.0)
    logits[0, [5, 280]] = 0.0
    uniform = np.array([0.0, 0.4999, 0.5001, 1 - 2**-53])
    tokens, logprobs, *_ = draw(logits.to(DEVICE), np.zeros(4, np.int64), np.ones(4, np.float32), uniform, raw=False)
    assert tokens.tolist() == [5, 5, 280, 280]
    np.testing.assert_allclose(logprobs, np.log(0.5), atol=1e-6)


def by_triton(logits: torch.Tensor, asked: SamplingBatch) -> SampledTokens:
    cuts = sampler._cuts(asked)
    return draw(logits.to(DEVICE), asked.logits_row, asked.temperature, asked.uniform, asked.raw, cuts, asked.top)


def cut_in_every_way(count: int, vocabulary: int, best: list[int]) -> SamplingBatch:
    samplings = [msgspec.structs.replace(CUTS[i % len(CUTS)], seed=i, raw_logprobs=True) for i in range(count)]
    forbidden = [(i, sorted({best[i], i % vocabulary})) for i in range(3, count, 4)]
    return replace(batch(samplings), forbidden=forbidden)


@pytest.mark.parametrize(
    ("dtype", "spread"),
    [
        (torch.bfloat16, 0.5),
        pytest.param(torch.float32, 0.0, marks=pytest.mark.long),
        pytest.param(torch.float32, 6.0, marks=pytest.mark.long),
    ],
)
def test_cuts_what_torch_cuts(dtype: torch.dtype, spread: float) -> None:
    """Every truncation, forbidden tokens (the best one among them), ties of all logits: the same tokens are left."""
    logits = (torch.randn(20, FEW, generator=torch.Generator().manual_seed(1)) * spread).to(dtype)
    asked = cut_in_every_way(20, FEW, logits.argmax(-1).tolist())
    got, want = by_triton(logits, asked), sampler._sample_torch(logits, asked)
    same = got.tokens == want.tokens
    assert same.sum() >= 19 and got.finite.all() and want.finite.all()
    assert all(got.tokens[draw] not in tokens for draw, tokens in asked.forbidden)
    np.testing.assert_allclose(got.logprobs[same], want.logprobs[same], atol=4e-6)
    np.testing.assert_allclose(got.raw_logprobs[same], want.raw_logprobs[same], atol=4e-6)


@pytest.mark.parametrize(
    ("dtype", "spread"),
    [
        (torch.bfloat16, 0.02),
        pytest.param(torch.float32, 0.0, marks=pytest.mark.long),
        pytest.param(torch.float32, 6.0, marks=pytest.mark.long),
    ],
)
def test_the_most_probable_tokens_are_torchs(dtype: torch.dtype, spread: float) -> None:
    """Of draws that ask for none, for some and for more than are left; equal ones by the lower id."""
    logits = (torch.randn(10, FEW, generator=torch.Generator().manual_seed(3)) * spread).to(dtype)
    kinds = [CUTS[i % len(CUTS)] for i in range(10)]
    samplings = [msgspec.structs.replace(kind, seed=i, top_logprobs=(0, 3, 5, 1)[i % 4]) for i, kind in enumerate(kinds)]
    asked = replace(batch(samplings), forbidden=[(0, [1]), (5, [0, 7])])
    got, want, without = (
        by_triton(logits, asked),
        sampler._sample_torch(logits, asked),
        by_triton(logits, replace(asked, top=None)),
    )
    assert got.top is not None and want.top is not None and without.top is None
    np.testing.assert_array_equal(got.top.ids, want.top.ids)
    np.testing.assert_allclose(got.top.logprobs, want.top.logprobs, atol=4e-6)
    assert all(mine.tobytes() == plain.tobytes() for mine, plain in zip(got[:4], without[:4], strict=True) if mine is not None)


def test_what_is_not_allowed_is_not_drawn() -> None:
    """A logit so low that it has no weight, at the least and the greatest temperature, is neither drawn nor found."""
    logits = torch.full((3, FEW), NOT_ALLOWED)
    logits[:, [3, 70]] = torch.tensor([1.0, 0.5])
    samplings = [Sampling(temperature=t, top_logprobs=3, seed=1) for t in (0.001, 1.0, 100.0)]
    asked = replace(batch(samplings), uniform=np.array([1 - 2**-53] * 3))
    got = sampler._without_far(by_triton(logits, asked))
    assert got.top is not None and got.top.ids.tolist() == [[3, 70, -1]] * 3 and got.finite.all()
    assert got.tokens.tolist() == [3, 70, 70] and (got.top.logprobs[:, 2] == -np.inf).all()


@pytest.mark.long
def test_a_cut_does_not_know_its_neighbours() -> None:
    """To the bit, alone and beside all the others."""
    logits = torch.randn(10, FEW, generator=torch.Generator().manual_seed(2)) * 3
    asked = cut_in_every_way(10, FEW, logits.argmax(-1).tolist())
    together = by_triton(logits, asked)
    for i in range(10):
        own = [(0, tokens) for draw, tokens in asked.forbidden if draw == i]
        kind = msgspec.structs.replace(CUTS[i % len(CUTS)], seed=i, raw_logprobs=True)
        one = replace(batch([kind]), uniform=asked.uniform[i : i + 1], forbidden=own)
        for mine, all_of_them in zip(by_triton(logits[i : i + 1], one)[:4], together[:4], strict=True):
            assert mine.tobytes() == all_of_them[i : i + 1].tobytes()


def test_given_tokens() -> None:
    """Of what it draws itself the same log-prob; of any other torch's, -inf where it is cut."""
    logits = torch.randn(10, FEW, generator=torch.Generator().manual_seed(2)) * 3
    asked = cut_in_every_way(10, FEW, logits.argmax(-1).tolist())
    drawn = by_triton(logits, asked)
    again = by_triton(logits, replace(asked, uniform=-1.0 - drawn.tokens))
    assert [a.tobytes() for a in again if a is not None] == [d.tobytes() for d in drawn if d is not None]
    others = replace(asked, uniform=-1.0 - (drawn.tokens + 7) % FEW)
    got, want = by_triton(logits, others), sampler._sample_torch(logits, others)
    assert got.tokens.tolist() == want.tokens.tolist() == ((drawn.tokens + 7) % FEW).tolist()
    assert np.isneginf(want.logprobs).any() and not np.isneginf(want.logprobs).all()
    np.testing.assert_allclose(got.logprobs, want.logprobs, atol=4e-6)
    np.testing.assert_allclose(got.raw_logprobs, want.raw_logprobs, atol=4e-6)


def test_where_every_token_is_forbidden() -> None:
    asked = replace(batch([Sampling(top_k=3)] * 3), forbidden=[(1, list(range(VOCABULARY)))])
    assert by_triton(torch.randn(3, VOCABULARY), asked).finite.tolist() == [True, False, True]


def test_an_allowed_token_has_a_finite_log_prob() -> None:
    """However unlikely: its weight may underflow."""
    asked, allowed = far_draws(FEW)
    logits = far_logits(FEW)
    got, want = by_triton(logits, asked), sampler._sample_torch(logits, asked)
    assert np.isfinite(got.logprobs).tolist() == allowed and got.top is not None and want.top is not None
    np.testing.assert_allclose(got.logprobs, want.logprobs, rtol=1e-6)
    np.testing.assert_array_equal(got.top.ids, want.top.ids)
