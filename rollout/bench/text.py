"""Prompts of real text: consecutive slices of the shipped licence texts, tokenised with the model's own tokenizer."""

from __future__ import annotations

from importlib import resources
from typing import Any, Protocol

import numpy as np


class PromptSource(Protocol):
    """Where the prompts of a run come from."""

    def slices(self, start: int, count: int, length: int) -> list[np.ndarray]:
        """Return `count` prompts of [length] int32 ids; others for another `start`."""
        ...


class PromptText:
    """Token ids of the text as a ring: where it ends, it goes on from the start."""

    def __init__(self, tokenizer: Any) -> None:
        text = resources.files("rollout.bench").joinpath("licences.txt").read_text(encoding="utf-8")
        ids = tokenizer(" ".join(text.split()), add_special_tokens=False, verbose=False)["input_ids"]
        self.ids = np.array(ids, np.int32)

    def slices(self, start: int, count: int, length: int) -> list[np.ndarray]:
        """Return `count` slices of [length] int32 ids, one after the other from `start`. Runs that start where the last one
        ended get other prompts than it, so that no run finds another's prompts in the prefix index."""
        index = (start + np.arange(count * length)) % len(self.ids)
        return list(self.ids[index].reshape(count, length))


class RandomText:
    """Ids for a model without a tokenizer."""

    def __init__(self, vocabulary: int) -> None:
        self._vocabulary = vocabulary

    def slices(self, start: int, count: int, length: int) -> list[np.ndarray]:
        return list(np.random.default_rng(start).integers(3, self._vocabulary, (count, length), np.int32))
