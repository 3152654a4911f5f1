"""`rollout bench fidelity`: difference between the service's log-probs and a trainer's forward with the same weights.

Three forwards score samples of the service: `exact`, with `use_exact`, whose difference must be 0; `plain`, transformers in the
service's dtype (`plain_self`: against itself with BATCH samples per forward); and `fp32`.

With `kv_dtype = "fp8_e4m3"` no trainer has the service's bits. `exact` then computes with KV in the model's dtype, so its
difference is the effect of fp8; `…_kv16` are the differences of the other forwards from it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from rollout.bench.harness import BenchSetup, Row
from rollout.config import Config
from rollout.engine.forward.random_weights import load_module
from rollout.engine.values import Sample, Sampling
from rollout.engine.values.arithmetic import Arithmetic
from rollout.exact import sample_logprobs, use_exact

PROMPTS, PROMPT_TOKENS, N, NEW_TOKENS = 8, 512, 4, 128
BATCH = 4


def measure(setup: BenchSetup) -> Iterator[Row]:
    """Yield the summary. Differences are trainer - service, over all tokens."""
    length, new = setup.scaled(PROMPT_TOKENS, 32), setup.scaled(NEW_TOKENS, 32)
    engine = setup.config(kv_tokens=PROMPTS * N * (length + new + 64), cpu_offload_gib=0)
    prompts = setup.text.slices(0, PROMPTS, length)
    sampling = Sampling(n=N, max_tokens=new, temperature=1.0, ignore_eos=True, seed=0)
    with setup.open_target(Config(engine=engine)) as target:
        samples = list(target.generate(prompts, sampling))
        status, name = target.status(), target.name
    samples.sort(key=lambda sample: (number_of(sample), sample.index))
    numbers = sorted({number_of(sample) for sample in samples})
    rows = [(prompts[numbers.index(number_of(sample))], sample) for sample in samples]
    service = np.concatenate([sample.logprobs for sample in samples]).astype(np.float64)

    def load(dtype: torch.dtype) -> Any:
        return load_module(setup.folder, dtype=dtype, attn_implementation="sdpa").eval()

    model = load(getattr(torch, engine.dtype))
    plain, together = score(model, rows), score(model, rows, BATCH)
    use_exact(model, str(Arithmetic.parse(status["arithmetic"])._replace(fp8=False)), engine.block_tokens, engine.threads)
    exact, truth = score(model, rows), score(load(torch.float32), rows)
    yield {
        "summary": True,
        "engine": name,
        **{key: status[key] for key in ("arithmetic", "torch_bits", "attention")},
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


def number_of(sample: Sample) -> int:
    return int(sample.group_id.lstrip("#"))


def score(model: Any, rows: list[tuple[np.ndarray, Sample]], batch: int = 1) -> np.ndarray:
    """Return the log-probs of all samples' tokens, [tokens] float64, with `batch` samples per forward, padded on the right."""
    scores: list[torch.Tensor] = []
    with torch.inference_mode():
        for first in range(0, len(rows), batch):
            scores += sample_logprobs(model, [(prompt, sample.token_ids) for prompt, sample in rows[first : first + batch]])
    return torch.cat(scores).double().numpy()


def compare(name: str, trainer: np.ndarray, service: np.ndarray) -> dict[str, float]:
    """Return mean and max |Δ|, k3 (Schulman 2020: mean of r - 1 - log r), and the fraction of ratios outside [0.9, 1.1]."""
    difference = trainer - service
    ratio = np.exp(difference)
    return {
        f"mean_abs_{name}": float(np.abs(difference).mean()),
        f"max_abs_{name}": float(np.abs(difference).max()),
        f"k3_{name}": float((ratio - 1 - difference).mean()),
        f"outside_{name}": float(((ratio < 0.9) | (ratio > 1.1)).mean()),
    }
