"""DAPO's dynamic sampling: more groups run than a step needs, and it trains on the first ones that have something to teach.

    in flight   a a a a  b b b b  c c c c  d d d d      groups × over of them; one that ends makes room for the next
    a child ends         → its reward, at once
    rewards all equal    → the group teaches nothing: it is cancelled, or dropped when it ends
    `groups` are whole   → a step of training, new weights; what is in flight goes on under them
    none ever has spread → the training ends with `NothingToLearn`, after --max-num-gen-batches

    python -m rollout.recipes.dapo                # one-digit products with SmolLM2-135M, as rollout.recipes.grpo
    python -m rollout.recipes.dapo --decide-after 4    # cancels a group when 4 of its children have the same reward

No slot waits for the slowest group of a step, and no step is spent on groups without spread. The run reports what that costs:
the share of all sampled tokens that no step trained on.

Yu et al., "DAPO" (2025): dynamic sampling, token-level loss, clip-higher. The rest is that of `rollout.recipes.grpo`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rollout import Handle, RolloutClient, Sample, SampleStream, Sampling
from rollout.recipes import grpo, program
from rollout.recipes.grpo import NothingToLearn, Phase, Row, quiet

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Options(grpo.Options):
    """What to train and how."""

    over: float = 2.0
    """groups in flight for each group that a step trains on, at least 1"""
    decide_after: int | None = None
    """cancel a group when so many of its children have ended with the same reward; None: when all have"""
    clip_high: float = 0.28
    """the importance ratio counts only within 1 - clip and 1 + clip_high"""
    max_num_gen_batches: int = 20
    """end the training if a step has dropped this many times `groups` groups; 0 = never"""
    out: Path = Path("dapo-run")
    """folder for rewards.jsonl, curves.png and wandb's files"""


@dataclass
class Asked:
    """A group in flight."""

    index: int
    """of its question"""
    handle: Handle
    arrived: int = 0
    """children that have ended"""
    rewards: dict[int, float] = field(default_factory=dict)
    """of the children that have ended by themselves"""

    @property
    def spread(self) -> bool:
        """Whether rewards differ, so that the group teaches something."""
        return len(set(self.rewards.values())) > 1

    @property
    def whole(self) -> bool:
        """Whether all children have ended by themselves."""
        return len(self.rewards) == self.handle.n


class Sampler:
    """Keeps groups in flight, and hands out those that have something to teach."""

    def __init__(self, options: Options, client: RolloutClient, task: Any) -> None:
        self.options, self.client, self.task = options, client, task
        self.arrivals = SampleStream()
        self.in_flight: dict[str, Asked] = {}
        self.next_index = 0
        self.dropped = 0
        """groups without spread"""
        self.dropped_reward = 0.0
        """sum over these groups of the reward that all their children had"""
        self.sampled = self.wasted = 0
        """tokens, and those of them in groups that were dropped"""

    def fill(self) -> None:
        """Submit groups until as many are in flight as may be."""
        options = self.options
        while len(self.in_flight) < round(options.over * options.groups):
            index, self.next_index = self.next_index, self.next_index + 1
            seed = options.seed * 1_000_003 + index
            sampling = Sampling(n=options.n, max_tokens=options.max_tokens, temperature=options.temperature, seed=seed)
            question = index % len(self.task)
            handle = self.client.submit(self.task.prompt(question), sampling, group_id=f"{index}")
            self.in_flight[handle.group_id] = Asked(question, handle)
            self.arrivals.add(handle)

    def take(self, wanted: int, phase: Phase = quiet) -> list[Asked]:
        """Wait for so many groups with spread; the others go on. Raises NothingToLearn if too many have none."""
        ready: list[Asked] = []
        dropped, reward = self.dropped, self.dropped_reward
        while len(ready) < wanted:
            phase(f"sampling: {len(ready)} of {wanted} groups, {self.dropped - dropped} dropped")
            self.fill()
            handle, sample = self.arrivals.get(timeout=600)
            asked = self.in_flight[handle.group_id]
            self._note(asked, sample)
            if asked.arrived == handle.n:
                del self.in_flight[handle.group_id]
                if asked.whole and asked.spread:
                    ready.append(asked)
                else:
                    self._drop(asked)
                    self._check(self.dropped - dropped, self.dropped_reward - reward)
        return ready

    def _drop(self, asked: Asked) -> None:
        self.dropped += 1
        self.dropped_reward += next(iter(asked.rewards.values()), 0.0)
        self.wasted += sum(len(each.token_ids) for each in asked.handle.result())

    def _check(self, dropped: int, reward: float) -> None:
        """Raise NothingToLearn if a step has dropped so many groups, with this sum of rewards."""
        bound = self.options.max_num_gen_batches * self.options.groups
        if bound and dropped >= bound:
            mean = reward / dropped
            cause = "no sample scores: take an easier task or a better model" if mean == 0 else "take a harder task"
            raise NothingToLearn(
                f"{dropped} groups in a row were dropped or too few had different rewards; all rewards of a dropped group are "
                f"equal, {mean:.2f} on average: {cause}, or raise --n, --temperature or --max-num-gen-batches"
            )

    def _note(self, asked: Asked, sample: Sample) -> None:
        self.sampled += len(sample.token_ids)
        asked.arrived += 1
        if sample.finish_reason in ("stop", "length"):
            asked.rewards[sample.index] = self.task.reward(asked.index, sample)
        elif not asked.handle.cancelled:
            grpo.checked([sample])  # raises: it was not cancelled
        if len(asked.rewards) == self.options.decide_after and not asked.spread:
            asked.handle.cancel()


def train(options: Options, client: RolloutClient, task: Any, model: torch.nn.Module, phase: Phase = quiet) -> Iterator[Row]:
    """Train, and yield the metrics of each step."""
    from rollout.recipes import policy

    learner, sampler = policy.Learner(model, options.rate), Sampler(options, client, task)
    learn = partial(policy.add_gradients, clip=(options.clip, options.clip_high), temperature=options.temperature)
    try:
        for step in range(options.steps):
            began = time.perf_counter()
            dropped, sampled, wasted = sampler.dropped, sampler.sampled, sampler.wasted
            ready = sampler.take(options.groups, phase)
            phase("training")
            waited = time.perf_counter() - began
            groups = [asked.handle.result() for asked in ready]
            rewards = np.array([[asked.rewards[i] for i in range(options.n)] for asked in ready])
            tokens = sum(len(sample.token_ids) for group in groups for sample in group)
            ratios = [
                learn(model, task.prompt(asked.index), group, advantage, tokens=tokens)
                for asked, group, advantage in zip(ready, groups, policy.advantages(rewards), strict=True)
            ]
            norm = learner.step()
            phase("refresh")
            weights = grpo.push(client, model, step + 1) if options.refresh else {}
            lag = policy.lags(groups, step)
            yield {
                "train/step": step + 1,
                "train/reward": float(rewards.mean()),
                "train/grad_norm": norm,
                "train/tokens": tokens,
                "train/seconds": time.perf_counter() - began,
                "train/wait_seconds": waited,
                "train/tokens_per_s": tokens / (time.perf_counter() - began),
                "train/dropped_groups": sampler.dropped - dropped,
                "train/waste": (sampler.wasted - wasted) / max(1, sampler.sampled - sampled),
                "train/lag_mean": float(lag.mean()),
                "train/lag_max": float(lag.max()),
                "train/ratio": float(np.concatenate(ratios).mean()),
                **weights,
            }
    finally:
        for asked in sampler.in_flight.values():
            asked.handle.cancel()


def main(options: Options) -> list[Row]:
    """As `grpo.main`."""
    return grpo.main(options, train)


if __name__ == "__main__":
    raise SystemExit(program.run("dapo", main, Options))
