"""What an engine knows of a model: the interface `ModelLike`, and what a model may have besides.

`rollout.engine.forward.model.Model` is one, of transformers; tests and benchmarks have smaller ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import torch

from rollout.engine.forward.attention import Backend
from rollout.engine.forward.batch import Batch
from rollout.engine.kv.pages import KVGeometry, PagedKV
from rollout.engine.weights.parts import StreamedLayers

if TYPE_CHECKING:
    from rollout.engine.kv.states import StateGeometry


class NativeLayers(Protocol):
    """Runs the layers of a model in place of its module."""

    def forward(self, batch: Batch, kv: PagedKV, backend: Backend) -> torch.Tensor:
        """Return [S, vocabulary] logits of the tokens `batch.logits_at`."""

    def weights_moved(self) -> None:
        """Update after parameters moved to other addresses."""


class ExecutionPath(NamedTuple):
    """A device's choice of what runs a model, and its arithmetic."""

    decoder: NativeLayers | None
    """None: the module"""
    arithmetic: str
    """name of the products"""
    torch_bits: bool | None
    """whether plain torch gives the same bits, at every number of rows that was tried; None: not compared"""
    why: str
    """reason why it is not a better one, or why results depend on the batch; empty for the best one"""
    batch_invariant: bool | None = None
    """whether a token has the same bits alone and in larger batches, at every number of rows that was tried; None: not
    compared"""


class ModelLike(Protocol):
    """Interface of a model for an engine. `Model` implements it; tests and benchmarks have smaller implementations."""

    name: str
    vocab_size: int
    context: int
    """tokens of the longest sequence"""
    heads: Sequence[tuple[int, int, int, int]]
    """(q_heads, kv_heads, head_dim, value_dim) of each layer with attention"""
    device: torch.device
    geometry: KVGeometry
    eos_token_ids: frozenset[int]

    def forward(self, batch: Batch, kv: PagedKV, backend: Backend) -> torch.Tensor:
        """Return [S, vocabulary] logits of the tokens `batch.logits_at`."""


def module_of(model: ModelLike) -> torch.nn.Module | None:
    """Return the module whose tensors are the model's weights; None: the model has no tensors."""
    return getattr(model, "module", None)


def weights_moved(model: ModelLike) -> None:
    """Tell the decoder of a model, if it has one, that parameters have other addresses."""
    decoder: NativeLayers | None = getattr(model, "decoder", None)
    if decoder is not None:
        decoder.weights_moved()


def streamed_of(model: ModelLike) -> StreamedLayers | None:
    """Return the weight offload of a model; None: all layers are on the device."""
    return getattr(model, "streamed", None)


def windows_of(model: ModelLike) -> tuple[int, ...]:
    """Return the window of each layer that stores KV, in tokens: 0 where a query attends to all positions, or where the KV of
    all tokens is held."""
    return getattr(model, "windows", ())


def states_of(model: ModelLike) -> StateGeometry | None:
    """Return the shapes of a model's recurrent state; None: it has none."""
    return getattr(model, "states", None)


def advance_states(model: Any, kv: PagedKV, advances: np.ndarray) -> None:
    """Advance the recurrent states of rows of the newest step of a model that has some: see `Plan.state_advances`."""
    model.recurrence.advance(kv.states, advances)
