"""Fused norms: the numbers of transformers' eight operators, or they are left alone. On the CPU torch's `rms_norm` is made of
operators as well; `make test-gpu` runs this on a device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from rollout.engine.cuda.norms import fuse_norms
from tests.support.tiny import tiny

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def logits(model: Any) -> torch.Tensor:
    with torch.inference_mode():
        out: torch.Tensor = model(input_ids=torch.arange(3, 60, device=DEVICE)[None], use_cache=False).logits
    return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("family", "norms"), [("llama", 5), ("qwen3", 9), ("phi3", 5), ("qwen2", 5), ("mistral", 5)])
def test_models_that_have_such_norms(family: str, norms: int, dtype: torch.dtype) -> None:
    plain, fused = (tiny(family, dtype, num_hidden_layers=2).to(DEVICE) for _ in range(2))
    assert fuse_norms(fused) == norms
    torch.testing.assert_close(logits(fused), logits(plain), rtol=0, atol=1e-4 if dtype == torch.float32 else 0.1)


def test_norms_of_another_kind_are_left_alone() -> None:
    """Gemma adds one to the weight, under another name of epsilon."""
    model = tiny("gemma3_text").to(DEVICE)
    want = logits(model)
    assert fuse_norms(model) == 0 and torch.equal(logits(model), want)


class Other(nn.Module):
    """Looks like one. `late`: rounded after the weight, as some families do; else it computes something else."""

    def __init__(self, late: bool) -> None:
        super().__init__()
        self.weight, self.variance_epsilon, self.late = nn.Parameter(torch.ones(512, dtype=torch.bfloat16)), 1e-6, late

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return (self.weight.float() * y).to(x.dtype) if self.late else (1 + self.weight) * y.to(x.dtype)


@pytest.mark.parametrize("late", [True, False])
def test_what_computes_something_else_is_seen(late: bool) -> None:
    """Even while the weight is all ones, as it is in a model that was not trained."""
    assert fuse_norms(nn.Sequential(Other(late)).to(DEVICE)) == 0


class Gated(Other):
    def forward(self, x: torch.Tensor, gate: torch.Tensor | None = None) -> torch.Tensor:
        return super().forward(x) if gate is None else super().forward(x) * gate


def test_norms_that_take_more_are_left_alone() -> None:
    assert fuse_norms(nn.Sequential(Gated(True)).to(DEVICE)) == 0


def test_a_weight_that_is_written_reaches_it() -> None:
    model = tiny("llama").to(DEVICE)
    fuse_norms(model)
    before = logits(model)
    with torch.no_grad():
        model.model.norm.weight.mul_(2)
    torch.testing.assert_close(logits(model), 2 * before)
