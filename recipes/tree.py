"""Branch a finished sample at several positions and roll out again from each: Monte Carlo values of its prefixes.

    prompt ── sample ────●───────────●───────────●──────── end        reward 1
                         ├─ …  1     ├─ …  1     ├─ …  1
                         ├─ …  0     ├─ …  0     ├─ …  1              value of a prefix = mean reward of its new endings
                         └─ …  0     └─ …  1     └─ …  1
              0.1           0.3         0.7         1.0               advantage of a segment = what the value rose by in it

    python -m rollout.recipes.tree                    # SmolLM2-135M on one-digit products, a minute on 2 cores

A branch is nothing but a group whose prompt is prompt + the first k tokens of the sample. The service finds the KV of these
tokens, generated ones included, in its prefix index, so a branch prefills less than a block of tokens.

The sample itself can also continue otherwise, with its own index and counters: `otherwise` replays it from its receipt up to
the position where most was won or lost, and changes the seed from there on.

VinePPO: Kazemnejad et al., "VinePPO: Refining Credit Assignment in RL Training of LLMs" (2024).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from msgspec.structs import replace

from rollout import Change, RolloutClient, Sample, Sampling, models
from rollout.config import Config
from rollout.engine.config import EngineConfig
from rollout.process import service_process
from rollout.recipes import program
from rollout.recipes.program import say

Reward = Callable[[np.ndarray], float]
"""of the tokens after the prompt: [tokens] int32 -> a number"""


@dataclass(frozen=True)
class Options:
    """What to branch and how often."""

    model: str = "smollm2"
    """smollm2, a folder, or a hub id"""
    questions: int = 3
    """products of two digits"""
    n: int = 4
    """samples of each question; the longest is branched"""
    branches: int = 4
    """positions at which a sample is branched"""
    rollouts: int = 8
    """new endings from each position"""
    max_tokens: int = 64
    """maximum number of tokens of a sample"""
    temperature: float = 0.8
    """of all samples"""
    seed: int = 0
    """of questions and samples"""


@dataclass(frozen=True)
class Vine:
    """A sample and what its prefixes are worth."""

    sample: Sample
    positions: np.ndarray
    """[branches] tokens of the sample before each branch, ascending; the first is 0: the prompt alone"""
    values: np.ndarray
    """[branches] mean reward of the endings rolled out from there"""
    reward: float
    """of the sample itself"""

    @property
    def advantages(self) -> np.ndarray:
        """Return [branches] of the segment from each position to the next (from the last one to the end)."""
        return np.diff(self.values, append=self.reward)


def positions(length: int, branches: int) -> np.ndarray:
    """Return [≤ branches] where to branch a sample of `length` tokens: evenly, from 0 on, each once."""
    return np.unique(np.arange(branches) * length // branches)


def grow(
    client: RolloutClient, prompt: Sequence[int], sample: Sample, where: np.ndarray, sampling: Sampling, reward: Reward
) -> Vine:
    """Roll out `sampling.n` new endings from each position, all of them at once."""
    prefixes = [sample.token_ids[:k] for k in where]
    prompts = [np.concatenate([np.asarray(prompt, np.int32), prefix]) for prefix in prefixes]
    groups = list(client.generate_groups(prompts, sampling, timeout=600))
    values = [
        np.mean([reward(np.concatenate([prefix, ending.token_ids])) for ending in group])
        for prefix, group in zip(prefixes, groups, strict=True)
    ]
    return Vine(sample, where, np.array(values), reward(sample.token_ids))


def otherwise(
    client: RolloutClient, prompt: Sequence[int], sample: Sample, sampling: Sampling, token: int, seed: int
) -> Sample:
    """Return the sample as it would be with another seed from a token on. sampling: of its group. Raises RuntimeError if the
    service has other weights by now."""
    change = Change(token=token, sampling={"seed": seed})
    (made,) = client.replay([client.receipt(sample, prompt, sampling)], [prompt], change=change, timeout=600)
    if made.sample is None:
        raise RuntimeError(made.why)
    return made.sample


def product(rng: np.random.Generator) -> tuple[str, int]:
    """Make a question and its answer."""
    a, b = rng.integers(2, 10, 2)
    return f"What is {a} times {b}? Think aloud in one short sentence, then give the number.", int(a * b)


def show(vine: Vine, tokenizer: Any) -> None:
    ends = [*vine.positions[1:], len(vine.sample.token_ids)]
    for start, end, value, advantage in zip(vine.positions, ends, vine.values, vine.advantages, strict=True):
        text = tokenizer.decode(vine.sample.token_ids[start:end])
        print(f"  value {value:.2f}  advantage {advantage:+.2f}  {text!r}")
    print(f"  reward {vine.reward:.0f}")


def main(options: Options) -> list[Vine]:
    folder = models.resolve(options.model)
    tokenizer = models.load_tokenizer(folder)
    rng = np.random.default_rng(options.seed)
    sampling = Sampling(max_tokens=options.max_tokens, temperature=options.temperature, seed=options.seed)
    engine = EngineConfig(model=str(folder), kv_tokens=65_536, block_size=16)  # small blocks: more of a short prefix is found
    vines = []
    say("starting the service")
    with service_process(Config(engine=engine)) as service, RolloutClient(service.endpoint, name="tree") as client:
        for _ in range(options.questions):
            question, answer = product(rng)

            def reward(tokens: np.ndarray, answer: int = answer) -> float:
                numbers = re.findall(r"\d+", tokenizer.decode(tokens, skip_special_tokens=True))
                return float(bool(numbers) and int(numbers[-1]) == answer)

            chat = [{"role": "user", "content": question}]
            prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
            (samples,) = client.generate_groups([prompt], replace(sampling, n=options.n), timeout=600)
            sample = max(samples, key=lambda sample: len(sample.token_ids))
            before = client.status()
            where = positions(len(sample.token_ids), options.branches)
            vine = grow(client, prompt, sample, where, replace(sampling, n=options.rollouts), reward)
            after = client.status()
            hits, prefilled = (after[key] - before[key] for key in ("prefix_hit_tokens", "prefill_tokens"))
            print(f"{question}  ({hits} prefix tokens found in the KV, {prefilled} prefilled)")
            show(vine, tokenizer)
            turn = int(vine.positions[np.abs(vine.advantages).argmax()])
            other = otherwise(client, prompt, sample, replace(sampling, n=options.n), turn, options.seed + 1)
            print(f"  with another seed from token {turn} on: reward {reward(other.token_ids):.0f}")
            vines.append(vine)
    return vines


if __name__ == "__main__":
    raise SystemExit(program.run("tree", main, Options))
