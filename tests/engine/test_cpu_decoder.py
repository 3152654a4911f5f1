"""The native decoder, by every instruction set that this CPU has, gives the bits of the module with the same products."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from rollout.engine.cpu.decoder import EchoAttention, NativeDecoder
from rollout.engine.cpu.exact_modules import plain_products
from rollout.engine.cpu.isa import here
from rollout.engine.forward.model import Model
from tests.support.equipped import equip
from tests.support.isas import best_first
from tests.support.tiny import tiny, tiny_engine
from tests.support.toy import group, run

SIZES = {"hidden_size": 96, "intermediate_size": 224, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 32}
SIZES |= {"vocab_size": 208}
SERVED = {
    "llama": {},
    "llama-wide": {"hidden_size": 1152, "intermediate_size": 2080, "head_dim": 64},
    "llama-mha": {"num_key_value_heads": 6, "tie_word_embeddings": True},
    "qwen2": {"num_key_value_heads": 3},
    "qwen3": {"head_dim": 64},
    "mistral": {"sliding_window": 12},
}
"""family: sizes beside SIZES; qwen2 has biases, qwen3 norms of its heads"""


SLOW = ("plain", "amx_portable")
"""instruction sets that take no wide models"""


def model(name: str, dtype: torch.dtype = torch.bfloat16, **more: object) -> PreTrainedModel:
    made = tiny(name, dtype, **{**SIZES, **SERVED.get(name, {}), **more})
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.ndim == 1:  # biases that are not all zero, norms that are not all one
                parameter.add_((torch.randn(parameter.shape) * 0.3).to(dtype))
    return made


@pytest.fixture(scope="module", params=best_first(here()))
def isa(request: pytest.FixtureRequest) -> str:
    return request.param


def natively(name: str, isa: str, dtype: torch.dtype = torch.bfloat16, **more: object) -> Model:
    served = Model(model(name, dtype, **more), name)
    computes = equip(served, isa)
    assert isinstance(served.decoder, NativeDecoder), computes
    return served


def batch(rows: int, vocabulary: int = 208) -> SimpleNamespace:
    """Tokens of a step as far as a decoder looks at them; a lone one is doubled, as `Batch.build` does."""
    ids = torch.randint(vocabulary, (1, rows), generator=torch.Generator().manual_seed(rows))
    ids, at = ids.expand(1, max(2, rows)), torch.arange(max(2, rows)).clamp(max=rows - 1)
    return SimpleNamespace(
        input_ids=ids, position_ids=(at * 5)[None], num_tokens=rows, logits_at=at, num_logits=rows, attention={}
    )


@torch.inference_mode()
def logits(served: Model, rows: int, transformers: bool = False) -> torch.Tensor:
    forward = served.forward_transformers if transformers else served.forward
    return forward(batch(rows), None, EchoAttention())  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", SERVED)
def test_the_bits_of_the_module(name: str, isa: str, dtype: torch.dtype) -> None:
    if name == "llama-wide" and isa in SLOW:
        pytest.skip(f"{isa} is slow")
    served = natively(name, isa, dtype)
    for rows in (1, 2, 3, 17, 129, 300) if isa not in SLOW else (1, 3, 17):
        assert torch.equal(logits(served, rows), logits(served, rows, transformers=True)), f"{rows} rows"


def test_other_products_are_seen(isa: str) -> None:
    """The negative control: torch's own fp32 products, in another order, or a norm with another epsilon, are not these bits."""
    served = natively("qwen2", isa, torch.float32, hidden_size=1152)
    want = logits(served, 37)
    plain_products(served.module)
    assert not torch.equal(logits(served, 37, transformers=True), want)
    served.decoder._structs[1].eps_in *= 2
    assert not torch.equal(logits(served, 37), want)


def test_a_row_is_the_same_in_any_company(isa: str) -> None:
    """Also alone: there is no smallest batch."""
    served = natively("llama", isa)
    all_rows = logits(served, 70)
    for i in (0, 33, 69):
        lone = batch(70)
        for field in ("input_ids", "position_ids"):
            setattr(lone, field, getattr(lone, field)[:, i : i + 1])
        lone.num_tokens, lone.logits_at, lone.num_logits = 1, torch.zeros(1, dtype=torch.long), 1
        with torch.inference_mode():
            assert torch.equal(served.forward(lone, None, EchoAttention()), all_rows[i : i + 1])  # type: ignore[arg-type]


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_any_number_of_threads(isa: str, threads: int) -> None:
    served = natively("qwen3", isa)
    before = torch.get_num_threads()
    want = logits(served, 90)
    try:
        torch.set_num_threads(threads)
        for _ in range(5 if isa not in SLOW else 1):
            assert torch.equal(logits(served, 90), want)
    finally:
        torch.set_num_threads(before)


def test_sizes_that_fill_no_vector(isa: str) -> None:
    """Outputs and inputs that are multiples of nothing."""
    served = natively("llama", isa, vocab_size=211, intermediate_size=203)
    assert torch.equal(logits(served, 20), logits(served, 20, transformers=True))


@pytest.mark.parametrize(
    ("name", "attention", "threads"),
    [
        ("llama", "native", 1),
        ("qwen2", "native", 2),
        ("qwen3", "native", 3),
        ("mistral", "native", 2),
        ("llama", "reference", 2),
    ],
)
def test_samples_through_the_engine(name: str, attention: str, threads: int) -> None:
    """Tokens and log-probs of an engine are the same to the bit with and without the native decoder, which runs all layers and
    native attention in one go."""
    module, before = model(name), torch.get_num_threads()
    one, other = (tiny_engine(dtype="bfloat16", model=copy.deepcopy(module), attention=attention) for _ in range(2))
    assert isinstance(one.model.decoder, NativeDecoder)
    other.model.run_by(None)
    r = np.random.default_rng(0)
    groups = [group(f"g{i}", r.integers(3, 199, 10 + 17 * i), n=3, max_tokens=20, seed=i, ignore_eos=True) for i in range(5)]
    try:
        torch.set_num_threads(threads)
        mine = run(one, groups)
    finally:
        torch.set_num_threads(before)
    theirs = run(other, groups)
    for key, sample in mine.items():
        assert sample.logprobs.tobytes() == theirs[key].logprobs.tobytes()
        np.testing.assert_array_equal(sample.token_ids, theirs[key].token_ids)


def test_new_weights_are_seen() -> None:
    """Written in place, and put into another tensor."""
    served = natively("qwen2", here()[0])
    old, newer = logits(served, 5), model("qwen2", seed=1)
    with torch.no_grad():
        for parameter, new in zip(served.module.parameters(), newer.parameters(), strict=True):
            parameter.copy_(new)
    new = logits(served, 5)
    assert not torch.equal(new, old) and torch.equal(new, logits(served, 5, transformers=True))
    for parameter in served.module.parameters():
        parameter.data = parameter.data * 0.5
    halved = logits(served, 5)
    assert not torch.equal(halved, new) and torch.equal(halved, logits(served, 5, transformers=True))


@pytest.mark.parametrize(
    ("name", "sizes", "why"),
    [
        ("gemma3_text", {"head_dim": 32}, "the embedding"),
        ("olmo2", {}, "unsupported decoder layer"),
        ("phi3", {}, "unsupported decoder layer"),
        ("llama", {"head_dim": 16}, "head_dim 16"),
        ("llama", {"hidden_act": "gelu"}, "unsupported activation"),
        ("llama", {"hidden_size": 102}, "hidden_size 102"),
        ("granite", {"residual_multiplier": 0.5}, "differ from the module's"),
        ("mixtral", {"num_local_experts": 2}, "unsupported projections"),
    ],
)
def test_other_models_run_through_transformers(
    name: str, sizes: dict[str, object], why: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO", "rollout.engine"):
        served = Model(tiny(name, torch.bfloat16, **{**SIZES, **sizes}), name)
        equip(served)
    assert served.decoder is None
    assert ("runs through transformers" in caplog.text or "torch's own products" in caplog.text) and why in caplog.text
