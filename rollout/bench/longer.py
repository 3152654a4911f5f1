"""A model like the one at hand, with more positions or with a smaller vocabulary, and random weights.

What a token costs does not depend on what the weights say.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def long_enough(folder: Path, tokens: int) -> Iterator[tuple[Path, str]]:
    """Yield (folder, "its own") if the model of `folder` holds `tokens` positions; else a temporary folder and "random"."""
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
