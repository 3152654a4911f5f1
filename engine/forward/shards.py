"""Loads one rank's part of a model (`rollout.engine.weights.cuts`): no rank holds the whole model at any time.

The module is transformers' own with smaller products: its attention has fewer heads, its MLP fewer numbers. Three places
exchange something with the other ranks: the embedding, of which each rank has some tokens; the head, whose logits are gathered;
and o and down, whose sums are those of all ranks (`rollout.engine.cpu.sums`)."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from safetensors import safe_open
from torch import nn
from transformers import GenerationConfig, PreTrainedModel

from rollout.engine.forward.random_weights import blank, fill
from rollout.engine.forward.shapes import is_random
from rollout.engine.memory import host_buffer, placed, side_by_side
from rollout.engine.weights.cuts import Cut, Part, check_ranks, counts_of, cuts_of, parts_of

Gather = Callable[[torch.Tensor, Sequence[Sequence[int]]], list[torch.Tensor]]
"""takes a tensor and the shapes of those that all ranks give, and returns these, in the order of the ranks"""
INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"


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
    config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
    with torch.device("meta"):
        module = transformers.AutoModelForCausalLM.from_config(config)
    cuts_of(module)
    check_ranks(module, ranks)
    return int(config.get_text_config().hidden_size)


def load_part(folder: str | Path, dtype: torch.dtype, place: RankPlace) -> LoadedPart:
    """Load one rank's part of the model of a folder, into host memory. Raises ValueError: NotCut, or the reason why the folder
    cannot be read."""
    config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
    module = blank(config, dtype)
    cuts = cuts_of(module)
    check_ranks(module, place.ranks)
    shapes = {name: tuple(each.shape) for name, each in module.named_parameters(remove_duplicate=False)}
    parts = parts_of(cuts, shapes, *place[:2])
    _shrink(module, parts)
    _divide_vocabulary(module, place)
    if is_random(folder):
        fill(module, parts)
    else:
        read_parts(Path(folder), dict(module.named_parameters(remove_duplicate=False)), parts)
        if (Path(folder) / "generation_config.json").is_file():
            module.generation_config = GenerationConfig.from_pretrained(folder, local_files_only=True)
    return LoadedPart(module.eval(), cuts, shapes)


def _shrink(module: PreTrainedModel, parts: Mapping[str, Part]) -> None:
    """Give a blank module parameters of the parts' shapes, next to each other, and the numbers that follow from them."""
    likes = {name: torch.empty(parts[name].here, dtype=each.dtype, device="meta") for name, each in module.named_parameters()}
    starts, size = side_by_side(likes.values())
    memory = host_buffer(size, pin=False)
    for (name, like), start in zip(likes.items(), starts, strict=True):
        module.get_parameter(name).data = placed(memory, start, like)
    for each in module.modules():
        if type(each) is nn.Linear:
            each.out_features, each.in_features = each.weight.shape
    for layer in module.base_model.layers:
        counts = counts_of(layer)
        assert counts is not None
        layer.self_attn.num_key_value_groups = counts.heads // counts.kv_heads


def _divide_vocabulary(module: PreTrainedModel, place: RankPlace) -> None:
    embedding, head = module.get_input_embeddings(), module.get_output_embeddings()
    size = embedding.num_embeddings
    spans = [(size * rank // place.ranks, size * (rank + 1) // place.ranks) for rank in range(place.ranks)]
    head.vocabulary = embedding.vocabulary = VocabularyParts(spans, place)
    embedding.__class__ = EmbeddingPart
    head.register_forward_hook(_joined)


def read_parts(folder: Path, parameters: Mapping[str, torch.Tensor], parts: Mapping[str, Part]) -> None:
    """Read the parts of tensors from a folder's safetensors, only the bytes that they need. parameters: by all their names, of
    tied ones too. Raises ValueError naming the tensor that is not there or has another shape."""
    names: dict[int, list[str]] = {}
    for name, parameter in parameters.items():
        names.setdefault(id(parameter), []).append(name)
    files = _files(folder)
    wanted: dict[Path, list[str]] = {}
    for same in names.values():
        found = next((name for name in same if name in files), None)
        if found is None:
            raise ValueError(f"model folder {str(folder)!r}: {same[0]} is in none of its safetensors, by this name")
        wanted.setdefault(files[found], []).append(found)
    for file, here in wanted.items():
        with safe_open(file, framework="pt") as opened:
            for name in here:
                whole, part = opened.get_slice(name), parts[name]
                if tuple(whole.get_shape()) != part.shape:
                    raise ValueError(f"{file}: {name} has shape {tuple(whole.get_shape())}, and {part.shape} in config.json")
                parameters[name].data.copy_(whole[part.where()] if part.where() else whole[:])


def _files(folder: Path) -> dict[str, Path]:
    """Return the file of each tensor of a folder. Raises ValueError."""
    if (index := folder / INDEX).is_file():
        return {name: folder / file for name, file in json.loads(index.read_text())["weight_map"].items()}
    if not (single := folder / SINGLE).is_file():
        raise ValueError(f"model folder {str(folder)!r} has neither {INDEX} nor {SINGLE}: save the model with save_pretrained")
    with safe_open(single, framework="pt") as opened:
        return dict.fromkeys(opened.keys(), single)
