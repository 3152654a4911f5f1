"""The equivalence classes on a device.

Promised to the bit: attention, whatever the batch (tests/engine/test_triton_attention.py, compiled where there is a GPU), and
so whole samples as long as the schedule is the same: prefix shared or not, graphs or not at a size that nobody pads. Promised
up to rounding: samples under another schedule, since cuBLAS picks its kernels by the number of rows.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from rollout.engine.config import AdvancedConfig, EngineConfig
from rollout.engine.engine import Engine
from tests.support.equivalence import CLASSES, ROOMY, assert_same, groups
from tests.support.on_device import DEVICE, Samples, agree, captured_of, engine
from tests.support.tiny import MODELS, plain_logprobs, tiny, tiny_engine
from tests.support.toy import group, run

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def canonical() -> Samples:
    return run(engine(**ROOMY), groups())


@pytest.mark.usefixtures("copies_pay")
@pytest.mark.parametrize("name", CLASSES)
def test_class(name: str, canonical: Samples) -> None:
    made = engine(**CLASSES[name])
    agree(canonical, run(made, groups()))
    if "resets" in name:
        assert made.counters.recompute_preemptions > 0
    if "offload" in name:
        assert made.counters.offloads > 0


def test_without_graphs(canonical: Samples) -> None:
    agree(canonical, run(engine(**ROOMY, cuda_graphs=False), groups()))


def test_as_on_the_cpu(canonical: Samples) -> None:
    agree(canonical, run(tiny_engine(attention="reference", **ROOMY), groups()))


def test_as_the_reference_on_the_device(canonical: Samples) -> None:
    agree(canonical, run(engine(attention="reference", **ROOMY), groups()))


def test_another_seed_is_seen(canonical: Samples) -> None:
    with pytest.raises(AssertionError):
        agree(canonical, run(engine(**ROOMY), groups(seed=1)))


def test_other_weights_are_seen(canonical: Samples) -> None:
    with pytest.raises(AssertionError):
        agree(canonical, run(engine(model=tiny("llama", seed=1), **ROOMY), groups()))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_shared_or_not_to_the_bit(dtype: str) -> None:
    assert_same(run(engine(dtype=dtype, **ROOMY), groups()), run(engine(dtype=dtype, **ROOMY, share_prefix=False), groups()))


MIXED = [name for name, options in MODELS.items() if any("experts" in option for option in options)]
"""with experts, whose products in fp32 wait for the device"""


@pytest.mark.parametrize("family", MODELS)
def test_families_have_the_log_probs_of_the_trainers_forward(family: str) -> None:
    made = engine(name=family, cuda_graphs=family not in MIXED)
    prompt = np.arange(5, 64, dtype=np.int32)
    samples = run(made, [group("g", prompt, n=4, max_tokens=12, ignore_eos=True)])
    assert made.worker.graphs is None or captured_of(made), "its forward could not be captured"
    trainer = tiny(family).to(DEVICE)
    for sample in samples.values():
        np.testing.assert_allclose(sample.logprobs, plain_logprobs(trainer, prompt, sample), atol=1e-4, rtol=0)


def test_smollm2(smollm2: Path) -> None:
    """bf16, real weights: shared or not and replayed or not to the bit; as near to a plain forward as two of these are to
    each other."""
    options = {"dtype": "bfloat16", "device": DEVICE, "kv_tokens": 8192, "cpu_offload_gib": 0, "max_num_seqs": 32}
    attention = "triton" if DEVICE == "cuda" else "reference"
    prompt = np.arange(100, 300, dtype=np.int32)
    some = [group("g", prompt, n=16, max_tokens=16, ignore_eos=True)]

    def samples(**more: object) -> Samples:
        return run(Engine(EngineConfig(model=str(smollm2), attention=attention, **options, **more)), some)  # type: ignore[arg-type]

    want = samples()
    assert_same(want, samples(advanced=AdvancedConfig(share_prefix=False)))
    assert_same(want, samples(cuda_graphs=False))
    trainer = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.bfloat16, attn_implementation="sdpa").to(DEVICE).eval()
    differences = [sample.logprobs - plain_logprobs(trainer, prompt, sample) for sample in want.values()]
    assert np.abs(np.concatenate(differences)).mean() < 0.1
