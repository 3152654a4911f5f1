"""The seam between transformers models and our KV: one attention function, registered under one name.

transformers calls it with fresh q, k, v of a layer, and passes keyword arguments of `model(...)` through untouched; so the
step's `Batch` and the pool travel as one argument and there is no global context. The name keeps clear of "flash", "sdpa",
"flex_attention" and a leading "paged|", each of which would set off other code in transformers.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from transformers import AttentionInterface

from engine.config import EngineConfig
from engine.forward.batch import Batch
from engine.kv.pages import PagedKV

ATTENTION_NAME = "rollout"


class CannotAttend(Exception):
    """A backend cannot be had here, or does not serve the shapes of a model; the message says which and why."""


@dataclass(frozen=True, slots=True)
class StepCapacity:
    """The largest step."""

    tokens: int
    rows: int
    columns: int
    """blocks of the longest sequence"""
    q_heads: int
    """0 = not the same in all layers"""
    kv_heads: int
    head_dim: int
    itemsize: int
    """bytes of a number of K and V"""

    @property
    def group(self) -> int:
        """Query heads of a KV head."""
        return self.q_heads // self.kv_heads

    @staticmethod
    def of(config: EngineConfig, model: Any) -> StepCapacity:
        """Read it off a configuration and a model (`engine.forward.model.ModelLike`)."""
        return StepCapacity(
            tokens=max(config.most_tokens, 16),  # a smaller batch is padded
            rows=max(config.most_seqs, 16),
            columns=-(-model.context // config.block_size),
            q_heads=model.q_heads,
            kv_heads=model.geometry.kv_heads,
            head_dim=model.geometry.head_dim,
            itemsize=model.geometry.dtype.itemsize,
        )


class Backend(Protocol):
    """How attention is computed. Everything inside a block's K and V is the backend's to lay out.

    The promise of every backend: what a query gets depends on its own tokens alone. It does the same arithmetic for each
    query and chunk of its context (of a fixed size), in their order, whatever else is in the batch, however the prompt was
    computed: in how many steps, shared or not.
    """

    name: str

    def prepare(self, batch: Batch, kv: PagedKV) -> Any:
        """Whatever is wanted once a step for all layers; it travels as `Batch.attention`."""

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        batch: Batch,
        kv: PagedKV,
        scaling: float,
        window: int,
    ) -> torch.Tensor:
        """Write the step's K and V into `kv`, then attend. query [P, q_heads, head_dim], key [P, kv_heads, head_dim], value [P,
        kv_heads, value_dim] (any strides, P = padded tokens), window 0 = unlimited. Returns [P, q_heads, value_dim], zero for
        padding."""


class AttentionCall:
    """What travels down to every layer of one forward. Not a tuple: torch.compile would look inside, and compile anew for every
    step."""

    __slots__ = ("backend", "batch", "kv")

    def __init__(self, backend: Backend, batch: Batch, kv: PagedKV) -> None:
        self.backend = backend
        self.batch = batch
        self.kv = kv


class AttentionProbe:
    """Stands in for a `AttentionCall` while a model is loaded: notes what each layer asks of its attention, and how often."""

    def __init__(self) -> None:
        self.layers: dict[int, dict[str, Any]] = {}
        self.calls: Counter[int] = Counter()


def paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    rollout: AttentionCall | AttentionProbe | None = None,
    **other: Any,
) -> tuple[torch.Tensor, None]:
    """query [1, q_heads, P, head_dim], key [1, kv_heads, P, head_dim], value [1, kv_heads, P, value_dim] → [1, P, q_heads,
    value_dim]."""
    if scaling is None:
        scaling = query.shape[-1] ** -0.5
    layer: int = module.layer_idx  # type: ignore[assignment]
    if rollout is None:
        raise TypeError(
            f"attention {ATTENTION_NAME!r} runs inside the engine only, in models that hand keyword arguments on to it"
        )
    if isinstance(rollout, AttentionProbe):
        rollout.calls[layer] += 1
        rollout.layers[layer] = {
            "q_heads": query.shape[1],
            "kv_heads": key.shape[1],
            "head_dim": key.shape[3],
            "value_dim": value.shape[3],
            "value_heads": value.shape[1],
            "query_dim": query.shape[3],
            "window": sliding_window or 0,
            "scaling": scaling,
            "masked": attention_mask is not None,
            "causal": getattr(module, "is_causal", True),
            "other": {name: value for name, value in other.items() if value is not None and name not in HARMLESS},
        }
        return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[3]), None
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    out = rollout.backend.attend(layer, q, k, v, rollout.batch, rollout.kv, scaling, sliding_window or 0)
    return out[None], None


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
"""keyword arguments that may reach an attention function without changing what it must compute"""

AttentionInterface.register(ATTENTION_NAME, paged_attention)
