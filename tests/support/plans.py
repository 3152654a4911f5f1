"""Plans as tests see them: sent as bytes, read as rows; and a small scheduler to make them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from rollout.engine.kv.block import PoolCounts
from rollout.engine.scheduling.build import open_scheduler
from rollout.engine.scheduling.plan import Plan, SampledTokens
from rollout.engine.scheduling.scheduler import Scheduler
from rollout.engine.values import Group, Sample, Sampling
from tests.support.configs import engine_config


class PlanRow(NamedTuple):
    """A row of a plan, with the child that the scheduler made it for."""

    group: str
    child: int
    start: int
    count: int
    samples: int


def rows(scheduler: Scheduler, plan: Plan) -> list[PlanRow]:
    """Return the rows of a plan that is not committed, in order."""
    numbers = zip(plan.starts.tolist(), plan.counts.tolist(), plan.samples.tolist(), strict=True)
    children = [(seq.state.group.id, seq.index) for seq in scheduler.sequences_of(plan)]
    return [PlanRow(*child, *row) for child, row in zip(children, numbers, strict=True)]


def sent(plan: Plan) -> Plan:
    """Return a plan as another process gets it."""
    return Plan.decode(plan.encode())


def small_scheduler(device_blocks: int = 16, host_blocks: int = 0, **config: Any) -> Scheduler:
    """Make a scheduler of blocks of 4 tokens, steps of 8 tokens, 4 sequences; its clock stands still."""
    options = {"block_size": 4, "max_batch_tokens": 8, "max_num_seqs": 4, "lookahead_blocks": 1, "min_run_tokens": 0, **config}
    settings = engine_config(kv_tokens=4 * device_blocks, **options)
    return open_scheduler(settings, PoolCounts(device_blocks, host_blocks, max_blocks=device_blocks), clock=lambda: 0.0)


def submit(scheduler: Scheduler, id: str, prompt: Sequence[int] | range, client: str = "", **sampling: Any) -> None:
    """Submit a group of one child that ends after 20 tokens, or at token 0."""
    options = {"max_tokens": 20, "seed": 1, **sampling}
    group = Group(id, np.array(prompt, np.int32), Sampling(**options))
    scheduler.submit(group, client, group.sampling.seed or 0, frozenset({0}))


def launch(scheduler: Scheduler) -> Plan:
    """Plan a step and launch it."""
    plan = scheduler.plan()
    assert plan is not None
    scheduler.state.store.moved()
    if plan.num_rows:
        scheduler.launched(plan)
    return plan


def commit(scheduler: Scheduler, plan: Plan, token: int | np.ndarray = 9) -> list[Sample]:
    """Commit a launched step that sampled `token` everywhere, or these [draws]. Returns the children that ended."""
    draws = len(plan.sampling)
    tokens, zeros = np.zeros(draws, np.int32) + np.asarray(token, np.int32), np.zeros(draws, np.float32)
    return scheduler.commit(plan, SampledTokens(tokens, zeros, None, np.ones(draws, bool)))


def step(scheduler: Scheduler, token: int = 9) -> list[PlanRow]:
    """Plan, launch and commit a step. Returns its rows."""
    plan = launch(scheduler)
    if not plan.num_rows:
        return []
    planned = rows(scheduler, plan)
    commit(scheduler, plan, token)
    return planned
