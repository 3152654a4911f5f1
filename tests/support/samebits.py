"""Bits of a model's samples in different settings of an engine, and in a trainer's forward."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from rollout.engine.config import EngineConfig
from rollout.engine.engine import Engine
from rollout.engine.forward.model import Model
from rollout.engine.values import Group
from rollout.exact import sample_logprobs, use_exact
from tests.support.equivalence import Samples, assert_same
from tests.support.toy import group, run

NO_VECTORS = torch.backends.cpu.get_cpu_capability() == "DEFAULT"
"""whether torch computes functions of elements one at a time"""
torchs_log_softmax = pytest.mark.skipif(NO_VECTORS, reason="log_softmax has other bits without vectors")
ROOMY: dict[str, Any] = {"block_size": 8, "kv_tokens": 4096, "max_num_seqs": 16, "max_batch_tokens": 512, "cpu_offload_gib": 0}
SAME: dict[str, dict[str, Any]] = {
    "small chunks": {"max_batch_tokens": 33},
    "one at a time": {"max_num_seqs": 1},
    "offloaded": {"kv_tokens": 320, "cpu_offload_gib": 0.01},
    "recomputed": {"kv_tokens": 200},
    "overlapped": {"overlap_steps": True, "max_batch_tokens": 64, "kv_tokens": 320},
}


def prompt(tokens: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(24, 99, tokens).astype(np.int32)


def asked(lengths: tuple[int, ...], n: int = 3, tokens: int = 20) -> list[Group]:
    return [
        group(f"g{i}", prompt(length, i), n=n, max_tokens=tokens, seed=i, ignore_eos=True) for i, length in enumerate(lengths)
    ]


def samples_of(made: PreTrainedModel, groups: list[Group], **config: Any) -> tuple[Samples, Engine]:
    """Run groups on a copy of a model, whose samples may not depend on the batch."""
    engine = engine_of(made, **config)
    return run(engine, groups), engine


def engine_of(made: PreTrainedModel, **config: Any) -> Engine:
    """Make an engine over a copy of a model, whose samples may not depend on the batch."""
    dtype = str(made.dtype).removeprefix("torch.")
    engine = Engine(EngineConfig(**{**ROOMY, "threads": 1, "dtype": dtype, **config}), Model(copy.deepcopy(made), "m"))
    assert "/batch" not in engine.arithmetic, engine.status()["computed_by_reason"]
    return engine


def assert_same_everywhere(made: PreTrainedModel, groups: list[Group]) -> None:
    """Assert that samples have the same bits in each setting of `SAME`."""
    roomy, _ = samples_of(made, groups)
    for each, config in SAME.items():
        try:
            assert_same(roomy, samples_of(made, groups, **config)[0])
        except AssertionError as error:
            raise AssertionError(f"{each}: {error}") from error


def assert_same_in_a_trainer(made: PreTrainedModel, groups: list[Group]) -> None:
    """Assert that an exact trainer has the log-probs of the samples, to the bit."""
    samples, engine = samples_of(made, groups)
    kept = [(each.prompt, samples[each.id, index]) for each in groups for index in each.wanted]
    use = use_exact(made, engine.arithmetic, block_size=8)
    with torch.no_grad():
        again = sample_logprobs(made, [(prompt, sample.token_ids) for prompt, sample in kept])
    use.remove()
    for (_, sample), logprobs in zip(kept, again, strict=True):
        assert np.array_equal(logprobs.numpy(), sample.logprobs)
    assert not any("forward" in vars(each) for each in made.modules())


def gradients(made: PreTrainedModel, exact: bool, rows: list[tuple[np.ndarray, np.ndarray]]) -> dict[str, torch.Tensor | None]:
    """Return the gradient of the sum of log-probs of `rows` by parameter: in one padded batch of an exact model, or of the
    model as it comes, row by row."""
    made.requires_grad_(True)
    if exact:
        use_exact(made, block_size=8)
        torch.cat(sample_logprobs(made, rows)).sum().backward()  # type: ignore[no-untyped-call]
    else:
        for row in rows:
            sample_logprobs(made, [row])[0].sum().backward()
    return {key: value.grad for key, value in made.named_parameters()}


def assert_same_gradients(plain: dict[str, torch.Tensor | None], exact: dict[str, torch.Tensor | None]) -> None:
    """Assert that gradients are those of the plain model, as far as fp32 goes."""
    for key, want in plain.items():
        got = exact[key]
        assert (want is None) == (got is None), key
        if want is not None and got is not None:
            assert (got - want).abs().max() <= 2e-3 * want.abs().max() + 1e-6, key
