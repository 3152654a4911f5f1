"""Engines of tiny models on the device that there is, and what two runs of them must have in common."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from rollout.engine.engine import Engine
from rollout.engine.values import Group, Sample
from tests.support.equivalence import assert_same
from tests.support.tiny import tiny_engine
from tests.support.toy import group

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
needs_cuda = pytest.mark.skipif(DEVICE == "cpu", reason="streams, graphs and memory of a CUDA device")
Samples = dict[tuple[str, int], Sample]


def engine(**options: Any) -> Engine:
    """Make an engine that captures what comes up, so that a test of few steps starts at once. Without drafts, which are worth
    it or not by the time that steps take: with them, steps of two engines have different sizes."""
    attention = "triton" if DEVICE == "cuda" else "reference"
    return tiny_engine(**{"device": DEVICE, "attention": attention, "warm_up": False, "drafts": 0, **options})


def module_of(engine: Engine) -> torch.nn.Module:
    model: Any = engine.model
    return model.module


def captured_of(engine: Engine) -> dict[Any, Any]:
    """Return the forwards that an engine's graphs have captured."""
    graphs: Any = engine.worker.graphs
    captured: dict[Any, Any] = graphs._replays
    return captured


def lockstep(tag: str = "", seed: int = 0) -> list[Group]:
    """Make sixteen children of one prompt that all draw as many tokens. Every decode step has sixteen rows, a batch size that
    is captured and that nobody pads: whatever else differs, the matrix products are the same, and so must the bits be."""
    return [group(f"lockstep{tag}", [3 + i % 190 for i in range(41)], n=16, max_tokens=24, seed=seed, ignore_eos=True)]


def same_or_near(dtype: str) -> Callable[[Samples, Samples], None]:
    """Return what compares samples of steps that are padded and not. In bf16 products of few inputs have the same bits for any
    number of rows, as tensor cores add them up; in fp32 cuBLAS takes other kernels for one row of logits than for many."""
    return assert_same if dtype == "bfloat16" else agree


def agree(one: Samples, other: Samples, atol: float = 1e-4, alike: float = 0.9) -> None:
    """Assert the same samples up to the rounding of matrix products, whose kernels cuBLAS picks by the size of the batch:
    log-probs within `atol` as far as the tokens are the same, which in nearly all samples they are to the end. (A draw whose
    number falls within the rounding of an edge goes to the neighbour, and the sample goes another way from there.)"""
    assert one.keys() == other.keys()
    same = 0
    for key, sample in one.items():
        mine, theirs = sample.token_ids, other[key].token_ids
        length = min(len(mine), len(theirs))
        differ = np.flatnonzero(mine[:length] != theirs[:length])
        common = int(differ[0]) if len(differ) else length
        np.testing.assert_allclose(sample.logprobs[:common], other[key].logprobs[:common], atol=atol, rtol=0)
        same += common == len(mine) == len(theirs)
    assert same >= alike * len(one), f"{same} of {len(one)} samples have the same tokens"
