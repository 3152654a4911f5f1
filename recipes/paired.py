"""Compare two versions of the weights on the same questions with the same seeds: what an update changed, and where.

    question, seed ──→ weights before ──→ … 6 * 7 is 4|4     reward 0
                  └──→ weights after  ──→ … 6 * 7 is 4|2     reward 1      difference 1, from the marked token on

    python -m rollout.recipes.grpo --save trained
    python -m rollout.recipes.paired --after trained

A sample is a function of weights, prompt, sampling, seed and index. With equal seeds both versions draw with the same random
numbers, so an answer that the update does not touch is the same to the bit, and its difference is 0. With independent seeds
the difference of two rewards has the noise of both. The program prints both standard errors.

Common random numbers: Glasserman, Yao, "Some Guidelines and Guarantees for Common Random Numbers" (1992).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from msgspec.structs import replace

from rollout import RolloutClient, Sample, Sampling, models
from rollout.config import Config, InputError
from rollout.engine.config import EngineConfig
from rollout.process import service_process, write_atomically
from rollout.recipes import grpo, program
from rollout.recipes.program import say

Groups = list[list[Sample]]
"""[questions][n]"""


@dataclass(frozen=True)
class Options:
    """What to compare, on what."""

    after: Path
    """folder of a model with the weights after the update, for example of recipes.grpo --save"""
    before: str = "smollm2"
    """weights before the update: smollm2, a folder, or a hub id"""
    task: str = "times-table"
    """as of recipes.grpo; even-ids needs no tokenizer"""
    task_config: str = "{}"
    """settings of a data set of reasoning-gym, as JSON"""
    questions: int = 20
    """questions to ask"""
    n: int = 8
    """samples of each question and version"""
    max_tokens: int = 12
    """maximum number of tokens of a sample"""
    temperature: float = 1.0
    """of all samples"""
    seed: int = 0
    """of questions and samples"""
    threads: int = 1
    """CPU threads of the service"""
    json: Path | None = None
    """file for the result"""


@dataclass(frozen=True)
class Paired:
    """What an update changed."""

    pairs: int
    """samples of each version"""
    gain: float
    """mean reward after minus before, with equal seeds"""
    paired_error: float
    """standard error of `gain` for these questions"""
    independent_error: float
    """the same with a seed of its own for each version"""
    unchanged: float
    """share of the answers that are equal"""
    first_changed: float | None
    """median position of the first other token among the answers that changed, from 0"""


def first_difference(one: Sample, other: Sample) -> int | None:
    """Return the position of the first token that differs, from 0. None: the tokens are equal."""
    short = min(len(one.token_ids), len(other.token_ids))
    where = np.flatnonzero(one.token_ids[:short] != other.token_ids[:short])
    if len(where):
        return int(where[0])
    return None if len(one.token_ids) == len(other.token_ids) else short


def standard_error(differences: np.ndarray) -> float:
    """Return the standard error of the mean of [questions, n] differences, for these questions: of the draws alone."""
    questions, n = differences.shape
    return float(np.sqrt(differences.var(axis=1, ddof=1).mean() / (questions * n)))


def ask(client: RolloutClient, prompts: Sequence[list[int]], sampling: Sampling, seed: int) -> Groups:
    """Return samples of each prompt, which has a seed of its own, since equal seeds draw equal numbers."""
    handles = [client.submit(prompt, replace(sampling, seed=seed + index)) for index, prompt in enumerate(prompts)]
    return [handle.result(timeout=600) for handle in handles]


def rewards(task: Any, asked: Sequence[int], groups: Groups) -> np.ndarray:
    """Return [questions, n]."""
    return np.array([[task.reward(index, sample) for sample in group] for index, group in zip(asked, groups, strict=True)])


def compare(
    client: RolloutClient, task: Any, asked: Sequence[int], after: Any, sampling: Sampling
) -> tuple[Paired, Groups, Groups]:
    """Sample with the live weights, refresh to `after`, and sample again with the same seeds. Returns the comparison and the
    samples before and after.

    Args:
        asked: indices of questions of the task.
        after: what `RolloutClient.refresh` takes.
        sampling: with a seed; n of at least 2.
    """
    assert sampling.seed is not None and sampling.n > 1
    prompts = [task.prompt(index) for index in asked]
    before = ask(client, prompts, sampling, sampling.seed)
    others = ask(client, prompts, sampling, sampling.seed + len(prompts))
    client.refresh(after)
    then = ask(client, prompts, sampling, sampling.seed)
    old, other, new = (rewards(task, asked, groups) for groups in (before, others, then))
    changed = [first_difference(*pair) for groups in zip(before, then, strict=True) for pair in zip(*groups, strict=True)]
    where = [position for position in changed if position is not None]
    return (
        Paired(
            pairs=len(changed),
            gain=float((new - old).mean()),
            paired_error=standard_error(new - old),
            independent_error=standard_error(new - other),
            unchanged=1 - len(where) / len(changed),
            first_changed=float(np.median(where)) if where else None,
        ),
        before,
        then,
    )


def show(found: Paired) -> None:
    say(f"{found.pairs} pairs: reward {found.gain:+.4f} ± {found.paired_error:.4f} with equal seeds")
    say(f"with independent seeds ± {found.independent_error:.4f}")
    if found.paired_error:
        times = (found.independent_error / found.paired_error) ** 2
        say(f"with independent seeds, the same precision takes {times:.1f} times as many samples")
    at = "" if found.first_changed is None else f", the others first differ at token {found.first_changed:g} (median)"
    say(f"{found.unchanged:.0%} of the answers are unchanged{at}")


def main(options: Options) -> Paired:
    if options.n < 2:
        raise InputError(f"--n {options.n}: give at least 2: the standard errors need the spread of a question's samples")
    folder = models.resolve(options.before)
    engine = EngineConfig(model=str(folder), kv_tokens=65_536, cpu_offload_gib=0, threads=options.threads)
    settings = grpo.Options(
        model=options.before, task=options.task, task_config=options.task_config, steps=options.questions, groups=1,
        seed=options.seed, held_out=0,
    )  # fmt: skip
    sampling = Sampling(n=options.n, max_tokens=options.max_tokens, temperature=options.temperature, seed=options.seed)
    say("starting the service")
    with service_process(Config(engine=engine)) as service, RolloutClient(service.endpoint, name="paired") as client:
        if options.task == grpo.EVEN_IDS:
            task: Any = grpo.EvenIds(settings, client.info.vocab_size)
        else:
            task = grpo.Task(settings, models.load_tokenizer(folder))
        found, before, then = compare(client, task, range(options.questions), options.after, sampling)
    show(found)
    if options.task != grpo.EVEN_IDS:
        show_example(task, before, then)
    if options.json is not None:
        write_atomically(options.json, msgspec.json.encode(asdict(found)).decode() + "\n")
    return found


def show_example(task: Any, before: Groups, then: Groups) -> None:
    """Print the first answer that changed."""
    for index, groups in enumerate(zip(before, then, strict=True)):
        for one, other in zip(*groups, strict=True):
            if (at := first_difference(one, other)) is not None:
                words = [task.tokenizer.decode(each.token_ids, skip_special_tokens=True) for each in (one, other)]
                say(f"for example: {task.data[index].text!r}: {words[0]!r} became {words[1]!r} at token {at}")
                return


if __name__ == "__main__":
    raise SystemExit(program.run("paired", main, Options))
