"""A trainer with the service's arithmetic: log-probs in every bit, gradients like anybody's. For each arithmetic here."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

from rollout.engine.cpu.build import NativeUnavailable
from rollout.engine.cpu.exact_modules import ExactLinear, exact_heads, use_products
from rollout.engine.cpu.isa import here
from rollout.engine.cpu.products import products_of, sensitive
from rollout.engine.values import Sample
from rollout.exact import sample_logprobs, token_logprobs, use_exact
from rollout.recipes.policy import logprobs as tree_logprobs
from tests.support.families import build
from tests.support.isas import best_first
from tests.support.tiny import tiny, tiny_engine
from tests.support.toy import group, run

NATIVE = {"hidden_size": 96, "intermediate_size": 224, "num_attention_heads": 6, "head_dim": 32, "vocab_size": 208}
"""sizes that the native decoder takes"""
FAMILIES: list[Any] = [("llama", {}), ("qwen2", {**NATIVE, "num_key_value_heads": 3})]
FAMILIES += [("mistral", {**NATIVE, "sliding_window": 12})]
FAMILIES += [pytest.param(*each, marks=pytest.mark.long) for each in [("llama", NATIVE), ("qwen3", NATIVE), ("llama-mha", {})]]
PROMPTS = [[5, 6, 7], [9, 8, 7, 6, 5, 4, 3, 2, 11, 12, 13], [3] * 8, list(range(20, 61))]
DTYPES = ("bfloat16", "float32")


@pytest.fixture(params=[*best_first(here()), "torch"])
def isa(request: pytest.FixtureRequest) -> str:
    try:
        products_of(request.param)
    except NativeUnavailable as error:
        pytest.skip(str(error))
    return request.param


def served(module: PreTrainedModel, dtype: str, isa: str, temperature: float = 1.0) -> tuple[str, list[Sample]]:
    """The arithmetic's name, and three samples of each of PROMPTS, in order."""
    engine = tiny_engine(dtype=dtype, model=copy.deepcopy(module), isa=isa)
    groups = [
        group(str(i), prompt, n=3, max_tokens=9 + i, seed=i, ignore_eos=True, temperature=temperature)
        for i, prompt in enumerate(PROMPTS)
    ]
    return engine.arithmetic, [sample for _, sample in sorted(run(engine, groups).items())]


def sequences(samples: list[Sample]) -> list[list[int]]:
    return [PROMPTS[int(sample.group_id)] + sample.token_ids.tolist() for sample in samples]


def of_service(samples: list[Sample]) -> torch.Tensor:
    return torch.from_numpy(np.concatenate([sample.logprobs for sample in samples]))


def padded(model: PreTrainedModel, samples: list[Sample], left: bool = False, **more: Any) -> torch.Tensor:
    """Log-probs by one padded batch."""
    rows = sequences(samples)
    ids, mask = torch.zeros(2, len(rows), max(map(len, rows)), dtype=torch.long)
    for i, row in enumerate(rows):
        where = slice(-len(row), None) if left else slice(len(row))
        ids[i, where], mask[i, where] = torch.tensor(row), 1
    every = token_logprobs(model(input_ids=ids, attention_mask=mask, use_cache=False, **more).logits[:, :-1], ids[:, 1:])
    return torch.cat([e[m.bool()][-len(s.token_ids) :] for e, m, s in zip(every, mask[:, 1:], samples, strict=True)])


def packed(model: PreTrainedModel, samples: list[Sample]) -> torch.Tensor:
    """Log-probs by one row in which all sequences stand behind each other."""
    rows = sequences(samples)
    ids = torch.tensor([[token for row in rows for token in row]])
    positions = torch.tensor([[i for row in rows for i in range(len(row))]])
    logits = model(input_ids=ids, position_ids=positions, use_cache=False).logits[0]
    ends, out = np.cumsum([len(row) for row in rows]), []
    for end, sample in zip(ends.tolist(), samples, strict=True):
        new = len(sample.token_ids)
        out.append(token_logprobs(logits[end - new - 1 : end - 1], ids[0, end - new : end]))
    return torch.cat(out)


def tree(model: PreTrainedModel, samples: list[Sample]) -> torch.Tensor:
    """Log-probs as recipes/policy.py computes them: each prompt once, completions that do not see each other."""
    groups = [[s for s in samples if s.group_id == str(i)] for i in range(len(PROMPTS))]
    return torch.cat([tree_logprobs(model, prompt, group, 1.0) for prompt, group in zip(PROMPTS, groups, strict=True)])


@pytest.mark.some(6)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("name", "sizes"), FAMILIES)
def test_max_difference_is_zero(name: str, sizes: dict[str, Any], dtype: str, isa: str) -> None:
    """Padded on either side, packed, and as a tree."""
    module = tiny(name, getattr(torch, dtype), **sizes)
    arithmetic, samples = served(module, dtype, isa)
    use_exact(module, arithmetic, block_size=8)
    want = of_service(samples)
    ways = [padded(module, samples), padded(module, samples, left=True), packed(module, samples), tree(module, samples)]
    if isa == "torch" and dtype == "float32":  # the reference's batched products depend on the number of tiles there
        for logprobs in ways:
            torch.testing.assert_close(logprobs, want, atol=2e-6, rtol=0)
    else:
        assert all(torch.equal(logprobs, want) for logprobs in ways)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_samples_are_scored_together_as_alone(temperature: float) -> None:
    """One forward over prompts and samples of many lengths has the service's bits, as one for each has; and a gradient."""
    module = tiny("llama", torch.float32, **NATIVE)
    arithmetic, samples = served(module, "float32", "auto", temperature)
    use_exact(module, arithmetic, block_size=8)
    pairs = [(np.array(PROMPTS[int(sample.group_id)]), sample.token_ids) for sample in samples]
    together = sample_logprobs(module, pairs, temperature)
    alone = [sample_logprobs(module, [pair], temperature)[0] for pair in pairs]
    assert all(torch.equal(one, other) for one, other in zip(together, alone, strict=True))
    assert torch.equal(torch.cat(together), of_service(samples))
    assert not torch.equal(torch.cat(sample_logprobs(module, pairs, temperature + 0.1)), of_service(samples))
    torch.cat(together).sum().backward()
    assert all(parameter.grad is not None for parameter in module.parameters())


@pytest.mark.parametrize("precision", ["high", "medium"])
def test_reduced_precision_is_refused(precision: str) -> None:
    """It would round the product of positions and rotary frequencies."""
    module = tiny("llama", torch.float32, **NATIVE)
    torch.set_float32_matmul_precision(precision)
    try:
        with pytest.raises(ValueError, match=r'computes fp32 products in \w+, .*set_float32_matmul_precision\("highest"\)'):
            use_exact(module)
    finally:
        torch.set_float32_matmul_precision("highest")
    use_exact(module).remove()


def test_another_arithmetic_is_seen() -> None:
    """The negative control: plain products, and plain attention, differ; in the end nothing is left of ours."""
    module = tiny("llama", torch.bfloat16, **NATIVE)
    arithmetic, samples = served(module, "bfloat16", "auto")
    want = of_service(samples)
    assert not torch.equal(tree(module, samples), want)
    exact = use_exact(module, arithmetic, block_size=8)
    assert torch.equal(tree(module, samples), want)
    plain = nn.functional.linear
    first = module.model.layers[0].mlp.down_proj
    first.__class__ = type(
        "Other", (nn.Linear,), {"forward": lambda self, x: plain(x.float(), self.weight.float()).bfloat16() * 1.01}
    )
    assert not torch.equal(tree(module, samples), want)
    first.__class__ = ExactLinear
    exact.remove()
    assert not torch.equal(tree(module, samples), want)
    assert not any(isinstance(each, ExactLinear) for each in module.modules())


def test_temperature() -> None:
    module = tiny("llama", torch.bfloat16)
    arithmetic, samples = served(module, "bfloat16", "auto", temperature=0.7)
    use_exact(module, arithmetic, block_size=8)
    for sample in samples:
        prompt = PROMPTS[int(sample.group_id)]
        ids = torch.tensor([prompt + sample.token_ids.tolist()])
        logits = module(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1]
        assert (
            token_logprobs(logits, torch.from_numpy(sample.token_ids), 0.7).detach().numpy().tobytes()
            == sample.logprobs.tobytes()
        )


@pytest.mark.some(6)
@pytest.mark.parametrize("name", ["llama", "mistral"])
@pytest.mark.parametrize("way", [padded, packed, tree])
def test_the_gradient_is_the_plain_one(name: str, way: Any, isa: str) -> None:
    module = tiny(name)
    _, samples = served(module, "float32", isa)
    gradients = []
    for exact in (False, True):
        model = copy.deepcopy(module)
        if exact:
            use_exact(model, block_size=8)
        elif name == "mistral" and way is tree:  # a mask of one's own replaces transformers' window
            use_exact(model, block_size=8).remove()
            way = padded
        way(model, samples).sum().backward()
        gradients.append(torch.cat([parameter.grad.flatten() for parameter in model.parameters()]))
    plain, ours = gradients
    assert (plain - ours).norm() < 2e-5 * plain.norm() and plain.norm() > 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_forward_that_modifies_products_in_place_has_gradients(dtype: torch.dtype) -> None:
    """Gemma 3n's does. The log-probs are those without gradients."""
    model = build("gemma3n_text", dtype)
    pair = [(np.arange(5, 20), np.arange(30, 40))]
    plain = copy.deepcopy(model)
    use_exact(model)
    with torch.no_grad():
        want = sample_logprobs(model, pair)[0]
    got = sample_logprobs(model, pair)[0]
    got.sum().backward()
    assert torch.equal(got, want)
    ids = torch.from_numpy(np.concatenate(pair[0]))[None]
    plain(input_ids=ids, use_cache=False).logits[0, 14:-1].float().log_softmax(-1).gather(1, ids[0, 15:, None]).sum().backward()
    theirs, ours = (torch.cat([each.grad.flatten().float() for each in one.parameters()]) for one in (plain, model))
    assert ours.isfinite().all()
    assert dtype == torch.bfloat16 or (theirs - ours).norm() < 1e-4 * theirs.norm()  # top-k of activations: bf16 differs


def test_no_autograd_function_returns_a_view() -> None:
    """Any of their results may be modified in place."""
    x, kinds = torch.randn(2, 5, 16, requires_grad=True), [nn.Linear(16, 16), nn.SiLU()]
    for each in kinds:
        made = nn.ModuleList([each])
        use_products(made, "torch")
        out = made[0](x)
        out += 1
        out.sum().backward()
    heads = exact_heads("torch", torch.randn(3, 4, 8, requires_grad=True), torch.randn(3, 6, 8), False)
    heads += 1
    viewed = _Viewed.apply(x)
    with pytest.raises(RuntimeError, match="is a view and is being modified inplace"):
        viewed += 1


class _Viewed(torch.autograd.Function):
    """The negative control."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.flatten(0, 1).clone().view(x.shape)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("bias", [False, True])
def test_a_product_s_gradient_is_torch_s(dtype: torch.dtype, bias: bool, isa: str) -> None:
    torch.manual_seed(0)
    plain = nn.Linear(64, 48, bias=bias, dtype=dtype)
    ours = copy.deepcopy(plain)
    use = copy.deepcopy(nn.ModuleList([ours]))
    use_products(use, isa)
    gradients = []
    for linear in (plain, use[0]):
        x = torch.randn(3, 7, 64, generator=torch.Generator().manual_seed(1)).to(dtype).requires_grad_()
        out = linear(x)
        out.backward(torch.randn(out.shape, generator=torch.Generator().manual_seed(2)).to(dtype))
        gradients.append([x.grad, *(parameter.grad for parameter in linear.parameters())])
    for theirs, mine in zip(*gradients, strict=True):
        torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(48, 64), (208, 96), (199, 50), (8, 64), (1, 7)])
def test_a_row_does_not_know_its_batch(shape: tuple[int, int], dtype: torch.dtype, isa: str) -> None:
    """Numbers in which another order of the sum would show."""
    x, weight = sensitive(300, torch.empty(shape, dtype=dtype))
    products, bias = products_of(isa), torch.randn(shape[0]).to(dtype)
    for b in (None, bias):
        whole = products.linear(x, weight, b)
        for rows in (1, 2, 5, 16, 33, 100):
            assert torch.equal(products.linear(x[:rows], weight, b), whole[:rows])
            assert torch.equal(products.linear(x[300 - rows :], weight, b), whole[300 - rows :])
        assert products.linear(x[:0], weight, b).shape == (0, shape[0])


def test_another_order_would_show() -> None:
    """The negative control of the numbers above."""
    x, weight = sensitive(8, torch.empty(16, 64, dtype=torch.float32))
    assert not torch.equal(x @ weight.T, x.flip(1) @ weight.flip(1).T)


def test_parameters_checkpointing_and_training_mode() -> None:
    module = tiny("llama", torch.bfloat16, **NATIVE)
    arithmetic, samples = served(module, "bfloat16", "auto")
    before, names = [p.data_ptr() for p in module.parameters()], list(module.state_dict())
    use_exact(module, arithmetic, block_size=8)
    assert [p.data_ptr() for p in module.parameters()] == before and list(module.state_dict()) == names
    gradients = []
    for checkpointing in (False, True):
        module.train()
        module.zero_grad()
        if checkpointing:
            module.gradient_checkpointing_enable({"use_reentrant": False})
        logprobs = tree(module, samples)
        assert torch.equal(logprobs, of_service(samples))
        logprobs.sum().backward()
        gradients.append([parameter.grad.clone() for parameter in module.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*gradients, strict=True))
    module.requires_grad_(False)
    assert torch.equal(tree(module, samples), of_service(samples))
    with torch.no_grad():
        module.lm_head.weight.mul_(0.5)  # a step of the optimiser, in place
    assert not torch.equal(tree(module, samples), of_service(samples))


class Quantised(nn.Linear):
    pass


def test_what_is_not_served_is_refused_and_changes_nothing() -> None:
    module = tiny("llama", torch.bfloat16)
    module.model.layers[1].mlp.up_proj.__class__ = Quantised
    with pytest.raises(ValueError, match="layers.1.mlp.up_proj is a Quantised"):
        use_exact(module)
    assert not any(isinstance(each, ExactLinear) for each in module.modules())
    assert module.config._attn_implementation == "eager"
    with pytest.raises(ValueError, match="matrix of a Conv1D"):
        use_exact(build("gpt2", torch.bfloat16))
    with pytest.raises(ValueError, match=r"'cuda/9', and this machine has .*torch/"):
        use_exact(tiny("llama"), "cuda/9")
    with pytest.raises(ValueError, match="float16"):
        use_exact(tiny("llama", torch.float16))
    module = tiny("llama", torch.bfloat16)
    use_exact(module)
    ids = torch.arange(9)[None]
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(ValueError, match="autocast"):
        module(input_ids=ids, use_cache=False)
    with pytest.raises(ValueError, match="count each sequence from 0"):
        module(input_ids=ids, position_ids=torch.arange(1, 10)[None], use_cache=False)
    with pytest.raises(ValueError, match="attention_mask: each token must attend to itself"):
        module(input_ids=ids, attention_mask=torch.ones(1, 1, 9, 9, dtype=torch.bool).tril().triu(-3), use_cache=False)
    with pytest.raises(ValueError, match="only padding"):
        module(input_ids=ids, attention_mask=torch.zeros(1, 9), use_cache=False)


def test_low_rank_adapters_are_served() -> None:
    """As PEFT wraps a Linear: the inner ones are plain, of any width."""

    class Lora(nn.Module):
        def __init__(self, base: nn.Linear) -> None:
            super().__init__()
            self.base_layer = base
            self.lora_A = nn.Linear(base.in_features, 8, bias=False, dtype=torch.bfloat16)
            self.lora_B = nn.Linear(8, base.out_features, bias=False, dtype=torch.bfloat16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.base_layer(x) + 2.0 * self.lora_B(self.lora_A(x))

    module = tiny("llama", torch.bfloat16, **NATIVE)
    module.model.layers[0].self_attn.q_proj = Lora(module.model.layers[0].self_attn.q_proj)
    _, samples = served(tiny("llama", torch.bfloat16, **NATIVE), "bfloat16", "auto")
    use_exact(module, block_size=8)
    together = padded(module, samples)
    assert torch.equal(together, torch.cat([padded(module, [sample]) for sample in samples]))
    together.sum().backward()
    assert module.model.layers[0].self_attn.q_proj.lora_A.weight.grad.norm() > 0
