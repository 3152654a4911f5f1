"""`rollout bench tail`: how long a batch waits for its slowest children, beside first-come without drafts, in turn.

In process: 64 groups of 8, whose children have lognormal lengths, which the engine is told (`Sampling.lengths`); end tokens are
ignored. The engine has 64 slots: as on a machine that is full, most children wait.

    seconds_to_most   until 7 of 8 children of every group have ended
    seconds_to_all    until the last one has
    tokens_per_step   that a child makes in a step it takes part in, over the whole run
    steps             until the last one has ended
    step_ms           of steps that decode, medians by their tokens

Times on a machine that does other things too are noisy, the schedule is not. So the same is also counted: `counted_to_most` and
`counted_to_all` have each step as long as the median step of so many tokens, over both variants. `bound_to_most` and
`bound_to_all` are how many times sooner than first-come any order could be at these prices, without drafts.

`tail_tokens_per_step`: of drafts alone. Four questions are each answered 16 times, four at a time, at temperature 1 up to the
model's own end; counted from when the last four of a question run.
"""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

from engine.config import EngineConfig
from engine.engine import Engine
from engine.scheduling.drafts import never_falling
from engine.types import Group, Sample, Sampling
from rollout.bench.harness import BenchFailed
from rollout.bench.inputs import PromptText
from rollout.models import hide_progress_bars, load_tokenizer

NAME = "tail"
GROUPS, N, MOST, PROMPT_TOKENS = 64, 8, 7, 64
MEDIAN, SPREAD, LONGEST = 64, 0.9, 1024
"""tokens of a child; standard deviation of their logarithm"""
SLOTS, WARM = 64, 2
"""children that run at once; groups that run before the first turn"""
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
    for serving in engines.values():  # so that none of them has the first steps of all
        one_turn(serving, text.slices(repeat * GROUPS * PROMPT_TOKENS, WARM, PROMPT_TOKENS), np.full((WARM, N), 4), repeat)
    turns: dict[str, list[TailRun]] = {suffix: [] for suffix in engines}
    for turn in range(repeat):
        prompts = text.slices(turn * GROUPS * PROMPT_TOKENS, GROUPS, PROMPT_TOKENS)
        for suffix, serving in list(engines.items())[:: 1 - 2 * (turn % 2)]:
            turns[suffix].append(one_turn(serving, prompts, lengths, turn))
            yield {"workload": NAME + suffix, "turn": turn} | rounded(turns[suffix][-1].figures)
    summary = {"workload": NAME, "summary": True, "turns": repeat, "tokens": int(lengths.sum())} | compared(turns, lengths)
    few = Engine(msgspec.structs.replace(own, max_num_seqs=LAST), model)
    summary["tail_tokens_per_step"] = round(last_children(few, folder, scale), 4)
    yield summary | {"arithmetic": engines[""].arithmetic, "dtype": engine.dtype, "model": str(folder)}


def compared(turns: dict[str, list[TailRun]], lengths: np.ndarray) -> dict[str, Any]:
    """Return the medians of both variants' figures, measured and counted, their ratios and the bounds of these."""
    prices = Prices([step for runs in turns.values() for run in runs for step in run.steps])
    found: dict[str, float] = {}
    for suffix, runs in turns.items():
        figures = [run.figures | run.counted(prices) for run in runs]
        found |= {name + suffix: statistics.median(each[name] for each in figures) for name in figures[0]}
    for name in ("seconds_to_most", "seconds_to_all", "counted_to_most", "counted_to_all"):
        found[f"ratio_{name}"] = found[f"{name}_plain"] / found[name]
    for name, most in (("most", MOST), ("all", N)):
        drawn, steps = waited_for(lengths, most)
        least = least_seconds(prices.of(np.arange(SLOTS + 1)), drawn, max(steps, drawn / SLOTS)) + prices.prompts
        found[f"bound_to_{name}"] = found[f"counted_to_{name}_plain"] / least
    return rounded(found) | {"step_ms": prices.by_tokens()}


def rounded(figures: dict[str, float]) -> dict[str, float]:
    return {name: round(x, 4) for name, x in figures.items()}


def child_lengths(scale: float) -> np.ndarray:
    """Return [GROUPS, N] int64 tokens of the children, the same ones each time."""
    drawn = np.random.default_rng(0).lognormal(np.log(MEDIAN), SPREAD, (GROUPS, N)) * scale
    return np.clip(np.rint(drawn), 2, max(2, round(LONGEST * scale))).astype(np.int64)


def least_seconds(costs: np.ndarray, tokens: int, steps: float) -> float:
    """Return the seconds below which no schedule computes so many tokens in at least so many steps. costs: [most + 1] float64,
    seconds of a step of 0, 1 … tokens. A step costs at least what the lower convex hull of these says, so all together cost at
    least what that says of their mean."""
    hull = [1]
    for size in range(2, len(costs)):
        while len(hull) > 1 and slope(costs, hull[-2], hull[-1]) >= slope(costs, hull[-1], size):
            hull.pop()
        hull.append(size)
    mean = min(tokens / steps, hull[-1])
    sizes = np.array([mean, *range(1, int(mean) + 1)])
    return float((tokens / sizes * np.interp(sizes, hull, costs[hull])).min())


def slope(costs: np.ndarray, one: int, other: int) -> float:
    return float((costs[other] - costs[one]) / (other - one))


def waited_for(lengths: np.ndarray, most: int) -> tuple[int, int]:
    """Return the tokens that the `most` shortest children of each group draw behind their first, which comes with the prompt,
    and the steps that the longest of them takes. lengths: [groups, n]"""
    shortest = np.sort(lengths, axis=1)[:, :most] - 1
    return int(shortest.sum()), max(1, int(shortest.max()))


class StepRecord(NamedTuple):
    """What one step of the engine did."""

    tokens: int
    """drawn and drafted, but the first ones of children"""
    prefilled: int
    """tokens"""
    seconds: float


class Prices:
    """What steps take by their tokens: medians over all that only decoded, nearest to which they never fall."""

    def __init__(self, steps: list[StepRecord]) -> None:
        seconds: dict[int, list[float]] = {}
        for step in steps:
            if step.tokens and not step.prefilled:
                seconds.setdefault(step.tokens, []).append(step.seconds)
        self._seconds = dict(sorted(seconds.items()))
        medians = [statistics.median(each) for each in self._seconds.values()]
        self._known = list(self._seconds), never_falling(medians, [len(each) for each in self._seconds.values()])
        filling = [step for step in steps if step.prefilled]
        beside = float(self.of(np.array([step.tokens for step in filling])).sum())
        self._token = max(0.0, sum(step.seconds for step in filling) - beside) / sum(step.prefilled for step in filling)
        """seconds of a prefilled token, and of its share of the draws of its prompt"""

    @property
    def prompts(self) -> float:
        """seconds of all prompts of a turn"""
        return GROUPS * PROMPT_TOKENS * self._token

    def of(self, tokens: np.ndarray) -> np.ndarray:
        """Return the seconds of steps that decode so many tokens, between what is known in proportion; none of none."""
        seconds: np.ndarray = np.interp(tokens, *self._known)
        return np.where(tokens > 0, seconds, 0.0)

    def total(self, steps: list[StepRecord]) -> float:
        """Return the seconds of steps."""
        decoding = self.of(np.array([step.tokens for step in steps])).sum()
        return float(decoding) + self._token * sum(step.prefilled for step in steps)

    def by_tokens(self) -> dict[int, float]:
        """Return milliseconds by tokens: of the numbers that are powers of two or closest below."""
        near: dict[int, list[float]] = {}
        for tokens, seconds in self._seconds.items():
            near.setdefault(1 << tokens.bit_length() - 1, []).extend(seconds)
        return {tokens: round(1e3 * statistics.median(seconds), 1) for tokens, seconds in near.items()}


class TailRun(NamedTuple):
    """A run of all groups."""

    figures: dict[str, float]
    steps: list[StepRecord]
    steps_to_most: int

    def counted(self, prices: Prices) -> dict[str, float]:
        """Return what its steps take at these prices."""
        most = prices.total(self.steps[: self.steps_to_most])
        return {"counted_to_most": most, "counted_to_all": prices.total(self.steps)}


def one_turn(engine: Engine, prompts: list[np.ndarray], lengths: np.ndarray, seed: int) -> TailRun:
    """Run all groups to their end. Raises BenchFailed if a child has another length."""
    before, started = made(engine), time.perf_counter()
    for i, prompt in enumerate(prompts):
        own = tuple(lengths[i].tolist())
        engine.submit(Group(f"{seed}/{i}", prompt, Sampling(n=N, max_tokens=max(own), lengths=own, ignore_eos=True, seed=seed)))
    ended, steps, to_most, seconds_to_most = Counter[str](), list[StepRecord](), 0, 0.0
    while engine.has_work:
        for sample in stepped(engine, steps):
            if len(sample.token_ids) != lengths[int(sample.group_id.split("/")[1]), sample.index]:
                raise BenchFailed(f"child {sample.index} of group {sample.group_id} ended as {sample.finish_reason}")
            ended[sample.group_id] += 1
            if ended[sample.group_id] == MOST:
                to_most = len(steps)
                seconds_to_most = time.perf_counter() - started
    if len(ended) != len(prompts) or set(ended.values()) != {N}:
        raise BenchFailed(f"{sum(ended.values())} children of {len(prompts) * N} ended")
    seconds = time.perf_counter() - started
    figures = {"seconds_to_most": seconds_to_most, "seconds_to_all": seconds}
    figures |= {"tokens_per_step": per_step(before, made(engine)), "steps": len(steps)}
    return TailRun(figures, steps, to_most)


def stepped(engine: Engine, steps: list[StepRecord]) -> list[Sample]:
    """Take a step of the engine and note what it did. Returns the children that ended."""
    counters = engine.counters
    before = counters.generated_tokens, counters.drafted_tokens, counters.accepted_tokens, counters.forks
    prefilled, started = counters.prefill_tokens, time.perf_counter()
    samples = engine.step()
    seconds = time.perf_counter() - started
    after = counters.generated_tokens, counters.drafted_tokens, counters.accepted_tokens, counters.forks
    drawn, drafted, accepted, forks = (now - then for now, then in zip(after, before, strict=True))
    first = forks * N // (N - 1)
    steps.append(StepRecord(drawn - first + drafted - accepted, counters.prefill_tokens - prefilled, seconds))
    return samples


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
