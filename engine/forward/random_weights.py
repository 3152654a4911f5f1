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
    with no_init_weights():
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, **options)
    model.tie_weights()
    output = model.get_output_embeddings()
    chunks = []
    for name, weight in model.named_parameters():
        if weight.dim() > 1:
            weight._is_hf_initialized = True  # so that transformers leaves it alone
            deviation = (SPREAD if output is not None and weight is output.weight else 1.0) / math.sqrt(weight.shape[-1])
            chunks += [(each, f"{name}/{i}", deviation) for i, each in enumerate(weight.data.view(-1).split(CHUNK))]
    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        list(pool.map(_fill, *zip(*chunks, strict=True)))
    _initialise_the_rest(model)
    _turn_last_norm(model)
    return model.eval()


def _fill(numbers: torch.Tensor, name: str, deviation: float) -> None:
    drawn = _generator(name).random(numbers.numel(), dtype=np.float32)
    drawn -= np.float32(0.5)
    drawn *= np.float32(deviation * math.sqrt(12))
    numbers.copy_(torch.from_numpy(drawn))


def _seed(name: str) -> int:
    return xxhash.xxh3_64_intdigest(name.encode())


def _generator(name: str) -> np.random.Generator:
    return np.random.Generator(np.random.SFC64(_seed(name)))


@torch.no_grad()
def _initialise_the_rest(model: PreTrainedModel) -> None:
    """Let transformers initialise what is no matrix, each module from a seed of its own."""
    with torch.random.fork_rng(devices=[]), guard_torch_init_functions():
        for name, module in model.named_modules():
            torch.manual_seed(_seed(name) % 2**63)
            model._init_weights(module)


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
