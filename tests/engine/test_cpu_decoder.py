"""The native decoder, by every instruction set that this CPU has, gives the bits of the module with the same products."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from rollout.engine.cpu.decoder import EchoAttention, NativeDecoder, NotNative
from rollout.engine.cpu.exact_modules import plain_products
from rollout.engine.cpu.isa import here
from rollout.engine.cpu.layer_steps import CONVOLVE, DECAY, DELTA, GATE, GATED_NORM, HEADS, MULTIPLY, NORM
from rollout.engine.engine import Engine
from rollout.engine.forward.batch import StateRows
from rollout.engine.forward.model import Model
from rollout.exact import use_exact
from tests.support.equipped import equip
from tests.support.isas import best_first
from tests.support.samebits import NO_VECTORS, torchs_log_softmax
from tests.support.tiny import plain_logprobs, tiny, tiny_engine
from tests.support.toy import group, run

SIZES = {"hidden_size": 96, "intermediate_size": 224, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 32}
SIZES |= {"vocab_size": 208}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
LINEAR, FULL, SLIDING, CONV = "linear_attention", "full_attention", "sliding_attention", "conv"
SERVED: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama-wide": {"hidden_size": 1152, "intermediate_size": 2080, "head_dim": 64},
    "llama-mha": {"num_key_value_heads": 6, "tie_word_embeddings": True},
    "qwen2": {"num_key_value_heads": 3},
    "qwen3": {"head_dim": 64},
    "mistral": {"sliding_window": 12},
    "smollm3": {"num_hidden_layers": 4, "no_rope_layers": [1, 1, 1, 0]},
    "gemma3_text": {
        "num_hidden_layers": 6, "layer_types": [*[SLIDING] * 5, FULL], "sliding_window": 12, "query_pre_attn_scalar": 24,
    },
    "lfm2": {"num_hidden_layers": 4, "layer_types": [CONV, CONV, FULL, CONV], "conv_L_cache": 3, "hidden_size": 192},
    "qwen3_5_text": {
        "num_hidden_layers": 4, "layer_types": [LINEAR, LINEAR, LINEAR, FULL], "head_dim": 128, "linear_num_key_heads": 2,
        "linear_num_value_heads": 6, "linear_key_head_dim": 40, "linear_value_head_dim": 64,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25},
    },
    "mixtral": {**EXPERTS, "num_local_experts": 4},
    "olmoe": {**EXPERTS, "num_key_value_heads": 6, "hidden_size": 192},
    "qwen3_moe": {**EXPERTS, "num_hidden_layers": 3, "mlp_only_layers": [1]},
    "glm4_moe": {**EXPERTS, "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "head_dim": 64},
}  # fmt: skip
"""family: sizes beside SIZES; qwen2 has biases, qwen3 norms of its heads, smollm3 layers without rotary embeddings, gemma3
norms after the mixers and two rotary bases, lfm2 convolutions, qwen3_5 gated delta nets, olmoe norms of all heads together; the
last four have layers whose experts are called as a module, qwen3_moe and glm4_moe dense ones too"""
RECURRENT = ("lfm2", "qwen3_5_text")
BY_VECTORS = ("gemma3_text", *RECURRENT)
"""families with steps that repeat functions of torch: GELU, silu, sigmoid, softplus"""

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
    if name in BY_VECTORS and NO_VECTORS:
        assert served.decoder is None and "without vectors" in computes.why
        pytest.skip(computes.why)
    assert isinstance(served.decoder, NativeDecoder), computes
    return served


def native_engine(name: str, module: PreTrainedModel, **config: Any) -> Engine:
    engine = tiny_engine(dtype="bfloat16", model=copy.deepcopy(module), **config)
    if name in BY_VECTORS and NO_VECTORS:
        assert engine.model.decoder is None
        pytest.skip("torch computes without vectors here")
    assert isinstance(engine.model.decoder, NativeDecoder)
    return engine


def batch(rows: int, vocabulary: int = 208, each: int = 1) -> SimpleNamespace:
    """Tokens of a step as far as a decoder looks at them; a lone one is doubled, as `Batch.build` does. each: tokens of a row;
    the last one may have fewer."""
    ids = torch.randint(vocabulary, (1, rows), generator=torch.Generator().manual_seed(rows))
    ids, at = ids.expand(1, max(2, rows)), torch.arange(max(2, rows)).clamp(max=rows - 1)
    starts = np.array([*range(0, rows, each), rows], np.int32)
    return SimpleNamespace(
        input_ids=ids, position_ids=(at * 5)[None], num_tokens=rows, logits_at=at, num_logits=rows, attention={},
        query_starts=starts, states=None, windowed=None,
    )  # fmt: skip


@torch.inference_mode()
def logits(served: Model, rows: int, transformers: bool = False, each: int = 1) -> torch.Tensor:
    forward = served.forward_transformers if transformers else served.forward
    return forward(batch(rows, each=each), None, EchoAttention())  # type: ignore[arg-type]


@pytest.mark.some(8)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", SERVED)
def test_the_bits_of_the_module(name: str, isa: str, dtype: torch.dtype) -> None:
    if name == "llama-wide" and isa in SLOW:
        pytest.skip(f"{isa} is slow")
    served = natively(name, isa, dtype)
    for rows in (1, 2, 3, 17, 129, 300) if isa not in SLOW else (1, 3, 17):
        assert torch.equal(logits(served, rows), logits(served, rows, transformers=True)), f"{rows} rows"
    for rows, each in ((7, 4), (40, 13)) if name in RECURRENT else ():
        mine, theirs = (logits(served, rows, transformers, each) for transformers in (False, True))
        assert torch.equal(mine, theirs), f"{rows} tokens, {each} of a sequence"
        assert not torch.equal(mine, logits(served, rows)), "no state"


def change(what: Any, field: str, value: float) -> None:
    setattr(what, field, type(getattr(what, field))(value))


CHANGES: dict[str, tuple[str, int, Any]] = {
    "the epsilon of a norm": ("gemma3_text", NORM, lambda step: change(step.norm, "eps", step.norm.eps * 1e4)),
    "one plus the weight of a norm": ("gemma3_text", NORM, lambda step: change(step.norm, "plus_one", 0)),
    "the activation of an MLP": ("gemma3_text", MULTIPLY, lambda step: change(step, "gated", min(step.gated, 1))),
    "the numbers that are turned": ("qwen3_5_text", HEADS, lambda step: change(step, "turned", 0)),
    "rotary embeddings where there are none": ("smollm3", HEADS, lambda step: change(step, "turned", 0)),
    "the gate of the attention": ("qwen3_5_text", GATE, lambda step: change(step, "first", 0)),
    "the activation of a convolution": ("qwen3_5_text", CONVOLVE, lambda step: change(step, "silu", 0)),
    "the gate before a convolution": ("lfm2", CONVOLVE, lambda step: change(step, "before", -1)),
    "the gate behind a convolution": ("lfm2", CONVOLVE, lambda step: change(step, "after", step.before)),
    "the decay": ("qwen3_5_text", DECAY, lambda step: change(step, "a", step.b)),
    "the scale of a delta rule": ("qwen3_5_text", DELTA, lambda step: change(step, "scale", step.scale * 1.01)),
    "the norm of a delta net": ("qwen3_5_text", GATED_NORM, lambda step: change(step, "gate", step.tensor)),
}


@pytest.mark.some(3)
@pytest.mark.parametrize("what", CHANGES)
def test_a_changed_step_has_other_bits(what: str) -> None:
    """The negative control of the comparison: any one thing that a step does otherwise is seen."""
    name, kind, change_it = CHANGES[what]
    served = natively(name, here()[0])
    assert torch.equal(logits(served, 20, each=5), want := logits(served, 20, transformers=True, each=5))
    for its, step in served.decoder.steps.made:
        if its == kind:
            change_it(step)
    assert not torch.equal(logits(served, 20, each=5), want)


def test_other_products_are_seen(isa: str) -> None:
    """The negative control: torch's own fp32 products, in another order, or a norm with another epsilon, are not these bits."""
    served = natively("qwen2", isa, torch.float32, hidden_size=1152)
    want = logits(served, 37)
    plain_products(served.module)
    assert not torch.equal(logits(served, 37, transformers=True), want)
    next(what for kind, what in served.decoder.steps.made if kind == NORM).norm.eps *= 2
    assert not torch.equal(logits(served, 37), want)


@pytest.mark.parametrize("name", ["llama", "qwen3_5_text", "gemma3_text"])
def test_a_row_is_the_same_in_any_company(name: str, isa: str) -> None:
    """Also alone: there is no smallest batch."""
    served = natively(name, isa)
    all_rows = logits(served, 70)
    for i in (0, 33, 69):
        lone = batch(70)
        for field in ("input_ids", "position_ids"):
            setattr(lone, field, getattr(lone, field)[:, i : i + 1])
        lone.num_tokens, lone.logits_at, lone.num_logits = 1, torch.zeros(1, dtype=torch.long), 1
        lone.query_starts = np.arange(2, dtype=np.int32)
        with torch.inference_mode():
            assert torch.equal(served.forward(lone, None, EchoAttention()), all_rows[i : i + 1])  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["qwen3", "qwen3_5_text", "lfm2"])
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_any_number_of_threads(name: str, isa: str, threads: int) -> None:
    served = natively(name, isa)
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


@pytest.mark.some(3)
@pytest.mark.parametrize(
    ("name", "attention", "threads"),
    [
        ("llama", "native", 1),
        ("qwen2", "native", 2),
        ("qwen3", "native", 3),
        ("mistral", "native", 2),
        ("llama", "reference", 2),
        ("gemma3_text", "native", 2),
        ("smollm3", "native", 1),
        ("lfm2", "native", 2),
        ("qwen3_5_text", "native", 2),
        ("qwen3_5_text", "reference", 1),
    ],
)
def test_samples_through_the_engine(name: str, attention: str, threads: int) -> None:
    """Tokens and log-probs of an engine are the same to the bit with and without the native decoder, which runs all layers and
    native attention in one go."""
    module, before = model(name), torch.get_num_threads()
    one, other = (native_engine(name, module, attention=attention) for _ in range(2))
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


@pytest.mark.some(3)
@pytest.mark.parametrize("name", RECURRENT)
@pytest.mark.parametrize(
    "pressure",
    [{"max_batch_tokens": 17}, {"kv_tokens": 400, "cpu_offload_gib": 0.01}, {"kv_tokens": 300, "drafts": 0}, {"drafts": 0}],
    ids=str,
)
def test_states_in_chunks_forks_restores_and_resets(name: str, pressure: dict[str, Any]) -> None:
    """As with the module, to the bit, whatever happens to the states."""
    module = model(name)
    config = {"kv_tokens": 4096, "max_num_seqs": 16, "threads": 1, **pressure}
    one, other = (native_engine(name, module, **config) for _ in range(2))
    other.model.run_by(None)
    r = np.random.default_rng(1)
    groups = [group(f"g{i}", r.integers(3, 199, 20 + 23 * i), n=3, max_tokens=24, seed=i, ignore_eos=True) for i in range(4)]
    mine, theirs = run(one, groups), run(other, groups)
    for key, sample in mine.items():
        assert sample.finish_reason == "length", sample.error
        assert sample.logprobs.tobytes() == theirs[key].logprobs.tobytes()
    status = one.status()
    assert status["offloaded_blocks"] > 0 or "cpu_offload_gib" not in pressure
    assert status["recompute_preemptions"] > 0 or pressure != {"kv_tokens": 300, "drafts": 0}


@torchs_log_softmax
@pytest.mark.parametrize("name", RECURRENT)
def test_a_trainer_has_the_same_bits(name: str) -> None:
    """Log-probs of an engine with the native decoder are those of the trainer's module, to the bit."""
    module = model(name)
    engine = native_engine(name, module, threads=1)
    each = group("g", np.arange(40) % 97 + 24, n=2, max_tokens=20, seed=5, ignore_eos=True)
    samples = run(engine, [each])
    exact = use_exact(module, engine.arithmetic, block_size=8, threads=1)
    try:
        for sample in samples.values():
            assert plain_logprobs(module, each.prompt, sample).tobytes() == sample.logprobs.tobytes()
    finally:
        exact.remove()


def test_rows_outside_the_pool_are_refused() -> None:
    served = natively("lfm2", here()[0])
    wrong = batch(3)
    wrong.states = StateRows(wrong.query_starts, *(np.array([0, -1, slot], np.int32) for slot in (-1, 7)))
    with torch.inference_mode(), pytest.raises(ValueError, match="a slot outside the pool"):
        served.forward(wrong, None, EchoAttention())  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["qwen2", "gemma3_text", *RECURRENT])
def test_new_weights_are_seen(name: str) -> None:
    """Written in place, and put into another tensor."""
    served = natively(name, here()[0])
    old, newer = logits(served, 5), model(name, seed=1)
    with torch.no_grad():
        for parameter, new in zip(served.module.parameters(), newer.parameters(), strict=True):
            parameter.copy_(new)
    new = logits(served, 5)
    assert not torch.equal(new, old) and torch.equal(new, logits(served, 5, transformers=True))
    for parameter in served.module.parameters():
        parameter.data = parameter.data * 0.5
    with pytest.raises(AssertionError, match="a parameter has moved"):
        logits(served, 5)
    served.decoder.weights_moved()
    halved = logits(served, 5)
    assert not torch.equal(halved, new) and torch.equal(halved, logits(served, 5, transformers=True))


HYBRID = {"num_hidden_layers": 4, "layer_types": [LINEAR, LINEAR, LINEAR, FULL], "head_dim": 128}


@pytest.mark.usefixtures("loads_in_full")
@pytest.mark.parametrize(
    ("name", "sizes", "why"),
    [
        ("gemma3_text", {"head_dim": 16}, "head_dim 16"),
        ("gemma3_text", {"final_logit_softcapping": 3.0}, "differ from the module's"),
        ("gemma2", {"head_dim": 32}, "sinks or soft caps"),
        ("qwen3_5_text", {"linear_value_head_dim": 16, **HYBRID}, "a delta rule of heads of"),
        ("olmo2", {}, "unsupported decoder layer"),
        ("phi3", {}, "unsupported decoder layer"),
        ("llama", {"head_dim": 16}, "head_dim 16"),
        ("llama", {"hidden_act": "gelu"}, "unsupported activation"),
        ("llama", {"hidden_size": 102}, "hidden_size 102"),
        ("granite", {"residual_multiplier": 0.5}, "differ from the module's"),
        ("olmo2", {}, "unsupported decoder layer"),
    ],
)
def test_other_models_run_through_transformers(
    name: str, sizes: dict[str, object], why: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO", "rollout.engine"):
        served = Model(tiny(name, torch.bfloat16, **{**SIZES, **sizes}), name)
        equip(served)
    assert served.decoder is None
    assert "runs through transformers" in caplog.text or "torch's own products" in caplog.text
    assert why in caplog.text or (NO_VECTORS and "without vectors" in caplog.text)


def test_a_module_that_is_called_may_have_parameters_of_another_dtype(isa: str) -> None:
    """As routers, which transformers 5.24 keeps in float32; a parameter that the steps read may not."""
    if isa in SLOW:
        pytest.skip("the same on each")
    made = model("glm4_moe")
    made.get_submodule("model.layers.1.mlp.gate").float()
    served = Model(made, "glm4_moe")
    equip(served, isa)
    assert isinstance(served.decoder, NativeDecoder) and torch.equal(logits(served, 3), logits(served, 3, transformers=True))
    made.get_submodule("model.norm").float()
    with pytest.raises(NotNative, match="parameters in torch.bfloat16, torch.float32"):
        NativeDecoder(made, served.asked, served.decoder.kernels)
