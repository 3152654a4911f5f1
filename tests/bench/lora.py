"""`python -m tests.bench lora`: an adapter sent by `refresh_lora`, compared with PEFT's own merge.

The service samples with base + adapter. PEFT merges the same adapter in this process. The merged model, with `use_exact`,
scores the samples: log-probs and digests must be equal to the bit."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rollout.bench.fidelity import score
from rollout.bench.harness import BenchSetup, Row
from rollout.bench.target import connected
from rollout.client.lora import base_tensors, digest_of_tensors
from rollout.config import Config, InputError
from rollout.engine.forward.random_weights import load_module
from rollout.engine.values import Sampling
from rollout.exact import use_exact
from rollout.models import hide_progress_bars

RANK, ALPHA = 4, 32
"""as in recipes/grpo.py, for all linear layers of the decoder"""
PROMPTS, PROMPT_TOKENS, N, NEW_TOKENS = 4, 256, 4, 64


def measure(setup: BenchSetup) -> Iterator[Row]:
    """Yield the summary. max_abs_delta: of log-probs, over all tokens. bytes_fraction: bytes sent, over the bytes of the model.
    Raises InputError without PEFT."""
    if find_spec("peft") is None:
        raise InputError("peft is not installed: pip install 'rl-rollout[lora]'")
    engine = setup.config()
    prompts = setup.text.slices(0, PROMPTS, setup.scaled(PROMPT_TOKENS, 32))
    model = adapted(setup.folder, getattr(torch, engine.dtype))
    with connected(Config(engine=engine)) as (_, client):
        whole = client.refresh(base_tensors(model.get_base_model()))
        first, done = client.refresh_lora(model), client.refresh_lora(model)
        sampling = Sampling(n=N, max_tokens=setup.scaled(NEW_TOKENS, 32), ignore_eos=True, seed=0)
        groups = list(client.generate_groups(prompts, sampling, timeout=600))
        arithmetic = client.info.arithmetic
    merged = model.merge_and_unload().eval()
    digest = digest_of_tensors(base_tensors(merged))
    use_exact(merged, arithmetic, engine.block_tokens, engine.threads)
    rows = [(prompt, sample) for prompt, group in zip(prompts, groups, strict=True) for sample in group]
    service = np.concatenate([sample.logprobs for _, sample in rows]).astype(np.float64)
    yield {
        "summary": True,
        "dtype": engine.dtype,
        "arithmetic": arithmetic,
        "rank": RANK,
        "tokens": len(service),
        "max_abs_delta": float(np.abs(score(merged, rows) - service).max()),
        "same_digest": digest == done.digest,
        "bytes_fraction": done.sent_bytes / done.bytes,
        "model_bytes": done.bytes,
        "first_seconds": first.seconds,
        **{name: getattr(done, name) for name in ("sent_bytes", "seconds", "staged_seconds", "paused_seconds")},
        "whole_seconds": whole.seconds,
    }


def adapted(folder: Path, dtype: torch.dtype) -> Any:
    """Load a model as a PeftModel whose adapter has small random values."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    hide_progress_bars()
    model = load_module(folder, dtype=dtype)
    settings = LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules="all-linear", task_type="CAUSAL_LM")
    made = get_peft_model(model, settings)
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if ".lora_B." in name:
                parameter.normal_(std=2e-3)
    return made
