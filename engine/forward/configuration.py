"""A digest of what a model's forward depends on besides its weights: the configuration.

Two folders with equal weights compute different functions if their config.json differ in the base of the rotary embedding,
the epsilon of a norm, a window, a scale or a soft cap. So whatever names a sample names this digest, beside the digest of the
weights and the arithmetic.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

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
    NEUTRAL, in nested configurations too. Neither the order of fields, nor 1 or 1.0, nor fields that are null change it."""
    text = json.dumps(_plain(config.to_dict()), sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.sha256(text.encode()).digest()[:20].hex()


def _plain(value: Any) -> Any:
    """Return a value with one spelling: numbers as floats, containers without what is neutral or null."""
    if isinstance(value, dict):
        kept = {str(name): each for name, each in value.items() if str(name) not in NEUTRAL and each is not None}
        return {name: _plain(each) for name, each in kept.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if isinstance(value, set | frozenset):
        return sorted(map(str, value))
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number else value
