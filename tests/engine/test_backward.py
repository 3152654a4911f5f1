"""Gradients of bf16 models by fp32 where torch is slow in bf16: right, and without a product of torch's in bf16."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from rollout.engine.cpu import backward
from rollout.engine.cpu.exact_modules import use_products
from rollout.engine.cpu.kernels import choose
from rollout.exact import attention, token_logprobs, use_exact_attention
from tests.support.tiny import tiny

MULTIPLY = ("mm", "addmm", "bmm", "baddbmm", "attention")


class Multiplied(TorchDispatchMode):
    """Notes the dtypes of what torch multiplies."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: set[torch.dtype] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(name in func.overloadpacket.__name__ for name in MULTIPLY):
            self.dtypes |= {each.dtype for each in args[:2] if isinstance(each, torch.Tensor)}
        return func(*args, **(kwargs or {}))


@pytest.fixture(params=[True, False], ids=["fast", "slow"])
def fast(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    found: bool = request.param
    for module in (backward, attention):
        monkeypatch.setattr(module, "fast_in_bf16", lambda: found)
    return found


def exact_model(dtype: torch.dtype = torch.bfloat16, **sizes: Any) -> Any:
    model = tiny("llama", dtype, **sizes).requires_grad_()
    use_products(model, choose().isa)
    use_exact_attention(model, block_size=8)
    return model


def step(model: Any) -> dict[str, torch.Tensor]:
    ids = torch.randint(3, 199, (2, 19), generator=torch.Generator().manual_seed(0))
    model.zero_grad()
    logits = model(input_ids=ids, use_cache=False).logits
    loss = token_logprobs(logits[:, :-1], ids[:, 1:]).mean().neg()
    with Multiplied() as seen:
        loss.backward()
    gradients = {name: each.grad.double() for name, each in model.named_parameters()}
    return gradients | {"": torch.tensor([each.itemsize for each in sorted(seen.dtypes, key=str)])}


def test_where_bf16_is_slow_torch_multiplies_fp32_alone(fast: bool) -> None:
    if fast and not torch.backends.cpu.get_cpu_capability().startswith("AVX512"):
        pytest.skip("torch's attention cannot run in bf16 under this limit on every CPU")
    sizes = step(exact_model())[""].tolist()
    assert sizes == ([2] if fast else [4]), "bytes of each dtype that was multiplied"


def test_gradients_are_those_of_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    """To what bf16 rounds away in the forward and between the products."""
    for module in (backward, attention):
        monkeypatch.setattr(module, "fast_in_bf16", lambda: False)
    narrow = exact_model()
    wide = exact_model(torch.float32)
    wide.load_state_dict(narrow.state_dict())
    found, wanted = step(narrow), step(wide)
    for name in wanted.keys() - {""}:
        assert (found[name] - wanted[name]).norm() < 0.05 * wanted[name].norm(), name
    swapped = found["model.layers.0.self_attn.q_proj.weight"] - wanted["model.layers.1.self_attn.q_proj.weight"]
    assert swapped.norm() > 0.5 * wanted["model.layers.1.self_attn.q_proj.weight"].norm(), "a bound that holds for anything"


def test_finite_differences(fast: bool) -> None:
    """The layers in fp32, where both ways are one."""
    model = exact_model(torch.float32)
    weight = model.model.layers[0].mlp.down_proj.weight
    gradient = step(model)["model.layers.0.mlp.down_proj.weight"]
    ids = torch.randint(3, 199, (2, 19), generator=torch.Generator().manual_seed(0))
    direction = torch.randn(weight.shape, generator=torch.Generator().manual_seed(1))
    losses = []
    with torch.no_grad():
        for sign in (1, -1):
            weight += sign * 1e-2 * direction
            logits = model(input_ids=ids, use_cache=False).logits
            losses.append(token_logprobs(logits[:, :-1], ids[:, 1:]).double().mean().neg())
            weight -= sign * 1e-2 * direction
    slope = (losses[0] - losses[1]) / 2e-2
    assert float(slope) == pytest.approx(float((gradient * direction).sum()), rel=2e-2, abs=1e-5)


@pytest.mark.parametrize("sizes", [(1, 1, 1), (5, 33, 7), (70, 9, 130), (0, 4, 3), (3, 0, 2)])
def test_widened_products(sizes: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Within one rounding to bf16 of the exact sum, over whole pieces and ends of them."""
    monkeypatch.setattr(backward, "PIECE", 32)
    m, k, n = sizes
    generator = torch.Generator().manual_seed(m + k + n)
    a, b = torch.randn(k, m, generator=generator).bfloat16().T, torch.randn(k, n, generator=generator).bfloat16()
    exact, scale = a.double() @ b.double(), a.double().abs() @ b.double().abs()
    got = backward.widened(a, b)
    far = (k + 1) * 2.0**-24 * scale
    assert got.dtype == torch.bfloat16 and got.shape == (m, n)
    assert ((got.double() - exact).abs() <= far + 2.0**-8 * (exact.abs() + far)).all()


@pytest.mark.long
def test_without_avx512_bf16_is_slow() -> None:
    """As on a CPU with AVX2 alone, in a process of its own: torch reads the limit when it starts."""
    if not torch.backends.cpu.get_cpu_capability().startswith("AVX"):
        pytest.skip("no x86 CPU")
    environment = os.environ | {"ATEN_CPU_CAPABILITY": "avx2"}
    code = "from rollout.engine.cpu.backward import fast_in_bf16; print(fast_in_bf16())"
    assert subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True).stdout == "False\n"
