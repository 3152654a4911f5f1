"""Inputs of benchmarks: prompts, lengths and models, the same ones in every run of a command."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import resources
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np

from rollout.engine.forward.shapes import is_random


def lognormal(rows: int, median: int, longest: int, seed: int = 0) -> np.ndarray:
    """Draw lognormal lengths with sigma 1, at least 1 and at most `longest`: [rows] int32."""
    drawn = np.random.default_rng(seed).normal(np.log(median), 1, rows)
    return np.clip(np.exp(drawn), 1, longest).astype(np.int32)


class PromptSource(Protocol):
    def slices(self, start: int, count: int, length: int) -> list[np.ndarray]:
        """Return `count` prompts of [length] int32 ids. They depend on `start`, which may be negative."""
        ...


class PromptText:
    """Token ids of `licences.txt` by a model's tokenizer, as a ring: after the last token comes the first."""

    def __init__(self, tokenizer: Any) -> None:
        text = resources.files("rollout.bench").joinpath("licences.txt").read_text(encoding="utf-8")
        ids = tokenizer(" ".join(text.split()), add_special_tokens=False, verbose=False)["input_ids"]
        self.ids = np.array(ids, np.int32)

    def slices(self, start: int, count: int, length: int) -> list[np.ndarray]:
        """Return `count` consecutive slices of [length] int32 ids from `start` on. A run that starts where the previous one
        ended finds none of its prompts in the prefix index."""
        index = (start + np.arange(count * length)) % len(self.ids)
        return list(self.ids[index].reshape(count, length))


class RandomText:
    """Random ids, for a model without a tokenizer. Each start has its own."""

    def __init__(self, vocabulary: int) -> None:
        self._vocabulary = vocabulary

    def slices(self, start: int, count: int, length: int) -> list[np.ndarray]:
        return list(np.random.default_rng(start % 2**63).integers(3, self._vocabulary, (count, length), np.int32))


def stored_weights(folder: Path) -> dict[str, Any]:
    """Load the tensors of a model's safetensors files, by name; in bfloat16 those of a folder without files."""
    import torch
    from safetensors.torch import load_file

    if is_random(folder):
        from rollout.engine.forward.random_weights import load_module

        return dict(load_module(folder, dtype=torch.bfloat16).named_parameters())

    return {name: tensor for path in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(path).items()}


def save_tiny(folder: Path, hidden: int, vocabulary: int, dtype: Literal["bfloat16", "float32"]) -> Path:
    """Save a Llama of two layers with random weights and no tokenizer, for benchmarks of the work around the model. Returns the
    folder."""
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
    """Yield (folder, "its own") if the model has `tokens` positions, else (temporary folder, "random"): the same model with
    more positions and random weights. The cost of a token does not depend on the weights."""
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
    """Yield a temporary folder with the same decoder, a vocabulary of `size` tokens, no stop tokens and random weights."""
    with tempfile.TemporaryDirectory(prefix="rollout-bench-") as name:
        _write_random(folder, Path(name), vocab_size=size, bos_token_id=None, eos_token_id=None, pad_token_id=None)
        yield Path(name)


def _write_random(folder: Path, target: Path, **changed: int | None) -> None:
    from transformers import AutoConfig

    from rollout.engine.forward.shapes import write_configuration

    config = AutoConfig.from_pretrained(folder, local_files_only=True)
    for name, value in changed.items():
        setattr(config.get_text_config(), name, value)
    write_configuration(config, target)
