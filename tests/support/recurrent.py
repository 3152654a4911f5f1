"""Recurrent types of transformers as tiny models with real patterns of layers, whose mixers call our kernels.

The convolution and the scan of a mixer are found by their global names; the mixer's code is its own. Attention is an echo of
the values, so everything that a token's logits depend on, but its own numbers, is in the states.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from types import FunctionType, MethodType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM

from rollout.engine.cpu.recurrence import Recurrence, StateRows

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
SCANS = ("torch_chunk_gated_delta_rule", "chunk_kimi_delta_attention", "mamba2_chunk_scan")
SLOTS = 4


class Step:
    """What travels as `rollout` to the mixers of a step: rows, and the states of each mixer."""

    def __init__(self, rows: StateRows, pools: dict[Any, Tensor]) -> None:
        self.rows, self.pools = rows, pools

    def states(self, key: Any, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        if key not in self.pools:
            self.pools[key] = torch.zeros(SLOTS, *shape, dtype=dtype)
        return self.pools[key]


def echo(_: Any, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
    return value.repeat_interleave(query.shape[1] // value.shape[1], 1).transpose(1, 2).contiguous(), None


AttentionInterface.register("echo", echo)


def tiny_recurrent(name: str, dtype: torch.dtype, kernels: Recurrence) -> tuple[nn.Module, list[nn.Module]]:
    """Make a model of a family of `TYPES`. Also returns its convolutions, whose weights only the kernels use."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(name, **{**COMMON, **TYPES[name]})
    model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="eager").eval().requires_grad_(False)
    for each in model.parameters():
        if each.ndim > 1:
            each.mul_(3)
    model.set_attn_implementation("echo")
    convolutions = []
    for mixer in model.modules():
        inner = inspect.unwrap(type(mixer).forward)
        names = inner.__code__.co_names if isinstance(inner, FunctionType) else ()
        if "causal_conv1d_fn" not in names:
            continue
        found: dict[str, Any] = {each: _scan(mixer, each, inner.__globals__[each], kernels) for each in SCANS if each in names}
        found["causal_conv1d_fn"] = _convolution(mixer, kernels)
        made = FunctionType(
            inner.__code__, {**inner.__globals__, **found}, inner.__name__, inner.__defaults__, inner.__closure__
        )
        made.__kwdefaults__ = inner.__kwdefaults__
        mixer.forward = MethodType(made, mixer)
        convolutions += [each for each in mixer.modules() if isinstance(each, nn.Conv1d)]
    return model, convolutions


def _convolution(mixer: nn.Module, kernels: Recurrence) -> Callable[..., Tensor]:
    def causal_conv1d_fn(
        x: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None, *, rollout: Step, **_: Any
    ) -> Tensor:
        states = rollout.states((mixer, "inputs"), (weight.shape[0], weight.shape[1] - 1), x.dtype)
        return kernels.convolve(x[0].T, weight, bias, activation, states, rollout.rows).T[None]

    return causal_conv1d_fn


def _scan(mixer: nn.Module, name: str, original: Callable[..., Any], kernels: Recurrence) -> Callable[..., Any]:
    signature = inspect.signature(original)

    def scan(*args: Any, **kwargs: Any) -> Any:
        given = dict(signature.bind(*args, **kwargs).arguments)
        step: Step = given["kwargs"]["rollout"]
        if name == "mamba2_chunk_scan":
            hidden, b, c = (given[key][0] for key in ("hidden_states", "B", "C"))
            states = step.states(mixer, (*hidden.shape[1:], b.shape[-1]), torch.float32)
            options = {key: given[key] for key in ("D", "dt_bias", "dt_softplus", "dt_limit") if key in given}
            return kernels.mamba2(hidden, given["dt"][0], given["A"], b, c, states, step.rows, **options)[None]
        inputs = [given[key][0] for key in ("query", "key", "value", "g", "beta")]
        states = step.states(mixer, (inputs[2].shape[1], inputs[1].shape[2], inputs[2].shape[2]), torch.float32)
        return kernels.delta_rule(*inputs, states, step.rows, l2norm=given["use_qk_l2norm_in_kernel"])[None], None

    return scan


def logits(model: nn.Module, ids: Tensor, cuts: Sequence[int], crowd: Tensor) -> Tensor:
    """Return the logits of a sequence that runs in one step for each of `cuts`, its number of tokens, beside a crowd."""
    pools: dict[Any, Tensor] = {}
    parts, at = [], 0
    for count in cuts:
        lengths = [count, len(crowd)] if len(crowd) else [count]
        starts = np.cumsum([0, *lengths]).astype(np.int32)
        reads, writes = np.full(len(lengths), -1, np.int32), np.full(len(lengths), -1, np.int32)
        reads[0], writes[0] = (0 if at else -1), 0
        with torch.inference_mode():
            out = model(
                input_ids=torch.cat([ids[at : at + count], crowd])[None],
                position_ids=torch.cat([torch.arange(at, at + count), torch.arange(len(crowd))])[None],
                use_cache=False,
                rollout=Step(StateRows(starts, reads, writes), pools),
            )
        parts.append(out.logits[0, :count])
        at += count
    assert at == len(ids)
    return torch.cat(parts)
