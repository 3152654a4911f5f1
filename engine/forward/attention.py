"""Attention over paged KV: the interface of a backend, and what the layers of a step ask of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import torch

from rollout.engine.config import EngineConfig
from rollout.engine.forward.batch import Batch
from rollout.engine.kv.pages import PagedKV


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
