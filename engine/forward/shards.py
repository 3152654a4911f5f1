"""Loads one rank's part of a model (`rollout.engine.weights.cuts`): no rank holds the whole model at any time.

The module is transformers' own with smaller products: its attention has fewer heads, its MLP fewer numbers. Three places
exchange something with the other ranks: the embedding, of which each rank has some tokens; the head, whose logits are gathered;
and products whose inputs are cut, whose sums are those of all ranks (`rollout.engine.cpu.sums`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from torch import nn
from transformers import PreTrainedModel

from rollout.engine.forward.load import configuration, generation_configuration, look_at_config, refuse_not_finite
from rollout.engine.forward.random_weights import blank, fill, initialise
from rollout.engine.forward.saved_parts import read_parts
from rollout.engine.forward.shapes import is_random
from rollout.engine.memory import host_buffer, placed, side_by_side
from rollout.engine.weights.cuts import Cut, Part, parts_of
from rollout.engine.weights.layer_cuts import check_ranks, cuts_of, divisions_of, tensors_of

Gather = Callable[[torch.Tensor, Sequence[Sequence[int]]], list[torch.Tensor]]
"""takes a tensor and the shapes of those that all ranks give, and returns these, in the order of the ranks"""


class RankPlace(NamedTuple):
    """Which of the ranks of a replica this one is."""

    rank: int
    ranks: int
    gather: Gather


class LoadedPart(NamedTuple):
    """One rank's part of a model."""

    module: PreTrainedModel
    cuts: dict[str, Cut]
    """of the whole model's tensors, by all their names"""
    shapes: dict[str, tuple[int, ...]]
    """of the same"""


class VocabularyParts(NamedTuple):
    """The tokens of the vocabulary that each rank has."""

    spans: list[tuple[int, int]]
    """first token, and the one after the last"""
    place: RankPlace

    def joined(self, logits: torch.Tensor) -> torch.Tensor:
        """Return [S, vocabulary] logits, given those of this rank's tokens."""
        shapes = [(len(logits), last - first) for first, last in self.spans]
        return torch.cat(self.place.gather(logits, shapes), 1)

    def embedded(self, ids: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Return the rows [T, hidden] of tokens [T], given those of this rank's tokens."""
        first, last = self.spans[self.place.rank]
        here = weight[(ids - first).clamp(0, last - first - 1)]
        rows = self.place.gather(here, [here.shape] * len(self.spans))
        out = rows[0]
        for (first, _), other in zip(self.spans[1:], rows[1:], strict=True):
            out = torch.where((ids < first)[:, None], out, other)
        return out


def parts_of_head(head: nn.Module) -> VocabularyParts | None:
    """Return how the logits of a head are divided; None: it has all."""
    return getattr(head, "vocabulary", None)


class EmbeddingPart(nn.Embedding):
    """An embedding of which each rank has some tokens."""

    vocabulary: VocabularyParts

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """[…] tokens → […, hidden]."""
        return self.vocabulary.embedded(input.reshape(-1), self.weight).view(*input.shape, -1)


def _joined(head: nn.Module, args: Any, logits: torch.Tensor) -> torch.Tensor:
    """Gather the logits […, tokens of this rank], after the head's forward."""
    vocabulary = parts_of_head(head)
    assert vocabulary is not None
    return vocabulary.joined(logits.reshape(-1, logits.shape[-1])).view(*logits.shape[:-1], -1)


def check_folder(folder: str | Path, ranks: int) -> int:
    """Check that the model of a folder can be divided among so many ranks, without its weights. Returns the width of the rows
    that are summed. Raises NotCut, ValueError or OSError."""
    config = configuration(folder)
    with torch.device("meta"):
        module = transformers.AutoModelForCausalLM.from_config(config)
    cuts_of(module)
    check_ranks(module, ranks)
    return int(config.get_text_config().hidden_size)


def load_part(folder: str | Path, dtype: torch.dtype, place: RankPlace) -> LoadedPart:
    """Load one rank's part of the model of a folder, into host memory. Raises ValueError: NotCut, or the reason why the folder
    cannot be read."""
    look_at_config(str(folder))
    config = configuration(folder)
    module = blank(config, dtype)
    cuts = cuts_of(module)
    check_ranks(module, place.ranks)
    shapes = {name: tuple(each.shape) for name, each in tensors_of(module)}
    parts = parts_of(cuts, shapes, *place[:2])
    if is_random(folder):
        draw_parts(module, parts, place.ranks)
    else:
        shrink(module, parts, place.ranks)
        read_parts(Path(folder), module, parts)
        if (generation := generation_configuration(folder)) is not None:
            module.generation_config = generation
        refuse_not_finite(module, str(folder))
    _divide_vocabulary(module, place)
    return LoadedPart(module.eval(), cuts, shapes)


def draw_parts(module: PreTrainedModel, parts: Mapping[str, Part], ranks: int) -> None:
    """Make a blank module one rank's part of the model that `random_weights.draw` makes."""
    initialise(module)
    small = {name: each.data for name, each in module.named_parameters() if each.ndim == 1}
    shrink(module, parts, ranks)
    for name, whole in small.items():
        module.get_parameter(name).data.copy_(parts[name].of(whole))
    fill(module, parts)


def shrink(module: PreTrainedModel, parts: Mapping[str, Part], ranks: int) -> None:
    """Give a blank module parameters of the parts' shapes, next to each other, and the numbers that follow from them."""
    kind = module.config.model_type
    divisions = [each for layer in module.base_model.layers for each in divisions_of(layer, kind)]
    likes = {name: torch.empty(parts[name].here, dtype=each.dtype, device="meta") for name, each in module.named_parameters()}
    starts, size = side_by_side(likes.values())
    memory = host_buffer(size, pin=False)
    for (name, like), start in zip(likes.items(), starts, strict=True):
        module.get_parameter(name).data = placed(memory, start, like)
    for each in module.modules():
        if type(each) is nn.Linear:
            each.out_features, each.in_features = each.weight.shape
    for division in divisions:
        division.fit(ranks)


def _divide_vocabulary(module: PreTrainedModel, place: RankPlace) -> None:
    embedding, head = module.get_input_embeddings(), module.get_output_embeddings()
    size = embedding.num_embeddings
    spans = [(size * rank // place.ranks, size * (rank + 1) // place.ranks) for rank in range(place.ranks)]
    head.vocabulary = embedding.vocabulary = VocabularyParts(spans, place)
    embedding.__class__ = EmbeddingPart
    head.register_forward_hook(_joined)
