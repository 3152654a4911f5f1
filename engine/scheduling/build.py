"""Makes the scheduler of a configuration, with the parts that the model's kinds of layers, and drafts, need. What nothing needs
is not imported."""

from __future__ import annotations

import time
from collections.abc import Callable

from rollout.engine.config import EngineConfig
from rollout.engine.kv.block import PoolCounts
from rollout.engine.scheduling.scheduler import Drafting, NoDrafts, Scheduler
from rollout.engine.scheduling.state import SchedulerState


def open_scheduler(config: EngineConfig, pools: PoolCounts, clock: Callable[[], float] = time.monotonic) -> Scheduler:
    """Make the scheduler of a configuration. clock: returns seconds, never falling."""
    state = open_state(config, pools, clock)
    return Scheduler(state, drafting(config, state))


def open_state(config: EngineConfig, pools: PoolCounts, clock: Callable[[], float]) -> SchedulerState:
    """Make the state of a scheduler."""
    size, keep = config.block_tokens, config.prefix_cache
    states = windows = None
    if pools.slots is not None:
        from rollout.engine.scheduling.states import StateSlots

        states = StateSlots(pools.slots, size, keep)
    if pools.windows is not None:
        from rollout.engine.scheduling.windows import WindowBlocks

        windows = WindowBlocks(pools.windows, size, config.most_tokens, keep)
    return SchedulerState(config, pools, clock, states, windows)


def drafting(config: EngineConfig, state: SchedulerState) -> Drafting:
    """Choose what proposes drafts."""
    if not config.drafts:
        return NoDrafts()
    from rollout.engine.scheduling.drafts import Drafts

    return Drafts(config.drafts, state, bool(config.overlap_steps))
