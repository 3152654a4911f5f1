"""Every causal family of transformers as a tiny model, and what becomes of it in an engine: right, refused, or something else.

in a child process, with a time-out:   build → Engine → samples → their log-probs against the module's plain forward
"""

from __future__ import annotations

import copy
import json
import os
import signal
import traceback
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from rollout.engine.config import EngineConfig
from rollout.engine.engine import Engine
from rollout.engine.forward.model import Model, UnsupportedModel
from tests.support.tiny import COMMON, plain_logprobs
from tests.support.toy import group, run

FAMILIES = tuple(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
MOST_PARAMETERS = 20_000_000
"""of a model that is called tiny"""
FP32_BOUND = 1e-5
PROMPTS = (5, 37, 70)
SLIDING = ["sliding_attention", "full_attention"]
MOE = {
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "moe_num_experts": 4, "num_experts_per_tok": 2,
    "moe_k": 2, "moe_topk": 2, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32, "n_group": 1,
    "topk_group": 1, "n_shared_experts": 1, "first_k_dense_replace": 1,
}  # fmt: skip
MLA = {"q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 12}
MLA_MOE = {**MOE, **MLA, "num_key_value_heads": 4}
NARROW = {"head_dim": 16}
GEMMA4 = {
    "num_hidden_layers": 10, "layer_types": [*["sliding_attention"] * 4, "full_attention"] * 2, "num_kv_shared_layers": 5,
    "head_dim": 16, "global_head_dim": 32, "num_key_value_heads": 1, "sliding_window": 12, "use_double_wide_mlp": True,
    "vocab_size_per_layer_input": 199, "hidden_size_per_layer_input": 16, "final_logit_softcapping": 30.0,
}  # fmt: skip
"""Gemma 4 E2B in small: heads of two sizes, layers that share KV, an embedding a layer"""
GEMMA4_WITHOUT_V = {
    "num_hidden_layers": 6, "layer_types": [*["sliding_attention"] * 5, "full_attention"], "head_dim": 16,
    "global_head_dim": 32, "num_key_value_heads": 2, "num_global_key_value_heads": 1, "attention_k_eq_v": True,
    "num_kv_shared_layers": 0, "sliding_window": 12, "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 199,
    "use_double_wide_mlp": False,
}  # fmt: skip
"""Gemma 4 31B in small: two numbers of heads too, and V computed from K"""
GEMMA3N = {
    "num_hidden_layers": 10, "layer_types": [*["sliding_attention"] * 4, "full_attention"] * 2, "num_kv_shared_layers": 5,
    "head_dim": 16, "sliding_window": 12, "vocab_size_per_layer_input": 199, "hidden_size_per_layer_input": 16,
    "laurel_rank": 8, "activation_sparsity_pattern": [0.95] * 4 + [0.0] * 6,
}  # fmt: skip
FOUR = {"num_hidden_layers": 4}
LINEAR = ["linear_attention"] * 3 + ["full_attention"]
"""as published: one layer in four has attention"""
DELTA = {**FOUR, **NARROW, "layer_types": LINEAR, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
         "linear_key_head_dim": 16, "linear_value_head_dim": 16}  # fmt: skip
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_chunk_size": 32}
EXPERTS = (
    "afmoe", "axk1", "axk2", "deepseek_v4", "ernie4_5_moe", "exaone_moe", "glm4_moe", "gpt_oss", "hy_v3", "hy_v4",
    "inkling2_text", "inkling_text", "kimi_linear", "kolibri1", "laguna", "lfm2_moe", "longcat_flash", "mellum",
    "mimo_v2_flash", "minimax_m2", "minimax_m3_vl_text", "nemotron_h", "qwen2_moe", "qwen3_5_moe_text", "qwen3_moe",
    "qwen3_next", "qwen4_exp_text", "solar_open", "zaya", "dots1", "hunyuan_v1_moe", "llama4_text", "phimoe", "mixtral",
)  # fmt: skip
OVERRIDES: dict[str, dict[str, Any]] = {
    **{name: MOE for name in EXPERTS},
    **{name: MLA_MOE for name in ("deepseek_v2", "deepseek_v3", "deepseek_v32", "glm4_moe_lite", "glm_moe_dsa", "youtu",
                                  "axk1", "axk2", "minicpm3", "kimi_linear", "longcat_flash", "dots3_note_text")},
    **{name: {"decoder_layers": 2, "encoder_layers": 2, "d_model": 64, "decoder_attention_heads": 4, "is_decoder": True,
              "encoder_attention_heads": 4, "decoder_ffn_dim": 96, "encoder_ffn_dim": 96, "is_encoder_decoder": False}
       for name in ("bart", "bigbird_pegasus", "blenderbot", "blenderbot-small", "marian", "mbart", "mvp", "pegasus", "plbart",
                    "whisper", "xglm", "trocr", "speech_to_text_2")},
    **{name: {"is_decoder": True} for name in
       ("bert", "bert-generation", "big_bird", "camembert", "data2vec-text", "electra", "ernie", "megatron-bert", "rembert",
        "roberta", "roberta-prelayernorm", "roc_bert", "roformer", "xlm-roberta", "xlm-roberta-xl", "xmod")},
    "dots1": {**MOE, "layer_types": ["full_attention"] * 2},
    "gpt_neo": {"num_layers": 2, "attention_types": [[["global", "local"], 1]], "window_size": 12},
    "hunyuan_v1_dense": NARROW,
    "hunyuan_v1_moe": {**MOE, **NARROW},
    "ministral": {**NARROW, "sliding_window": 12, "layer_types": SLIDING},
    "gemma3_text": {**NARROW, "sliding_window": 12, "layer_types": SLIDING},
    "gemma3n_text": GEMMA3N,
    "gemma4_text": GEMMA4,
    "gemma4_unified_text": GEMMA4_WITHOUT_V,
    "lfm2": {**FOUR, "layer_types": ["conv", "full_attention"] * 2, "block_auto_adjust_ff_dim": False},
    "lfm2_moe": {**MOE, **FOUR, "layer_types": ["conv", "full_attention"] * 2},
    "qwen3_5_text": DELTA,
    "qwen3_5_moe_text": {**MOE, **DELTA},
    "qwen3_next": {**MOE, **DELTA},
    "olmo_hybrid": {**DELTA, "num_key_value_heads": 4},
    "kimi_linear": {**MLA_MOE, **FOUR, "layer_types": LINEAR, "linear_head_dim": 16, "linear_num_heads": 4,
                    "num_key_value_heads": 4},
    "granitemoehybrid": {**MOE, **FOUR, **MAMBA, "layer_types": ["linear_attention", "full_attention"] * 2,
                         "shared_intermediate_size": 32},
    "nemotron_h": {**MOE, **FOUR, **NARROW, "layer_types": ["linear_attention", "moe", "full_attention", "linear_attention"],
                   "mamba_num_heads": 8, "mamba_head_dim": 16, "ssm_state_size": 16, "n_groups": 2, "chunk_size": 32,
                   "moe_shared_expert_intermediate_size": 32},
    "falcon_h1": {**FOUR, **NARROW, **MAMBA, "mamba_d_ssm": 128},
    "bamba": {**FOUR, **MAMBA, "attn_layer_indices": [1, 3]},
    "cohere_compass_text": {"layer_types": SLIDING},
    "codegen": {"rotary_dim": 8},
    "gptj": {"rotary_dim": 8},
    "helium": NARROW,
    "reformer": {"is_decoder": True},
    "mamba2": {"num_heads": 8, "head_dim": 16},
    "zamba": {"layer_types": ["mamba", "hybrid"]},
    "zamba2": {"layer_types": ["mamba", "hybrid"]},
    "llama4_text": {**MOE, **NARROW, "intermediate_size_mlp": 96, "num_experts_per_tok": 1},
    "zaya": {**MOE, "num_experts_per_tok": 1},
    "phimoe": {**MOE, "sliding_window": 12},
    "mistral": {"sliding_window": 12},
}  # fmt: skip
"""What a family needs beside COMMON to be small, or to be built at all"""


class Outcome(NamedTuple):
    kind: str
    """right, refused, wrong, unclear (an error that says nothing, a crash, a time-out), or not built"""
    says: str = ""
    worst: float = 0.0


def sizes(name: str, overrides: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a family's configuration; one that is put together of others gets a small one in each place."""
    options = {**COMMON, **OVERRIDES.get(name, {}), **overrides}
    for part in getattr(CONFIG_MAPPING[name], "sub_configs", {}):
        options.setdefault(part, {**COMMON, **OVERRIDES.get(f"{name}_text", {})} if "text" in part else dict(COMMON))
    return options


def build(name: str, dtype: torch.dtype = torch.float32, scale: float = 4.0, **overrides: Any) -> PreTrainedModel:
    """Make a model of a family with random weights: distributions far from flat, norms, biases and what the initialisation
    leaves at zero such that they count. Raises whatever transformers does, ValueError for one that is not tiny."""
    config = AutoConfig.for_model(name, **sizes(name, overrides))
    with torch.device("meta"):
        count = sum(each.numel() for each in AutoModelForCausalLM.from_config(copy.deepcopy(config)).parameters())
    if count > MOST_PARAMETERS:
        raise ValueError(f"{count / 1e6:.0f} million parameters")
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="eager").eval()
    generator = torch.Generator().manual_seed(1)

    def normal(like: torch.Tensor, deviation: float) -> torch.Tensor:
        return (torch.randn(like.shape, generator=generator) * deviation).to(like.dtype)

    with torch.no_grad():
        for parameter_name, each in model.named_parameters():
            if each.ndim > 1:
                if each.abs().max() == 0:
                    each.copy_(normal(each, 0.02))
                each.mul_(scale)
            elif "bias" in parameter_name:
                each.copy_(normal(each, 0.05))
            else:
                each.add_(normal(each, 0.1))
    return model


def outcome(model: PreTrainedModel, name: str, prompts: tuple[int, ...] = PROMPTS, **config: Any) -> Outcome:
    """Compare samples of an engine over the model with the model's plain forward: to 1e-5 in fp32, or within rounding. That is
    where the engine is at most 3 times as far as the plain forward from the same weights in a finer format: fp32 for bf16, fp64
    for fp32."""
    plain = copy.deepcopy(model)
    options = {"block_size": 8, "kv_tokens": 4096, "max_num_seqs": 16, "max_batch_tokens": 64, "cpu_offload_gib": 0, **config}
    dtype = str(model.dtype).removeprefix("torch.")
    try:
        engine = Engine(EngineConfig(dtype=dtype, threads=1, **options), Model(model, name))
    except UnsupportedModel as error:
        one_sentence = "\n" not in str(error) and len(str(error)) < 600
        return Outcome("refused" if one_sentence else "unclear", str(error))
    r = np.random.default_rng(0)
    groups = [
        group(f"g{i}", r.integers(24, 99, length), seed=i, n=2, max_tokens=12, ignore_eos=True)
        for i, length in enumerate(prompts)
    ]
    samples = run(engine, groups)
    if failed := {sample.error for sample in samples.values() if sample.finish_reason != "length"}:
        return Outcome("unclear", str(failed))
    pairs = [(each.prompt, samples[each.id, index]) for each in groups for index in range(2)]
    rounded = [plain_logprobs(plain, prompt, sample) for prompt, sample in pairs]
    if dtype == "float32":
        worst = max(float(np.abs(s.logprobs - want).max()) for (_, s), want in zip(pairs, rounded, strict=True))
        if worst <= FP32_BOUND:
            return Outcome("right", engine.worker.backend.name, worst)
    finer = plain.to(torch.float64 if dtype == "float32" else torch.float32)
    try:
        exact = [plain_logprobs(finer, prompt, sample) for prompt, sample in pairs]
    except RuntimeError as error:  # torch has no grouped products in fp64, so experts have 1e-5 to keep to
        return Outcome("wrong", f"{engine.worker.backend.name}: {str(error)[:80]}", worst)
    mine = float(np.mean([np.abs(s.logprobs - want).mean() for (_, s), want in zip(pairs, exact, strict=True)]))
    theirs = float(np.mean([np.abs(one - want).mean() for one, want in zip(rounded, exact, strict=True)]))
    least = 0 if dtype == "float32" else 2**-9
    return Outcome(
        "right" if mine <= 3 * theirs + least else "wrong", f"{engine.worker.backend.name}, plain {theirs:.1e}", mine
    )


def both(name: str) -> dict[str, Outcome]:
    """Return what becomes of a family, by dtype."""
    try:
        model = build(name)
        with torch.inference_mode():
            model(input_ids=torch.arange(24, 34)[None], use_cache=False)
    except Exception as error:
        text = " ".join(str(error).split())[:120]
        return dict.fromkeys(("float32", "bfloat16"), Outcome("not built", f"{type(error).__name__}: {text}"))
    found = {}
    for dtype in (torch.float32, torch.bfloat16):
        try:
            found[str(dtype).removeprefix("torch.")] = outcome(copy.deepcopy(model).to(dtype), name)
        except Exception as error:
            where = traceback.extract_tb(error.__traceback__)[-1]
            text = f"{type(error).__name__}: {error} ({where.filename}:{where.lineno})"
            found[str(dtype).removeprefix("torch.")] = Outcome("unclear", text)
    return found


def both_in_a_child(name: str, timeout_s: int = 120) -> dict[str, Outcome]:
    """Return the same from a process of its own, so that a crash or a hang is an outcome."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(read)
            signal.signal(signal.SIGALRM, signal.SIG_DFL)  # pytest's own handler would go on with the tests here
            signal.alarm(timeout_s)
            with os.fdopen(write, "w") as pipe:
                json.dump(both(name), pipe)
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        text = pipe.read()
    _, status = os.waitpid(pid, 0)
    if not text:
        why = f"no end in {timeout_s} s" if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGALRM else f"{status}"
        return dict.fromkeys(("float32", "bfloat16"), Outcome("unclear", why))
    return {dtype: Outcome(*each) for dtype, each in json.loads(text).items()}
