"""A tiny model, for what does not depend on how fast the engine is."""

from __future__ import annotations

from pathlib import Path
from typing import Literal


def save_tiny(folder: Path, hidden: int, vocabulary: int, dtype: Literal["bfloat16", "float32"]) -> Path:
    """Save a Llama of two layers with random weights, without a tokenizer, and return its folder."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocabulary, hidden_size=hidden, intermediate_size=2 * hidden, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=4096, bos_token_id=1, eos_token_id=2, dtype=dtype,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder
