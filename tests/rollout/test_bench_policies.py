"""`rollout bench policies` in small: the scheduler that is simulated is the one that runs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest

from engine.config import EngineConfig
from engine.scheduling.drafts import StepSeconds
from rollout.bench import policies, run, simulator
from rollout.bench.simulator import Costs, SimulatedBatch, SimulatedEnds, follow, simulate
from tests.support.tiny import tiny_engine

COSTS = Costs(tokens=(1, 100), seconds=(0.02, 0.12), per_draw=0.001, per_kv_token=0.0, per_block=0.0)
CONFIG = EngineConfig(block_size=8, kv_tokens=1024, max_num_seqs=16, max_batch_tokens=64)
WORK = SimulatedBatch(12, 40, policies.lengths("bimodal", 6, 4, 16, 40, seed=1))


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
        simulated = simulate(WORK, engine.config, COSTS, pool, engine.scheduler.store.host.size)
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


def test_the_tail_is_what_the_last_tenth_takes() -> None:
    ended = SimulatedEnds(np.arange(1.0, 21.0), 1, 0, 0.0)
    assert (ended.half, ended.total, ended.tail) == (11.0, 20.0, 1.0)


@pytest.mark.parametrize("kind", policies.LENGTHS)
def test_lengths_are_within_their_bounds_and_drawn_again(kind: str) -> None:
    drawn = policies.lengths(kind, 50, 8, 100, 600, seed=3)
    assert drawn.shape == (50, 8) and drawn.min() >= 2 and drawn.max() <= 600
    np.testing.assert_array_equal(drawn, policies.lengths(kind, 50, 8, 100, 600, seed=3))
    assert (drawn != policies.lengths(kind, 50, 8, 100, 600, seed=4)).any()
    if kind != "long":
        assert np.log(drawn).mean(1).var() > 2 * np.log(drawn).var(1).mean() / 8, "children of a group are alike"


def test_the_order_that_wins_is_the_default() -> None:
    """At a third of the KV, with steps whose cost hardly depends on their rows; lengths that leave something to gain."""
    flat = Costs(tokens=(1, 1000), seconds=(0.01, 0.02), per_draw=0.0, per_kv_token=0.0, per_block=1e-5)
    rows = []
    for kind in ("bimodal", "long"):
        rows += policies.compared(policies.Case(kind, 8, policies.TIGHT), EngineConfig(block_size=16), flat, 0.25, 1)
    found = policies.summary(rows)
    assert found["best"] == EngineConfig().order and found["tail_ratio_to_first_come"] > 1.3
    assert found["orders"]["first_come"] == {"total_ratio": 1.0, "tail_ratio": 1.0}


def test_known_lengths_bring_most_of_each_group_sooner() -> None:
    """Where rows cost their share and most children wait, in a roomy pool and in a tight one, at hardly longer a total."""
    share = Costs(tokens=(1, 1000), seconds=(0.015, 1.2), per_draw=0.0, per_kv_token=0.0, per_block=1e-5)
    for pool in (1.0, policies.TIGHT):
        rows = policies.compared(policies.Case("lognormal", 8, pool, 1.0, 64), EngineConfig(block_size=16), share, 0.12, 1)
        known = policies.ratios(rows, ("total_ratio", "most_ratio", "total_bound", "most_bound"))
        last = known["longest_last"]
        assert 1.2 < last["most_ratio"] < last["most_bound"] and 1.0 < last["total_ratio"] < last["total_bound"]
        assert known["least_far"]["most_ratio"] < 1.1, "which knows nothing of lengths"


def test_on_a_device_of_flat_cost_all_end_sooner_too() -> None:
    """With lengths that are known. Told up to twice as long, only those that are waited for do; told nothing, nobody."""
    for known, most, total in ((1.0, 1.4, 1.0), (2.0, 1.3, 0.85), (0.0, 0.99, 0.99)):
        case = policies.Case("independent", 8, 1.0, known, 64, flat=True)
        rows = policies.compared(case, EngineConfig(block_size=16), policies.FLAT, 0.12, 1)
        last = policies.ratios(rows, ("total_ratio", "most_ratio"))["longest_last"]
        assert last["total_ratio"] > total and last["most_ratio"] > most, (known, last)
        assert known or last["most_ratio"] < 1.1


def test_no_schedule_is_faster_than_the_bound() -> None:
    """Over all of a few rows and tokens, by trying each; and the bound is reached."""
    costs = np.array([0.0, 14.0, 20.0, 21.0, 22.0])

    def cheapest(tokens: int, steps: int) -> float:
        if not tokens:
            return 0.0 if steps <= 0 else np.inf
        return min(costs[rows] + cheapest(tokens - rows, steps - 1) for rows in range(1, min(4, tokens) + 1))

    for tokens in range(1, 10):
        for steps in range(1, tokens + 1):
            assert simulator.least_seconds(costs, tokens, steps) <= cheapest(tokens, steps) + 1e-9
    assert simulator.least_seconds(costs, 8, 2) == 44.0 and simulator.least_seconds(costs, 3, 3) == 42.0
    assert simulator.waited_for(np.array([[5, 9, 2], [3, 3, 4]]), 2) == (4 + 1 + 2 + 2, 4)


TWO_CORES = Costs(
    tokens=(1, 2, 8, 16, 64, 256), seconds=(0.014, 0.02, 0.022, 0.035, 0.09, 0.31), per_draw=0, per_kv_token=0, per_block=1e-5
)
SHARE = Costs(tokens=(1, 1000), seconds=(0.005, 5.0), per_draw=0.0, per_kv_token=0.0, per_block=1e-5)


def said_at_random(words: int) -> Callable[[int, int, int], int]:
    """Texts of so many words in which nothing follows from anything: guesses are found and are mostly wrong."""
    said = np.random.default_rng(words).integers(16, 16 + words, (8, 8, 256))
    return lambda group, index, position: int(said[group, index, position])


def as_at_first(self: StepSeconds, tokens: np.ndarray) -> np.ndarray:
    """Prices that are the same below the smallest size that is known, and beyond the largest."""
    sizes, known = self.table
    return np.interp(tokens, sizes, known) if sizes else np.ones(len(tokens))


@pytest.mark.parametrize("costs", [TWO_CORES, SHARE, policies.FLAT], ids=["two cores", "each its share", "flat"])
@pytest.mark.parametrize("words", [8, 100])
def test_drafts_never_cost_more_than_a_hundredth(words: int, costs: Costs, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted: a batch down to its last child, at what steps take by the table, of texts that cannot be guessed."""
    monkeypatch.setattr(simulator, "word", said_at_random(words))
    work = SimulatedBatch(16, 256, policies.lengths("independent", 8, 8, 64, 256, seed=2))
    config = msgspec.structs.replace(CONFIG, kv_tokens=64_000, max_num_seqs=64, max_batch_tokens=256)
    plain, drafting = (simulate(work, msgspec.structs.replace(config, drafts=most), costs, 8000, 0).total for most in (0, 6))
    assert drafting <= 1.01 * plain, drafting / plain
    if costs is TWO_CORES and words == 100:
        monkeypatch.setattr(StepSeconds, "of", as_at_first)
        worse = simulate(work, msgspec.structs.replace(config, drafts=6), costs, 8000, 0).total
        assert worse > 1.03 * plain, "the control: steps that are not known seem to take as long as larger ones"


def test_bench_policies_prints_and_draws(
    tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(policies, "CHILDREN", 32)
    monkeypatch.setattr(policies, "N", (4,))
    monkeypatch.setattr(
        policies, "few_slots", lambda: [policies.Case("bimodal", 4, 1.0, 1.0, 16, flat) for flat in (False, True)]
    )
    monkeypatch.setattr(simulator, "WORDS", range(16, 96))
    out, picture = tmp_path / "rows.jsonl", tmp_path / "p.png"
    options = {"in_process": False, "scale": 0.1, "repeat": 1, "dtype": "float32", "threads": 1, "plot": str(picture)}
    assert run(("policies",), model=str(tiny_model), json_file=str(out), **options) == 0  # type: ignore[arg-type]
    *rows, last = [json.loads(line) for line in out.read_text().splitlines()]
    assert last["summary"] and last["best"] in last["orders"] and last["tail_ratio_to_first_come"] > 0
    assert set(last["known_lengths"]) == set(last["known_lengths_flat"]) == set(last["orders"])
    assert last["simulator_error"] == max(row["error"] for row in rows if "error" in row)
    real = [row for row in rows if "error" in row]
    assert len(real) == 2 and all(row["engine_steps"] == row["simulated_steps"] for row in real)
    assert "policies: best" in capsys.readouterr().out and picture.stat().st_size > 1000
