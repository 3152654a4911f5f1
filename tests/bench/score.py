"""`python -m tests.bench score`: scoring of given tokens, compared with prefill of the same tokens and with generation.

In this process. The same sequences are prefilled as prompts, and scored as completions, in turn. Both read a common prompt
once. Scoring also computes the logits of every token. By operation counts its rate is 1 - `vocabulary_share` of that of
prefill; `vocabulary_share` is the output layer's fraction of the parameters that multiply a token, 21 % in SmolLM2-135M. So a
second measurement (`ratio_to_prefill_8b`) takes the same decoder with random weights and a vocabulary as large, relatively, as
that of Llama-3.1-8B."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import msgspec
import numpy as np
from transformers import PreTrainedModel

from rollout.bench.harness import BenchFailed, BenchSetup, Row
from rollout.bench.inputs import of_vocabulary
from rollout.engine.engine import Engine
from rollout.engine.forward.interface import module_of
from rollout.engine.values import Group, PartialSample, Sample, Sampling
from rollout.models import hide_progress_bars

PROMPTS, N, PROMPT_TOKENS, TOKENS = 8, 8, 64, 1024
SHARE_8B = 128_256 * 4096 / (128_256 * 4096 + 32 * (4096 * 4096 * 2 + 4096 * 1024 * 2 + 3 * 4096 * 14_336))
"""`vocabulary_share` of Llama-3.1-8B: 32 layers of 4,096, 8 of 32 heads with keys and values, 14,336 inside, 128,256 tokens"""
SAMPLED = 128
"""tokens of each sample that is generated and then scored"""
SAMPLINGS = (
    Sampling(n=4, seed=1, ignore_eos=True),
    Sampling(n=4, seed=2, temperature=0.7, top_p=0.9, min_tokens=9, raw_logprobs=True),
)


def measure(setup: BenchSetup) -> Iterator[Row]:
    """Yield a row per turn of each model, then the summary. Raises BenchFailed if a completion was not scored."""
    hide_progress_bars()
    block = setup.config().block_tokens
    tokens, sampled = setup.scaled(TOKENS, block), setup.scaled(SAMPLED, block)
    prompts = setup.text.slices(0, PROMPTS, PROMPT_TOKENS)
    completions = setup.text.slices(PROMPTS * PROMPT_TOKENS, PROMPTS * N, tokens)
    engine = open_engine(setup, setup.folder, tokens)
    turns = []
    for row in in_turn(engine, prompts, completions, setup.repeat):
        turns.append(row)
        yield row
    seconds, share = statistics.median(each["score_seconds"] for each in turns), vocabulary_share(engine)
    largest, arithmetic = largest_difference(engine, prompts, sampled), engine.arithmetic
    vocab_size = round(engine.vocab_size * SHARE_8B / (1 - SHARE_8B) * (1 - share) / share)
    del engine
    ratios = []
    with of_vocabulary(setup.folder, vocab_size) as like_8b:
        engine = open_engine(setup, like_8b, tokens)
        prompts_8b, completions_8b = ([ids % vocab_size for ids in each] for each in (prompts, completions))
        for row in in_turn(engine, prompts_8b, completions_8b, setup.repeat):
            ratios.append(row["ratio_to_prefill"])
            yield {"workload": "score_8b", **row}
    yield {
        "summary": True,
        "turns": setup.repeat,
        "ratio_to_prefill": statistics.median(each["ratio_to_prefill"] for each in turns),
        "vocabulary_share": share,
        "ratio_to_prefill_8b": statistics.median(ratios),
        "vocabulary_share_8b": vocabulary_share(engine),
        "scored_tokens_per_second": len(completions) * tokens / seconds,
        "max_abs_delta": largest,
        "completions": len(completions),
        "tokens": tokens,
        "arithmetic": arithmetic,
        "dtype": setup.options.dtype,
        "model": str(setup.folder),
    }


def open_engine(setup: BenchSetup, folder: Path, tokens: int) -> Engine:
    """Open an engine with KV for all completions at once."""
    config = setup.config(model=str(folder), prefix_cache=False, cpu_offload_gib=0)
    room = PROMPTS * N * (PROMPT_TOKENS + tokens + 2 * config.block_tokens)
    return Engine(msgspec.structs.replace(config, kv_tokens=room))


def in_turn(engine: Engine, prompts: list[np.ndarray], completions: list[np.ndarray], repeat: int) -> Iterator[Row]:
    """Prefill and score the sequences, `repeat` times in turn, and yield the seconds of each."""
    run_all(engine, as_prompts("warm", prompts[:1], completions[:1]))
    for turn in range(repeat):
        prefill, _ = run_all(engine, as_prompts(f"prefill{turn}", prompts, completions))
        score, samples = run_all(engine, as_completions(f"score{turn}", prompts, completions))
        if {sample.finish_reason for sample in samples} != {"scored"} or len(samples) != len(completions):
            raise BenchFailed(f"{len(samples)} of {len(completions)} completions were scored")
        yield {"turn": turn, "prefill_seconds": prefill, "score_seconds": score, "ratio_to_prefill": prefill / score}


def vocabulary_share(engine: Engine) -> float:
    """Return the output layer's fraction of the parameters that multiply a token: those with two dimensions, except for an
    embedding that is not the output layer."""
    module = cast(PreTrainedModel, module_of(engine.model))
    embeddings, head = module.get_input_embeddings().weight, module.get_output_embeddings().weight
    matrices = sum(each.numel() for each in module.parameters() if each.ndim > 1 and each is not embeddings)
    return float(head.numel() / (matrices + (head.numel() if head is embeddings else 0)))


def as_prompts(name: str, prompts: list[np.ndarray], completions: list[np.ndarray]) -> list[Group]:
    """Make a group of each sequence, which is prefilled and ends after one token."""
    whole = [np.concatenate([prompts[i // N], tokens]) for i, tokens in enumerate(completions)]
    return [Group(f"{name}/{i}", tokens, Sampling(max_tokens=1, seed=0)) for i, tokens in enumerate(whole)]


def as_completions(name: str, prompts: list[np.ndarray], completions: list[np.ndarray]) -> list[Group]:
    """Make a group of each prompt, whose completions are scored."""
    groups = []
    for i, prompt in enumerate(prompts):
        mine = completions[i * N : (i + 1) * N]
        sampling = Sampling(n=N, max_tokens=max(map(len, mine)), seed=0)
        groups.append(Group(f"{name}/{i}", prompt, sampling, None, tuple(map(completion, range(N), mine)), score=True))
    return groups


def completion(index: int, tokens: np.ndarray) -> PartialSample:
    """Make a child whose tokens are scored."""
    zeros = np.zeros(len(tokens), np.float32)
    return PartialSample(index=index, token_ids=tokens, logprobs=zeros, weight_versions=[(0, 0)])


def largest_difference(engine: Engine, prompts: list[np.ndarray], tokens: int) -> float:
    """Generate samples by several samplings and score their tokens. Returns the largest difference of a log-prob."""
    largest = 0.0
    for number, sampling in enumerate(SAMPLINGS):
        sampling = msgspec.structs.replace(sampling, max_tokens=tokens)
        groups = [Group(f"sampled{number}/{i}", prompt, sampling) for i, prompt in enumerate(prompts)]
        sampled = {(sample.group_id, sample.index): sample for sample in run_all(engine, groups)[1]}
        again = [
            msgspec.structs.replace(
                group, partials=tuple(completion(i, sampled[group.id, i].token_ids) for i in range(sampling.n)), score=True
            )
            for group in groups
        ]
        for scored in run_all(engine, again)[1]:
            sample = sampled[scored.group_id, scored.index]
            pairs = [(sample.logprobs, scored.logprobs)]
            if sample.raw_logprobs is not None and scored.raw_logprobs is not None:
                pairs.append((sample.raw_logprobs, scored.raw_logprobs))
            largest = max(largest, *(float(np.abs(a - b).max()) for a, b in pairs))
    return largest


def run_all(engine: Engine, groups: list[Group]) -> tuple[float, list[Sample]]:
    """Run groups until they finish. Returns the seconds and the samples."""
    started, samples = time.perf_counter(), list[Sample]()
    for group in groups:
        engine.submit(group)
    while engine.has_work:
        samples += engine.step()
    return time.perf_counter() - started, samples
