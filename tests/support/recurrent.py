"""Recurrent types of transformers as tiny models with real patterns of layers, whose mixers call our kernels.

Attention is an echo of the values, so everything that a token's logits depend on, but its own numbers, is in the states.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM

from rollout.engine.cpu.recurrence import RecurrenceKernels
from rollout.engine.forward.batch import StateRows
from rollout.engine.forward.model import Model
from rollout.engine.kv.block import SlotCounts
from rollout.engine.kv.states import StatePages
from rollout.engine.memory import HostMemory

COMMON = {
    "hidden_size": 72, "intermediate_size": 100, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
    "vocab_size": 199, "max_position_embeddings": 512, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
LINEAR = ["linear_attention", "linear_attention", "linear_attention", "full_attention"]
DELTA = {
    "head_dim": 20, "layer_types": LINEAR, "linear_num_key_heads": 2, "linear_key_head_dim": 12, "linear_value_head_dim": 20,
}  # fmt: skip
ROPE = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.4, "mrope_section": [2, 1, 1]}
MAMBA = {"mamba_n_heads": 6, "mamba_d_state": 18, "mamba_chunk_size": 32}
TYPES: dict[str, dict[str, Any]] = {
    "qwen3_5_text": {**DELTA, "linear_num_value_heads": 6, "rope_parameters": ROPE},
    "olmo_hybrid": {**DELTA, "linear_num_value_heads": 2, "num_key_value_heads": 4},
    "kimi_linear": {
        "layer_types": LINEAR, "linear_head_dim": 20, "linear_num_heads": 4, "num_key_value_heads": 4, "kv_lora_rank": 16,
        "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 12, "mlp_layer_types": ["dense"] * 4,
    },
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2, "block_auto_adjust_ff_dim": False},
    "falcon_h1": {**MAMBA, "mamba_d_head": 20, "mamba_d_ssm": 120, "head_dim": 20},
    "granitemoehybrid": {
        **MAMBA, "mamba_d_head": 24, "layer_types": ["linear_attention", "full_attention"] * 2, "shared_intermediate_size": 40,
        "num_local_experts": 0,
    },
    "nemotron_h": {
        "layer_types": ["linear_attention", "mlp", "full_attention", "linear_attention"], "mamba_num_heads": 6,
        "mamba_head_dim": 20, "ssm_state_size": 18, "n_groups": 2, "chunk_size": 32, "head_dim": 20,
    },
}  # fmt: skip
"""widths that are no multiples of a vector, and no experts"""


def echo(_: Any, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
    return value.repeat_interleave(query.shape[1] // value.shape[1], 1).transpose(1, 2).contiguous(), None


AttentionInterface.register("echo", echo)


def tiny_recurrent(name: str, dtype: torch.dtype, kernels: RecurrenceKernels) -> Model:
    """Make a model of a family of `TYPES`, whose mixers compute with kernels."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(name, **{**COMMON, **TYPES[name]})
    module = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="eager").eval().requires_grad_(False)
    for each in module.parameters():
        if each.ndim > 1:
            each.mul_(3)
    model = Model(module, name)
    module.set_attn_implementation("echo")
    model.recurrence.kernels = kernels
    return model


def logits(model: Model, ids: Tensor, cuts: Sequence[int], crowd: Tensor) -> Tensor:
    """Return the logits of a sequence that runs in one step for each of `cuts`, its number of tokens, beside a crowd."""
    assert model.states is not None and sum(cuts) == len(ids)
    kv = SimpleNamespace(states=StatePages(model.states, SlotCounts(2, 0), HostMemory()))
    parts, at = [], 0
    for count in cuts:
        lengths = [count, len(crowd)] if len(crowd) else [count]
        starts = np.cumsum([0, *lengths]).astype(np.int32)
        reads, writes = np.full(len(lengths), -1, np.int32), np.full(len(lengths), -1, np.int32)
        reads[0], writes[0] = (0 if at else -1), 0
        with torch.inference_mode():
            out = model.module(
                input_ids=torch.cat([ids[at : at + count], crowd])[None],
                position_ids=torch.cat([torch.arange(at, at + count), torch.arange(len(crowd))])[None],
                use_cache=False,
                rollout=SimpleNamespace(batch=SimpleNamespace(states=StateRows(starts, reads, writes)), kv=kv),
            )
        parts.append(out.logits[0, :count])
        at += count
    return torch.cat(parts)
