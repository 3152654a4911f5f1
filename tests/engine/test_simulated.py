"""What drafts cost, counted by the scheduler without a model: what is simulated is the scheduler that runs."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import numpy as np
import pytest

from rollout.engine.config import EngineConfig
from rollout.engine.scheduling.drafts import FIRST, DraftBudget, StepSeconds
from rollout.engine.scheduling.drafts import SHARE as OF_TIME
from tests.support import simulator
from tests.support.simulator import Costs, SimulatedBatch, follow, simulate
from tests.support.tiny import tiny_engine

COSTS = Costs(tokens=(1, 100), seconds=(0.02, 0.12), per_draw=0.001, per_kv_token=0.0, per_block=0.0)
CONFIG = EngineConfig(block_size=8, kv_tokens=1024, max_num_seqs=16, max_batch_tokens=64)


def lengths(groups: int, n: int, mean: int, most: int, seed: int) -> np.ndarray:
    """Draw [groups, n] lognormal lengths that do not depend on the group."""
    random = np.random.default_rng(seed)
    random.normal(size=(groups, 1))  # the figures in docs/benchmarks/drafts.md are of the draw behind these
    return np.clip(mean * np.exp(0.9 * random.normal(size=(groups, n)) - 0.9**2 / 2), 2, most).astype(int)


WORK = SimulatedBatch(12, 40, lengths(6, 4, 16, 40, seed=1))


def test_children_get_as_long_as_they_must_on_the_engine_and_simulated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Step for step the same schedule: the engine's scheduler is the simulated one."""
    monkeypatch.setattr(simulator, "WORDS", range(16, 196))
    for pool in (10_000, 20):
        engine = tiny_engine(kv_tokens=8 * pool, max_num_seqs=16, max_batch_tokens=64, cpu_offload_gib=0.01, drafts=0)
        follow(engine.scheduler, WORK.lengths)
        for group in WORK.groups():
            engine.submit(group)
        samples = []
        while engine.has_work:
            samples += engine.step()
        assert {(int(s.group_id), s.index): len(s.token_ids) for s in samples} == dict(np.ndenumerate(WORK.lengths))
        assert all(sample.finish_reason == "stop" or len(sample.token_ids) == 40 for sample in samples)
        simulated = simulate(WORK, engine.config, COSTS, pool, engine.scheduler.state.store.host.size)
        assert (simulated.steps, len(simulated.seconds)) == (engine.counters.steps, 24)
        assert bool(simulated.offloads) == (pool == 20)


def test_a_step_costs_what_the_table_says() -> None:
    """One child alone: a prompt of 12 tokens, then a token a step."""
    work = SimulatedBatch(12, 40, np.array([[5]]))
    ended = simulate(work, CONFIG, COSTS, 100, 0)
    table = {tokens: 0.02 + (tokens - 1) * 0.1 / 99 for tokens in (1, 12)}
    assert ended.steps == 5 and ended.total == pytest.approx(table[12] + 4 * table[1] + 5 * 0.001)
    beyond = msgspec.structs.replace(COSTS, tokens=(1, 10), seconds=(0.02, 0.02 + 0.9 / 99))
    assert simulate(work, CONFIG, beyond, 100, 0).total == pytest.approx(ended.total), "the last slope goes on"
    kv = simulate(work, CONFIG, msgspec.structs.replace(COSTS, per_kv_token=1.0), 100, 0)
    assert kv.total - ended.total == pytest.approx(12 + 13 + 14 + 15 + 16)


TWO_CORES = Costs(
    tokens=(1, 2, 8, 16, 64, 256), seconds=(0.014, 0.02, 0.022, 0.035, 0.09, 0.31), per_draw=0, per_kv_token=0, per_block=1e-5
)
FLAT = Costs(tokens=(1, 64), seconds=(0.9 * 0.01 + 0.1 * 0.01 / 64, 0.01), per_draw=0, per_kv_token=0, per_block=1e-6)
"""nine tenths of a step of 64 rows are there with one"""
SHARE = Costs(tokens=(1, 1000), seconds=(0.005, 5.0), per_draw=0.0, per_kv_token=0.0, per_block=1e-5)


def said_at_random(words: int) -> Callable[[int, int, int], int]:
    """Texts of so many words in which nothing follows from anything: guesses are found and are mostly wrong."""
    said = np.random.default_rng(words).integers(16, 16 + words, (8, 8, 256))
    return lambda group, index, position: int(said[group, index, position])


def as_at_first(self: StepSeconds, tokens: np.ndarray) -> np.ndarray:
    """Prices that are the same below the smallest size that is known, and beyond the largest."""
    sizes, known = self.table
    return np.interp(tokens, sizes, known) if sizes else np.ones(len(tokens))


@pytest.mark.parametrize("costs", [TWO_CORES, SHARE, FLAT], ids=["two cores", "each its share", "flat"])
@pytest.mark.parametrize("words", [8, 100])
def test_drafts_never_cost_more_than_a_hundredth(words: int, costs: Costs, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted: a batch down to its last child, at what steps take by the table, of texts that cannot be guessed."""
    monkeypatch.setattr(simulator, "word", said_at_random(words))
    work = SimulatedBatch(16, 256, lengths(8, 8, 64, 256, seed=2))
    config = msgspec.structs.replace(CONFIG, kv_tokens=64_000, max_num_seqs=64, max_batch_tokens=256)
    plain, drafting = (simulate(work, msgspec.structs.replace(config, drafts=most), costs, 8000, 0).total for most in (0, 6))
    assert drafting <= 1.01 * plain, drafting / plain
    if costs is TWO_CORES and words == 100:
        monkeypatch.setattr(StepSeconds, "of", as_at_first)
        worse = simulate(work, msgspec.structs.replace(config, drafts=6), costs, 8000, 0).total
        assert worse > 1.03 * plain, "the control: steps that are not known seem to take as long as larger ones"


GPU = Costs(tokens=(1, 32, 256), seconds=(0.005, 0.0051, 0.006), per_draw=0.0, per_kv_token=0.0, per_block=1e-6)
"""more tokens take hardly longer"""
HOST_S = 0.0007


@pytest.mark.parametrize("words", [8, 100])
def test_drafts_end_an_overlap_only_where_that_pays(words: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of a GPU, which overlap without drafts. Texts that cannot be guessed cost what the budget has; those that siblings
    share save time. The negative control: a budget that does not count what the overlap saves."""
    work = SimulatedBatch(16, 256, lengths(4, 8, 64, 256, seed=2))
    config = msgspec.structs.replace(CONFIG, kv_tokens=64_000, max_num_seqs=64, max_batch_tokens=256, overlap_steps=True)

    def total(most: int) -> float:
        return simulate(work, msgspec.structs.replace(config, drafts=most), GPU, 8000, 0, HOST_S).total

    plain = total(0)
    monkeypatch.setattr(simulator, "word", lambda group, index, position: 16 + (position + 7 * index) % 40)
    assert total(6) < 0.75 * plain, "siblings say the same"
    monkeypatch.setattr(simulator, "word", said_at_random(words))
    bound = plain * (1 + OF_TIME) + FIRST + HOST_S
    assert total(6) <= bound
    close = DraftBudget.close
    monkeypatch.setattr(DraftBudget, "close", lambda self, times, overlapped=None: close(self, times))
    assert words == 8 or total(6) > bound
