"""`rollout bench fidelity`: how far the service's log-probs are from a trainer's forward of the same weights.

Samples come through the whole service. Forwards over prompt + tokens score them: with `use_exact`, which must agree in every
bit; with plain transformers in the service's dtype, alone and several to a batch, which shows how far plain torch is from
itself; and in fp32.

With `kv_dtype = "fp8_e4m3"` no trainer has the service's bits. There `use_exact` has those that the service would have with KV
in the model's dtype, so that `exact` is what fp8 changes, and `…_kv16` are the other differences without it, on the same
tokens.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from engine.config import EngineConfig
from engine.forward.arithmetic import without_fp8
from engine.types import Sample, Sampling
from rollout.bench.inputs import PromptText
from rollout.bench.target import OpenTarget
from rollout.config import Config
from rollout.exact import sample_logprobs, use_exact

NAME = "fidelity"
PROMPTS, PROMPT_TOKENS, N, NEW_TOKENS = 8, 512, 4, 128
BATCH = 4
"""samples of a forward, where plain torch is compared with itself"""


def measure(
    text: PromptText, engine: EngineConfig, folder: Path, open_target: OpenTarget, scale: float = 1.0
) -> dict[str, Any]:
    """Return the summary. Differences are trainer - service, over all tokens."""
    length, new = (max(32, round(tokens * scale)) for tokens in (PROMPT_TOKENS, NEW_TOKENS))
    prompts = text.slices(0, PROMPTS, length)
    sampling = Sampling(n=N, max_tokens=new, temperature=1.0, ignore_eos=True, seed=0)
    with open_target(Config(engine=engine)) as target:
        samples = list(target.generate(prompts, sampling))
        status, name = target.status(), target.name
    samples.sort(key=lambda sample: (int(sample.group_id.lstrip("#")), sample.index))
    numbers = sorted({int(sample.group_id.lstrip("#")) for sample in samples})
    rows = [(prompts[numbers.index(int(sample.group_id.lstrip("#")))], sample) for sample in samples]
    service = np.concatenate([sample.logprobs for sample in samples]).astype(np.float64)
    dtype = getattr(torch, engine.dtype)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="sdpa").eval()
    plain, together = score(model, rows), score(model, rows, BATCH)
    use_exact(model, without_fp8(status["arithmetic"]), engine.block_size, engine.threads)
    exact = score(model, rows)
    truth = score(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa").eval(), rows)
    return {
        "workload": NAME,
        "summary": True,
        "engine": name,
        "arithmetic": status["arithmetic"],
        "torch_bits": status["torch_bits"],
        "attention": status["attention"],
        "dtype": engine.dtype,
        "kv_dtype": status["kv"]["dtype"],
        "tokens": len(service),
        **compare("exact", exact, service),
        **compare("plain", plain, service),
        **compare("plain_self", together, plain),
        **compare("fp32", truth, service),
        **compare("plain_fp32", truth, plain),
        **(compare("plain_kv16", plain, exact) | compare("fp32_kv16", truth, exact) if engine.kv_dtype != "auto" else {}),
    }


def score(model: Any, rows: list[tuple[np.ndarray, Sample]], batch: int = 1) -> np.ndarray:
    """Return [tokens] float64 log-probs of every sample's tokens, `batch` samples a forward, padded on the right."""
    scores: list[torch.Tensor] = []
    with torch.inference_mode():
        for first in range(0, len(rows), batch):
            scores += sample_logprobs(model, [(prompt, sample.token_ids) for prompt, sample in rows[first : first + batch]])
    return torch.cat(scores).double().numpy()


def compare(name: str, trainer: np.ndarray, service: np.ndarray) -> dict[str, float]:
    """Return mean and max |Δ|, k3 (Schulman 2020: mean of r - 1 - log r), and the share of ratios outside [0.9, 1.1]."""
    difference = trainer - service
    ratio = np.exp(difference)
    return {
        f"mean_abs_{name}": float(np.abs(difference).mean()),
        f"max_abs_{name}": float(np.abs(difference).max()),
        f"k3_{name}": float((ratio - 1 - difference).mean()),
        f"outside_{name}": float(((ratio < 0.9) | (ratio > 1.1)).mean()),
    }
