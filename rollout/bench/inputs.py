"""What benchmarks run on: prompts, lengths and models, the same ones at every call."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import resources
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np


def lognormal(rows: int, median: int, longest: int, seed: int = 0) -> np.ndarray:
    """Draw lognormal lengths with sigma 1, at least 1 and at most `longest`: [rows] int32."""
    drawn = np.random.default_rng(seed).normal(np.log(median), 1, rows)
    return np.clip(np.exp(drawn), 1, longest).astype(np.int32)


class PromptSource(Protocol):
    """Where the prompts of a run come from."""

    def slices(self, start: int, count: int, length: int) -> list[np.ndarray]:
        """Return `count` prompts of [length] int32 ids; others for another `start`."""
        ...


class PromptText:
    """Token ids of the licence texts beside this file, by the model's own tokenizer, as a ring: where the text ends, it goes on
    from the start."""

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


def save_tiny(folder: Path, hidden: int, vocabulary: int, dtype: Literal["bfloat16", "float32"]) -> Path:
    """Save a Llama of two layers with random weights, without a tokenizer, for what does not depend on the engine's speed.
    Returns its folder."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocabulary, hidden_size=hidden, intermediate_size=2 * hidden, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=4096, bos_token_id=1, eos_token_id=2, dtype=dtype,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@contextmanager
def long_enough(folder: Path, tokens: int) -> Iterator[tuple[Path, str]]:
    """Yield (folder, "its own") if the model of `folder` holds `tokens` positions; else (a temporary folder with one like it
    that does, "random"). What a token costs does not depend on what the weights are."""
    config = json.loads((folder / "config.json").read_text())
    positions = config.get("text_config", config)["max_position_embeddings"]
    if tokens <= positions:
        yield folder, "its own"
        return
    with tempfile.TemporaryDirectory(prefix="rollout-bench-") as name:
        _write_random(folder, Path(name), max_position_embeddings=tokens)
        yield Path(name), "random"


@contextmanager
def of_vocabulary(folder: Path, size: int) -> Iterator[Path]:
    """Yield a temporary folder of the same decoder with `size` tokens in its vocabulary, of which none ends a sample."""
    with tempfile.TemporaryDirectory(prefix="rollout-bench-") as name:
        _write_random(folder, Path(name), vocab_size=size, bos_token_id=None, eos_token_id=None, pad_token_id=None)
        yield Path(name)


def _write_random(folder: Path, target: Path, **changed: int | None) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(folder, local_files_only=True)
    for name, value in changed.items():
        setattr(config.get_text_config(), name, value)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(target)
