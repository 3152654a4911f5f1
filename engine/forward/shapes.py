"""Shapes of published models, for benchmarks and tests without a download: real sizes and layer patterns, random weights.

    shape:qwen3-0.6b            the whole model
    shape:qwen3-30b-a3b:4       its first 4 layers

The values are those of the config.json that each model was published with.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

PREFIX = "shape:"
MARK = "random_weights"
"""empty file beside the config.json of a model whose weights are drawn (`rollout.engine.forward.random_weights`)"""
QWEN3 = {
    "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151_936, "max_position_embeddings": 40_960,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
}  # fmt: skip
GEMMA3 = {
    "vocab_size": 262_144, "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 256, "sliding_window": 512,
    "query_pre_attn_scalar": 256, "max_position_embeddings": 32_768,
}  # fmt: skip
LFM2 = {
    "vocab_size": 65_536, "num_hidden_layers": 16, "num_key_value_heads": 8, "max_position_embeddings": 128_000,
    "conv_L_cache": 3, "layer_types": [
        "full_attention" if layer in (2, 5, 8, 10, 12, 14) else "conv" for layer in range(16)
    ],
}  # fmt: skip
LETTERS = {"M": "linear_attention", "E": "moe", "*": "full_attention"}


class PublishedShape(NamedTuple):
    """Configuration of a published model."""

    model_type: str
    billions: float
    """published number of parameters, of the language model alone"""
    options: dict[str, Any]
    """arguments of transformers' configuration class"""


SHAPES: dict[str, PublishedShape] = {
    "tiny": PublishedShape("qwen3", 0.00026, {
        "num_hidden_layers": 8, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
        "intermediate_size": 96, "vocab_size": 199, "max_position_embeddings": 4096, "tie_word_embeddings": True,
    }),
    "tiny-moe": PublishedShape("qwen3_moe", 0.00026, {
        "num_hidden_layers": 4, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
        "intermediate_size": 96, "moe_intermediate_size": 32, "num_experts": 8, "num_experts_per_tok": 2,
        "norm_topk_prob": True, "vocab_size": 199, "max_position_embeddings": 4096, "tie_word_embeddings": True,
    }),
    "qwen3-0.6b": PublishedShape("qwen3", 0.596, {
        **QWEN3, "num_hidden_layers": 28, "hidden_size": 1024, "num_attention_heads": 16, "intermediate_size": 3072,
        "tie_word_embeddings": True,
    }),
    "qwen3-8b": PublishedShape("qwen3", 8.19, {
        **QWEN3, "num_hidden_layers": 36, "hidden_size": 4096, "num_attention_heads": 32, "intermediate_size": 12_288,
        "tie_word_embeddings": False,
    }),
    "qwen3-30b-a3b": PublishedShape("qwen3_moe", 30.5, {
        **QWEN3, "num_hidden_layers": 48, "hidden_size": 2048, "num_attention_heads": 32, "num_key_value_heads": 4,
        "intermediate_size": 6144, "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8,
        "norm_topk_prob": True, "tie_word_embeddings": False,
    }),
    "qwen3.5-0.8b": PublishedShape("qwen3_5_text", 0.752, {
        "num_hidden_layers": 24, "hidden_size": 1024, "intermediate_size": 3584, "num_attention_heads": 8,
        "num_key_value_heads": 2, "head_dim": 256, "linear_num_key_heads": 16, "linear_num_value_heads": 16,
        "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, "vocab_size": 248_320,
        "max_position_embeddings": 262_144, "tie_word_embeddings": True,
        "layer_types": [*["linear_attention"] * 3, "full_attention"] * 6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
    }),
    "llama-3.2-1b": PublishedShape("llama", 1.236, {
        "num_hidden_layers": 16, "hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 128_256, "max_position_embeddings": 131_072,
        "rms_norm_eps": 1e-5, "tie_word_embeddings": True, "bos_token_id": 128_000, "eos_token_id": 128_001,
        "rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, "factor": 32.0, "low_freq_factor": 1.0,
                            "high_freq_factor": 4.0, "original_max_position_embeddings": 8192},
    }),
    "gemma3-270m": PublishedShape("gemma3_text", 0.268, {
        **GEMMA3, "num_hidden_layers": 18, "hidden_size": 640, "intermediate_size": 2048,
    }),
    "gemma3-1b": PublishedShape("gemma3_text", 1.0, {
        **GEMMA3, "num_hidden_layers": 26, "hidden_size": 1152, "intermediate_size": 6912,
    }),
    "gemma4-e2b": PublishedShape("gemma4_text", 4.63, {
        "num_hidden_layers": 35, "hidden_size": 1536, "intermediate_size": 6144, "use_double_wide_mlp": True,
        "num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 256, "global_head_dim": 512, "sliding_window": 512,
        "num_kv_shared_layers": 20, "vocab_size": 262_144, "vocab_size_per_layer_input": 262_144,
        "hidden_size_per_layer_input": 256, "final_logit_softcapping": 30.0, "max_position_embeddings": 131_072,
        "layer_types": [*["sliding_attention"] * 4, "full_attention"] * 7,
    }),
    "lfm2-350m": PublishedShape("lfm2", 0.354, {
        **LFM2, "hidden_size": 1024, "num_attention_heads": 16, "intermediate_size": 6656,
    }),
    "lfm2-1.2b": PublishedShape("lfm2", 1.17, {
        **LFM2, "hidden_size": 2048, "num_attention_heads": 32, "intermediate_size": 12_288,
    }),
    "olmoe": PublishedShape("olmoe", 6.92, {
        "num_hidden_layers": 16, "hidden_size": 2048, "intermediate_size": 1024, "num_attention_heads": 16,
        "num_key_value_heads": 16, "num_experts": 64, "num_experts_per_tok": 8, "vocab_size": 50_304,
        "max_position_embeddings": 4096, "tie_word_embeddings": False,
    }),
    "gpt-oss-20b": PublishedShape("gpt_oss", 20.9, {
        "num_hidden_layers": 24, "hidden_size": 2880, "intermediate_size": 2880, "num_attention_heads": 64,
        "num_key_value_heads": 8, "head_dim": 64, "num_local_experts": 32, "num_experts_per_tok": 4, "vocab_size": 201_088,
        "sliding_window": 128, "max_position_embeddings": 131_072, "tie_word_embeddings": False,
        "layer_types": ["sliding_attention", "full_attention"] * 12,
    }),
    "nemotron-3-nano": PublishedShape("nemotron_h", 31.6, {
        "hidden_size": 2688, "intermediate_size": 1856, "num_attention_heads": 32, "num_key_value_heads": 2, "head_dim": 128,
        "mamba_num_heads": 64, "mamba_head_dim": 64, "ssm_state_size": 128, "n_groups": 8, "conv_kernel": 4,
        "n_routed_experts": 128, "num_experts_per_tok": 6, "n_shared_experts": 1, "moe_intermediate_size": 1856,
        "moe_shared_expert_intermediate_size": 3712, "routed_scaling_factor": 2.5, "vocab_size": 131_072,
        "max_position_embeddings": 262_144, "tie_word_embeddings": False,
        "layer_types": [LETTERS[each] for each in "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME"],
    }),
    "moonlight": PublishedShape("deepseek_v3", 15.96, {
        "num_hidden_layers": 27, "hidden_size": 2048, "intermediate_size": 11_264, "moe_intermediate_size": 1408,
        "num_attention_heads": 16, "num_key_value_heads": 16, "n_shared_experts": 2, "n_routed_experts": 64,
        "num_experts_per_tok": 6, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "routed_scaling_factor": 2.446,
        "q_lora_rank": None, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128,
        "vocab_size": 163_840, "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": 5e4},
    }),
}  # fmt: skip


def is_shape(name: str) -> bool:
    """Return whether a name of a model is that of a shape."""
    return name.startswith(PREFIX)


def configuration(name: str) -> Any:
    """Return the transformers configuration of a shape, `shape:NAME` or `shape:NAME:LAYERS`. Raises ValueError for an unknown
    name, and for layers that are not the beginning of the model's pattern."""
    import transformers

    base, _, cut = name.removeprefix(PREFIX).partition(":")
    if base not in SHAPES:
        raise ValueError(f"model {name!r}: no such shape; there are: {', '.join(PREFIX + each for each in SHAPES)}")
    shape = SHAPES[base]
    config = transformers.AutoConfig.for_model(shape.model_type, **shape.options)
    if not cut:
        return config
    if not cut.isdecimal() or not 1 <= int(cut) <= config.num_hidden_layers:
        raise ValueError(f"model {name!r}: {cut!r} must be a number of layers from 1 to {config.num_hidden_layers}")
    return transformers.AutoConfig.for_model(shape.model_type, **first_layers(config, shape.options, int(cut), name))


def first_layers(config: Any, options: dict[str, Any], layers: int, name: str) -> dict[str, Any]:
    """Return the options of a model's first layers. Raises ValueError if they are no whole periods of its pattern, or do not
    have each kind of layer."""
    kinds = list(getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers)
    whole = len(kinds)
    period = next((p for p in range(1, whole // 2 + 1) if all(kind == kinds[i % p] for i, kind in enumerate(kinds))), 1)
    least = 1 + max(kinds.index(kind) for kind in kinds)
    if layers < least or (layers % period and layers < whole):
        raise ValueError(
            f"model {name!r}: {layers} layers do not fit its pattern of layers: "
            + (
                f"take a multiple of {period}, its period"
                if period > 1
                else f"take at least {least}, to have each kind of layer"
            )
        )
    cut = {**options, "num_hidden_layers": layers, "layer_types": kinds[:layers]}
    if shared := options.get("num_kv_shared_layers"):
        cut["num_kv_shared_layers"] = max(0, layers - (len(kinds) - shared))
    if "layer_types" not in options and not getattr(config, "layer_types", None):
        del cut["layer_types"]
    return cut


def is_random(folder: str | Path) -> bool:
    """Return whether the weights of a model folder are drawn, not read."""
    return (Path(folder) / MARK).is_file()


def write_configuration(config: Any, folder: Path) -> None:
    """Write a model folder without weights. Another process may be reading one with the same content. Raises FileExistsError
    for a folder with another model."""
    folder.mkdir(parents=True, exist_ok=True)
    text, file = config.to_json_string(), folder / "config.json"
    if os.path.lexists(file) and not is_random(folder):
        raise FileExistsError(f"{folder} has a model whose weights are not drawn: it stays; move it")
    os.close(os.open(folder / MARK, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644))
    if not file.is_file() or file.read_text() != text:
        with tempfile.NamedTemporaryFile("w", dir=folder, prefix=".config-", delete=False) as temporary:
            temporary.write(text)
        Path(temporary.name).chmod(0o644)
        Path(temporary.name).rename(file)
