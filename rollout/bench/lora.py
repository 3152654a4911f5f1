"""`rollout bench lora`: an adapter pushed by `refresh_lora`, against PEFT's own merge of it.

The service samples with base + adapter. PEFT merges the same adapter in this process; the merged model, with `use_exact`,
scores the samples and must agree in every bit, as must the digests of the weights.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from transformers import AutoModelForCausalLM

from engine.config import EngineConfig
from engine.types import Sampling
from rollout.bench.fidelity import score
from rollout.bench.inputs import PromptText
from rollout.client.api import RolloutClient
from rollout.client.lora import base_tensors, digest_of_tensors
from rollout.config import Config, InputError
from rollout.exact import use_exact
from rollout.models import hide_progress_bars
from rollout.process import service_process

NAME = "lora"
RANK, ALPHA = 4, 32
"""as in recipes/grpo.py, on all linear layers of the decoder"""
PROMPTS, PROMPT_TOKENS, N, NEW_TOKENS = 4, 256, 4, 64


def measure(folder: Path, engine: EngineConfig, text: PromptText, scale: float = 1.0) -> dict[str, Any]:
    """Return the summary. `max_abs_delta`: of log-probs, over all tokens. `bytes_fraction`: bytes that travelled over bytes of
    the model. Raises InputError without PEFT."""
    if find_spec("peft") is None:
        raise InputError("lora compares with PEFT's merge: pip install -e '.[lora]'")
    length, new = (max(32, round(tokens * scale)) for tokens in (PROMPT_TOKENS, NEW_TOKENS))
    prompts = text.slices(0, PROMPTS, length)
    model = adapted(folder, getattr(torch, engine.dtype))
    config = Config(engine=msgspec.structs.replace(engine, model=str(folder)))
    with service_process(config) as service, RolloutClient(service.endpoint, name="rollout bench") as client:
        whole = client.refresh(base_tensors(model.get_base_model()))
        first, done = client.refresh_lora(model), client.refresh_lora(model)
        sampling = Sampling(n=N, max_tokens=new, ignore_eos=True, seed=0)
        groups = list(client.generate_groups(prompts, sampling, timeout=600))
        arithmetic = client.info.arithmetic
    merged = model.merge_and_unload().eval()
    digest = digest_of_tensors(base_tensors(merged))
    use_exact(merged, arithmetic, engine.block_size, engine.threads)
    rows = [(prompt, sample) for prompt, group in zip(prompts, groups, strict=True) for sample in group]
    service_side = np.concatenate([sample.logprobs for _, sample in rows]).astype(np.float64)
    return {
        "workload": NAME,
        "summary": True,
        "dtype": engine.dtype,
        "arithmetic": arithmetic,
        "rank": RANK,
        "tokens": len(service_side),
        "max_abs_delta": float(np.abs(score(merged, rows) - service_side).max()),
        "same_digest": digest == done.digest,
        "bytes_fraction": done.sent_bytes / done.bytes,
        "sent_bytes": done.sent_bytes,
        "model_bytes": done.bytes,
        "first_seconds": first.seconds,
        "seconds": done.seconds,
        "staged_seconds": done.staged_seconds,
        "paused_seconds": done.paused_seconds,
        "whole_seconds": whole.seconds,
    }


def adapted(folder: Path, dtype: torch.dtype) -> Any:
    """Load a model as a PeftModel with an adapter of small random numbers."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    hide_progress_bars()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    settings = LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules="all-linear", task_type="CAUSAL_LM")
    made = get_peft_model(model, settings)
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if ".lora_B." in name:
                parameter.normal_(std=2e-3)
    return made
