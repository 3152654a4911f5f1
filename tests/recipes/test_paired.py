"""recipes/paired.py: equal seeds leave what an update does not touch, and the difference has less noise."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from rollout.client.api import RolloutClient
from rollout.config import Config, InputError
from rollout.engine.values import Sampling
from rollout.process import service_process
from rollout.recipes import grpo, paired


def sample(*tokens: int) -> Any:
    return SimpleNamespace(token_ids=np.array(tokens, np.int32))


def test_where_answers_differ() -> None:
    assert paired.first_difference(sample(1, 2, 3), sample(1, 2, 3)) is None
    assert paired.first_difference(sample(1, 2, 3), sample(1, 5, 3)) == 1
    assert paired.first_difference(sample(1, 2), sample(1, 2, 3)) == 2


def test_errors_are_of_the_draws_alone() -> None:
    spread = np.array([[0.0, 1.0], [0.0, 1.0]])
    assert paired.standard_error(spread) == pytest.approx(np.sqrt(0.5 / 4))
    assert paired.standard_error(spread + [[5.0], [-5.0]]) == paired.standard_error(spread), "questions may differ"


@pytest.mark.long
def test_equal_seeds_have_less_noise(tiny_config: Config, tiny_model: Path, tmp_path: Path) -> None:
    """Weights that differ a little: most answers stay. Of the same weights none changes, and the error is 0."""
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    task = grpo.EvenIds(grpo.Options(task="even-ids", steps=8, groups=1, held_out=0), 250)
    sampling = Sampling(n=8, max_tokens=4, seed=3, ignore_eos=True)
    with service_process(tiny_config) as service, RolloutClient(service.endpoint) as client:
        same, *_ = paired.compare(client, task, range(8), model, sampling)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(1e-3 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0)))
        found, before, after = paired.compare(client, task, range(8), model, sampling)
    assert same.unchanged == 1 and same.gain == same.paired_error == 0 and same.first_changed is None
    assert same.independent_error > 0, "the control: other seeds are other answers"
    assert 0.5 < found.unchanged < 1 and found.paired_error < found.independent_error / 2
    assert found.pairs == 64 == sum(len(group) for group in before) == sum(len(group) for group in after)


def test_one_sample_has_no_spread(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="at least 2"):
        paired.main(paired.Options(after=tmp_path, n=1))
