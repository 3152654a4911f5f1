"""Names under which checkpoints and composite models have the tensors of a module, by transformers' rules for loading.

model.language_model.layers.0.mlp.up_proj.weight    a tensor of the module, renamed: model.layers.0.mlp.up_proj.weight
model.visual.patch_embed.proj.weight, mtp.…         what the class declares as not its own: skipped
model.layers.0.mlp.experts.3.up_proj.weight         a part of a tensor: see `rollout.models.stacked_experts`
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from torch import nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key


class Found(NamedTuple):
    """What a published name stands for."""

    target: str
    """name of a tensor, in the module if it is one of its own"""
    converter: WeightConverter | None
    """makes the tensor of parts; None: it is renamed only"""
    pattern: str | None
    """of the converter: which of its parts this is"""


class PublishedNames:
    """The rules of one module. known: all names of its tensors."""

    def __init__(self, module: PreTrainedModel, known: Mapping[str, Any]) -> None:
        self._module = module
        self._known = known
        self._resolved: dict[str, Found] = {}
        """what the names of the newest checkpoint stand for"""
        self._begin()
        self._prefix = module.base_model_prefix
        patterns = {str(each) for each in module._keys_to_ignore_on_load_unexpected or ()}
        for ending, of_old in (("rotary_emb.inv_freq", r"rotary_emb\.inv_freq"), ("position_ids", r"(^|\.)position_ids$")):
            if any(name.endswith(ending) for name, _ in module.named_buffers()):
                patterns.add(of_old)  # as `PreTrainedModel._adjust_missing_and_unexpected_keys`
        self._ignored = re.compile("|".join(f"({each})" for each in sorted(patterns)) or "(?!)")

    def _begin(self) -> None:
        """Take rules that have seen no name: some go by the names before."""
        rules = get_model_conversion_mapping(self._module)
        self._renamings = [each for each in rules if isinstance(each, WeightRenaming)]
        self._converters = [each for each in rules if isinstance(each, WeightConverter)]
        self._by_pattern = {pattern: each for each in self._converters for pattern in each.source_patterns}

    def resolve(self, names: Iterable[str]) -> None:
        """Find what the names of one checkpoint stand for, in the order of `from_pretrained`, each once."""
        self._begin()
        self._resolved = {}
        self._resolved = {name: self.find(name) for name in sorted(names, key=dot_natural_key)}

    def find(self, name: str) -> Found:
        """Return what a name stands for."""
        if name in self._resolved:
            return self._resolved[name]
        target, pattern = rename_source_key(name, self._renamings, self._converters, self._prefix, self._known)
        if target not in self._known and name in self._known:
            return Found(name, None, None)
        return Found(target, None if pattern is None else self._by_pattern[pattern], pattern)

    def skipped(self, name: str) -> bool:
        """Return whether the class declares a name as not its own, so that `from_pretrained` ignores it."""
        found = self.find(name)
        return found.target not in self._known and self._ignored.search(found.target) is not None


def published_names(module: nn.Module | None, known: Mapping[str, Any]) -> PublishedNames | None:
    """Return the rules of a module; None: it is not transformers' own."""
    return PublishedNames(module, known) if isinstance(module, PreTrainedModel) else None
