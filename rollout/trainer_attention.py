"""The service's attention by name, for a trainer's own transformers model.

    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation=trainer_attention())
    logits = model(input_ids, attention_mask=mask, position_ids=positions, use_cache=False).logits

Whole sequences, forward and backward, on the CPU. The log-probs of the service and of this forward agree in every bit, so an
importance ratio is exactly 1 on policy. `rollout.integrations.exact` has the arithmetic, and a form that also counts positions.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from engine.attention import NativeAttention
from rollout.integrations.exact import Rows, exact_attention


def trainer_attention(block_size: int = 32, threads: int | None = None) -> str:
    """Register the attention and return its name, to be given as `attn_implementation`.

    block_size: the service's. threads: None = torch's. The rows of a batch may be padded on either side; position_ids must
    count from a row's first real token then, as they must for every attention. Raises NativeUnavailable where the kernel cannot
    be built; the model raises ValueError if it is asked to continue from a cache."""
    native = NativeAttention(threads)
    name = f"rollout_trainer_{block_size}_{threads or 'all'}"

    def rows(batch_size: int, q_length: int, kv_length: int, attention_mask: torch.Tensor | None = None, **_: Any) -> Rows:
        if q_length != kv_length:
            raise ValueError("the service's attention takes whole sequences: call the model with use_cache=False")
        real = torch.ones(batch_size, q_length, dtype=torch.bool) if attention_mask is None else attention_mask.bool()
        return Rows.of(real, block_size, native)

    def attend(module: Any, query: Any, key: Any, value: Any, attention_mask: Rows, **other: Any) -> tuple[torch.Tensor, None]:
        return exact_attention(module, query, key, value, None, rollout_rows=attention_mask, **other)

    AttentionMaskInterface.register(name, rows)
    AttentionInterface.register(name, attend)
    return name
