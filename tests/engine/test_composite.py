"""Models for text and images: what text never reaches is left as it is, and text has bits of its own."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from rollout.engine.cpu import isa, select_path
from rollout.engine.cpu.exact_modules import NotServed, plain_products, unreached, use_products
from rollout.engine.cpu.functions import callers
from tests.support.families import build
from tests.support.samebits import asked, assert_same_everywhere, assert_same_in_a_trainer, engine_of

needs_kernels = pytest.mark.skipif(bool(isa.lacking("avx2")), reason="no kernels for this CPU")


class Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(4, 4))
        self.inner = nn.Linear(4, 4)


class Gate(nn.Module):
    """A matrix that another module reads."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))


class Both(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tower, self.gate, self.text = Tower(), Gate(), nn.Linear(4, 4)
        self.experts = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4), Tower()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert self.tower.table.dtype == x.dtype and self.tower.table.is_floating_point()
        return self.experts[0](nn.functional.linear(self.text(x), self.gate.weight))


def test_what_a_forward_does_not_reach() -> None:
    """A tower is not reached where only its dtype is read; a list's other modules may be reached by other tokens."""
    module = Both()
    with callers(module) as called:
        module(torch.randn(2, 4))
    left = {*unreached(module, called)}
    assert left == {module.tower, module.tower.inner}
    with pytest.raises(NotServed, match="gate.weight is a matrix of a Gate"):
        use_products(module, "torch", left)
    module.gate = nn.Identity()
    with pytest.raises(NotServed, match="experts.2.table is a matrix of a Tower"):
        use_products(module, "torch", left)
    module.experts[2] = nn.Identity()
    with pytest.raises(NotServed, match="tower.table"):
        use_products(module, "torch")
    use_products(module, "torch", left)
    assert type(module.tower.inner) is nn.Linear and type(module.text) is not nn.Linear
    plain_products(module)


@needs_kernels
@pytest.mark.parametrize(
    "name", ["gemma3", *(pytest.param(each, marks=pytest.mark.long) for each in ("gemma4", "moss_transcribe_diarize"))]
)
def test_text_of_a_composite_model_has_bits_of_its_own(name: str) -> None:
    """A tower for images, one with KV shared by layers beside it, one for sounds."""
    made = build(name, torch.bfloat16)
    assert_same_everywhere(made, asked((61, 7, 83), n=2))
    assert_same_in_a_trainer(made, asked((50, 9), n=2))


@needs_kernels
def test_a_tower_that_is_looked_at_leaves_torch_s_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control."""
    monkeypatch.setattr(select_path, "unreached", lambda module, called: iter(()))
    with pytest.raises(AssertionError, match="vision_tower"):
        engine_of(build("gemma3", torch.bfloat16))
