"""Who computes is decided by comparing numbers, and told."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch

from rollout.engine.cpu import select_path
from rollout.engine.cpu.decoder import NativeDecoder
from rollout.engine.cpu.exact_modules import ExactLinear
from rollout.engine.cpu.kernels import choose
from rollout.engine.cpu.layer_steps import NotNative, model_steps
from rollout.engine.cpu.products import products_of
from rollout.engine.forward.model import Model
from tests.support.equipped import equip
from tests.support.equivalence import ROOMY, assert_same, groups
from tests.support.families import build
from tests.support.tiny import tiny, tiny_engine
from tests.support.toy import run

pytestmark = pytest.mark.usefixtures("loads_in_full")

BEST = choose().isa
native = pytest.mark.skipif(BEST == "torch", reason="no native kernels on this machine")


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("llama", "bfloat16"),
        ("qwen3", "float32"),
        *(
            pytest.param(name, dtype, marks=pytest.mark.long)
            for name, dtype in product(("llama", "qwen2", "qwen3", "mistral"), ("bfloat16", "float32"))
            if (name, dtype) not in [("llama", "bfloat16"), ("qwen3", "float32")]
        ),
    ],
)
def test_without_kernels_the_module_runs_and_the_batch_changes_nothing(name: str, dtype: str) -> None:
    engine, other = (tiny_engine(name, dtype, isa="torch", **ROOMY) for _ in range(2))
    assert engine.model.decoder is None
    status = engine.status()
    assert (status["computed_by"], status["computed_by_reason"]) == ("module", "there are no kernels for a decoder")
    samples = run(engine, groups())
    alone = [sample for each in groups()[:3] for sample in run(other, [each]).items()]
    assert_same({key: samples[key] for key, _ in alone}, dict(alone))


@native
def test_wrong_products_are_not_used(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    products = products_of(BEST)
    right = products.linear
    for scale, used in ((1.0, BEST), (1.02, "torch")):  # 2 % is more than rounding to bf16
        monkeypatch.setattr(
            products, "linear", lambda x, weight, bias, scale=scale: right(x, weight, bias) * scale, raising=False
        )
        with caplog.at_level("INFO", "rollout.engine"):
            served = Model(tiny("llama", torch.bfloat16), "llama")
            equip(served)
        assert {each.isa for each in served.module.modules() if isinstance(each, ExactLinear)} == {used}
    assert "× as far from the exact sum as rounding allows" in caplog.text and "are not used" in caplog.text


@native
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_wrong_decoder_is_not_used(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One bit in one logit."""
    forward = NativeDecoder.forward

    def wrong(*args: Any) -> torch.Tensor:
        logits = forward(*args)
        logits[-1, 3] = torch.nextafter(logits[-1, 3], torch.full_like(logits[-1, 3], torch.inf))
        return logits

    monkeypatch.setattr(NativeDecoder, "forward", wrong)
    served = Model(tiny("llama", dtype, head_dim=32), "llama")
    computes = equip(served)
    assert served.decoder is None and "differ from the module's with 1 rows" in computes.why
    assert "which is slower" in caplog.text
    assert all(each.isa == BEST for each in served.module.modules() if isinstance(each, ExactLinear))


@native
def test_another_kind_of_layer_runs_in_the_module_with_our_products() -> None:
    """And so its samples do not depend on the batch either."""
    samples = run(tiny_engine("olmo2", "bfloat16", **ROOMY), groups())
    engine = tiny_engine("olmo2", "bfloat16", **ROOMY)
    assert engine.model.decoder is None and "unsupported decoder layer" in engine.status()["computed_by_reason"]
    assert engine.status()["computed_by"] == "module" and engine.status()["arithmetic"] == products_of(BEST).arithmetic
    for each in groups()[:3]:
        alone = run(engine, [each])
        assert_same({key: samples[key] for key in alone}, alone)


@native
@pytest.mark.parametrize("name", ["gemma2", "granite_swa", "deepseek_v2"])
def test_soft_caps_sinks_and_values_of_another_width_alone_and_in_a_crowd(name: str) -> None:
    samples = run(tiny_engine(name, "bfloat16", **ROOMY), groups())
    engine = tiny_engine(name, "bfloat16", **ROOMY)
    assert engine.worker.backend.name == "native" and engine.status()["arithmetic"] == products_of(BEST).arithmetic
    for each in groups()[:3]:
        alone = run(engine, [each])
        assert_same({key: samples[key] for key in alone}, alone)


@native
@pytest.mark.parametrize(("name", "value"), [("sinks", (4,)), ("softcap", 50.0)])
def test_scores_that_the_decoder_does_not_compute(name: str, value: object) -> None:
    """A layer that asks for more than a window; its attention is no part of what is compared."""
    served = Model(tiny("llama", hidden_size=128), "llama")
    equip(served)
    assert served.decoder is not None
    served.asked[1][name] = value
    computes = equip(served)
    assert served.decoder is None and "sinks or soft caps" in computes.why


def test_products_that_stay_torchs_are_reported(caplog: pytest.LogCaptureFixture) -> None:
    engine = tiny_engine("gpt2", "bfloat16", build("gpt2", torch.bfloat16))
    assert "samples may depend on the batch" in caplog.text
    assert engine.status()["arithmetic"].startswith(f"torch/{torch.__version__.split('+')[0]}/batch")


def test_torch_bits_are_found_out() -> None:
    """torch's own products in pieces have torch's bits wherever torch is steady; a product in another order has not."""
    module = tiny("llama", torch.float32)
    products = products_of("torch")

    class Reversed:
        def linear(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
            return products.linear(x.flip(1), weight.flip(1), bias)

    assert not select_path.products_like_torch(module, Reversed())  # type: ignore[arg-type]


def test_layers_of_another_kind_are_refused() -> None:
    with pytest.raises(NotNative, match="unsupported decoder layer"):
        model_steps(tiny("olmo2"))


@native
def test_a_module_that_only_a_forward_shows_to_be_another_one_runs() -> None:
    """The rotary embeddings of ernie4_5 are in fp32, whatever the model is in: no decoder computes it in bf16. It is served."""
    engine = tiny_engine("ernie4_5", "bfloat16")
    assert engine.model.decoder is None and "rotary embeddings" in engine.status()["computed_by_reason"]
    samples = run(engine, groups())
    assert {sample.finish_reason for sample in samples.values()} <= {"stop", "length"}
