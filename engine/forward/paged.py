"""The attention function of transformers models over paged KV, registered under one name.

transformers calls it with q, k, v of each layer and passes keyword arguments of `model(...)` on unchanged. So the step's
`Batch` and the KV pool travel as one argument, without a global context. The name contains no "flash", "sdpa" or
"flex_attention" and does not begin with "paged|": each of these would enable other code in transformers.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from transformers import AttentionInterface

from rollout.engine.forward.attention import AttentionCall, Scores
from rollout.engine.forward.latent import OURS, latent_heads_of

ATTENTION_NAME = OURS


class AttentionProbe:
    """Takes the place of an `AttentionCall` while a model is loaded: records the attention arguments of each layer and counts
    the calls."""

    def __init__(self) -> None:
        self.layers: dict[int, dict[str, Any]] = {}
        self.calls: Counter[int] = Counter()
        self._stored: list[tuple[int, torch.Tensor, torch.Tensor]] = []
        """layer, K and V of each call; kept, so that a tensor's identity is not used again"""

    def stored_by(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> int:
        """Return the first layer that had the same two tensors, which may be this one."""
        self._stored.append((layer, key, value))
        return next(first for first, k, v in self._stored if k is key and v is value)


class NoCall(TypeError):
    """A layer called the engine's attention without the keyword arguments of the model's forward."""

    def __init__(self, message: str, layer: int) -> None:
        """layer: decoder layer."""
        super().__init__(message)
        self.layer = layer


def paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    rollout: AttentionCall | AttentionProbe | None = None,
    **other: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention function: query [1, q_heads, P, head_dim], key [1, kv_heads, P, head_dim], value [1, kv_heads, P,
    value_dim], s_aux [q_heads] the sinks → [1, P, q_heads, value_dim]."""
    if scaling is None:
        scaling = query.shape[-1] ** -0.5
    layer: int = module.layer_idx  # type: ignore[assignment]
    latent = latent_heads_of(module)
    if latent is not None:
        query = latent.absorb(query)
    if rollout is None:
        raise NoCall(
            f"attention {ATTENTION_NAME!r} works only inside the engine, in models that pass keyword arguments on to it", layer
        )
    if isinstance(rollout, AttentionProbe):
        rollout.calls[layer] += 1
        rollout.layers[layer] = {
            "q_heads": query.shape[1],
            "kv_heads": key.shape[1],
            "head_dim": key.shape[3],
            "value_dim": value.shape[3],
            "value_heads": value.shape[1],
            "stored_by": rollout.stored_by(layer, key, value),
            "query_dim": query.shape[3],
            "window": sliding_window or 0,
            "scaling": scaling,
            "softcap": softcap or 0.0,
            "sinks": None if s_aux is None else tuple(s_aux.shape),
            "masked": attention_mask is not None,
            "causal": getattr(module, "is_causal", True),
            "other": {name: value for name, value in other.items() if value is not None and name not in HARMLESS},
        }
        out = query.new_zeros(1, query.shape[2], query.shape[1], value.shape[3])
        return out if latent is None else latent.expand(out), None
    at, stores = rollout.places[layer]
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    new_k, new_v = (k, v) if stores else (None, None)
    scores = Scores(scaling, sliding_window or 0, softcap or 0.0, s_aux)
    out = rollout.attend(at, q, new_k, new_v, scores)[None]
    return out if latent is None else latent.expand(out), None


HARMLESS = frozenset(
    {
        "position_ids",
        "use_cache",
        "cache_position",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "logits_to_keep",
        "return_dict",
        "is_causal",
        "position_embeddings",
        "past_key_values",
        "num_items_in_batch",
        "is_training",
    }
)
"""keyword arguments that do not change what an attention function must compute"""

AttentionInterface.register(ATTENTION_NAME, paged_attention)
