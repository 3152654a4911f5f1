"""`rollout bench fidelity`: how far the service's log-probs are from a trainer's forward of the same weights.

Samples come through the whole service; plain transformers forwards over prompt + tokens score them: with the attention that
transformers would choose (sdpa) in bf16 and fp32, and with ours (`rollout.trainer_attention`), which must agree to the bit.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from transformers import AutoModelForCausalLM

from engine.config import EngineConfig
from engine.request import Sample, Sampling
from rollout.bench.target import OpenTarget
from rollout.bench.text import PromptText
from rollout.config import Config
from rollout.trainer_attention import trainer_attention

NAME = "fidelity"
PROMPTS, PROMPT_TOKENS, N, NEW_TOKENS = 8, 512, 4, 128


def measure(
    text: PromptText, engine: EngineConfig, folder: Path, open_target: OpenTarget, scale: float = 1.0
) -> dict[str, Any]:
    """The summary object. Differences are trainer - service, over all tokens."""
    length, new = (max(32, round(tokens * scale)) for tokens in (PROMPT_TOKENS, NEW_TOKENS))
    prompts = text.slices(0, PROMPTS, length)
    sampling = Sampling(n=N, max_tokens=new, temperature=1.0, ignore_eos=True, seed=0)
    with open_target(Config(engine=engine)) as target:
        samples = list(target.generate(prompts, sampling))
        attention, name = target.status()["attention"], target.name
    samples.sort(key=lambda sample: (int(sample.group_id.lstrip("#")), sample.index))
    numbers = sorted({int(sample.group_id.lstrip("#")) for sample in samples})
    rows = [(prompts[numbers.index(int(sample.group_id.lstrip("#")))], sample) for sample in samples]
    service = np.concatenate([sample.logprobs for sample in samples]).astype(np.float64)
    dtype = getattr(torch, engine.dtype)
    own = score(folder, dtype, trainer_attention(engine.block_size, engine.threads), rows)
    sdpa, truth = score(folder, dtype, "sdpa", rows), score(folder, torch.float32, "sdpa", rows)
    return {
        "workload": NAME,
        "summary": True,
        "engine": name,
        "attention": attention,
        "dtype": engine.dtype,
        "tokens": len(service),
        **compare("own_attention", own, service),
        **compare("sdpa", sdpa, service),
        **compare("fp32", truth, service),
        **compare("trainer_own", truth, sdpa),
    }


def print_summary(console: Console, row: dict[str, Any]) -> None:
    console.print(f"fidelity: {row['tokens']} tokens of the service ({row['dtype']}, {row['attention']} attention)")
    for name, what in (
        ("own_attention", "trainer's forward with the service's attention"),
        ("sdpa", f"trainer's forward in {row['dtype']}, sdpa"),
        ("fp32", "trainer's forward in fp32, sdpa"),
        ("trainer_own", "for comparison, these two forwards from each other"),
    ):
        console.print(
            f"  {what}: |Δ log-prob| mean {row['mean_abs_' + name]:.2e}, max {row['max_abs_' + name]:.2e}, "
            f"k3 {row['k3_' + name]:.1e}, ratios outside [0.9, 1.1] {100 * row['outside_' + name]:.1f} %"
        )


def score(folder: Path, dtype: torch.dtype, attention: str, rows: list[tuple[np.ndarray, Sample]]) -> np.ndarray:
    """[tokens] float64 log-probs of every sample's tokens, one plain forward a sample."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation=attention).eval()
    scores = []
    with torch.inference_mode():
        for prompt, sample in rows:
            ids = torch.from_numpy(np.concatenate([prompt, sample.token_ids]).astype(np.int64))[None]
            logits = model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1].float()
            drawn = torch.from_numpy(sample.token_ids.astype(np.int64))[:, None]
            scores.append(logits.log_softmax(-1).gather(-1, drawn)[:, 0].numpy())
    return np.concatenate(scores).astype(np.float64)


def compare(name: str, trainer: np.ndarray, service: np.ndarray) -> dict[str, float]:
    """mean and max |Δ|, k3 (Schulman 2020: mean of r - 1 - log r), and the share of ratios outside [0.9, 1.1]."""
    difference = trainer - service
    ratio = np.exp(difference)
    return {
        f"mean_abs_{name}": float(np.abs(difference).mean()),
        f"max_abs_{name}": float(np.abs(difference).max()),
        f"k3_{name}": float((ratio - 1 - difference).mean()),
        f"outside_{name}": float(((ratio < 0.9) | (ratio > 1.1)).mean()),
    }
