"""A digest of what a model's forward depends on besides its weights: the configuration.

Two folders with equal weights compute different functions if their config.json differ in the base of the rotary embedding,
the epsilon of a norm, a window, a scale or a soft cap. So whatever names a sample names this digest, beside the digest of the
weights and the arithmetic.
"""

from __future__ import annotations

import hashlib
import json
from enum import Enum
from typing import Any

import torch
from transformers import PreTrainedConfig

NAMES = frozenset((
    "_name_or_path", "_commit_hash", "transformers_version", "architectures", "auto_map", "id2label", "label2id",
    "problem_type", "finetuning_task", "torchscript",
))  # fmt: skip
"""say where a model comes from, or what it is called"""
ELSEWHERE = frozenset((
    "dtype", "torch_dtype", "bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "decoder_start_token_id",
    "attn_implementation", "_attn_implementation", "_attn_implementation_internal", "experts_implementation",
    "_experts_implementation", "_experts_implementation_internal", "use_cache", "return_dict", "output_hidden_states",
    "output_attentions", "output_router_logits", "chunk_size_feed_forward",
))  # fmt: skip
"""are decided elsewhere: the dtype by the manifest of the weights, end tokens by each sampling, how it runs by the engine"""
TRAINING = frozenset((
    "initializer_range", "initializer_factor", "initializer_cutoff_factor", "attention_dropout", "hidden_dropout",
    "hidden_dropout_prob", "attention_probs_dropout_prob", "attn_pdrop", "embd_pdrop", "resid_pdrop", "resid_dropout",
    "embedding_dropout", "attn_dropout", "attention_dropout_prob", "residual_dropout", "embd_dropout", "ffn_dropout",
    "classifier_dropout", "router_aux_loss_coef", "router_z_loss_coef", "input_jitter_noise",
    "aux_loss_alpha", "seq_aux", "gradient_checkpointing",
))  # fmt: skip
"""act in training only"""
NEUTRAL = NAMES | ELSEWHERE | TRAINING


def configuration_digest(config: PreTrainedConfig) -> str:
    """Return the first 20 bytes, in hex, of the SHA-256 of the fields of a configuration that may decide a forward: all but
    NEUTRAL, in nested configurations too. Neither the order of fields, nor 1 or 1.0, nor fields that are null change it. Raises
    ValueError for a field of a type that has no spelling of its own."""
    text = json.dumps(_plain(config.to_dict(), "config.json"), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).digest()[:20].hex()


def _plain(value: Any, field: str) -> Any:
    """Return a value with one spelling: numbers as floats, containers without what is neutral or null. field: its name."""
    match value:
        case None | str() | bool():
            return value
        case int() | float():
            return float(value)
        case dict():
            kept = {str(name): each for name, each in value.items() if str(name) not in NEUTRAL and each is not None}
            return {name: _plain(each, f"{field}, {name}") for name, each in kept.items()}
        case list() | tuple():
            return [_plain(each, field) for each in value]
        case set() | frozenset():
            return sorted((_plain(each, field) for each in value), key=json.dumps)
        case torch.dtype():
            return str(value)
        case Enum():
            return _plain(value.value, field)
    raise ValueError(
        f"{field} is a {type(value).__name__}, which may have another text in the next process, so no digest names it: "
        "to_dict() of a configuration must return numbers, strings, lists and dicts"
    )
