"""Groups that run on an engine which sleeps between steps."""

from __future__ import annotations

from typing import Any

import numpy as np

from rollout.engine.engine import Engine
from rollout.engine.values import Sample
from tests.support.invariants import check
from tests.support.toy import group


def groups(count: int = 3) -> list[Any]:
    r = np.random.default_rng(0)
    return [group(f"g{i}", r.integers(3, 199, 30 + 7 * i), n=4, max_tokens=32, seed=i, ignore_eos=True) for i in range(count)]


def run_with_naps(engine: Engine, naps: set[int], level: int = 1) -> dict[tuple[str, int], Sample]:
    """Run all groups; before each step named in `naps` the engine sleeps and wakes."""
    for each in groups():
        engine.submit(each)
    samples, step = {}, 0
    while engine.has_work:
        if step in naps:
            engine.sleep(level)
            assert not engine.has_work and engine.step() == [] and engine.status()["state"] == "asleep"
            assert not engine.worker.kv.data.count_nonzero() and not engine.scheduler.state.store.device.used
            check(engine.scheduler)
            engine.wake()
        for sample in engine.step():
            samples[sample.group_id, sample.index] = sample
        check(engine.scheduler)
        step += 1
    return samples
