"""Decoder layers through torch.compile: an option for devices where many small kernels cost more than they compute.

One compilation serves all layers and every number of tokens. Attention stays outside: the layer is cut in two there, into what
comes before and what comes after. Parameters are inputs of the compiled code, so a refresh in place reaches it. The numbers
are not those of the eager module: inductor rounds to bf16 less often.
"""

from __future__ import annotations

import logging
import os
import time
from types import SimpleNamespace
from typing import Any

import torch
from transformers import AttentionInterface

from engine.forward.attention import ATTENTION_NAME, paged_attention
from engine.paths import cache_dir
from engine.weights.offload import decoder_layers

log = logging.getLogger("rollout.engine")

COMPILED_NAME = f"{ATTENTION_NAME}_compiled"
WARM_UP_TOKENS = (37, 61)
"""two numbers that no other dimension has, or the compiled code would take them for the same"""


def compile_layers(model: Any, backend: Any = "inductor") -> None:
    """Compile the decoder layers of an `engine.forward.model.Model`, now, before anybody waits for a step. `backend`: of
    torch.compile. Raises ValueError where the layers cannot be found."""
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache_dir() / "inductor"))  # for the next start
    started = time.perf_counter()
    AttentionInterface.register(COMPILED_NAME, torch.compiler.disable(paged_attention))
    model.module.set_attn_implementation(COMPILED_NAME)
    for layer in decoder_layers(model.module, model.name)[1]:
        layer.forward = torch.compile(layer.forward, dynamic=True, backend=backend)  # inside of hooks around the layer
    with torch.inference_mode():
        for tokens in WARM_UP_TOKENS:
            model.forward(_batch(tokens, model.device), None, _NoAttention())
    log.info("%s: decoder layers compiled in %.1f s", model.name, time.perf_counter() - started)


def _batch(tokens: int, device: torch.device) -> Any:
    """As much of a `Batch` as a forward without KV needs."""
    return SimpleNamespace(
        input_ids=torch.zeros((1, tokens), dtype=torch.int64, device=device),
        position_ids=torch.arange(tokens, device=device)[None],
        logits_at=torch.arange(2, device=device),
        num_logits=2,
    )


class _NoAttention:
    def attend(self, layer: int, query: torch.Tensor, *_: Any) -> torch.Tensor:
        return torch.zeros_like(query, memory_format=torch.contiguous_format)
