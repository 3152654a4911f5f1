"""`rollout bench score`: log-probs of given tokens, beside a prefill of the same tokens and beside what generation gave.

In process. The same sequences are prefilled as prompts of a group each, and scored as completions, in turn; both read a prompt
that sequences have in common once. Scoring has the logits of every token to compute on top: by count its rate is
1 - `vocabulary_share` of that of prefill, where `vocabulary_share` is what the vocabulary has of the model's parameters that a
token is multiplied with. In small models that is much (21 % of SmolLM2-135M). So the same is measured with the same decoder and
a vocabulary of the share that Llama-3.1-8B's has, with random weights: `ratio_to_prefill_8b`.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import msgspec
import numpy as np
from transformers import PreTrainedModel

from engine.config import EngineConfig
from engine.engine import Engine
from engine.forward.model import module_of
from engine.types import Group, PartialSample, Sample, Sampling
from rollout.bench.errors import BenchFailed
from rollout.bench.inputs import PromptText, of_vocabulary
from rollout.models import hide_progress_bars

NAME = "score"
PROMPTS, N, PROMPT_TOKENS, TOKENS = 8, 8, 64, 1024
SHARE_8B = 128_256 * 4096 / (128_256 * 4096 + 32 * (4096 * 4096 * 2 + 4096 * 1024 * 2 + 3 * 4096 * 14_336))
"""`vocabulary_share` of Llama-3.1-8B: 32 layers of 4,096, 8 of 32 heads with keys and values, 14,336 inside, 128,256 tokens"""
DRAWN = 128
"""tokens of each sample that is drawn and then scored"""
DRAWS = (
    Sampling(n=4, seed=1, ignore_eos=True),
    Sampling(n=4, seed=2, temperature=0.7, top_p=0.9, min_tokens=9, raw_logprobs=True),
)


def measure(text: PromptText, engine: EngineConfig, folder: Path, scale: float, repeat: int) -> Iterator[dict[str, Any]]:
    """Yield a row a turn of each model and the summary. Raises BenchFailed if a group did not end as it must."""
    hide_progress_bars()
    tokens, drawn = (max(engine.block_size, round(each * scale)) for each in (TOKENS, DRAWN))
    prompts = text.slices(0, PROMPTS, PROMPT_TOKENS)
    completions = text.slices(PROMPTS * PROMPT_TOKENS, PROMPTS * N, tokens)
    serving = open_engine(engine, folder, tokens)
    turns = []
    for row in in_turn(serving, prompts, completions, repeat):
        turns.append(row)
        yield {"workload": NAME, "turn": len(turns) - 1} | rounded(row)
    score, share = statistics.median(each["score_seconds"] for each in turns), vocabulary_share(serving)
    largest, arithmetic = largest_difference(serving, prompts, drawn), serving.arithmetic
    vocab_size = round(serving.vocab_size * SHARE_8B / (1 - SHARE_8B) * (1 - share) / share)
    del serving
    ratios = []
    with of_vocabulary(folder, vocab_size) as like_8b:
        serving = open_engine(engine, like_8b, tokens)
        prompts_8b, completions_8b = ([ids % vocab_size for ids in each] for each in (prompts, completions))
        for row in in_turn(serving, prompts_8b, completions_8b, repeat):
            ratios.append(row["ratio_to_prefill"])
            yield {"workload": f"{NAME}_8b", "turn": len(ratios) - 1} | rounded(row)
    yield {
        "workload": NAME,
        "summary": True,
        "turns": repeat,
        "ratio_to_prefill": round(statistics.median(each["ratio_to_prefill"] for each in turns), 4),
        "vocabulary_share": round(share, 4),
        "ratio_to_prefill_8b": round(statistics.median(ratios), 4),
        "vocabulary_share_8b": round(vocabulary_share(serving), 4),
        "scored_tokens_per_second": round(len(completions) * tokens / score, 2),
        "max_abs_delta": largest,
        "completions": len(completions),
        "tokens": tokens,
        "arithmetic": arithmetic,
        "dtype": engine.dtype,
        "model": str(folder),
    }


def open_engine(engine: EngineConfig, folder: Path, tokens: int) -> Engine:
    """Open an engine with room for all completions at once."""
    room = PROMPTS * N * (PROMPT_TOKENS + tokens + 2 * engine.block_size)
    return Engine(msgspec.structs.replace(engine, model=str(folder), kv_tokens=room, prefix_cache=False, cpu_offload_gib=0))


def in_turn(
    engine: Engine, prompts: list[np.ndarray], completions: list[np.ndarray], repeat: int
) -> Iterator[dict[str, float]]:
    """Prefill and score the sequences, `repeat` times in turn, and yield what that took."""
    run_all(engine, as_prompts("warm", prompts[:1], completions[:1]))
    for turn in range(repeat):
        prefill, _ = run_all(engine, as_prompts(f"prefill{turn}", prompts, completions))
        score, samples = run_all(engine, as_given(f"score{turn}", prompts, completions))
        if {sample.finish_reason for sample in samples} != {"scored"} or len(samples) != len(completions):
            raise BenchFailed(f"{len(samples)} of {len(completions)} completions were scored")
        yield {"prefill_seconds": prefill, "score_seconds": score, "ratio_to_prefill": prefill / score}


def vocabulary_share(engine: Engine) -> float:
    """Return what the output's weight has of all parameters that a token is multiplied with: those of more than one dimension,
    without the table that tokens are looked up in."""
    module = cast(PreTrainedModel, module_of(engine.model))
    embeddings, head = module.get_input_embeddings().weight, module.get_output_embeddings().weight
    matrices = sum(each.numel() for each in module.parameters() if each.ndim > 1 and each is not embeddings)
    return float(head.numel() / (matrices + (head.numel() if head is embeddings else 0)))


def rounded(row: dict[str, float]) -> dict[str, float]:
    return {name: round(value, 4) for name, value in row.items()}


def as_prompts(name: str, prompts: list[np.ndarray], completions: list[np.ndarray]) -> list[Group]:
    """Make a group of each sequence, to prefill and to end after a token."""
    whole = [np.concatenate([prompts[i // N], tokens]) for i, tokens in enumerate(completions)]
    return [Group(f"{name}/{i}", tokens, Sampling(max_tokens=1, seed=0)) for i, tokens in enumerate(whole)]


def as_given(name: str, prompts: list[np.ndarray], completions: list[np.ndarray]) -> list[Group]:
    """Make a group for each prompt, whose completions are to be scored."""
    groups = []
    for i, prompt in enumerate(prompts):
        mine = completions[i * N : (i + 1) * N]
        sampling = Sampling(n=N, max_tokens=max(map(len, mine)), seed=0)
        groups.append(Group(f"{name}/{i}", prompt, sampling, None, tuple(map(given, range(N), mine)), score=True))
    return groups


def given(index: int, tokens: np.ndarray) -> PartialSample:
    """Make a child whose tokens are to be scored."""
    zeros = np.zeros(len(tokens), np.float32)
    return PartialSample(index=index, token_ids=tokens, logprobs=zeros, weight_versions=[(0, 0)])


def largest_difference(engine: Engine, prompts: list[np.ndarray], tokens: int) -> float:
    """Draw samples in several ways and score their tokens. Returns the largest difference of a log-prob."""
    largest = 0.0
    for way, draws in enumerate(DRAWS):
        sampling = msgspec.structs.replace(draws, max_tokens=tokens)
        groups = [Group(f"drawn{way}/{i}", prompt, sampling) for i, prompt in enumerate(prompts)]
        drawn = {(sample.group_id, sample.index): sample for sample in run_all(engine, groups)[1]}
        again = [
            msgspec.structs.replace(
                group, partials=tuple(given(i, drawn[group.id, i].token_ids) for i in range(sampling.n)), score=True
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
