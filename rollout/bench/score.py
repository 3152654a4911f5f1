"""`rollout bench score`: log-probs of given tokens, beside a prefill of the same tokens and beside what generation gave.

In process. The same sequences are prefilled as prompts of a group each, and scored as completions, in turn; both read a prompt
that sequences have in common once. Scoring has the logits of every token to compute on top.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from rich.console import Console

from engine.config import EngineConfig
from engine.engine import Engine
from engine.types import Begun, Group, Sample, Sampling
from rollout.bench.runner import BenchFailed
from rollout.bench.text import PromptText
from rollout.models import hide_progress_bars

NAME = "score"
PROMPTS, N, PROMPT_TOKENS, TOKENS = 8, 8, 64, 1024
DRAWN = 128
"""tokens of each sample that is drawn and then scored"""
DRAWS = (
    Sampling(n=4, seed=1, ignore_eos=True),
    Sampling(n=4, seed=2, temperature=0.7, top_p=0.9, min_tokens=9, raw_logprobs=True),
)


def measure(text: PromptText, engine: EngineConfig, folder: Path, scale: float, repeat: int) -> Iterator[dict[str, Any]]:
    """Yield a row a turn and the summary. Raises BenchFailed if a group did not end as it must."""
    hide_progress_bars()
    tokens, drawn = (max(engine.block_size, round(each * scale)) for each in (TOKENS, DRAWN))
    room = PROMPTS * N * (PROMPT_TOKENS + tokens + 2 * engine.block_size)
    serving = Engine(msgspec.structs.replace(engine, model=str(folder), kv_tokens=room, prefix_cache=False, cpu_offload_gib=0))
    prompts = text.slices(0, PROMPTS, PROMPT_TOKENS)
    completions = text.slices(PROMPTS * PROMPT_TOKENS, PROMPTS * N, tokens)
    run_all(serving, as_prompts("warm", prompts[:1], completions[:1]))
    turns = []
    for turn in range(repeat):
        prefill, _ = run_all(serving, as_prompts(f"prefill{turn}", prompts, completions))
        score, samples = run_all(serving, as_given(f"score{turn}", prompts, completions))
        if {sample.finish_reason for sample in samples} != {"scored"} or len(samples) != len(completions):
            raise BenchFailed(f"{len(samples)} of {len(completions)} completions were scored")
        turns.append({"prefill_seconds": prefill, "score_seconds": score, "ratio_to_prefill": prefill / score})
        yield {"workload": NAME, "turn": turn} | {name: round(value, 4) for name, value in turns[-1].items()}
    score = statistics.median(each["score_seconds"] for each in turns)
    yield {
        "workload": NAME,
        "summary": True,
        "turns": repeat,
        "ratio_to_prefill": round(statistics.median(each["ratio_to_prefill"] for each in turns), 4),
        "scored_tokens_per_second": round(len(completions) * tokens / score, 2),
        "max_abs_delta": largest_difference(serving, prompts, drawn),
        "completions": len(completions),
        "tokens": tokens,
        "arithmetic": serving.arithmetic,
        "dtype": engine.dtype,
        "model": str(folder),
    }


def as_prompts(name: str, prompts: list[np.ndarray], completions: list[np.ndarray]) -> list[Group]:
    """The sequences, each to prefill and to end after a token."""
    whole = [np.concatenate([prompts[i // N], tokens]) for i, tokens in enumerate(completions)]
    return [Group(f"{name}/{i}", tokens, Sampling(max_tokens=1, seed=0)) for i, tokens in enumerate(whole)]


def as_given(name: str, prompts: list[np.ndarray], completions: list[np.ndarray]) -> list[Group]:
    """The sequences, their completions to score: a group for each prompt."""
    groups = []
    for i, prompt in enumerate(prompts):
        mine = completions[i * N : (i + 1) * N]
        sampling = Sampling(n=N, max_tokens=max(map(len, mine)), seed=0)
        groups.append(Group(f"{name}/{i}", prompt, sampling, None, tuple(map(given, range(N), mine)), score=True))
    return groups


def given(index: int, tokens: np.ndarray) -> Begun:
    """Tokens to score."""
    zeros = np.zeros(len(tokens), np.float32)
    return Begun(index=index, token_ids=tokens, logprobs=zeros, weight_versions=[(0, 0)])


def largest_difference(engine: Engine, prompts: list[np.ndarray], tokens: int) -> float:
    """Draw samples in several ways and score their tokens. Returns the largest difference of a log-prob."""
    largest = 0.0
    for way, draws in enumerate(DRAWS):
        sampling = msgspec.structs.replace(draws, max_tokens=tokens)
        groups = [Group(f"drawn{way}/{i}", prompt, sampling) for i, prompt in enumerate(prompts)]
        drawn = {(sample.group_id, sample.index): sample for sample in run_all(engine, groups)[1]}
        again = [
            msgspec.structs.replace(
                group, begun=tuple(given(i, drawn[group.id, i].token_ids) for i in range(sampling.n)), score=True
            )
            for group in groups
        ]
        for scored in run_all(engine, again)[1]:
            sample = drawn[scored.group_id, scored.index]
            pairs = [(sample.logprobs, scored.logprobs)]
            if sample.raw_logprobs is not None and scored.raw_logprobs is not None:
                pairs.append((sample.raw_logprobs, scored.raw_logprobs))
            largest = max(largest, *(float(np.abs(a - b).max()) for a, b in pairs))
    return largest


def run_all(engine: Engine, groups: list[Group]) -> tuple[float, list[Sample]]:
    """Run groups to their end. Returns the seconds and the samples."""
    started, samples = time.perf_counter(), list[Sample]()
    for group in groups:
        engine.submit(group)
    while engine.has_work:
        samples += engine.step()
    return time.perf_counter() - started, samples


def print_row(console: Console, row: dict[str, Any]) -> None:
    if "summary" not in row:
        console.print(f"  prefill {row['prefill_seconds']:.2f} s, score {row['score_seconds']:.2f} s")
        return
    console.print(
        f"score: {row['completions']} x {row['tokens']} tokens at {row['ratio_to_prefill']:.3f} x the rate of their prefill, "
        f"{row['scored_tokens_per_second']:.0f} tokens/s; largest difference from generation {row['max_abs_delta']:.1e}"
    )
