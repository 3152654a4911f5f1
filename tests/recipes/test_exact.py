"""The service's attention in a trainer: log-probs to the bit, gradients like anybody's."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from rollout.engine.cpu.attention import NativeAttention
from rollout.engine.cpu.build import NativeUnavailable
from rollout.engine.forward.attention import Scores
from rollout.engine.forward.reference import ReferenceAttention
from rollout.engine.values import Group, Sample, Sampling
from rollout.exact import use_exact, use_exact_attention
from rollout.exact.attention import _Attention
from rollout.exact.layout import rows_of
from tests.support.tiny import tiny, tiny_engine

PROMPTS = [[5, 6, 7], [9, 8, 7, 6, 5, 4, 3, 2, 11, 12, 13], [3, 3, 3, 3, 3, 3, 3, 3]]


@pytest.fixture(autouse=True)
def _native() -> None:
    try:
        NativeAttention()
    except NativeUnavailable as error:
        pytest.skip(str(error))


def rollouts(name: str, dtype: str) -> list[Sample]:
    engine = tiny_engine(name, dtype, attention="native")
    for i, prompt in enumerate(PROMPTS):
        engine.submit(Group(str(i), np.array(prompt, np.int32), Sampling(n=2, max_tokens=9 + i, seed=i, ignore_eos=True)))
    samples = []
    while engine.has_work:
        samples += engine.step()
    return samples


def padded(samples: list[Sample]) -> tuple[torch.Tensor, torch.Tensor, list[slice]]:
    """ids, mask [samples, L] as TRL pads them (prompts left, completions right), and where each completion stands."""
    width = max(map(len, PROMPTS))
    ids = torch.zeros(len(samples), width + max(len(s.token_ids) for s in samples), dtype=torch.long)
    mask, spans = torch.zeros_like(ids), []
    for row, sample in enumerate(samples):
        tokens = PROMPTS[int(sample.group_id)] + sample.token_ids.tolist()
        first = width - sample.prompt_tokens
        ids[row, first : first + len(tokens)] = torch.tensor(tokens)
        mask[row, first : first + len(tokens)] = 1
        spans.append(slice(width, first + len(tokens)))
    return ids, mask, spans


def logprobs(model: PreTrainedModel, samples: list[Sample], **extra: torch.Tensor) -> torch.Tensor:
    ids, mask, spans = padded(samples)
    table = model(input_ids=ids, attention_mask=mask, use_cache=False, **extra).logits[:, :-1].float().log_softmax(-1)
    every = table.gather(-1, ids[:, 1:, None])[..., 0]
    return torch.cat([every[row, span.start - 1 : span.stop - 1] for row, span in enumerate(spans)])


@pytest.mark.some(6)
@pytest.mark.parametrize("name", ["llama", "qwen3", "mistral", "gemma2", "granite_swa", "deepseek_v2"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_trainer_has_the_service_s_logprobs(name: str, dtype: str) -> None:
    samples = rollouts(name, dtype)
    model = tiny(name, getattr(torch, dtype))
    use_exact(model, block_size=8)
    served = torch.from_numpy(np.concatenate([sample.logprobs for sample in samples]))
    assert torch.equal(logprobs(model, samples), served)


def test_another_attention_would_be_noticed() -> None:
    samples = rollouts("llama", "bfloat16")
    served = torch.from_numpy(np.concatenate([sample.logprobs for sample in samples]))
    model = tiny("llama", torch.bfloat16)
    _, mask, _ = padded(samples)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    assert not torch.equal(logprobs(model, samples, position_ids=positions), served)


@pytest.mark.some(3)
@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2", "gpt_oss", "granite_swa", "deepseek_v2"])
def test_the_gradient_is_that_of_plain_attention(name: str) -> None:
    samples = rollouts(name, "float32")
    gradients = []
    for exact in (False, True):
        model = tiny(name)
        extra = {}
        if exact:
            use_exact_attention(model, block_size=8)
        else:
            _, mask, _ = padded(samples)
            extra["position_ids"] = (mask.cumsum(1) - 1).clamp(min=0)
        logprobs(model, samples, **extra).sum().backward()
        gradients.append(torch.cat([parameter.grad.flatten() for parameter in model.parameters()]))
    plain, ours = gradients
    assert (plain - ours).norm() < 1e-5 * plain.norm() and plain.norm() > 1


@pytest.mark.parametrize("attend", [NativeAttention(1).attend, ReferenceAttention().attend])
def test_the_gradient_of_soft_caps_and_sinks_is_that_of_finite_differences(attend: Any) -> None:
    """Of every input, along a random direction. Negative control: the gradient without the cap is another one."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    inputs = [normal(2, 4, 9, 16), normal(2, 2, 9, 16), normal(2, 2, 9, 8), normal(4)]
    weight, along = normal(2, 9, 4, 8), [normal(*each.shape) for each in inputs]

    def loss(given: list[torch.Tensor], softcap: float = 1.5) -> torch.Tensor:
        rows = rows_of((2, 9), None, None, 4)
        apply: Any = _Attention.apply
        return (apply(*given, rows, attend, Scores(0.4, 5, softcap)) * weight).sum()

    for i, direction in enumerate(along):
        given = [each.clone().requires_grad_() for each in inputs]
        (slope,), (uncapped,) = (torch.autograd.grad(loss(given, cap), [given[i]]) for cap in (1.5, 0.0))
        moved = [[x + sign * 5e-3 * direction if j == i else x for j, x in enumerate(inputs)] for sign in (1, -1)]
        difference = (loss(moved[0]) - loss(moved[1])) / 1e-2
        torch.testing.assert_close((slope * direction).sum(), difference, rtol=2e-3, atol=2e-3)
        assert ((uncapped * direction).sum() - difference).abs() > 2e-2
