"""`python -m tests.bench int8`: weights in eight bits beside those in the model's dtype, in one process, on the same weights.

For each number of sequences, decode steps of both engines in turn:

    milliseconds, int8_milliseconds   of a step, medians over `--repeat` rounds
    speedup                           their ratio

With one thread, CPU time counts.

Then what it costs, on a text and on samples of the engine in eight bits:

    mean_abs, max_abs      |Δ log-prob| of a trainer's exact forward in eight bits against one in the model's dtype, on the text
    perplexity, int8_…     of the text
    …_exact                |Δ log-prob|, k3 and ratios outside [0.9, 1.1] of samples: a trainer with `use_exact` against the
                           engine; 0
    …_plain                the same of a trainer that computes in the model's dtype
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from statistics import median
from typing import Any

import numpy as np
import torch

from rollout.bench.fidelity import compare
from rollout.bench.harness import BenchSetup, Row
from rollout.engine.engine import Engine
from rollout.engine.forward.model import Model
from rollout.engine.forward.random_weights import load_module
from rollout.engine.values import Group, Sample, Sampling
from rollout.engine.values.arithmetic import Arithmetic
from rollout.exact import sample_logprobs, use_exact

ROWS = (1, 2, 4, 8)
"""sequences that decode"""
PROMPT, STEPS = 32, 24
"""tokens of a sequence's prompt; decode steps of a round"""
TEXTS, TEXT_TOKENS = 8, 320
"""pieces of the text that are scored, and the tokens of each; the first PROMPT count as given"""
N, NEW_TOKENS = 4, 64
"""samples of a prompt whose log-probs are compared, and the tokens of each"""
Sequences = list[tuple[np.ndarray, np.ndarray]]


def measure(setup: BenchSetup) -> Iterator[Row]:
    """Yield a row per number of sequences, then the summary. `--scale` multiplies the steps of a round and the tokens of the
    text."""
    engines = {name: engine_of(setup, name) for name in ("auto", "int8")}
    rows = [decode(setup, engines, count) for count in ROWS]
    yield from rows
    eight = engines.pop("int8")
    engines.clear()
    status = eight.status()
    yield {
        "summary": True,
        **{key: status[key] for key in ("model", "arithmetic", "computed_by", "dtype", "weight_dtype")},
        "threads": eight.worker.config.threads or torch.get_num_threads(),
        "load": os.getloadavg()[0],
        "speedup_min": min(row["speedup"] for row in rows),
        "resident_bytes": status["weights"]["resident_bytes"],
        **differences(setup, eight),
    }


def engine_of(setup: BenchSetup, weight_dtype: str) -> Engine:
    """Make an engine whose steps have one token a sequence."""
    config = setup.config(
        weight_dtype=weight_dtype, drafts=0, kv_tokens=16_384, cpu_offload_gib=0, max_num_seqs=64, prefix_cache=False
    )
    return Engine(config, Model(load_module(setup.folder, dtype=getattr(torch, config.dtype)).eval(), config.model))


def decode(setup: BenchSetup, engines: dict[str, Engine], count: int) -> Row:
    """Time the decode steps of `count` sequences."""
    steps = setup.scaled(STEPS, 2)
    sampling = Sampling(n=1, max_tokens=steps * (setup.repeat + 1) + 8, ignore_eos=True, seed=0)
    for engine in engines.values():
        for number, prompt in enumerate(setup.text.slices(0, count, PROMPT)):
            engine.submit(Group(f"{count}/{number}", prompt, sampling))
        timed_steps(engine, steps)  # prefill, and the first decode steps
    seconds: dict[str, list[float]] = {name: [] for name in engines}
    for _ in range(setup.repeat):
        for name, engine in engines.items():
            seconds[name].append(timed_steps(engine, steps) / steps)
    for engine in engines.values():
        for number in range(count):
            engine.abort(f"{count}/{number}")
        while engine.has_work:
            engine.step()
    plain, eight = (median(seconds[name]) * 1e3 for name in ("auto", "int8"))
    return {
        "rows": count, "milliseconds": plain, "int8_milliseconds": eight, "speedup": plain / eight,
        "rounds": [[round(each * 1e3, 3) for each in seconds[name]] for name in ("auto", "int8")],
    }  # fmt: skip


def timed_steps(engine: Engine, steps: int) -> float:
    """Return the seconds of some steps, none of which may end a sequence; of one thread, its CPU time."""
    clock = time.perf_counter if torch.get_num_threads() > 1 else time.thread_time
    began = clock()
    for _ in range(steps):
        assert engine.has_work and not engine.step()
    return clock() - began


def differences(setup: BenchSetup, eight: Engine) -> Row:
    """Compare log-probs in eight bits and in the model's dtype, and those of a trainer with the engine's."""
    text: Sequences = [
        (piece[:PROMPT], piece[PROMPT:]) for piece in setup.text.slices(0, TEXTS, setup.scaled(TEXT_TOKENS, 2 * PROMPT))
    ]
    sampling = Sampling(n=N, max_tokens=setup.scaled(NEW_TOKENS, 16), ignore_eos=True, seed=0)
    prompts = {str(i): prompt for i, (prompt, _) in enumerate(text)}
    samples = list[Sample]()
    for name, prompt in prompts.items():
        eight.submit(Group(name, prompt, sampling))
    while eight.has_work:
        samples += eight.step()
    sampled: Sequences = [(prompts[each.group_id], each.token_ids) for each in samples]
    service = np.concatenate([each.logprobs for each in samples]).astype(np.float64)
    module: Any = load_module(setup.folder, dtype=getattr(torch, setup.options.dtype)).eval()
    scores = {}
    for name in (eight.arithmetic, str(Arithmetic.parse(eight.arithmetic)._replace(int8=False))):
        exact = use_exact(module, name, eight.block_size, setup.threads)
        scores[name] = scored(module, text), scored(module, sampled)
        exact.remove()
    (of_text, of_samples), (plain_text, plain_samples) = scores.values()
    far = np.abs(of_text - plain_text)
    return {
        "text_tokens": len(of_text), "mean_abs": float(far.mean()), "max_abs": float(far.max()),
        "perplexity": float(np.exp(-plain_text.mean())), "int8_perplexity": float(np.exp(-of_text.mean())),
        "tokens": len(service), **compare("exact", of_samples, service), **compare("plain", plain_samples, service),
    }  # fmt: skip


def scored(module: Any, sequences: Sequences) -> np.ndarray:
    """Return the log-probs of all tokens behind the prompts, [tokens] float64."""
    with torch.inference_mode():
        return torch.cat([sample_logprobs(module, [each])[0] for each in sequences]).double().numpy()
