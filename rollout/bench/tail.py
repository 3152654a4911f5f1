"""`rollout bench tail`: how long a batch waits for its slowest children, beside first-come without drafts, in turn.

In process: 64 groups of 8, whose children have lognormal lengths, which the engine is told (`Sampling.lengths`); end tokens are
ignored. The engine has 64 slots: as on a machine that is full, most children wait.

    seconds_to_most   until 7 of 8 children of every group have ended
    seconds_to_all    until the last one has
    tokens_per_step   that a child makes in a step it takes part in, over the whole run
    step_ms           of steps that decode, medians by their rows

`tail_tokens_per_step`: of drafts alone. Four questions are each answered 16 times, four at a time, at temperature 1 up to the
model's own end; counted from when the last four of a question run.
"""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from rich.console import Console

from engine.config import EngineConfig
from engine.engine import Engine
from engine.types import Group, Sample, Sampling
from rollout.bench.errors import BenchFailed
from rollout.bench.text import PromptText
from rollout.models import hide_progress_bars, load_tokenizer

NAME = "tail"
GROUPS, N, MOST, PROMPT_TOKENS = 64, 8, 7, 64
MEDIAN, SPREAD, LONGEST = 64, 0.9, 1024
"""tokens of a child; standard deviation of their logarithm"""
SLOTS = 64
KNOWING: dict[str, Any] = {"order": "longest_last"}
PLAIN: dict[str, Any] = {"order": "first_come", "drafts": 0}
"""how the engine goes by the lengths, and what that is compared with"""
QUESTIONS = (
    "A baker sells 36 loaves in the morning and a third as many in the afternoon. How many loaves does she sell in a day?",
    "What is 17 times 23? Explain step by step.",
    "Write a Python function that returns the n-th Fibonacci number.",
    "A train travels 180 km in 2 hours and 15 minutes. What is its average speed in km/h?",
)
ANSWERS, ANSWER_TOKENS, LAST = 16, 200, 4


def measure(text: PromptText, engine: EngineConfig, folder: Path, scale: float, repeat: int) -> Iterator[dict[str, Any]]:
    """Yield a row a turn of each variant, and the summary. Raises BenchFailed if a child is lost."""
    from engine.devices import device_of
    from engine.forward.model import open_model

    hide_progress_bars()
    lengths = child_lengths(scale)
    room = int((lengths.sum() + GROUPS * (PROMPT_TOKENS + N * 2 * engine.block_size)) * 1.1) + 64 * engine.block_size
    own = msgspec.structs.replace(engine, model=str(folder), kv_tokens=room, cpu_offload_gib=0, max_num_seqs=SLOTS)
    model = open_model(own, device_of(own).memory)
    engines = {name: Engine(msgspec.structs.replace(own, **how), model) for name, how in (("", KNOWING), ("_plain", PLAIN))}
    turns: dict[str, list[dict[str, float]]] = {suffix: [] for suffix in engines}
    costs = StepCosts()
    for turn in range(repeat):
        prompts = text.slices(turn * GROUPS * PROMPT_TOKENS, GROUPS, PROMPT_TOKENS)
        for suffix, serving in engines.items():
            turns[suffix].append(one_turn(serving, prompts, lengths, turn, costs))
            yield {"workload": NAME + suffix, "turn": turn} | {name: round(x, 4) for name, x in turns[suffix][-1].items()}
    summary: dict[str, Any] = {"workload": NAME, "summary": True, "turns": repeat, "tokens": int(lengths.sum())}
    for suffix, rows in turns.items():
        summary |= {name + suffix: round(statistics.median(row[name] for row in rows), 4) for name in rows[0]}
    for name in ("seconds_to_most", "seconds_to_all"):
        summary[f"ratio_{name}"] = round(summary[f"{name}_plain"] / summary[name], 4)
    few = Engine(msgspec.structs.replace(own, max_num_seqs=LAST), model)
    summary["tail_tokens_per_step"] = round(last_children(few, folder, scale), 4)
    summary["step_ms"] = costs.medians()
    yield summary | {"arithmetic": engines[""].arithmetic, "dtype": engine.dtype, "model": str(folder)}


def child_lengths(scale: float) -> np.ndarray:
    """Return [GROUPS, N] int64 tokens of the children, the same ones each time."""
    drawn = np.random.default_rng(0).lognormal(np.log(MEDIAN), SPREAD, (GROUPS, N)) * scale
    return np.clip(np.rint(drawn), 2, max(2, round(LONGEST * scale))).astype(np.int64)


class StepCosts:
    """What steps took in which all that ran decoded."""

    def __init__(self) -> None:
        self._seconds: dict[int, list[float]] = {}

    def step(self, engine: Engine) -> list[Sample]:
        """Take a step of the engine and note what it took, by how many sequences ran before and after it."""
        rows, prefilled, started = len(engine.scheduler.running), engine.counters.prefill_tokens, time.perf_counter()
        samples = engine.step()
        if rows and rows == len(engine.scheduler.running) + len(samples) and prefilled == engine.counters.prefill_tokens:
            self._seconds.setdefault(rows, []).append(time.perf_counter() - started)
        return samples

    def medians(self) -> dict[int, float]:
        """Return milliseconds by rows: of the numbers that are powers of two or closest below."""
        near: dict[int, list[float]] = {}
        for rows, seconds in sorted(self._seconds.items()):
            near.setdefault(1 << rows.bit_length() - 1, []).extend(seconds)
        return {rows: round(1e3 * statistics.median(seconds), 1) for rows, seconds in near.items()}


def one_turn(engine: Engine, prompts: list[np.ndarray], lengths: np.ndarray, seed: int, costs: StepCosts) -> dict[str, float]:
    """Run all groups to their end. Returns the figures. Raises BenchFailed if a child has another length."""
    before, started = made(engine), time.perf_counter()
    for i, prompt in enumerate(prompts):
        own = tuple(lengths[i].tolist())
        engine.submit(Group(f"{seed}/{i}", prompt, Sampling(n=N, max_tokens=max(own), lengths=own, ignore_eos=True, seed=seed)))
    ended, ends = Counter[str](), list[float]()
    while engine.has_work:
        for sample in costs.step(engine):
            if len(sample.token_ids) != lengths[int(sample.group_id.split("/")[1]), sample.index]:
                raise BenchFailed(f"child {sample.index} of group {sample.group_id} ended as {sample.finish_reason}")
            ended[sample.group_id] += 1
            if ended[sample.group_id] == MOST:
                ends.append(time.perf_counter() - started)
    if len(ends) != GROUPS or set(ended.values()) != {N}:
        raise BenchFailed(f"{sum(ended.values())} children of {GROUPS * N} ended")
    seconds = time.perf_counter() - started
    return {"seconds_to_most": max(ends), "seconds_to_all": seconds, "tokens_per_step": per_step(before, made(engine))}


def last_children(engine: Engine, folder: Path, scale: float) -> float:
    """Return the tokens a step of the last LAST children of each question, one question after the other."""
    tokenizer, tokens, accepted = load_tokenizer(folder), 0, 0
    for i, question in enumerate(QUESTIONS):
        chat = [{"role": "user", "content": question}]
        try:
            ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
        except ValueError:  # a tokenizer without a template
            ids = tokenizer(question)["input_ids"]
        sampling = Sampling(n=ANSWERS, max_tokens=max(8, round(ANSWER_TOKENS * min(1, 2 * scale))), seed=i)
        engine.submit(Group(f"question/{i}", np.array(ids, np.int32), sampling))
        while engine.has_work:
            few, before = 0 < len(engine.scheduler.running) <= LAST and not len(engine.scheduler.waiting), made(engine)
            engine.step()
            if few:
                tokens, accepted = tokens + made(engine)[0] - before[0], accepted + made(engine)[1] - before[1]
    return per_step((0, 0), (tokens, accepted)) if tokens else 1.0


def made(engine: Engine) -> tuple[int, int]:
    """Return the tokens that were drawn, and how many of them by drafts."""
    return engine.counters.generated_tokens, engine.counters.accepted_tokens


def per_step(before: tuple[int, int], after: tuple[int, int]) -> float:
    """Return the tokens that a child made in a step: each makes one, and what was accepted on top."""
    tokens, accepted = after[0] - before[0], after[1] - before[1]
    return tokens / (tokens - accepted)


def print_row(console: Console, row: dict[str, Any]) -> None:
    if "summary" not in row:
        console.print(
            f"  {row['workload']}: most {row['seconds_to_most']:.1f} s, all {row['seconds_to_all']:.1f} s, "
            f"{row['tokens_per_step']:.2f} tokens a step"
        )
        return
    console.print(
        f"tail, {GROUPS} x {N} children, {row['tokens']} tokens: most {row['ratio_seconds_to_most']:.2f} x and all "
        f"{row['ratio_seconds_to_all']:.2f} x as soon as plainly; the last {LAST} children of a question make "
        f"{row['tail_tokens_per_step']:.2f} tokens a step; ms a step by rows: "
        + ", ".join(f"{rows}: {ms:.0f}" for rows, ms in row["step_ms"].items())
    )
