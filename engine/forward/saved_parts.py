"""Reads parts of tensors from a folder's safetensors: only the bytes that a rank needs.

Files may have other names than the module, and a tensor of each expert where the module has one of all. `from_pretrained`
renames and stacks them by rules; here the rules are applied to names alone, and `Stacked` reads a part of what they make."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)

from rollout.engine.weights.cuts import Part
from rollout.engine.weights.layer_cuts import tensors_of

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"


class Stacked:
    """A tensor [experts, rows, …] that lies in files as matrices of each expert, such as gates and ups, whose rows are one
    behind the other in it. It is read as slices of safetensors are. blocks: slices of all experts, for gates and for ups."""

    def __init__(self, blocks: list[list[Any]]) -> None:
        self.blocks = blocks

    def get_shape(self) -> list[int]:
        shapes = [block[0].get_shape() for block in self.blocks]
        return [len(self.blocks[0]), sum(shape[0] for shape in shapes), *shapes[0][1:]]

    def __getitem__(self, index: Any) -> torch.Tensor:
        """Return all experts' rows, or columns, of a range. index: slice(None) for each dimension before it."""
        if index == slice(None):
            index = (index, index)
        experts, rows, *columns = index
        assert experts == slice(None), "experts are not divided"
        found, at, shape = [], 0, self.get_shape()
        for block in self.blocks:
            size = block[0].get_shape()[0]
            first, last, _ = rows.indices(shape[1])
            low, high = max(first, at), min(last, at + size)
            if low < high:
                found.append(torch.stack([each[low - at : high - at, *columns] for each in block]))
            at += size
        return torch.cat(found, 1)


class Source(NamedTuple):
    """Where a tensor of a module is: names in files, one list for each of what is one behind the other."""

    names: list[list[str]]
    stacked: bool


def read_parts(folder: Path, module: PreTrainedModel, parts: Mapping[str, Part]) -> None:
    """Read the parts of all tensors of a module, whose parameters have their shapes. Raises ValueError naming the tensor that
    is not there or has another shape."""
    with ExitStack() as opened:
        slices: dict[str, Any] = {}
        for file, names in _files(folder).items():
            handle = opened.enter_context(safe_open(file, framework="pt"))
            slices |= {name: (handle, file) for name in names or handle.keys()}
        sources = _sources(module, list(slices))
        tensors: dict[int, tuple[torch.Tensor, list[str]]] = {}
        for name, tensor in tensors_of(module):
            tensors.setdefault(id(tensor), (tensor, []))[1].append(name)
        for tensor, names in tensors.values():
            found = next((name for name in names if name in sources), None)
            if found is None:
                raise ValueError(f"model folder {str(folder)!r}: {names[0]} is in none of its safetensors, by this name")
            source, part = sources[found], parts[found]
            blocks = [[slices[name][0].get_slice(name) for name in block] for block in source.names]
            whole = Stacked(blocks) if source.stacked else blocks[0][0]
            if tuple(whole.get_shape()) != part.shape:
                file = slices[source.names[0][0]][1]
                raise ValueError(f"{file}: {found} has shape {tuple(whole.get_shape())}, and {part.shape} in config.json")
            tensor.data.copy_(part.of(whole))


def _sources(module: PreTrainedModel, names: Sequence[str]) -> dict[str, Source]:
    """Return where the tensors of a module are, given the names in its files, by the rules of `from_pretrained`. Raises
    ValueError for a rule that does something else than to rename and to stack."""
    rules = get_model_conversion_mapping(module)
    renamings = [each for each in rules if isinstance(each, WeightRenaming)]
    converters = [each for each in rules if isinstance(each, WeightConverter)]
    by_pattern = {pattern: each for each in converters for pattern in each.source_patterns}
    known, prefix = dict(tensors_of(module)), module.base_model_prefix
    found: dict[str, Source] = {}
    stacked: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for name in sorted(names, key=dot_natural_key):
        target, pattern = rename_source_key(name, renamings, converters, prefix, known)
        if target not in known and name in known:
            target, pattern = name, None
        if pattern is None:
            found[target] = Source([[name]], stacked=False)
        elif target in known:
            stacked[target][pattern].append(name)
    for target, of in stacked.items():
        rule = by_pattern[next(iter(of))]
        kinds = [(type(each), each.dim) for each in rule.operations if isinstance(each, MergeModulelist | Concatenate)]
        if len(kinds) < len(rule.operations) or kinds not in ([(MergeModulelist, 0)], [(MergeModulelist, 0), (Concatenate, 1)]):
            raise ValueError(f"{target} lies in files in a form that ranks do not read: save the model with this transformers")
        blocks = [of.get(pattern, []) for pattern in rule.source_patterns]
        if len({*map(len, blocks)}) > 1:
            raise ValueError(
                f"the files of a model have, for {target}: {' and '.join(str(len(each)) for each in blocks)} experts"
            )
        found[target] = Source(blocks, stacked=True)
    return found


def _files(folder: Path) -> dict[Path, list[str]]:
    """Return the files of a folder and the tensors in each; none listed: all that it has. Raises ValueError."""
    if (index := folder / INDEX).is_file():
        files: dict[Path, list[str]] = defaultdict(list)
        for name, file in json.loads(index.read_text())["weight_map"].items():
            files[folder / file].append(name)
        return files
    if not (single := folder / SINGLE).is_file():
        raise ValueError(f"model folder {str(folder)!r} has neither {INDEX} nor {SINGLE}: save the model with save_pretrained")
    return {single: []}
