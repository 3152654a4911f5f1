"""Reads tensors of a folder's safetensors: what is saved there, and parts of it, only the bytes that a rank needs.

Files may have other names than the module, and a tensor of each expert where the module has one of all. `from_pretrained`
renames and stacks them by rules (`rollout.engine.weights.published`); here the rules are applied to names alone, and `Stacked`
reads a part of what they make."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from transformers import PreTrainedModel
from transformers.core_model_loading import Concatenate, MergeModulelist, WeightConverter, dot_natural_key

from rollout.engine.model_files import INDEX, SINGLE, checkpoint_of
from rollout.engine.weights.cuts import Part
from rollout.engine.weights.layer_cuts import tensors_of
from rollout.engine.weights.published import PublishedNames
from rollout.engine.weights.rounding import RoundingLog, Roundings
from rollout.engine.weights.tensors import persistent_buffers

FLOATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""dtypes from which a float tensor is read as it is: others are codes, without the scales that belong to them"""
TIED_DIFFER = (
    "config.json ties {} to {}, and they differ in its files: set tie_word_embeddings to false there, or save the model again"
)


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


class Saved(NamedTuple):
    """A tensor in a file."""

    file: Path
    slice: Any
    """of safetensors"""
    read: Callable[[], torch.Tensor]
    """returns all of it, mapped while the file is open"""

    @property
    def dtype(self) -> str:
        """Return its dtype as safetensors name it, such as "BF16"."""
        return str(self.slice.get_dtype())

    @property
    def is_codes(self) -> bool:
        """Return whether it has another dtype than those of FLOATS."""
        return self.dtype not in FLOATS

    @property
    def torch_dtype(self) -> torch.dtype:
        """Return its dtype, of those in FLOATS."""
        return FLOATS[self.dtype]


class Source(NamedTuple):
    """Where a tensor of a module is: names in files, one list for each of what is one behind the other."""

    names: list[list[str]]
    stacked: bool
    """False: it is one tensor"""
    readable: bool = True
    """False: its rule does something else than to rename and to stack"""


class SavedTensors:
    """The tensors of a folder, while its files are open. Raises ValueError for a folder that has none or contradicts itself."""

    def __init__(self, folder: Path, opened: ExitStack) -> None:
        checkpoint = checkpoint_of(folder)
        if checkpoint is None:
            raise ValueError(
                f"model folder {str(folder)!r} has neither {INDEX} nor {SINGLE}: save the model with save_pretrained"
            )
        handles = {file: opened.enter_context(safe_open(file, framework="pt")) for file in checkpoint.files}
        checkpoint.check((file.name, name) for file, handle in handles.items() for name in handle.keys())  # noqa: SIM118
        self.by_name = {
            name: Saved(file, handle.get_slice(name), partial(handle.get_tensor, name))
            for file, handle in handles.items()
            for name in handle.keys()  # noqa: SIM118
        }

    def sources(self, module: PreTrainedModel) -> dict[str, Source]:
        """Return where the tensors of a module are, by the rules of `from_pretrained`."""
        return sources_of(module, self.by_name)

    def whole(self, source: Source) -> Any:
        """Return what reads a part of a tensor, as slices of safetensors do."""
        blocks = [[self.by_name[name].slice for name in block] for block in source.names]
        return Stacked(blocks) if source.stacked else blocks[0][0]


def read_parts(folder: Path, module: PreTrainedModel, parts: Mapping[str, Part]) -> None:
    """Read the parts of all tensors of a module, whose parameters have their shapes. Raises ValueError naming the tensor that
    is not there, has another shape or is not of floats."""
    with ExitStack() as opened:
        saved = SavedTensors(folder, opened)
        sources = saved.sources(module)
        tensors: dict[int, tuple[torch.Tensor, list[str]]] = {}
        rounded = Roundings()
        for name, tensor in tensors_of(module):
            tensors.setdefault(id(tensor), (tensor, []))[1].append(name)
        for tensor, names in tensors.values():
            found = next((name for name in names if name in sources), None)
            if found is None:
                raise ValueError(f"model folder {str(folder)!r}: {names[0]} is in none of its safetensors, by this name")
            source, part = sources[found], parts[found]
            check_source(found, source)
            check_codes(found, tensor, [saved.by_name[name] for block in source.names for name in block])
            whole = saved.whole(source)
            if tuple(whole.get_shape()) != part.shape:
                file = saved.by_name[source.names[0][0]].file
                raise ValueError(f"{file}: {found} has shape {tuple(whole.get_shape())}, and {part.shape} in config.json")
            sent = part.of(whole)
            rounded.add(found, sent.numel(), sent, tensor.data.copy_(sent))
            for other in names:
                if other == found or other not in sources:
                    continue
                check_source(other, sources[other])
                if not same_part(saved, sources[other], part, tensor):
                    raise ValueError(f"model folder {str(folder)!r}: {TIED_DIFFER.format(other, found)}")
    RoundingLog().say("load", rounded.found, frozenset(persistent_buffers(module)))


def same_part(saved: SavedTensors, source: Source, part: Part, tensor: torch.Tensor) -> bool:
    """Return whether a tensor that was read has the numbers of another source."""
    whole = saved.whole(source)
    return tuple(whole.get_shape()) == part.shape and torch.equal(part.of(whole).to(tensor.dtype), tensor.data)


def check_codes(name: str, tensor: torch.Tensor, saved: Iterable[Saved]) -> None:
    """Raise ValueError naming the file if a float tensor is saved as codes."""
    for each in saved:
        if tensor.is_floating_point() and each.is_codes:
            raise ValueError(
                f"{each.file}: {name} is saved as {each.dtype}: codes of a quantised model, whose scales are not read here: "
                "save the model in bfloat16 or float32"
            )


def check_source(name: str, source: Source) -> None:
    """Raise ValueError if a tensor of a module is not to be read from its source."""
    if not source.readable:
        raise ValueError(f"{name} lies in files in a form that ranks do not read: save the model with this transformers")
    if len({*map(len, source.names)}) > 1:
        counts = " and ".join(str(len(each)) for each in source.names)
        raise ValueError(f"the files of a model have, for {name}: {counts} experts")


def sources_of(module: PreTrainedModel, names: Iterable[str]) -> dict[str, Source]:
    """Return where the tensors of a module are, given the names in its files. A tensor under its own name is not looked for
    under others."""
    known = dict(tensors_of(module))
    rules = PublishedNames(module, known)
    found: dict[str, Source] = {}
    stacked: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    converters: dict[str, WeightConverter] = {}
    for name in sorted(names, key=dot_natural_key):
        target, converter, pattern = rules.find(name)
        if converter is None:
            found[target] = Source([[name]], stacked=False)
            continue
        assert pattern is not None
        for each in targets_of(target, converter, known):
            stacked[each][pattern].append(name)
            converters[each] = converter
    for target, of in stacked.items():
        rule = converters[target]
        kinds = [(type(each), each.dim) for each in rule.operations if isinstance(each, MergeModulelist | Concatenate)]
        readable = len(kinds) == len(rule.operations) and kinds in (
            [(MergeModulelist, 0)],
            [(MergeModulelist, 0), (Concatenate, 1)],
        )
        found[target] = Source([of.get(pattern, []) for pattern in rule.source_patterns], stacked=True, readable=readable)
    return found


def targets_of(first: str, converter: WeightConverter, known: Collection[str]) -> list[str]:
    """Return the tensors of a module that a rule makes together with the first one."""
    pattern, *others = converter.target_patterns
    before, found, after = first.partition(pattern)
    return [name for name in [first, *(before + each + after for each in others if found)] if name in known]
