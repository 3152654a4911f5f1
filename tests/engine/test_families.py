"""Every causal family of transformers, tiny: computed right, or refused in one sentence."""

from __future__ import annotations

import os
import signal
import threading
from itertools import product

import pytest
import torch
from transformers import AutoConfig

from tests.support import families
from tests.support.families import (
    FAMILIES,
    GEMMA4_31B,
    MLA_MOE,
    MOE,
    PATTERNS,
    SETTINGS,
    Outcome,
    both_in_a_child,
    build,
    outcome,
    sizes,
)
from tests.support.models_page import DTYPES, counts, read

pytestmark = pytest.mark.usefixtures("loads_in_full")

FP32, BF16 = torch.float32, torch.bfloat16
LLAMA4 = {"no_rope_layers": [1, 1, 1, 0], "layer_types": ["full_attention"] * 4}
SCALED = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 40,
          "llama_4_scaling_beta": 0.5}  # fmt: skip
ELSE = "log-probs differ from those of the model's own forward"
CASES = {
    "a window in the mask only": ("qwen2_moe", FP32, {"use_sliding_window": True, "sliding_window": 100,
                                  "max_window_layers": 4}, ELSE),
    "the same model without": ("qwen2_moe", FP32, {}, ""),
    "a window beyond the texts of the judge": ("phimoe", FP32, {"sliding_window": 300}, ELSE),
    "a window that every layer asks for": ("mistral", FP32, {"sliding_window": 300}, ""),
    "two calls a layer": ("diffllama", FP32, {}, "2 calls in layer 0"),
    "queries scaled by the place in the batch": ("llama4_text", FP32, {**LLAMA4, "floor_scale": 300, "attn_scale": 0.5}, ELSE),
    "the same without scaling": ("llama4_text", FP32, {**LLAMA4, "attn_temperature_tuning": False}, ""),
    "positions that start elsewhere": ("roberta", FP32, {}, ELSE),
    "queries scaled by position": ("ministral3", BF16, {"head_dim": 32, "hidden_size": 128, "intermediate_size": 160,
                                   "vocab_size": 208, "rope_parameters": SCALED}, ""),
    "keyword arguments that end in the layer": ("nemotron", FP32, {}, r"keyword arguments of the model, in "
                                                r"model.layers.0.self_attn (NemotronAttention.forward)"),
    "the same of another family": ("stablelm", FP32, {}, r"in model.layers.0.self_attn (StableLmAttention.forward)"),
    "a norm without a weight": ("olmo", BF16, {}, ""),
    "keys of 24 and values of 12 dimensions": ("deepseek_v2", FP32, {}, ""),
    "the same in bf16": ("deepseek_v3", BF16, {}, ""),
    "latent attention of equal widths": ("deepseek_v3", BF16, {**MLA_MOE, "v_head_dim": 24}, ""),
    "keys of 192 and values of 128 dimensions": ("deepseek_v3", BF16, {**MLA_MOE, "qk_nope_head_dim": 128,
                                                 "qk_rope_head_dim": 64, "v_head_dim": 128}, ""),
    "sinks, in a window and without": ("gpt_oss", FP32, {"sliding_window": 12}, ""),
    "sinks in bf16": ("gpt_oss", BF16, {"sliding_window": 12}, ""),
    "sinks, keys of 16 and values of 12 dimensions": ("mimo_v2_flash", BF16, {**MOE, "layer_types": ["sliding_attention"] * 6,
                                                      "v_head_dim": 12, "sliding_window": 12}, ""),
    "sinks as a share of the output": ("granite_swa", BF16, {}, ""),
    "soft caps": ("gemma2", FP32, {"head_dim": 16, "attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 16,
                  "sliding_window": 12}, ""),
    "soft caps in bf16": ("gemma2", BF16, {"head_dim": 16, "attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 16,
                           "sliding_window": 12}, ""),
    "another of these": ("youtu", BF16, {**MLA_MOE, "v_head_dim": 24}, ""),
    "and another": ("glm4_moe_lite", BF16, MOE, ""),
    "heads of two sizes and layers that share KV": ("gemma4_text", FP32, {}, ""),
    "heads of two sizes and of two numbers": ("gemma4_text", FP32, GEMMA4_31B, ""),
    "the same, in bf16": ("gemma4_unified_text", BF16, {}, ""),
    "attention without transformers' interface": ("bloom", FP32, {}, "the first transformer.h.0.self_attention (BloomAtte"),
    "lightning attention": ("minimax", FP32, {}, "in 3 of 4 layers, the first model.layers.0.self_attn (MiniMaxLightningAtt"),
    "recurrent blocks of their own": ("recurrent_gemma", FP32, {}, "model.layers.0.temporal_block (RecurrentGemmaRecurr"),
    "Mamba-1 beside attention": ("jamba", FP32, {}, "arguments of the model, in 3 layers, the first model.layers.0.mamba"),
    "Mamba-1 alone": ("mamba", FP32, {}, "keyword arguments of the model, in 4 layers, the first backbone.layers.0.mixer"),
    "states beside attention": ("zaya", FP32, {}, "the recurrent state of model.layers.0.self_attn.qkv_proj"),
    "attention that layers share": ("zamba2", FP32, {}, "an attention module that several layers share, called 2 times"),
}  # fmt: skip


@pytest.mark.some(10)
@pytest.mark.parametrize("case", CASES)
def test_right_or_refused(case: str) -> None:
    """What was served wrong once, or broke in a way that said nothing; an empty last column means right."""
    name, dtype, overrides, refusal = CASES[case]
    found = outcome(build(name, dtype, **overrides), name, ["in a large pool"])
    assert found.kind == ("refused" if refusal else "right"), found
    assert refusal in found.says


@pytest.mark.parametrize("setting", SETTINGS)
def test_right_whatever_happens_to_sequences(setting: str) -> None:
    """As the sweep computes them, for one family; the tests of engines have others."""
    assert outcome(build("exaone4"), "exaone4", [setting]).kind == "right"


@pytest.mark.long
@pytest.mark.timeout(7200)
def test_every_family_is_right_or_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """In fp32 and bf16, and as docs/models.md says; a model that transformers cannot build from a small configuration is
    counted, and says nothing."""
    found = {name: both_in_a_child(name) for name in FAMILIES}
    with capsys.disabled():
        for (name, each), dtype in product(found.items(), DTYPES):
            print(f"{name:28} {dtype:9} {each[dtype].kind:9} {each[dtype].worst:.1e}  {each[dtype].says}")
        print(*((dtype, *counts(found, dtype).items()) for dtype in DTYPES), sep="\n")
    for dtype in DTYPES:
        assert not [name for name, each in found.items() if each[dtype].kind in ("wrong", "unclear")]
        assert counts(found, dtype)["right"] >= 105
    kinds = {name: [each[dtype].kind for dtype in DTYPES] for name, each in found.items()}
    stored = {name: [each[dtype].kind for dtype in DTYPES] for name, each in read().items()}
    assert kinds == stored, "run python -m tests.support.models_page --sweep"


def test_the_small_models_have_the_layers_of_published_ones() -> None:
    """Each kind of layer that a family's own default configuration has, in four layers or more."""
    for name in FAMILIES:
        try:
            small, whole = (AutoConfig.for_model(name, **each).get_text_config() for each in (sizes(name, {}), {}))
        except Exception:  # not built
            continue
        assert small.num_hidden_layers >= 4, name
        kinds = [set(getattr(each, "layer_types", None) or []) for each in (small, whole)]
        assert kinds[0] >= kinds[1], name
        if (pattern := PATTERNS.get(name)) is not None:
            assert list(small.layer_types) == pattern, name


def test_a_crash_and_a_hang_are_outcomes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control of the sweep."""
    monkeypatch.setattr(families, "both", lambda name: os.kill(os.getpid(), signal.SIGKILL))
    assert both_in_a_child("llama")["float32"].kind == "unclear"
    monkeypatch.setattr(families, "both", lambda name: threading.Event().wait())
    assert both_in_a_child("llama", timeout_s=1)["float32"] == Outcome("unclear", "no end in 1 s")


def test_the_sweep_sees_a_model_that_is_served_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its negative control: without the judge, a window that only the mask knows is served, and wrong."""
    monkeypatch.setattr("rollout.engine.forward.self_check.check_model", lambda *_: None)
    assert outcome(build("phimoe"), "phimoe", ["in a large pool"]).kind == "wrong"


def test_the_sweep_sees_a_setting_in_which_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(families.SETTINGS, "offloaded", SETTINGS["offloaded"]._replace(config={}))
    assert outcome(build("llama"), "llama", ["offloaded"]) == Outcome("unclear", "offloaded: no offloads")
