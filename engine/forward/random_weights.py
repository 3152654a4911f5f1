"""Loads models with random weights from folders that have a configuration and no weights, for benchmarks and tests.

A folder that `rollout.engine.forward.shapes` marks gets its weights when it is loaded, in the dtype that is asked for. They
depend on the name and the shape of each tensor alone, and are the same on every machine: a model that is cut to its first
layers has the weights of the whole one, and float32 weights rounded to bfloat16 are the bfloat16 ones.

    matrices        uniform, of variance 1 / inputs
    output layer    uniform, such that logits have a standard deviation of SPREAD: distributions neither flat nor certain
    all else        as transformers initialises it, but about half of the last norm's weights have the other sign: a tied
                    embedding would else make the last token the likeliest
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
import xxhash
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.initialization import guard_torch_init_functions, no_init_weights

from rollout.engine.forward.shapes import is_random
from rollout.engine.weights.cuts import WHOLE, Part

SPREAD = 3.0
"""standard deviation of logits"""
CHUNK = 1 << 22
"""numbers that are drawn from one seed"""


def load_module(folder: str | Path, **options: Any) -> PreTrainedModel:
    """Load the module of a folder as `AutoModelForCausalLM.from_pretrained` does, or draw its weights. options: `dtype` and
    `attn_implementation`, as there."""
    if not is_random(folder):
        return AutoModelForCausalLM.from_pretrained(folder, **options)
    config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
    return draw(config, **options)


def draw(config: Any, dtype: torch.dtype, **options: Any) -> PreTrainedModel:
    """Make a causal language model of a configuration with random weights, in host memory. options: of `from_config`."""
    model = blank(config, dtype, **options)
    initialise(model)
    fill(model, {name: Part(tuple(weight.shape), WHOLE, 0, 1) for name, weight in model.named_parameters()})
    return model.eval()


def blank(config: Any, dtype: torch.dtype, **options: Any) -> PreTrainedModel:
    """Make the same without values: memory of its weights is reserved, and none of it is used yet."""
    with no_init_weights():
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, **options)
    model.tie_weights()
    return model


def fill(model: PreTrainedModel, parts: Mapping[str, Part]) -> None:
    """Draw the matrices of a model whose parameters are these parts of whole ones, by name."""
    output = model.get_output_embeddings()
    chunks = []
    for name, weight in model.named_parameters():
        if weight.dim() > 1:
            shape = parts[name].shape
            deviation = (SPREAD if output is not None and weight is output.weight else 1.0) / math.sqrt(shape[-1])
            count = -(-math.prod(shape) // CHUNK)
            chunks += [(weight.data, parts[name], i, f"{name}/{i}", deviation) for i in range(count)]
    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        list(pool.map(_fill, *zip(*chunks, strict=True)))


def _fill(weight: torch.Tensor, part: Part, number: int, name: str, deviation: float) -> None:
    """Draw chunk `number` of a whole tensor, and keep what the part has of it."""
    start = number * CHUNK
    size = min(CHUNK, math.prod(part.shape) - start)
    if not part.touches(start, size):
        return
    drawn = _generator(name).random(size, dtype=np.float32)
    drawn -= np.float32(0.5)
    drawn *= np.float32(deviation * math.sqrt(12))
    for numbers, here in part.overlap(torch.from_numpy(drawn), start, weight):
        here.copy_(numbers)


def _seed(name: str) -> int:
    return xxhash.xxh3_64_intdigest(name.encode())


def _generator(name: str) -> np.random.Generator:
    return np.random.Generator(np.random.SFC64(_seed(name)))


@torch.no_grad()
def initialise(model: PreTrainedModel) -> None:
    """Let transformers initialise what is no matrix in a blank model, each module from a seed of its own."""
    for weight in model.parameters():
        weight._is_hf_initialized = weight.dim() > 1  # transformers leaves it alone  # pyright: ignore
    with torch.random.fork_rng(devices=[]), guard_torch_init_functions():
        for name, module in model.named_modules():
            torch.manual_seed(_seed(name) % 2**63)
            model._init_weights(module)
    _turn_last_norm(model)


@torch.no_grad()
def _turn_last_norm(model: PreTrainedModel) -> None:
    """Change the sign of about half of the weights of the norm before the output layer: 1 becomes -1, also where the weight is
    stored as its difference from 1."""
    hidden = model.config.get_text_config().hidden_size
    for name, child in model.base_model.named_children():
        weight = getattr(child, "weight", None)
        if isinstance(weight, torch.Tensor) and weight.shape == (hidden,):
            turned = _generator(f"{name}/sign").random(hidden) < 0.5
            weight[torch.from_numpy(turned)] -= 2
