"""Tiny transformers models built from a config, with random weights: no download, a forward in milliseconds."""

from __future__ import annotations

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from rollout.engine.build import device_of
from rollout.engine.engine import Engine
from rollout.engine.forward.model import Model
from rollout.engine.values import Sample
from rollout.engine.weights.offload import OffloadedModel
from rollout.exact import sample_logprobs
from tests.support.configs import engine_config

COMMON = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 199,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}

MODELS: dict[str, dict[str, object]] = {
    "llama": {},
    "llama-long": {"max_position_embeddings": 4096},
    "llama-mha": {"num_key_value_heads": 4, "tie_word_embeddings": True},
    "qwen2": {},
    "qwen3": {"head_dim": 24},
    "mistral": {"sliding_window": 12},
    "gemma3_text": {"head_dim": 16, "sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]},
    "gemma2": {
        "head_dim": 16,
        "query_pre_attn_scalar": 16,
        "attn_logit_softcapping": 3.0,
        "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "gpt_oss": {
        "head_dim": 16,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "granite_swa": {},
    "deepseek_v2": {
        "num_key_value_heads": 4,
        "q_lora_rank": 24,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 16,
        "v_head_dim": 16,
        "first_k_dense_replace": 2,
        "n_group": 1,
        "topk_group": 1,
    },
    "olmo2": {},
    "phi3": {},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 16},
}


def tiny(name: str, dtype: torch.dtype = torch.float32, seed: int = 0, **overrides: object) -> PreTrainedModel:
    """Make a model of the family `name` (see MODELS, or any other), weights scaled up so that distributions are far from
    flat."""
    torch.manual_seed(seed)
    options = {**COMMON, **MODELS.get(name, {}), **overrides}
    config = AutoConfig.for_model(name.split("-")[0], **options)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(4)
    return model


def tiny_engine(
    name: str = "llama", dtype: str = "float32", model: PreTrainedModel | None = None, device: str = "cpu", **config: object
) -> Engine:
    options = {"block_size": 8, "kv_tokens": 4096, "max_num_seqs": 64, "max_batch_tokens": 128, "cpu_offload_gib": 0, **config}
    module = model if model is not None else tiny(name, getattr(torch, dtype))
    settings = engine_config(dtype=dtype, device=device, **options)
    offload = settings.weight_offload
    streamed = None if offload is None else OffloadedModel(module, name, offload, device_of(settings).memory)
    if streamed is None:
        module.to(device)
    return Engine(settings, Model(module, name, streamed))


def plain_logprobs(model: PreTrainedModel, prompt: np.ndarray, sample: Sample, temperature: float = 1.0) -> np.ndarray:
    """Compute the log-probs [tokens] of a sample by one full forward of the transformers model, as a trainer computes them."""
    with torch.inference_mode():
        return sample_logprobs(model, [(prompt, sample.token_ids)], temperature)[0].cpu().numpy()
