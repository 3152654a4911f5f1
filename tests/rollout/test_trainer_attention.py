"""A trainer's forward with the service's attention by name, and its products: the engine's log-probs in every bit."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from rollout.engine.config import EngineConfig
from rollout.engine.cpu.exact_modules import use_products
from rollout.engine.cpu.kernels import choose
from rollout.engine.engine import Engine
from rollout.engine.values import Group, Sample, Sampling
from rollout.exact import use_exact
from rollout.exact.attention import _refuse_all_but_text, trainer_attention
from tests.support.pictures import CONFIGS, PICTURE, composite, with_picture
from tests.support.tiny import plain_logprobs, tiny, tiny_engine
from tests.support.toy import group, run

NATIVE = {"hidden_size": 96, "intermediate_size": 224, "num_attention_heads": 6, "head_dim": 32, "vocab_size": 208}
"""sizes that the native decoder takes"""


def trainer(model: PreTrainedModel, block_size: int = 8) -> PreTrainedModel:
    learner = copy.deepcopy(model).requires_grad_()
    use_products(learner, choose().isa)
    learner.set_attn_implementation(trainer_attention(block_size))
    return learner


def groups() -> list[Group]:
    r = np.random.default_rng(1)
    return [group(f"g{i}", r.integers(3, 199, 16 + 13 * i), n=4, max_tokens=24, seed=i, ignore_eos=True) for i in range(4)]


@pytest.mark.some(4)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(
    ("name", "sizes"), [("llama", {}), ("llama", NATIVE), ("qwen3", NATIVE), ("mistral", {**NATIVE, "sliding_window": 12})]
)
def test_max_difference_is_zero(name: str, sizes: dict[str, object], dtype: str) -> None:
    module = tiny(name, getattr(torch, dtype), **sizes)
    learner = trainer(module)
    prompts = {each.id: each.prompt for each in groups()}
    for (id, _), sample in run(tiny_engine(dtype=dtype, model=module), groups()).items():
        assert np.abs(sample.logprobs - plain_logprobs(learner, prompts[id], sample)).max() == 0


def test_another_attention_differs() -> None:
    """The negative control: transformers' own, and ours with another block size."""
    module = tiny("llama", torch.bfloat16)
    samples = run(tiny_engine(dtype="bfloat16", model=module), groups())
    prompts = {each.id: each.prompt for each in groups()}
    other, eager = trainer(module, block_size=16), trainer(module)
    eager.set_attn_implementation("eager")
    for learner in (other, eager):
        assert max(np.abs(s.logprobs - plain_logprobs(learner, prompts[id], s)).max() for (id, _), s in samples.items()) > 1e-4


def padded(samples: list[tuple[np.ndarray, Sample]], left: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """ids, mask and positions, each [B, L]"""
    rows = [np.concatenate([prompt, sample.token_ids]) for prompt, sample in samples]
    ids, mask = np.zeros((2, len(rows), max(map(len, rows))), np.int64)
    for i, row in enumerate(rows):
        where = slice(-len(row), None) if left else slice(len(row))
        ids[i, where], mask[i, where] = row, 1
    return torch.from_numpy(ids), torch.from_numpy(mask), torch.from_numpy((mask.cumsum(1) - 1).clip(0))


@pytest.mark.parametrize("left", [False, True], ids=["right", "left"])
def test_padded_batches_and_gradients(left: bool) -> None:
    """Padding changes no bit; the gradient is that of eager attention in fp32."""
    module = tiny("llama", torch.float32)
    prompts = {each.id: each.prompt for each in groups()}
    drawn = [(prompts[id], sample) for (id, _), sample in run(tiny_engine(model=module), groups()).items()]
    ids, mask, positions = padded(drawn, left)
    gradients = []
    for name in (trainer_attention(8), "eager"):
        learner = trainer(module)
        learner.set_attn_implementation(name)
        logits = learner(input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=False).logits
        logprobs = logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
        if name != "eager":
            for i, (_, sample) in enumerate(drawn):
                mine = logprobs[i][mask[i, 1:].bool()][-len(sample.token_ids) :].detach().numpy()
                assert np.abs(mine - sample.logprobs).max() == 0
        (logprobs * mask[:, 1:] * mask[:, :-1]).mean().backward()
        gradients.append(torch.cat([p.grad.flatten() for p in learner.parameters()]))
    assert (gradients[0] - gradients[1]).norm() <= 1e-5 * gradients[1].norm()


def test_a_cache_is_refused() -> None:
    learner = trainer(tiny("llama", torch.float32))
    out = learner(input_ids=torch.arange(20)[None], use_cache=True)
    with pytest.raises(ValueError, match="use_cache=False"):
        learner(input_ids=torch.arange(3)[None], past_key_values=out.past_key_values)


@pytest.mark.long
def test_smollm2_in_bf16(smollm2: Path) -> None:
    """The real model through the engine's defaults: max |Δ log-prob| = 0."""
    engine = Engine(EngineConfig(model=str(smollm2), kv_tokens=4096, cpu_offload_gib=0))
    learner = AutoModelForCausalLM.from_pretrained(
        smollm2, dtype=torch.bfloat16, attn_implementation=trainer_attention()
    ).eval()
    prompt = np.arange(500, 520, dtype=np.int32)
    samples = run(engine, [Group("a", prompt, Sampling(n=2, max_tokens=4, seed=3, ignore_eos=True))])
    use_products(learner, choose().isa)
    for sample in samples.values():
        assert np.abs(sample.logprobs - plain_logprobs(learner, prompt, sample)).max() == 0


@pytest.mark.parametrize("kind", CONFIGS)
def test_pictures_are_refused_by_name(kind: str) -> None:
    """An exact model computes text; of the same model without our attention, the picture changes the logits."""
    model, given = composite(kind), with_picture(kind)
    ids = given["input_ids"]
    text = ids.where(ids != PICTURE, 3)
    with torch.no_grad():
        plain, of_text = (model(**each, use_cache=False).logits for each in (given, {"input_ids": text}))
        exact = use_exact(model)
        for call in (model, model.base_model, model.get_base_model() if hasattr(model, "get_base_model") else model):
            with pytest.raises(ValueError, match=r"called with pixel_values: an exact model computes text alone"):
                call(**given, use_cache=False)
        kinds = torch.zeros_like(ids)
        torch.testing.assert_close(model(input_ids=text, token_type_ids=kinds, use_cache=False).logits, of_text)
        with pytest.raises(ValueError, match="called with mm_token_type_ids"):
            model(input_ids=text, mm_token_type_ids=(ids == PICTURE).long(), use_cache=False)
        exact.remove()
        assert torch.equal(model(**given, use_cache=False).logits, plain) and not torch.allclose(plain, of_text, atol=0.01)


@pytest.mark.parametrize(
    "given",
    [
        {"mm_encoder_outputs": {"image": torch.zeros(1, 4)}},
        {"pixel_values_videos": torch.zeros(1, 3)},
        {"input_features": [torch.zeros(1, 3)]},
        {"encoder_hidden_states": (torch.zeros(1, 3),)},
    ],
)
def test_no_other_tensor_is_dropped(given: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"called with {next(iter(given))}"):
        _refuse_all_but_text(torch.nn.Linear(1, 1), (torch.zeros(1, 2),), given)


def test_positions_of_three_axes() -> None:
    """Equal ones are those of text; others are refused, since the attention has one a token."""
    model, ids = composite("qwen2_5_vl"), torch.arange(5, 17)[None]
    three = torch.arange(12).expand(3, 1, 12)
    use_exact(model)
    with torch.no_grad():
        assert torch.equal(model(input_ids=ids, position_ids=three, use_cache=False).logits, model(input_ids=ids).logits)
        with pytest.raises(ValueError, match="differ between their axes"):
            model(input_ids=ids, position_ids=three * torch.tensor([1, 2, 1])[:, None, None], use_cache=False)
