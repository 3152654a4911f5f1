"""Mixtures of experts: samples that do not depend on which rows share an expert, in engines and in exact trainers."""

from __future__ import annotations

import copy

import pytest
import torch

from rollout.engine.cpu import exact_modules, isa
from rollout.engine.cpu.exact_modules import plain_products, use_products
from rollout.engine.cpu.isa import best
from tests.support.families import build
from tests.support.samebits import (
    asked,
    assert_same_everywhere,
    assert_same_gradients,
    assert_same_in_a_trainer,
    gradients,
    prompt,
    samples_of,
)

MORE = ("mixtral", "glm4_moe", "nemotron_h", "qwen3_5_moe_text", "lfm2_moe", "olmoe", "minimax_m2", "granitemoe_swa")
MIXTURES = ["qwen3_moe", "deepseek_v3", "gpt_oss", *(pytest.param(name, marks=pytest.mark.long) for name in MORE)]
pytestmark = pytest.mark.skipif(bool(isa.lacking("avx2")), reason="no kernels for this CPU")


@pytest.mark.parametrize("name", MIXTURES)
def test_bits_do_not_depend_on_what_else_runs(name: str) -> None:
    assert_same_everywhere(build(name, torch.bfloat16), asked((61, 40, 7)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", MIXTURES)
def test_a_trainer_has_the_bits_of_the_samples(name: str, dtype: torch.dtype) -> None:
    assert_same_in_a_trainer(build(name, dtype), asked((50, 9), n=2))


@pytest.mark.parametrize("name", MIXTURES)
def test_gradients_are_those_of_the_plain_model(name: str) -> None:
    rows = [(prompt(30, 1), prompt(12, 2)), (prompt(11, 3), prompt(20, 4))]
    assert_same_gradients(*(gradients(build(name), exact, rows) for exact in (False, True)))


def experts_of(name: str, dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    return next(each for each in build(name, dtype).modules() if hasattr(each, "is_transposed"))


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss", "nemotron_h"])
def test_empty_uneven_and_single_experts(name: str) -> None:
    """All tokens at one expert, one token each, and none at most: as transformers' loop over experts."""
    ours, plain = experts_of(name), experts_of(name)
    use_products(ours, best())
    plain.config._experts_implementation = "eager"
    generator = torch.Generator().manual_seed(0)
    for tokens, chosen in ((9, [[0, 3]] * 9), (2, [[0, 1], [3, 2]]), (1, [[2, 1]]), (0, [])):
        hidden = torch.randn(tokens, 64, generator=generator)
        index = torch.tensor(chosen, dtype=torch.int64).view(tokens, 2)
        weights = torch.rand(tokens, 2, generator=generator)
        with torch.no_grad():
            got, want = ours(hidden, index, weights), plain(hidden, index, weights)
        torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-4)


def test_another_sum_of_experts_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control."""
    made = build("qwen3_moe", torch.bfloat16)
    groups = asked((50, 9), n=2)
    samples, _ = samples_of(made, groups)
    exact = exact_modules.exact_experts

    def rounded(self: torch.nn.Module, hidden: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
        return exact(self, hidden, *rest) * 1.01  # type: ignore[no-any-return]

    monkeypatch.setattr(exact_modules, "exact_experts", rounded)
    other, _ = samples_of(copy.deepcopy(made), groups)
    assert any(samples[key].logprobs.tobytes() != other[key].logprobs.tobytes() for key in samples)


def test_products_leave_no_trace() -> None:
    made = build("gpt_oss")
    before = {name: type(each) for name, each in made.named_modules()}
    use_products(made, best())
    assert sum("forward" in vars(each) for each in made.modules()) == 2 * made.config.num_hidden_layers
    plain_products(made)
    assert {name: type(each) for name, each in made.named_modules()} == before
    assert not any("forward" in vars(each) or "isa" in vars(each) for each in made.modules())
