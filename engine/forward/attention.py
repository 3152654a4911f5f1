"""Attention interface between transformers models and the paged KV: one function, registered under one name.

transformers calls it with q, k, v of each layer and passes keyword arguments of `model(...)` on unchanged. So the step's
`Batch` and the KV pool travel as one argument, without a global context. The name contains no "flash", "sdpa" or
"flex_attention" and does not begin with "paged|": each of these would enable other code in transformers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import torch
from transformers import AttentionInterface

from rollout.engine.config import EngineConfig
from rollout.engine.forward.batch import Batch
from rollout.engine.forward.latent import OURS, latent_heads_of
from rollout.engine.kv.pages import PagedKV

ATTENTION_NAME = OURS


class CannotAttend(Exception):
    """An attention backend is not available here or does not support a model's shapes; the message says why."""


@dataclass(frozen=True, slots=True)
class StepCapacity:
    """Sizes of the largest step."""

    tokens: int
    rows: int
    columns: int
    """blocks of the longest sequence"""
    q_heads: int
    """0: layers differ"""
    kv_heads: int
    """0: layers differ"""
    head_dim: int
    """0: layers differ"""
    itemsize: int
    """bytes of a number of K and V"""
    other_value_dim: int | None = None
    """width of V; None: the same as of K"""
    different: tuple[tuple[int, int, int, int], ...] = ()
    """(q_heads, kv_heads, head_dim, value_dim) of each kind of layer, if they differ"""
    windowed: bool = False
    """some layers have a sliding window and pools of their own"""

    @property
    def value_dim(self) -> int:
        return self.head_dim if self.other_value_dim is None else self.other_value_dim

    @property
    def widest(self) -> int:
        return max(self.head_dim, self.value_dim)

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.q_heads // self.kv_heads

    @staticmethod
    def of(config: EngineConfig, model: Any) -> StepCapacity:
        """Return the capacity for a configuration and a model (`rollout.engine.forward.model.ModelLike`)."""
        kinds = tuple(dict.fromkeys(model.heads))
        even = len(kinds) == 1
        return StepCapacity(
            tokens=max(config.most_tokens, 16),  # smaller batches are padded
            rows=max(config.most_seqs, 16),
            columns=-(-model.context // config.block_tokens),
            q_heads=kinds[0][0] if even else 0,
            kv_heads=kinds[0][1] if even else 0,
            head_dim=kinds[0][2] if even else 0,
            itemsize=model.geometry.dtype.itemsize,
            other_value_dim=kinds[0][3] if even and kinds[0][3] != kinds[0][2] else None,
            different=() if even else kinds,
            windowed=any(getattr(model, "windows", ())),
        )

    def each(self) -> tuple[StepCapacity, ...]:
        """Return the capacity for each kind of layer."""
        kinds = self.different or ((self.q_heads, self.kv_heads, self.head_dim, self.value_dim),)
        return tuple(
            replace(self, q_heads=q, kv_heads=kv, head_dim=k, other_value_dim=None if v == k else v, different=())
            for q, kv, k, v in kinds
        )


class Scores(NamedTuple):
    """What a layer does with the products of its queries and keys, before and in the softmax."""

    scaling: float
    window: int = 0
    """a query attends to its own and the window - 1 previous positions; 0 = to all"""
    softcap: float = 0.0
    """scores become softcap · tanh(score / softcap) before the mask; 0 = they stay"""
    sinks: torch.Tensor | None = None
    """[q_heads] on the device: one more score per query head, which takes its share of the weights and has no value"""


def plain_scores(asked: dict[int, dict[str, Any]]) -> list[Scores] | None:
    """Return the scores of each layer for a decoder that computes no soft caps and no sinks; None if a layer has one.

    Args:
        asked: attention arguments of each layer (`AttentionProbe.layers`).
    """
    if any(each.get("softcap") or each.get("sinks") for each in asked.values()):
        return None
    return [Scores(asked[i]["scaling"], asked[i]["window"]) for i in sorted(asked)]


class Backend(Protocol):
    """Computes attention, and defines the layout inside a block's K and V.

    Every backend guarantees: the result of a query depends only on its own tokens. For each query it does the same arithmetic
    for each fixed-size chunk of its context, in order, for any batch, any chunking of the prompt, and shared prefixes or
    not."""

    name: str

    def prepare(self, batch: Batch, kv: PagedKV) -> Any:
        """Return metadata of a step for all layers; it becomes `Batch.attention`."""

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        batch: Batch,
        kv: PagedKV,
        scores: Scores,
    ) -> torch.Tensor:
        """Write the step's K and V into `kv`, then attend.

        Args:
            layer: of those that store KV, counted from 0.
            query: [P, q_heads, head_dim], P = padded tokens, any strides.
            key: [P, kv_heads, head_dim]; None: K and V are in the pool, since another layer stored the same ones in this step.
            value: [P, kv_heads, value_dim]; None with `key`.

        Returns:
            [P, q_heads, value_dim], zero for padding.
        """


def prepared(batch: Batch, backend: Backend, kv: PagedKV) -> Batch:
    """Return a batch with the metadata of the backend."""
    return replace(batch, attention=backend.prepare(batch, kv), windowed=prepared_window(batch, backend, kv))


def prepared_window(batch: Batch, backend: Backend, kv: PagedKV) -> Batch | None:
    """Return the batch for layers with a sliding window, with the metadata of the backend; None: there are no such layers."""
    assert (batch.windowed is None) == (kv.window is None), "a step has a block table of windows, and the pools have none"
    if batch.windowed is None or kv.window is None:
        return None
    return replace(batch.windowed, attention=backend.prepare(batch.windowed, kv.window))


def located(layer: int, batch: Batch, kv: PagedKV) -> tuple[int, Batch, PagedKV]:
    """Return layer, batch and pools for `Backend.attend` in a layer of those that store KV, counted from 0."""
    if batch.windowed is None or kv.window is None:
        return layer, batch, kv
    windowed, at = kv.places[layer]
    return (at, batch.windowed, kv.window) if windowed else (at, batch, kv)


class KVPlace(NamedTuple):
    """Where the KV of a decoder layer is stored."""

    layer: int
    """of those that store KV, counted from 0"""
    stores: bool
    """False: an earlier decoder layer has the same K and V, and stores them"""


class AttentionCall:
    """Arguments for every layer of one forward. Not a tuple: torch.compile would trace its elements and recompile at every
    step."""

    __slots__ = ("backend", "batch", "kv", "places")

    def __init__(self, backend: Backend, batch: Batch, kv: PagedKV, places: Mapping[int, KVPlace]) -> None:
        """places: of each decoder layer with attention."""
        self.backend = backend
        self.batch = batch
        self.kv = kv
        self.places = places

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor | None, value: torch.Tensor | None, scores: Scores
    ) -> torch.Tensor:
        """Do what `Backend.attend` does, over the blocks of the layer, counted over all that store KV."""
        at, batch, kv = located(layer, self.batch, self.kv)
        return self.backend.attend(at, query, key, value, batch, kv, scores)


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
