"""Products and norms that do not depend on the batch, in Triton's interpreter where there is no GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.functional import linear

pytest.importorskip("triton", reason="Triton is not installed")

from rollout.engine.cuda.exact import NotExact, exact_linear, exact_mean, exact_norm, make_exact  # noqa: E402
from tests.support.families import build  # noqa: E402
from tests.support.tiny import tiny  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SMALL = {"num_hidden_layers": 1, "hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1}
ROUNDING = {torch.float32: 1e-5, torch.bfloat16: 2**-7}


def normal(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_is_the_same_among_others(dtype: torch.dtype) -> None:
    """Right, and to the bit what it is alone: in the first tile of rows and in the third, with a bias and without."""
    x, weight, bias = normal(133, 100, dtype=dtype), normal(150, 100, dtype=dtype, seed=1), normal(150, dtype=dtype, seed=2)
    for added in (None, bias):
        whole = exact_linear(x, weight, added)
        torch.testing.assert_close(whole, linear(x, weight, added), rtol=ROUNDING[dtype], atol=20 * ROUNDING[dtype])
        for rows in ([0], [131], [5, 77], list(range(40, 80))):
            assert torch.equal(exact_linear(x[rows], weight, added), whole[rows])
    whole = exact_norm(x, weight[0], 1e-6)
    assert torch.equal(exact_norm(x[7:9], weight[0], 1e-6), whole[7:9])


def test_sums_that_depend_on_the_rows_are_seen() -> None:
    """The negative control: inputs summed in halves for fewer rows, as libraries do. (Other inputs at a time have the same bits
    on a GPU, which adds one number after the other either way.)"""
    x, weight = normal(64, 100), normal(40, 100, seed=1)
    halves = exact_linear(x[:3, :50], weight[:, :50]) + exact_linear(x[:3, 50:], weight[:, 50:])
    torch.testing.assert_close(halves, exact_linear(x, weight)[:3])
    assert not torch.equal(halves, exact_linear(x, weight)[:3])


@pytest.mark.parametrize("size", [7, 64, 100])
def test_means_of_rows(size: int) -> None:
    """Right, with a gradient, and to the bit what a row is alone; the control is another order of sums."""
    x = normal(40, size).requires_grad_()
    made = exact_mean(x)
    torch.testing.assert_close(made, x.mean(-1, keepdim=True))
    assert torch.equal(exact_mean(x[7:9]), made[7:9])
    turned = torch.cat([x[:, 1:], x[:, :1]], -1)
    assert not torch.equal(exact_mean(turned), made)
    made.sum().backward()
    torch.testing.assert_close(x.grad, torch.full_like(x, 1 / size))


@pytest.mark.parametrize(
    ("family", "dtype"),
    [*((family, torch.float32) for family in ("gemma3_text", "nemotron_h", "qwen3_5_text")), ("gpt_oss", torch.bfloat16)],
)
def test_norms_of_other_kinds(family: str, dtype: torch.dtype) -> None:
    """With 1 + weight, with a gate, in groups, rounded after the weight: the module's own up to rounding, and a row is the same
    among others."""
    plain, made = build(family, dtype).to(DEVICE), build(family, dtype).to(DEVICE)
    for model in (plain, made):
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.data.copy_(normal(*parameter.shape, dtype=dtype, seed=9))
    make_exact(made)
    replaced = [(one, other) for one, other in zip(plain.modules(), made.modules(), strict=True) if "forward" in vars(other)]
    norms = {type(one): (one, other) for one, other in replaced if "norm" in type(one).__name__.lower()}
    assert norms
    for one, other in norms.values():
        size = one.weight.numel()
        given = [normal(50, size, dtype=dtype, seed=seed) for seed in range(2 if "Gated" in type(one).__name__ else 1)]
        with torch.no_grad():
            whole = other(*given)
            torch.testing.assert_close(whole, one(*given), rtol=ROUNDING[dtype], atol=1e-5)
            assert dtype != torch.bfloat16 or (whole == one(*given)).float().mean() > 0.98
            assert torch.equal(other(*(each[30:32] for each in given)), whole[30:32])


def logits(model: Any, ids: torch.Tensor) -> torch.Tensor:
    made: torch.Tensor = model(input_ids=ids, use_cache=False).logits
    return made


@pytest.mark.parametrize("family", ["qwen3", "qwen2"])
def test_a_model_and_its_gradients(family: str) -> None:
    """The module's own up to rounding."""
    options = SMALL | ({"head_dim": 16} if family == "qwen3" else {})
    plain, made = (tiny(family, **options).to(DEVICE) for _ in range(2))
    make_exact(made)
    ids = torch.arange(3, 20, device=DEVICE)[None]
    for model in (plain, made):
        logits(model, ids).log_softmax(-1)[0, :, 7].sum().backward()
    torch.testing.assert_close(logits(made, ids), logits(plain, ids), rtol=1e-4, atol=1e-4)
    for (name, one), (_, other) in zip(plain.named_parameters(), made.named_parameters(), strict=True):
        assert one.grad is not None and other.grad is not None
        torch.testing.assert_close(other.grad, one.grad, rtol=1e-3, atol=1e-3, msg=name)


@pytest.mark.parametrize(
    ("family", "what"),
    [
        ("llama4_text", "feed_forward.experts.gate_up_proj belongs to no linear layer"),
        ("jetmoe", "JetMoeMoE.* adds rows up by index_add"),
        ("gpt_neox", "norms other than RMSNorm.*LayerNorm"),
    ],
)
def test_what_would_depend_on_the_batch_is_refused_by_name(family: str, what: str) -> None:
    model = build(family)
    with pytest.raises(NotExact, match=what):
        make_exact(model)
    assert all("forward" not in vars(each) for each in model.modules()), "half of it was changed"
