"""Mixtures of experts: samples that do not depend on which rows share an expert, in engines and in exact trainers."""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from rollout.engine.config import EngineConfig
from rollout.engine.cpu import exact_modules, isa
from rollout.engine.cpu.exact_modules import NotServed, plain_products, use_products
from rollout.engine.cpu.experts import ExpertKernels, sort_routes
from rollout.engine.cpu.isa import best
from rollout.engine.cpu.kernels import Kernels
from rollout.engine.cpu.products import products_of
from rollout.engine.engine import Engine
from rollout.engine.forward.model import Model
from rollout.exact import sample_logprobs, use_exact
from tests.support.equivalence import ROOMY, assert_same
from tests.support.families import build
from tests.support.samebits import (
    asked,
    assert_same_everywhere,
    assert_same_gradients,
    assert_same_in_a_trainer,
    engine_of,
    gradients,
    prompt,
    samples_of,
)
from tests.support.toy import group, run

MORE = (
    "mixtral",
    "glm4_moe",
    "nemotron_h",
    "qwen3_5_moe_text",
    "lfm2_moe",
    "olmoe",
    "minimax_m2",
    "granitemoe_swa",
    "kolibri1",
    "dbrx",
)
MIXTURES = ["qwen3_moe", "deepseek_v3", "gpt_oss", *(pytest.param(name, marks=pytest.mark.long) for name in MORE)]
TRAINED = ("olmoe", "qwen3_moe", "mixtral", "deepseek_v3", "gpt_oss", "glm4_moe", "minimax_m2")
MIXES = 200
pytestmark = pytest.mark.skipif(bool(isa.lacking("avx2")), reason="no kernels for this CPU")


@pytest.mark.some(2)
@pytest.mark.parametrize("name", MIXTURES)
def test_bits_do_not_depend_on_what_else_runs(name: str) -> None:
    assert_same_everywhere(build(name, torch.bfloat16), asked((61, 40, 7), tokens=12))


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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss", "nemotron_h"])
def test_one_call_for_all_experts_has_the_bits_of_one_for_each(name: str, dtype: torch.dtype) -> None:
    """Without gradients all experts are one call. Choices of no expert (number 4 here) are left out by both."""
    made, generator = experts_of(name, dtype).requires_grad_(False), torch.Generator().manual_seed(0)
    for each in isa.here():
        use_products(made, each)
        for tokens in (0, 1, 21, *((300,) if each == best() else ())):
            hidden = torch.randn(tokens, 64, generator=generator).to(dtype)
            index = torch.rand(tokens, 5, generator=generator).topk(2).indices
            index[: tokens // 2] = torch.tensor([3, 1])
            weights = torch.rand(tokens, 2, generator=generator).to(dtype)
            by_one = made(hidden, index, weights)
            with torch.no_grad():
                at_once = made(hidden, index, weights)
            assert at_once.dtype == dtype and torch.equal(at_once, by_one), (each, tokens)


@pytest.mark.long
@pytest.mark.parametrize("name", TRAINED)
def test_random_mixes_of_groups(name: str) -> None:
    """A group's samples alone are those in the mix, and an exact trainer has all log-probs, with gradients and without."""
    made, r = build(name, torch.bfloat16), np.random.default_rng(0)
    engine = engine_of(made, prefix_cache=False, max_batch_tokens=96)
    use_exact(made, engine.arithmetic, block_size=8)
    for mix in range(MIXES):
        mixed = [
            group(
                f"{mix}.{i}", prompt(int(r.integers(1, 60)), int(r.integers(1 << 30))), n=int(r.integers(1, 5)),
                max_tokens=int(r.integers(1, 9)), seed=mix, ignore_eos=True,
            )
            for i in range(int(r.integers(2, 6)))
        ]  # fmt: skip
        crowd = run(engine, mixed)
        alone = run(engine, [mixed[int(r.integers(len(mixed)))]])
        assert_same(alone, {key: crowd[key] for key in alone})
        kept = [(each.prompt, crowd[each.id, index]) for each in mixed for index in each.wanted]
        with torch.set_grad_enabled(mix % 2 == 0):
            again = sample_logprobs(made, [(prompt, sample.token_ids) for prompt, sample in kept])
        for (_, sample), logprobs in zip(kept, again, strict=True):
            assert np.array_equal(logprobs.detach().numpy(), sample.logprobs), mix


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_grouped_products_of_odd_sizes(dtype: torch.dtype) -> None:
    """In both layouts, as a product for each expert: 75 outputs and 1067 inputs, whose second chain ends inside a word."""
    generator = torch.Generator().manual_seed(0)
    weight, bias = torch.randn(3, 75, 1067, generator=generator).to(dtype), torch.randn(3, 75, generator=generator).to(dtype)
    x, routes = torch.randn(19, 1067, generator=generator).to(dtype), sort_routes(np.array([[0, 2]] * 17 + [[2, 3]] * 2), 3)
    assert routes.expert.tolist() == [0, 2] and routes.begin.tolist() == [0, 17, 36]
    for each in isa.here():
        kernels = Kernels(each)
        want = torch.cat([kernels.linear(x[:17], weight[0], bias[0]), kernels.linear(x, weight[2], bias[2])])
        for by_input in (False, True):
            laid = weight.mT.contiguous() if by_input else weight
            got = ExpertKernels(kernels).grouped(x, laid, bias, routes, gather=True, by_input=by_input)
            assert torch.equal(got, want), (each, by_input)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_few_rows_of_a_transposed_weight(dtype: torch.dtype, threads: int) -> None:
    """Its panels are read side by side: 9 whole ones and an edge, or fewer; three chains, the last one not of whole steps."""
    generator, rows = torch.Generator().manual_seed(0), (1, 2, 7, 8, 9, 16, 17)
    chosen = np.array(
        [[expert for expert in range(len(rows)) if at < rows[expert]] + [9] * sum(at >= n for n in rows) for at in range(17)]
    )
    routes = sort_routes(chosen, len(rows))
    assert np.diff(routes.begin).tolist() == list(rows)
    for inputs, outputs in ((2102, 437), (2101, 96), (64, 48)):
        weight = torch.randn(len(rows), outputs, inputs, generator=generator).to(dtype)
        x, bias = torch.randn(17, inputs, generator=generator).to(dtype), torch.randn(len(rows), outputs).to(dtype)
        for each in isa.here():
            kernels = Kernels(each)
            kernels.threads = threads
            want = torch.cat([kernels.linear(x[:n], weight[i], bias[i]) for i, n in enumerate(rows)])
            got = ExpertKernels(kernels).grouped(x, weight.mT.contiguous(), bias, routes, gather=True, by_input=True)
            assert torch.equal(got, want), (each, inputs, outputs)


def test_routes_are_sorted_by_expert() -> None:
    routes = sort_routes(np.array([[5, 0], [0, 2], [2, 9]]), 6)
    assert routes.expert.tolist() == [0, 2, 5] and routes.begin.tolist() == [0, 2, 4, 5]
    assert routes.choice.tolist() == [1, 2, 3, 4, 0]  # 9 is of no expert
    assert routes.place.tolist() == [[0, 4], [1, 2], [3, 5]]


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


@pytest.mark.parametrize("name", ["kolibri1", "dbrx"])
def test_matrices_of_other_modules_are_multiplied_by_our_products(name: str) -> None:
    """kolibri1's router has another product for CUDA; DBRX's experts have three matrices and matmul."""
    assert engine_of(build(name, torch.bfloat16)).status()["batch_invariant"]
    assert not engine_of(build(name, torch.bfloat16)).arithmetic.endswith("/batch")


class Own(torch.nn.Module):
    """Multiplies by a matrix of its own."""

    def __init__(self, product: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(37, 64, generator=torch.Generator().manual_seed(0)).bfloat16())
        self.product = product

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.product(x, self.weight.T).matmul(torch.eye(37, dtype=x.dtype))


def test_every_spelling_of_a_product_is_ours_or_refused() -> None:
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
    ours = {name: Own(product) for name, product in (("matmul", torch.matmul), ("mm", torch.Tensor.mm), ("@", operator.matmul))}
    want = products_of(best()).linear(x, ours["mm"].weight, None)
    for name, made in ours.items():
        use_products(made, best())
        assert torch.equal(made(x), want), name
    for made in (Own(lambda x, w: x.matmul(w[None])[0]), Own(lambda x, w: torch.mm(x, w.float(), out_dtype=torch.float32))):
        use_products(made, best())
        with pytest.raises(NotServed, match="need rows and a matrix of their dtype"):
            made(x)


@pytest.mark.usefixtures("loads_in_full")
def test_a_product_that_shows_in_the_forward_only_leaves_the_model_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    made = build("kolibri1", torch.bfloat16)
    router: Any = next(each for each in made.modules() if type(each).__name__ == "Kolibri1TopKRouter")
    plain = type(router).forward

    def batched(self: Any, hidden: torch.Tensor) -> Any:
        return plain(self, torch.matmul(hidden[None], torch.eye(hidden.shape[-1], dtype=hidden.dtype)[None])[0])

    monkeypatch.setattr(type(router), "forward", batched)
    model = Model(made, "m")
    status = Engine(EngineConfig(**ROOMY, dtype="bfloat16"), model).status()
    assert "/batch" in status["arithmetic"] and "matmul of torch.bfloat16" in status["computed_by_reason"]
    assert not any("forward" in vars(each) or "isa" in vars(each) for each in model.module.modules()), "nothing of ours is left"


def test_products_leave_no_trace() -> None:
    made = build("gpt_oss")
    before = {name: type(each) for name, each in made.named_modules()}
    use_products(made, best())
    assert sum("forward" in vars(each) for each in made.modules()) == 2 * made.config.num_hidden_layers
    plain_products(made)
    assert {name: type(each) for name, each in made.named_modules()} == before
    assert not any("forward" in vars(each) or "isa" in vars(each) for each in made.modules())
