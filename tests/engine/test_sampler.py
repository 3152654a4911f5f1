"""The sampler: distributions, truncation, independence of the batch, numbers that are not finite."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial

import msgspec
import numpy as np
import pytest
import torch

from rollout.engine.cpu.build import NativeUnavailable
from rollout.engine.cpu.isa import here
from rollout.engine.cpu.kernels import Kernels, choose
from rollout.engine.forward import sampling as sampler
from rollout.engine.forward.sampling import SamplingBatch, uniform
from rollout.engine.scheduling.plan import SampledTokens
from rollout.engine.values import Sampling
from tests.support.draws import CUTS, batch, far_draws, far_logits
from tests.support.isas import best_first

sample = partial(sampler.sample, kernel=choose().kernels)
"""by the best kernels of this machine"""


@pytest.fixture(autouse=True)
def the_same_logits() -> None:
    """Whichever tests ran before."""
    torch.manual_seed(0)


def chi_square(counts: np.ndarray, probabilities: np.ndarray) -> float:
    want = probabilities[probabilities > 0] * counts.sum()
    return float(((counts[probabilities > 0] - want) ** 2 / want).sum())


LOGITS = torch.tensor([2.0, 1.0, 0.5, 0.0, -1.0, -3.0])


@pytest.mark.parametrize(
    ("sampling", "kept"),
    [
        (Sampling(), 6),
        (Sampling(temperature=0.5), 6),
        (Sampling(temperature=2.0), 6),
        (Sampling(top_k=3), 3),
        (Sampling(top_p=0.7), 2),
        (Sampling(min_p=0.2), 3),
        (Sampling(temperature=1.5, top_k=5, top_p=0.9, min_p=0.05), 4),
    ],
)
def test_frequencies_are_the_probabilities(sampling: Sampling, kept: int) -> None:
    """chi-square over 20,000 draws; the log-prob returned is that of the distribution drawn from."""
    n = 20_000
    drawn = sample(LOGITS.expand(n, -1), batch([sampling] * n))
    scaled = (LOGITS / sampling.temperature).log_softmax(-1)
    reference = _cut_by_hand(scaled.double().exp().numpy(), sampling)
    assert (reference > 0).sum() == kept
    counts = np.bincount(drawn.tokens, minlength=6)
    assert (counts[reference == 0] == 0).all()
    assert chi_square(counts, reference) < 20.5, "p < 0.001 at 5 degrees of freedom"
    np.testing.assert_allclose(drawn.logprobs, np.log(reference[drawn.tokens]), atol=1e-5)


def test_a_wrong_distribution_is_seen() -> None:
    """The negative control of the test above."""
    drawn = sample(LOGITS.expand(20_000, -1), batch([Sampling(temperature=1.1)] * 20_000))
    assert chi_square(np.bincount(drawn.tokens, minlength=6), LOGITS.softmax(-1).double().numpy()) > 20.5


def _cut_by_hand(p: np.ndarray, sampling: Sampling) -> np.ndarray:
    order = np.argsort(-p, kind="stable")
    keep = np.ones(len(p), bool)
    if sampling.top_k:
        keep[order[sampling.top_k :]] = False
    p = np.where(keep, p, 0) / p[keep].sum()
    p = np.where(p >= sampling.min_p * p.max(), p, 0)
    p /= p.sum()
    mass = 0.0
    out = np.zeros_like(p)
    for token in order:
        if mass >= sampling.top_p:
            break
        out[token] = p[token]
        mass += p[token]
    return out / out.sum()


def test_draws_are_independent_over_seed_index_and_position() -> None:
    n = 30_000
    u = np.stack(
        [
            uniform(*(np.array(x, np.uint64) for x in axes))
            for axes in ((range(n), [0] * n, [0] * n), ([7] * n, range(n), [0] * n), ([7] * n, [0] * n, range(n)))
        ]
    )
    assert ((u >= 0) & (u < 1)).all()
    for row in u:
        assert chi_square(np.bincount((row * 50).astype(int), minlength=50), np.full(50, 1 / 50)) < 85.4
        assert abs(np.corrcoef(row[:-1], row[1:])[0, 1]) < 0.02
    assert (np.abs(np.corrcoef(u) - np.eye(3)) < 0.02).all()


def test_a_row_does_not_see_its_neighbours() -> None:
    """Tokens and log-probs to the bit, alone and among rows that ask for every kind of truncation."""
    torch.manual_seed(0)
    logits = torch.randn(12, 1000) * 3
    kinds = [Sampling(seed=1), Sampling(temperature=0.0), Sampling(top_k=7, seed=2), Sampling(top_p=0.8, seed=3)]
    kinds += [
        Sampling(min_p=0.1, seed=4),
        Sampling(temperature=0.6, top_k=20, top_p=0.9, min_p=0.01, seed=5, raw_logprobs=True),
    ]
    together = sample(logits, batch(kinds * 2))
    for i, kind in enumerate(kinds * 2):
        lone = batch([kind])
        lone.uniform[:] = batch(kinds * 2).uniform[i]
        alone = sample(logits[i : i + 1], lone)
        assert alone.tokens[0] == together.tokens[i]
        assert alone.logprobs.tobytes() == together.logprobs[i : i + 1].tobytes()


@pytest.mark.parametrize("sampling", [Sampling(top_p=0.9), Sampling(top_k=40), Sampling(min_p=0.01, raw_logprobs=True)])
def test_a_fork_draws_what_each_child_would_draw_alone(sampling: Sampling) -> None:
    """Children that share a distribution share the work on it; every bit is as if each had done it for itself."""
    torch.manual_seed(0)
    logits = torch.randn(3, 3000)
    many = batch([sampling] * 200)
    forked = replace(many, logits_row=np.arange(200) % 3)
    together, apart = sample(logits, forked), sample(logits[np.arange(200) % 3], many)
    for one, other in zip(together, apart, strict=True):
        assert (one is None) == (other is None) and (one is None or one.tobytes() == other.tobytes())
    assert len(set(together.tokens.tolist())) > 20


@pytest.mark.parametrize("spread", [0.1, 1.0, 6.0])
def test_a_nucleus_wider_than_the_first_look(spread: float) -> None:
    """The same tokens are kept as by sorting all of them, whether or not the most likely ones hold the mass."""
    torch.manual_seed(1)
    weights = (torch.randn(9, 3000) * spread).softmax(-1)
    top_p = torch.linspace(0.05, 0.999, 9)[:, None]
    edge = sampler._nucleus_edge(weights, top_p)
    kept = (weights >= edge).sum(-1)
    assert kept.max() > sampler.NUCLEUS or spread > 1
    for row, p, count in zip(weights, top_p[:, 0].double(), kept.tolist(), strict=True):
        mass = row.sort(descending=True).values.cumsum(-1, dtype=torch.float64)
        mass /= mass[-1].clone()
        assert mass[count - 1] >= p - 1e-12 and (count == 1 or mass[count - 2] < p)


def test_where_every_token_is_forbidden_nothing_is_drawn() -> None:
    drawn = sample(torch.randn(2, 4), replace(batch([Sampling()] * 2), forbidden=[(1, [0, 1, 2, 3])]))
    assert drawn.finite.tolist() == [True, False]


def test_greedy_takes_the_best_and_never_draws() -> None:
    drawn = sample(LOGITS.expand(100, -1), batch([Sampling(temperature=0.0)] * 100))
    assert (drawn.tokens == 0).all()
    np.testing.assert_allclose(drawn.logprobs, LOGITS.log_softmax(-1)[0].item(), rtol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_greedy_is_of_logits_and_not_of_their_rounded_log_probs(dtype: torch.dtype) -> None:
    """Float16 goes through torch. Of two logits that are neighbours the larger is taken, wherever it stands."""
    logits = torch.randn(200, 1000).to(dtype)
    best = logits.argmax(-1)
    top, row = logits.amax(-1), torch.arange(200)
    logits[row, (best + 1 + row) % 1000] = torch.nextafter(top, torch.zeros_like(top))
    drawn = sample(logits, batch([Sampling(temperature=0.0)] * 200))
    assert drawn.tokens.tolist() == best.tolist()


def test_the_ends_of_the_unit_interval() -> None:
    """u = 0 and u just below 1 fall on tokens that can be drawn."""
    logits = torch.tensor([[-torch.inf, 1.0, 2.0, -torch.inf]] * 2)
    ends = batch([Sampling()] * 2)
    ends.uniform[:] = [0.0, np.nextafter(1.0, 0.0)]
    assert sample(logits.nan_to_num(neginf=-1e30), ends).tokens.tolist() == [1, 2]


def test_what_is_not_finite_is_flagged() -> None:
    logits = torch.randn(3, 50)
    logits[1, 7] = torch.nan
    drawn = sample(logits, batch([Sampling()] * 3))
    assert drawn.finite.tolist() == [True, False, True]
    clean = sample(logits[[0, 2]], batch([Sampling()] * 2))
    assert clean.tokens[0] == drawn.tokens[0]


# ── the native kernel against plain torch ─────────────────────────────────────────────────────────────────────────────
PLAIN = [Sampling(), Sampling(temperature=0.7), Sampling(temperature=1.3), Sampling(temperature=0.0)]


@cache
def kernels_of(isa: str) -> Kernels:
    try:
        return Kernels(isa)
    except NativeUnavailable as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module", params=best_first(here()))
def kernels(request: pytest.FixtureRequest) -> Kernels:
    """of the best instruction set that this CPU has; nightly of each"""
    return kernels_of(request.param)


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def both(request: pytest.FixtureRequest, kernels: Kernels) -> Callable[..., tuple[SampledTokens, SampledTokens]]:
    def sample_twice(logits: torch.Tensor, batch: SamplingBatch) -> tuple[SampledTokens, SampledTokens]:
        """by the native kernel, and by torch"""
        logits = logits.to(request.param)
        return sampler.sample(logits, batch, kernels), sampler.sample(logits, batch)

    return sample_twice


def test_the_same_bits_on_every_instruction_set() -> None:
    """Tokens and log-probs, plain, cut and raw, of every width of a vector."""
    torch.manual_seed(1)
    kinds = [msgspec.structs.replace(CUTS[i % len(CUTS)], seed=i, raw_logprobs=True, top_logprobs=i % 21) for i in range(20)]
    draws = batch(kinds)
    for vocabulary, dtype in ((1, torch.float32), (19, torch.bfloat16), (1003, torch.float32), (20_011, torch.bfloat16)):
        logits = (torch.randn(20, vocabulary) * 3).to(dtype)
        some = replace(draws, forbidden=[(3, [vocabulary // 2]), (7, [0])])
        drawn = [sampler.sample(logits, some, kernels_of(isa)) for isa in here()]
        for other in drawn[1:]:
            for mine, theirs in zip((*drawn[0][:4], *drawn[0].top), (*other[:4], *other.top), strict=True):
                assert mine.tobytes() == theirs.tobytes()


def test_lanes_of_torch_are_found_not_assumed(kernels: Kernels) -> None:
    """What torch says of its own vectors agrees with what was found; and the other number of lanes gives other bits."""
    capability = torch.backends.cpu.get_cpu_capability()
    if capability not in ("AVX512", "AVX2"):
        pytest.skip(f"torch computes with {capability} here, whose sums are not copied")
    assert kernels.torch_logprobs and kernels.lanes == {"AVX512": 16, "AVX2": 8}[capability]
    other = Kernels(kernels.isa)
    other.lanes = 24 - kernels.lanes
    logits, draws = torch.randn(64, 999), batch([Sampling(seed=i) for i in range(64)])
    one, two = sampler.sample(logits, draws, kernels), sampler.sample(logits, draws, other)
    assert one.tokens.tobytes() == two.tokens.tobytes() and one.logprobs.tobytes() != two.logprobs.tobytes()


@pytest.mark.parametrize("vocabulary", [1, 7, 16, 199, 513, 4096, 49_157])
def test_native_draws_what_torch_draws(
    vocabulary: int, both: Callable[..., tuple[SampledTokens, SampledTokens]], kernels: Kernels
) -> None:
    """Tokens agree but where a uniform number falls on an edge within rounding; log-probs are torch's to the bit, where this
    torch's sums are of a kind that the kernel knows."""
    torch.manual_seed(vocabulary)
    logits = torch.randn(64, vocabulary) * 4
    samplings = [msgspec.structs.replace(kind, seed=i, raw_logprobs=True) for i in range(16) for kind in PLAIN]
    native, plain = both(logits, batch(samplings))
    same = native.tokens == plain.tokens
    assert same.mean() >= 0.98 and native.finite.all()
    if vocabulary >= 16 and kernels.torch_logprobs:
        assert native.logprobs[same].tobytes() == plain.logprobs[same].tobytes()
        assert native.raw_logprobs[same].tobytes() == plain.raw_logprobs[same].tobytes()
    np.testing.assert_allclose(native.logprobs[same], plain.logprobs[same], atol=2e-6 if kernels.torch_logprobs else 1e-5)
    assert (
        native.raw_logprobs[0] == native.logprobs[0]
        and (native.raw_logprobs[1::4] != native.logprobs[1::4]).any()
        or (vocabulary == 1)
    )


def test_native_with_many_draws_from_one_row(
    both: Callable[..., tuple[SampledTokens, SampledTokens]], kernels: Kernels
) -> None:
    logits = torch.randn(3, 300)
    wide = replace(batch([Sampling(seed=i) for i in range(30)]), logits_row=np.repeat([0, 2, 1], 10))
    native, plain = both(logits, wide)
    np.testing.assert_array_equal(native.tokens, plain.tokens)
    np.testing.assert_allclose(native.logprobs, plain.logprobs, atol=0 if kernels.torch_logprobs else 1e-5, rtol=0)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_native_flags_what_is_not_finite(bad: float, both: Callable[..., tuple[SampledTokens, SampledTokens]]) -> None:
    for at in (0, 17, 198):
        logits = torch.randn(4, 199)
        logits[2, at] = bad
        for drawn in both(logits, batch([Sampling()] * 4)):
            assert drawn.finite.tolist() == [True, True, False, True]


def test_native_at_the_ends_of_the_unit_interval(both: Callable[..., tuple[SampledTokens, SampledTokens]]) -> None:
    """What has no probability is never drawn, and neither is what stands behind the vocabulary."""
    logits = torch.full((2, 1029), -1e30)
    logits[:, [3, 700]] = 1.0
    ends = batch([Sampling()] * 2)
    ends.uniform[:] = [0.0, np.nextafter(1.0, 0.0)]
    assert both(logits, ends)[0].tokens.tolist() == [3, 700]


@pytest.mark.parametrize("vocabulary", [3, 16, 199, 4096, 16_389])
@pytest.mark.parametrize("spread", [0.0, 0.5, 6.0])
def test_native_cuts_what_torch_cuts(
    spread: float, vocabulary: int, both: Callable[..., tuple[SampledTokens, SampledTokens]], kernels: Kernels
) -> None:
    """Every truncation, forbidden tokens (the best one among them), ties of all logits: the same tokens are left."""
    torch.manual_seed(vocabulary)
    logits = torch.randn(60, vocabulary) * spread
    samplings = [msgspec.structs.replace(CUTS[i % len(CUTS)], seed=i, raw_logprobs=True) for i in range(60)]
    best = logits.bfloat16().argmax(-1).tolist()
    forbidden = [(i, sorted({best[i], i % vocabulary})) for i in range(3, 60, 4)]
    native, plain = both(logits, replace(batch(samplings), forbidden=forbidden))
    same = native.tokens == plain.tokens
    assert same.mean() >= 0.96 and native.finite.tolist() == plain.finite.tolist()
    assert all(native.tokens[draw] not in tokens for draw, tokens in forbidden if native.finite[draw])
    for one, other in ((native.logprobs, plain.logprobs), (native.raw_logprobs, plain.raw_logprobs)):
        np.testing.assert_allclose(one[same], other[same], atol=2e-6 if kernels.torch_logprobs else 1e-5)
        assert vocabulary < 16 or not kernels.torch_logprobs or one[same].tobytes() == other[same].tobytes()


def by_hand(logits: torch.Tensor, sampling: Sampling, forbidden: list[int]) -> list[int]:
    """Ids of the most probable tokens that are left, likeliest first, of equal ones the lower id."""
    scaled = logits / (sampling.temperature or 1.0)
    scaled[forbidden] = -torch.inf
    at = (scaled > -torch.inf).nonzero()[:, 0]
    if sampling.temperature:
        kept = sampler._truncate(scaled[None], batch([sampling]), np.array([0]))[0]
        at = at[kept[at] > -torch.inf]
    values = scaled.tolist()
    return sorted(at.tolist(), key=lambda i: (-values[i], i))[: sampling.top_logprobs]


@pytest.mark.parametrize("vocabulary", [3, 16, 199, 4096])
@pytest.mark.parametrize("spread", [0.0, 0.02, 6.0])
def test_the_most_probable_tokens(
    spread: float, vocabulary: int, both: Callable[..., tuple[SampledTokens, SampledTokens]], kernels: Kernels
) -> None:
    """Natively, by torch and by hand: of what truncation and forbidden tokens leave, where all are equal and where many are."""
    torch.manual_seed(vocabulary)
    logits = (torch.randn(40, vocabulary) * spread).bfloat16().float()  # the same numbers in either dtype
    samplings = [msgspec.structs.replace(CUTS[i % len(CUTS)], seed=i, top_logprobs=(0, 1, 5, 20)[i // 10]) for i in range(40)]
    forbidden = [(i, [i % vocabulary]) for i in range(3, 40, 4)]
    native, plain = both(logits, replace(batch(samplings), forbidden=forbidden))
    assert native.top is not None and plain.top is not None
    assert native.top.ids.tobytes() == plain.top.ids.tobytes()
    np.testing.assert_allclose(native.top.logprobs, plain.top.logprobs, atol=2e-6 if kernels.torch_logprobs else 1e-5)
    assert vocabulary < 16 or not kernels.torch_logprobs or native.top.logprobs.tobytes() == plain.top.logprobs.tobytes()
    for i, sampling in enumerate(samplings):
        want = by_hand(logits[i], sampling, dict(forbidden).get(i, []))
        assert native.top.ids[i].tolist() == want + [-1] * (20 - len(want))
        assert (native.top.logprobs[i, len(want) :] == -np.inf).all()
        if native.tokens[i] in want:
            assert native.top.logprobs[i, want.index(native.tokens[i])] == native.logprobs[i]


def test_what_most_probable_tokens_cost_nobody_else(both: Callable[..., tuple[SampledTokens, SampledTokens]]) -> None:
    """Those who do not ask draw the same, and nothing is made where nobody does."""
    logits, samplings = torch.randn(4, 99), [Sampling(seed=i, top_p=0.8 if i % 2 else 1.0) for i in range(4)]
    asked = [*samplings[:3], msgspec.structs.replace(samplings[3], top_logprobs=2)]
    for without, beside in zip(both(logits, batch(samplings)), both(logits, batch(asked)), strict=True):
        assert without.top is None and beside.top is not None and (beside.top.ids[:3] == -1).all()
        assert without.tokens.tobytes() == beside.tokens.tobytes() and without.logprobs.tobytes() == beside.logprobs.tobytes()


def test_most_probable_of_zeros_of_both_signs(both: Callable[..., tuple[SampledTokens, SampledTokens]]) -> None:
    logits = torch.tensor([[-0.0, 0.0] * 10])
    for drawn in both(logits, batch([Sampling(top_logprobs=4)])):
        assert drawn.top is not None and drawn.top.ids.tolist() == [[0, 1, 2, 3]]


def test_native_where_every_token_is_forbidden(both: Callable[..., tuple[SampledTokens, SampledTokens]]) -> None:
    for drawn in both(torch.randn(3, 40), replace(batch([Sampling(top_k=3)] * 3), forbidden=[(1, list(range(40)))])):
        assert drawn.finite.tolist() == [True, False, True]


@pytest.mark.parametrize("threads", [1, 3])
def test_native_cuts_whatever_the_threads(threads: int) -> None:
    """Each thread has room of its own."""
    torch.manual_seed(0)
    logits, before = torch.randn(90, 5000) * 2, torch.get_num_threads()
    samplings = [msgspec.structs.replace(CUTS[i % len(CUTS)], seed=i) for i in range(90)]
    want = sample(logits, batch(samplings))
    torch.set_num_threads(threads)
    try:
        for _ in range(5):
            got = sample(logits, batch(samplings))
            assert got.tokens.tobytes() == want.tokens.tobytes() and got.logprobs.tobytes() == want.logprobs.tobytes()
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("vocabulary", [40, 4096])
def test_an_allowed_token_has_a_finite_log_prob(
    vocabulary: int, both: Callable[..., tuple[SampledTokens, SampledTokens]]
) -> None:
    """However unlikely: its weight may underflow. Only what truncation or a forbidden id takes away has none."""
    asked, allowed = far_draws(vocabulary)
    for drawn in both(far_logits(vocabulary), asked):
        assert np.isfinite(drawn.logprobs).tolist() == allowed and drawn.logprobs[np.array(allowed)].max() < -104
        assert drawn.top is not None
        for i, ids in enumerate(drawn.top.ids.tolist()):
            forbidden = dict(asked.forbidden).get(i, [])
            left = [token for token in range(vocabulary) if token not in forbidden]
            want = left[:20] if i < 6 else left[: ids.index(-1)]
            assert ids == want + [-1] * (20 - len(want))
            assert np.isfinite(drawn.top.logprobs[i, : len(want)]).all()
