"""Hybrids run by their own modules: a token has the same bits in any step, wherever its sequence is cut."""

from __future__ import annotations

import pytest
import torch

from rollout.engine.cpu.exact_modules import use_products
from rollout.engine.cpu.functions import callers, use_whole_vectors
from rollout.engine.cpu.isa import best
from rollout.engine.cpu.recurrence import recurrence_of
from rollout.engine.forward.model import Model
from tests.support.recurrent import TYPES, logits, tiny_recurrent

IDS = torch.randint(3, 199, (40,), generator=torch.Generator().manual_seed(1))
CROWD = torch.randint(3, 199, (93,), generator=torch.Generator().manual_seed(2))
WAYS = (([1] * 40, 0), ([40], 93), ([7, 13, 20], 2), ([1] * 40, 17))
"""tokens of each step, tokens beside them"""


def served(name: str, dtype: torch.dtype, whole: bool = True) -> Model:
    """whole: element-wise functions in whole vectors."""
    model = tiny_recurrent(name, dtype, recurrence_of())
    with callers(model.module) as called:
        logits(model, IDS, [40], CROWD[:0])
    use_products(model.module, best())
    if whole:
        use_whole_vectors(called.found.values())
    return model


def differ(model: Model) -> list[tuple[int, int]]:
    """Return the ways that give other bits than one step without other tokens."""
    want = logits(model, IDS, [40], CROWD[:0])
    assert want.isfinite().all() and want.std() > 0.1
    return [(len(cuts), n) for cuts, n in WAYS if not torch.equal(logits(model, IDS, cuts, CROWD[:n]), want)]


@pytest.mark.some(4)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("name", TYPES)
def test_a_token_is_the_same_in_any_step(name: str, dtype: torch.dtype) -> None:
    assert not differ(served(name, dtype))


@pytest.mark.skipif(torch.backends.cpu.get_cpu_capability() == "DEFAULT", reason="torch computes nothing in vectors")
def test_it_is_not_without_whole_vectors() -> None:
    assert differ(served("qwen3_5_text", torch.float32, whole=False))
