"""A model for sequences longer than the one at hand can hold: the same architecture, more positions, random weights.

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
        _write_random(folder, tokens, Path(name))
        yield Path(name), "random"


def _write_random(folder: Path, tokens: int, target: Path) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(folder, local_files_only=True)
    config.get_text_config().max_position_embeddings = tokens
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(target)
