"""The scheduler without a model: what it decides is real, what a step costs is read from a table.

    lengths of the children ─┐
    Scheduler.plan ──────────┼─> tokens of a script ─> Scheduler.commit        clock += Costs.seconds(plan)
    Costs ───────────────────┘

The same script makes a real engine draw these tokens (`follow`), so that both do the same work and a simulated second can be
compared with a real one.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import msgspec
import numpy as np

from rollout.engine.config import EngineConfig
from rollout.engine.kv.block import PoolCounts
from rollout.engine.scheduling.build import open_scheduler
from rollout.engine.scheduling.plan import Plan, SampledTokens
from rollout.engine.scheduling.scheduler import Scheduler
from rollout.engine.values import Group, Sample, Sampling

END = 2
"""the token that ends a child"""
WORDS = range(16, 1016)
"""tokens that do not"""


class Costs(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Seconds of a step: of its tokens, read between the points of a table, of each draw, of each token of KV that it reads,
    and of each block that it copies between the pools."""

    tokens: tuple[int, ...]
    """ascending, from 1"""
    seconds: tuple[float, ...]
    """of a step of so many tokens that draws nothing and reads no KV"""
    per_draw: float
    per_kv_token: float
    """read by attention; a prefix that rows share is read once"""
    per_block: float
    """copied to or from host memory"""

    def of(self, plan: Plan, block_size: int) -> float:
        """Return the seconds of a step."""
        last, before = self.tokens[-1], self.tokens[-2]
        seconds = float(np.interp(plan.num_tokens, self.tokens, self.seconds))
        if plan.num_tokens > last:
            seconds += (plan.num_tokens - last) * (self.seconds[-1] - self.seconds[-2]) / (last - before)
        read = int((plan.starts + plan.counts).sum())
        read -= sum((prefix.num_rows - 1) * prefix.num_blocks * block_size for prefix in plan.shared)
        copied = len(plan.moves.offloads) + len(plan.moves.restores)
        return seconds + self.per_draw * len(plan.sampling) + self.per_kv_token * read + self.per_block * copied

    @property
    def prefill_tokens_per_second(self) -> float:
        """at the largest step of the table"""
        return self.tokens[-1] / self.seconds[-1]


class SimulatedBatch(NamedTuple):
    """Groups that are all there at the start, and how long their children get."""

    prompt_tokens: int
    max_tokens: int
    lengths: np.ndarray
    """[groups, n] int, each from 2 to max_tokens"""

    def groups(self) -> Iterator[Group]:
        """Yield the groups, with prompts that have nothing in common."""
        random = np.random.default_rng(7)
        for number in range(len(self.lengths)):
            prompt = random.integers(WORDS.start, WORDS.stop, self.prompt_tokens).astype(np.int32)
            sampling = Sampling(
                n=self.lengths.shape[1],
                max_tokens=self.max_tokens,
                stop_token_ids=(END,),
                ignore_eos=True,
                seed=number,
            )
            yield Group(str(number), prompt, sampling)

    def longest_blocks(self, block_size: int) -> int:
        """Return the blocks of a child that takes all its tokens: no pool may be smaller."""
        return -(-(self.prompt_tokens + self.max_tokens) // block_size)


class SimulatedEnds(NamedTuple):
    """When children ended, and what that took."""

    seconds: np.ndarray
    """[children] ascending, since the start"""
    steps: int
    offloads: int

    @property
    def total(self) -> float:
        """seconds until all have ended"""
        return float(self.seconds[-1])


def word(group: int, index: int, position: int) -> int:
    """Return the token at a position of a child that does not end it."""
    return WORDS[(position * 31 + index * 17 + group * 7) % len(WORDS)]


def script(scheduler: Scheduler, plan: Plan, lengths: np.ndarray) -> np.ndarray:
    """Return [draws] int32: what each draw of a plan has to be, so that children get as long as `lengths` says."""
    tokens = []
    for seq, draws in zip(scheduler.sequences_of(plan), plan.samples.tolist(), strict=True):
        state, group = seq.state, int(seq.state.group.id)
        for at in range(draws):
            index, position = (seq.index, len(seq.output) + at) if state.forked else (state.fresh[at], 0)
            ends = position + 1 >= lengths[group, index]
            tokens.append(END if ends else word(group, index, position))
    return np.array(tokens, np.int32)


def follow(scheduler: Scheduler, lengths: np.ndarray) -> None:
    """Make an engine's scheduler take the script for what was drawn."""
    commit = scheduler.commit

    def scripted(plan: Plan, drawn: SampledTokens) -> list[Sample]:
        return commit(plan, drawn._replace(tokens=script(scheduler, plan, lengths)))

    scheduler.commit = scripted  # type: ignore[method-assign]


def simulate(
    work: SimulatedBatch, config: EngineConfig, costs: Costs, device_blocks: int, host_blocks: int, host_s: float = 0.0
) -> SimulatedEnds:
    """Run the scheduler until all children have ended. host_s: seconds of the host for each step, during which the device
    computes the step before where steps overlap (`config.overlap_steps`)."""
    now, free_at, ends = 0.0, 0.0, list[float]()
    in_flight: list[tuple[Plan, float]] = []
    scheduler = open_scheduler(
        config,
        PoolCounts(device_blocks, host_blocks, max_blocks=work.longest_blocks(config.block_tokens)),
        clock=lambda: now,
    )
    counters, rates = scheduler.state.counters, scheduler.state.rates
    rates.copy_blocks_per_second = 1 / costs.per_block if costs.per_block else 0.0
    rates.prefill_tokens_per_second = costs.prefill_tokens_per_second
    for group in work.groups():
        scheduler.submit(group, "", group.sampling.seed or 0, frozenset({END}))

    def commit() -> None:
        nonlocal now
        plan, end = in_flight.pop(0)
        now = max(now, end)
        tokens = script(scheduler, plan, work.lengths)
        zeros = np.zeros(len(tokens), np.float32)
        ended = scheduler.commit(plan, SampledTokens(tokens, zeros, None, np.ones(len(tokens), bool)))
        ends.extend([now] * len(ended))
        counters.steps += 1

    while scheduler.state.has_work or in_flight:
        plan = scheduler.plan()
        if plan is None:
            commit()
            continue
        scheduler.state.store.moved()
        now += host_s
        if plan.num_rows:
            free_at = max(now, free_at) + costs.of(plan, config.block_tokens)
            scheduler.launched(plan)
            in_flight.append((plan, free_at))
        elif not in_flight:
            raise RuntimeError("the scheduler is stuck: nothing runs and nothing can start")
        while in_flight and not (config.overlap_steps and in_flight[0][0] is plan and not plan.followed):
            commit()
    return SimulatedEnds(np.array(ends), counters.steps, counters.offloads)
