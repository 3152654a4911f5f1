"""Every causal family of transformers as a tiny model, and what becomes of it in an engine: right, refused, or something else.

in a child process, with a time-out:   build → Engine → samples → their log-probs against the module's plain forward
"""

from __future__ import annotations

import copy
import json
import os
import signal
import traceback
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from rollout.engine.config import EngineConfig
from rollout.engine.engine import Engine
from rollout.engine.forward.model import Model, UnsupportedModel
from rollout.engine.values import Group, Sample, Sampling
from rollout.engine.values.arithmetic import Arithmetic
from tests.support.tiny import COMMON, plain_logprobs
from tests.support.toy import group, run

FAMILIES = tuple(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
MOST_PARAMETERS = 20_000_000
"""of a model that is called tiny"""
FP32_BOUND = 1e-5
PROMPTS = (5, 37, 70)
SMALL = {**COMMON, "num_hidden_layers": 4}
MOE = {
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "moe_num_experts": 4, "num_experts_per_tok": 2,
    "moe_k": 2, "moe_topk": 2, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32, "n_group": 1,
    "topk_group": 1, "n_shared_experts": 1, "first_k_dense_replace": 1,
}  # fmt: skip
MLA = {"q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 12}
MLA_MOE = {**MOE, **MLA, "num_key_value_heads": 4}
NARROW = {"head_dim": 16}
OMITTED = "omitted"
"""instead of a value: an argument that a configuration has not"""
DELTA = {
    **NARROW,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_chunk_size": 32}
GEMMA4 = {
    "head_dim": 16, "global_head_dim": 32, "num_key_value_heads": 1, "num_kv_shared_layers": 5, "use_double_wide_mlp": True,
    "vocab_size_per_layer_input": 199, "hidden_size_per_layer_input": 16, "final_logit_softcapping": 30.0,
}  # fmt: skip
"""Gemma 4 E2B in small: heads of two sizes, layers that share KV, an embedding a layer"""
GEMMA4_31B = {
    "head_dim": 16, "global_head_dim": 32, "num_key_value_heads": 2, "num_global_key_value_heads": 1, "attention_k_eq_v": True,
    "num_kv_shared_layers": 0, "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 199,
    "use_double_wide_mlp": False, "use_bidirectional_attention": "vision",
}  # fmt: skip
"""Gemma 4 31B in small: two numbers of heads too, and V computed from K"""
GEMMA3N = {
    "head_dim": 16, "vocab_size_per_layer_input": 199, "hidden_size_per_layer_input": 16, "num_kv_shared_layers": 5,
    "laurel_rank": 8, "activation_sparsity_pattern": [0.95] * 4 + [0.0] * 6,
}  # fmt: skip
S, F, L, C, H, DSA = (
    "sliding_attention", "full_attention", "linear_attention", "conv", "hybrid", "indexed_attention",
)  # fmt: skip
PATTERNS: dict[str, list[str]] = {
    **dict.fromkeys(("afmoe", "cohere2", "cohere2_moe", "exaone4", "exaone_moe", "mellum", "olmo3"), [S, S, S, F]),
    **dict.fromkeys(("cwm", "granite_swa", "granitemoe_swa", "laguna", "ministral"), [F, S, S, S]),
    **dict.fromkeys(("gemma2", "gpt_oss", "vaultgemma"), [S, F, S, F]),
    **dict.fromkeys(("beam", "gemma3_text", "gemma4_unified_text"), [S, S, S, S, S, F]),
    **dict.fromkeys(("gemma4_text", "gemma3n_text"), [S, S, S, S, F] * 2),
    **dict.fromkeys(
        ("bailing_hybrid", "granitemoehybrid", "kimi_linear", "minimax", "olmo_hybrid", "qwen3_5_moe_text", "qwen3_5_text",
         "qwen3_next"), [L, L, L, F]),
    **dict.fromkeys(("lfm2", "lfm2_moe"), [C, C, F, C]),
    **dict.fromkeys(("deepseek_v32", "glm_moe_dsa", "axk2", "hy_v4"), [DSA] * 4),
    **dict.fromkeys(("inkling_text", "inkling2_text", "inkling2_loop_text"), ["hybrid_sliding"] * 3 + [H]),
    **dict.fromkeys(("zamba", "zamba2"), [L, L, H, L, H]),
    **dict.fromkeys(("mamba", "mamba2", "falcon_mamba"), [L] * 4),
    **dict.fromkeys(("falcon_h1", "zaya"), [H] * 4),
    "bamba": [L, L, F, L],
    "cohere_compass_text": [S, S, S, F],
    "deepseek_v4": ["heavily_compressed_attention", "heavily_compressed_attention", "compressed_sparse_attention",
                    "heavily_compressed_attention"],
    "dots3_note_text": [DSA, S, S, DSA],
    "flint": [F, F, S, S],
    "jamba": [L, L, F, L],
    "kolibri1": [S, S, S, S, F],
    "lara_mini": [L, S, L, F],
    "lfm3": [C, F, C, S],
    "llama4_text": ["chunked_attention"] * 3 + [F],
    "mimo_v2_flash": [F, S, S, S, S, F],
    "minimax_m3_vl_text": [F, *["minimax_m3_sparse"] * 3],
    "modernbert-decoder": [F, S, S, F],
    "nemotron_h": [L, "moe", F, "mlp", L, "moe"],
    "qwen4_exp_text": [L, L, L, DSA],
    "recurrent_gemma": [L, L, S, L],
}  # fmt: skip
"""layer types of published checkpoints, shortened; every family has four layers or more, and each kind of layer that its
checkpoints have"""
NOT_BY_LAYER_TYPES: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [2]},
    "jamba": {"attn_layer_period": 4, "attn_layer_offset": 2, "expert_layer_period": 2, "expert_layer_offset": 1},
    "modernbert-decoder": {"global_attn_every_n_layers": 3, "local_attention": 24},
    "recurrent_gemma": {"block_types": ["recurrent", "recurrent", "attention"], "attention_window_size": 12},
    "zamba": {"layers_block_type": PATTERNS["zamba"]},
    "zamba2": {"layers_block_type": PATTERNS["zamba2"]},
    **dict.fromkeys(("mamba", "mamba2", "falcon_mamba", "falcon_h1"), {}),
}
"""configurations that follow a pattern by other arguments than layer_types"""
EXPERTS = (
    "afmoe", "axk1", "axk2", "deepseek_v4", "ernie4_5_moe", "exaone_moe", "glm4_moe", "gpt_oss", "hy_v3", "hy_v4",
    "inkling2_text", "inkling_text", "kimi_linear", "kolibri1", "laguna", "lfm2_moe", "longcat_flash", "mellum",
    "mimo_v2_flash", "minimax", "minimax_m2", "minimax_m3_vl_text", "nemotron_h", "qwen2_moe", "qwen3_5_moe_text", "qwen3_moe",
    "qwen3_next", "qwen4_exp_text", "solar_open", "zaya", "dots1", "hunyuan_v1_moe", "llama4_text", "phimoe", "mixtral",
    "jamba", "granitemoehybrid", "cohere2_moe", "beam", "flint", "inkling2_loop_text", "sarvam_moe",
)  # fmt: skip
OVERRIDES: dict[str, dict[str, Any]] = {
    **{name: MOE for name in EXPERTS},
    **{name: MLA_MOE for name in ("deepseek_v2", "deepseek_v3", "deepseek_v32", "glm4_moe_lite", "glm_moe_dsa", "youtu",
                                  "axk1", "axk2", "minicpm3", "sarvam_mla")},
    **{name: {"decoder_layers": 4, "encoder_layers": 4, "d_model": 64, "decoder_attention_heads": 4, "is_decoder": True,
              "encoder_attention_heads": 4, "decoder_ffn_dim": 96, "encoder_ffn_dim": 96, "is_encoder_decoder": False}
       for name in ("bart", "bigbird_pegasus", "blenderbot", "blenderbot-small", "marian", "mbart", "mvp", "pegasus", "plbart",
                    "xglm", "trocr", "speech_to_text_2")},
    **{name: {"is_decoder": True} for name in
       ("bert", "bert-generation", "big_bird", "camembert", "data2vec-text", "electra", "ernie", "megatron-bert", "rembert",
        "roberta", "roberta-prelayernorm", "roc_bert", "roformer", "xlm-roberta", "xlm-roberta-xl")},
    "bailing_hybrid": {**MLA_MOE, "num_attention_heads": 4, "head_dim": 16, "short_conv_kernel_size": 4, "num_mtp_layers": 0},
    "bamba": MAMBA,
    "blt": {"encoder_hash_byte_group_vocab": 64},
    "codegen": {"rotary_dim": 8},
    "cohere_compass_text": {"rope_parameters": {S: {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]},
                                                F: None}},
    "dbrx": {"d_model": 64, "n_layers": 4, "n_heads": 4, "max_seq_len": 512,
             "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 1e4},
             "ffn_config": {"hidden_size": 64, "ffn_hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2}},
    "deepseek_v4": {**MOE, "head_dim": 16, "q_lora_rank": 24, "o_lora_rank": 16, "index_n_heads": 2, "index_head_dim": 16},
    "dots3_note_text": {**MLA_MOE, "index_n_heads": 2, "index_head_dim": 16,
                        **{f"swa_{key}": value for key, value in {**MLA, "num_attention_heads": 4, "num_key_value_heads": 4,
                                                                  "head_dim": 24}.items()}},
    "falcon_h1": {**NARROW, **MAMBA, "mamba_d_ssm": 128},
    "gemma2": NARROW,
    "gemma3_text": {"head_dim": 32},
    "gemma3n_text": GEMMA3N,
    "dots3_note": {"vision_config": {"pyramid_num_routed": [-1, -1, 4, 4], "num_hidden_layers": 4, "embed_dim": 64,
                                     "num_heads": 4, "intermediate_size": 96, "moe_intermediate_size": 32, "adapter_in_dim": 64,
                                     "adapter_out_dim": 64},
                   "audio_config": {**SMALL, "downsample_hidden_size": 16, "adapter_input_size": 64, "adapter_out_dim": 64}},
    "gemma4_unified": {"vision_config": {"patch_size": 4, "mm_embed_dim": 64, "mm_posemb_size": 16}},
    "gemma4_text": GEMMA4,
    "gemma4_unified_text": GEMMA4_31B,
    "whisper": {"decoder_layers": 4, "encoder_layers": 4, "d_model": 64, "decoder_attention_heads": 4, "is_decoder": True,
                "encoder_attention_heads": 4, "decoder_ffn_dim": 96, "encoder_ffn_dim": 96, "max_target_positions": 512},
    "gpt_neo": {"num_layers": 4, "attention_types": [[["global", "local"], 2]], "window_size": 12},
    "gpt_oss": {**MOE, **NARROW},
    "gptj": {"rotary_dim": 8},
    "granitemoehybrid": {**MOE, **MAMBA, "shared_intermediate_size": 32},
    **{name: {"head_dim": 32} for name in ("granite", "llama", "qwen2", "smollm3")},
    "helium": {"head_dim": 32, "num_attention_heads": 2},
    "hunyuan_v1_dense": NARROW,
    "hunyuan_v1_moe": {**MOE, **NARROW},
    "kimi_linear": {**MLA_MOE, "linear_head_dim": 16, "linear_num_heads": 4},
    "inkling2_loop_text": {**MOE, "loop_layer_index_start": 2, "loop_layer_index_end": 4, "n_layers_per_attn_res_block": 2},
    "lara_mini": {**MOE, **DELTA},
    "laguna": {**MOE, **NARROW, "num_attention_heads_per_layer": [4, 8, 8, 8]},
    "lfm2": {"block_auto_adjust_ff_dim": False, "hidden_size": 128},
    "lfm3": NARROW,
    "llama4_text": {**MOE, **NARROW, "intermediate_size_mlp": 96, "num_experts_per_tok": 1, "attention_chunk_size": 16},
    "longcat_flash": {**MLA_MOE, "num_layers": 4, "head_dim": 8, "ffn_hidden_size": 96, "expert_ffn_hidden_size": 32,
                      "zero_expert_num": 2},
    "mamba2": {"num_heads": 8, "head_dim": 16},
    "mimo_v2_flash": {**MOE, **NARROW, "v_head_dim": 12},
    "ministral": {"head_dim": 32},
    "mistral": {"head_dim": 32, "sliding_window": 12},
    "nemotron_h": {**MOE, **NARROW, "mamba_num_heads": 8, "mamba_head_dim": 16, "ssm_state_size": 16, "n_groups": 2,
                   "chunk_size": 32, "moe_shared_expert_intermediate_size": 32},
    "olmo_hybrid": {**DELTA, "num_key_value_heads": 4},
    "phimoe": {**MOE, "sliding_window": 12},
    **{name: {"sliding_window": 12} for name in ("moshi", "phi3", "phi4_multimodal", "starcoder2")},
    "qwen3_5_text": {**DELTA, "head_dim": 128, "linear_value_head_dim": 32},
    "qwen3_5_moe_text": {**MOE, **DELTA},
    "qwen3_next": {**MOE, **DELTA},
    "qwen4_exp_text": {**MOE, **DELTA, "indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 16,
                       "indexer_budget": 32, "indexer_compress_ratio": 4, "ple_layer_ids": []},
    "prophetnet": {"num_hidden_layers": OMITTED, "num_decoder_layers": 4, "num_encoder_layers": 4, "decoder_ffn_dim": 96,
                   "num_decoder_attention_heads": 4, "is_decoder": True, "is_encoder_decoder": False},
    "reformer": {"is_decoder": True, "num_hidden_layers": OMITTED, "attn_layers": ["local", "lsh"] * 2,
                 "axial_pos_shape": [16, 32], "axial_pos_embds_dim": [16, 48], "attention_head_size": 16,
                 "feed_forward_size": 96},
    "xlnet": {"max_position_embeddings": OMITTED, "d_model": 64, "n_layer": 4, "n_head": 4, "d_inner": 96},
    "xmod": {"is_decoder": True, "default_language": "en_XX"},
    "zamba2": {"n_mamba_heads": 8, "mamba_d_state": 16, "chunk_size": 32, "num_key_value_heads": 4, "adapter_rank": 8},
    "zaya": {**MOE, "num_experts_per_tok": 1},
}  # fmt: skip
"""What a family needs beside SMALL and its pattern to be small, or to be built at all"""


class Outcome(NamedTuple):
    kind: str
    """right, refused, wrong, unclear (an error that says nothing, a crash, a time-out), or not built"""
    says: str = ""
    worst: float = 0.0
    """largest difference of a log-prob"""
    runs: str = ""
    """decoder, kernels (the module with ours) or torch (the module; a token's bits depend on the batch)"""
    why: str = ""
    """reason why it is nothing better"""


def published(name: str) -> dict[str, Any]:
    """Return the arguments that give a family the kinds of layers of its published checkpoints, with narrow windows."""
    if (pattern := PATTERNS.get(name)) is None:
        return {}
    layers = NOT_BY_LAYER_TYPES.get(name, {"layer_types": list(pattern)})
    return {"num_hidden_layers": len(pattern), **({"sliding_window": 12} if "sliding" in " ".join(pattern) else {}), **layers}


def sizes(name: str, overrides: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a family's configuration; one that is put together of others gets a small one in each place."""
    options = {**SMALL, **published(name), **OVERRIDES.get(name, {}), **overrides}
    for part in getattr(CONFIG_MAPPING[name], "sub_configs", {}):
        text = f"{name}_text"
        options.setdefault(part, {**SMALL, **published(text), **OVERRIDES.get(text, {})} if "text" in part else dict(SMALL))
    return {key: value for key, value in options.items() if value is not OMITTED}


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


class Setting(NamedTuple):
    """What happens to sequences in an engine beside being sampled."""

    config: dict[str, Any]
    """of the engine, beside ROOMY"""
    children: int
    happened: str
    """a count of `Engine.status` that must not be 0"""


ROOMY: dict[str, Any] = {"block_size": 8, "kv_tokens": 4096, "max_num_seqs": 16, "max_batch_tokens": 512, "cpu_offload_gib": 0}
SETTINGS = {
    "in a large pool": Setting({}, 1, "generated_tokens"),
    "forked": Setting({}, 4, "forks"),
    "in chunks": Setting({"max_batch_tokens": 17}, 1, "steps"),
    "offloaded": Setting({"kv_tokens": 200, "cpu_offload_gib": 0.01}, 3, "offloads"),
    "recomputed": Setting({"kv_tokens": 200}, 3, "recompute_preemptions"),
    "in the next turn": Setting({}, 2, "kept_tokens"),
}
"""what a family must be right in"""


class Asked(NamedTuple):
    """A prompt, and a sample of it."""

    prompt: np.ndarray
    sample: Sample


def groups_of(prompts: tuple[int, ...], children: int, **sampling: Any) -> list[Group]:
    """Make a group for each length of a prompt."""
    r = np.random.default_rng(0)
    options = {"n": children, "max_tokens": 12, "ignore_eos": True, **sampling}
    return [group(f"g{i}", r.integers(24, 99, length), seed=i, **options) for i, length in enumerate(prompts)]


def sampled(engine: Engine, setting: str, prompts: tuple[int, ...]) -> list[Asked]:
    """Run groups through an engine: over a turn, each second prompt is the first one with a sample and more behind it. Raises
    AssertionError for samples that failed."""
    children = SETTINGS[setting].children
    groups = groups_of(prompts, children, **({"kv_ttl_s": 100.0} if setting == "in the next turn" else {}))
    samples = run(engine, groups)
    if setting == "in the next turn":
        more = np.arange(30, 37)
        histories = [np.concatenate([each.prompt, samples[each.id, 1].token_ids, more]).astype(np.int32) for each in groups]
        options = Sampling(n=2, max_tokens=8, seed=7, ignore_eos=True)
        groups = [Group(f"{g.id}'", history, options, after=(g.id, 1)) for g, history in zip(groups, histories, strict=True)]
        samples = run(engine, groups)
    assert {sample.finish_reason for sample in samples.values()} == {"length"}, {sample.error for sample in samples.values()}
    return [Asked(each.prompt, samples[each.id, index]) for each in groups for index in range(each.sampling.n)]


def outcome(
    model: PreTrainedModel, name: str, settings: Iterable[str] = SETTINGS, prompts: tuple[int, ...] = PROMPTS
) -> Outcome:
    """Compare samples of an engine over the model with the model's plain forward, in each setting: to 1e-5 in fp32, or within
    rounding (`judged`). The first setting that is not right decides; otherwise the largest difference is returned."""
    dtype, found = str(model.dtype).removeprefix("torch."), []
    for setting in settings:
        try:
            config = EngineConfig(dtype=dtype, threads=1, **{**ROOMY, **SETTINGS[setting].config})  # type: ignore[arg-type]
            engine = Engine(config, Model(copy.deepcopy(model), name))
        except UnsupportedModel as error:
            one_sentence = "\n" not in str(error) and len(str(error)) < 600
            return Outcome("refused" if one_sentence else "unclear", str(error))
        asked, status = sampled(engine, setting, prompts), engine.status()
        if not status[SETTINGS[setting].happened]:
            return Outcome("unclear", f"{setting}: no {SETTINGS[setting].happened}")
        one = judged(model, asked)
        if one.kind != "right":
            return one._replace(says=f"{setting}: {one.says}")
        found.append(one._replace(says=status["attention"], runs=runs(status), why=status["computed_by_reason"]))
    return max(found, key=lambda each: each.worst)


def runs(status: dict[str, Any]) -> str:
    """Return what runs the layers of an engine."""
    if status["computed_by"] != "module":
        return "decoder"
    return "torch" if Arithmetic.parse(status["arithmetic"]).by_batch else "kernels"


def judged(plain: PreTrainedModel, asked: list[Asked]) -> Outcome:
    """Compare samples with the plain forward: right to 1e-5 in fp32, or within rounding. That is where the engine is at most 3
    times as far as the plain forward from the same weights in a finer format: fp32 for bf16, fp64 for fp32."""
    rounded = [plain_logprobs(plain, prompt, sample) for prompt, sample in asked]
    fp32 = plain.dtype == torch.float32
    worst = max(float(np.abs(s.logprobs - want).max()) for (_, s), want in zip(asked, rounded, strict=True))
    if fp32 and worst <= FP32_BOUND:
        return Outcome("right", "", worst)
    finer = finer_format(plain)
    exact = [plain_logprobs(finer, prompt, sample) for prompt, sample in asked]
    mine = float(np.mean([np.abs(s.logprobs - want).mean() for (_, s), want in zip(asked, exact, strict=True)]))
    theirs = float(np.mean([np.abs(one - want).mean() for one, want in zip(rounded, exact, strict=True)]))
    least = 0 if fp32 else 2**-9
    says = f"{mine:.1e} from exact on average, the plain forward {theirs:.1e}"
    return Outcome("right" if mine <= 3 * theirs + least else "wrong", says, worst)


def finer_format(plain: PreTrainedModel) -> PreTrainedModel:
    """Return the model with the same weights in fp32, or in fp64 for fp32; experts in the form that torch has for fp64."""
    finer = copy.deepcopy(plain).to(torch.float64 if plain.dtype == torch.float32 else torch.float32)
    if finer.dtype == torch.float64 and any("Experts" in type(each).__name__ for each in finer.modules()):
        finer.set_experts_implementation("eager")  # torch has no grouped products in fp64
    return finer


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
