"""Latent KV: layers of latent attention store one latent per token, with the log-probs of K and V of every head."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import nn

from rollout.engine.cpu import isa
from rollout.engine.cuda.device import CudaDevice
from rollout.engine.engine import Engine
from rollout.engine.forward.latent import LatentHeads, plain_kv, use_latent_kv
from rollout.engine.forward.model import Model, UnsupportedModel
from rollout.engine.kv.pages import LayerShape
from rollout.engine.memory import HostMemory
from rollout.engine.values import Sample
from rollout.engine.values.arithmetic import LATENT
from rollout.exact import sample_logprobs, use_exact
from tests.support.equivalence import CLASSES, ROOMY, assert_same, groups
from tests.support.families import MLA, build
from tests.support.samebits import torchs_log_softmax
from tests.support.tiny import plain_logprobs, tiny_engine
from tests.support.toy import group, run

BF16 = torch.bfloat16
FAMILIES = (
    "bailing_hybrid", "deepseek_v2", "deepseek_v3", "glm4_moe_lite", "kimi_linear", "longcat_flash", "minicpm3", "youtu",
)  # fmt: skip
ROUNDING = 1e-4
"""of a log-prob in fp32: products in another order, through four layers"""
native = pytest.mark.skipif(bool(isa.lacking("avx2")), reason="no kernels for this CPU")


def latent_engine(name: str = "deepseek_v3", dtype: torch.dtype = BF16, model: Any = None, **config: Any) -> Engine:
    module = build(name, dtype) if model is None else model
    use_latent_kv(module)
    return tiny_engine(model=module, dtype=str(dtype).removeprefix("torch."), latent_kv=True, **config)


@pytest.mark.some(4)
@pytest.mark.parametrize("name", FAMILIES)
def test_log_probs_are_those_of_the_plain_forward(name: str) -> None:
    engine = latent_engine(name, torch.float32, cpu_offload_gib=0.01)
    rank, rope = MLA["kv_lora_rank"], MLA["qk_rope_head_dim"]
    sizes = {shape for shape in engine.model.geometry.shapes if shape.kv_heads == 1}
    assert sizes == {LayerShape(1, rank + rope, rank)} == set(engine.model.geometry.shapes)
    assert engine.arithmetic.endswith(LATENT)
    plain = build(name)
    for each in (group("a", np.arange(7, 60), n=3, max_tokens=20, ignore_eos=True), group("b", np.arange(30, 35))):
        for sample in run(engine, [each]).values():
            np.testing.assert_allclose(sample.logprobs, plain_logprobs(plain, each.prompt, sample), atol=ROUNDING, rtol=0)


def test_a_model_that_is_refused_otherwise_is_refused_with_latents_too() -> None:
    """The self-check compares latents with the module's own attention: a wrong matrix is seen."""
    module = build("deepseek_v3")
    use_latent_kv(module)
    heads: LatentHeads = next(each.latent_heads for each in module.modules() if hasattr(each, "latent_heads"))
    heads.plain -= 4  # the queries' first part and the keys' first rows end too early
    with pytest.raises(UnsupportedModel):
        tiny_engine(model=module, latent_kv=True)


def test_memory_of_a_token() -> None:
    plain, latents = Model(build("deepseek_v3", BF16), "plain").geometry, latent_engine().model.geometry
    heads, (rank, rope) = 4, (16, 8)
    assert plain.bytes_per_token == 4 * heads * (16 + 8 + 12) * 2
    assert latents.bytes_per_token == 4 * (rank + rope + rank) * 2


@pytest.fixture(scope="module")
def canonical() -> dict[tuple[str, int], Sample]:
    return run(latent_engine(**ROOMY), groups())


SHORT = ("small chunks", "preemptions by recompute", "offload", "overlapped, offload")


@pytest.mark.some(2)
@native
@pytest.mark.usefixtures("copies_pay")
@pytest.mark.parametrize("name", [pytest.param(each, marks=() if each in SHORT else pytest.mark.long) for each in CLASSES])
def test_class(name: str, canonical: dict[tuple[str, int], Sample]) -> None:
    """Alone, in a crowd, in chunks, forked, reset, offloaded and restored: the same to the bit."""
    engine = latent_engine(**CLASSES[name])
    assert engine.worker.backend.name == "native" and engine.worker.kernels.path.batch_invariant
    assert_same(canonical, run(engine, groups()))


@torchs_log_softmax
def test_a_trainer_has_the_same_bits_and_gets_them_off_again() -> None:
    engine, trainer = latent_engine(), build("deepseek_v3", BF16)
    before = copy.deepcopy(trainer)
    each = group("a", np.arange(7, 60), n=2, max_tokens=30, ignore_eos=True)
    exact = use_exact(trainer, engine.arithmetic, 8, 1)
    assert exact.arithmetic == engine.arithmetic
    for sample in run(engine, [each]).values():
        scored = sample_logprobs(trainer, [(each.prompt, sample.token_ids)])[0].detach().numpy()
        assert scored.tobytes() == sample.logprobs.tobytes()
        assert plain_logprobs(before, each.prompt, sample).tobytes() != sample.logprobs.tobytes()
    assert set(trainer.state_dict()) == set(before.state_dict())
    exact.remove()
    assert not any("latent_heads" in vars(module) or "expand_kv" in vars(module) for module in trainer.modules())
    ids = torch.arange(9, 40)[None]
    assert torch.equal(trainer(input_ids=ids).logits, before(input_ids=ids).logits)


def test_gradients_are_those_of_the_plain_forward() -> None:
    latents, plain = build("minicpm3"), build("minicpm3")
    use_exact(latents, latent_engine("minicpm3", torch.float32).arithmetic, 8, 1)
    ids = torch.arange(9, 60)[None]
    for model in (latents, plain):
        model(input_ids=ids, use_cache=False).logits.log_softmax(-1)[0, :, 5].sum().backward()
    for (name, one), other in zip(latents.named_parameters(), plain.parameters(), strict=True):
        assert one.grad is not None and other.grad is not None and one.grad.abs().max() > 0, name
        far = (one.grad - other.grad).abs().max() / other.grad.abs().max()
        assert far < 1e-4, (name, far)


def test_a_refresh_in_place_changes_both_products() -> None:
    module, other = build("deepseek_v3"), build("deepseek_v3")
    engine = latent_engine(dtype=torch.float32, model=module)
    with torch.no_grad():
        for each in (module, other):
            for name, parameter in each.named_parameters():
                if "kv_b_proj" in name:
                    parameter.neg_()
    each = group("a", np.arange(7, 40), max_tokens=12, ignore_eos=True)
    sample = run(engine, [each])["a", 0]
    np.testing.assert_allclose(sample.logprobs, plain_logprobs(other, each.prompt, sample), atol=ROUNDING, rtol=0)


def test_what_cannot_store_latents_is_refused() -> None:
    with pytest.raises(ValueError, match="has no latent attention"):
        use_latent_kv(build("llama"))
    with pytest.raises(ValueError, match="latent_kv=True: .* has the other setting"):
        tiny_engine(model=build("deepseek_v3"), latent_kv=True)
    module = build("deepseek_v3")
    use_latent_kv(module)
    gpu = SimpleNamespace(memory=HostMemory())
    CudaDevice.check(cast(Any, gpu), Model(build("deepseek_v3"), "plain"))
    with pytest.raises(ValueError, match="latent_kv=True with device=cpu: it needs the CPU"):
        CudaDevice.check(cast(Any, gpu), Model(module, "latents"))
    adapted = build("deepseek_v3")
    attention = next(each for each in adapted.modules() if hasattr(each, "expand_kv"))
    attention.kv_b_proj = nn.Sequential(attention.kv_b_proj)
    with pytest.raises(ValueError, match="kv_b_proj to be a plain nn.Linear without bias, not a Sequential"):
        use_latent_kv(adapted)


def test_transformers_own_attention_is_not_changed() -> None:
    module, plain = build("deepseek_v3"), build("deepseek_v3")
    ids = torch.arange(9, 60)[None]
    want = plain(input_ids=ids).logits
    use_latent_kv(module)
    assert torch.equal(module(input_ids=ids).logits, want)
    plain_kv(module)
    assert torch.equal(module(input_ids=ids).logits, want)
