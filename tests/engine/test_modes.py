"""What an engine does is one `Mode`, and methods lead from one to the other."""

from __future__ import annotations

from typing import Any

import pytest

from rollout.engine.values import Mode
from rollout.engine.weights.live import Weights, WeightsTorn
from tests.support.toy import engine, expected, group, run
from tests.support.watermark import watermark_engine, weights_of


def test_an_engine_begins_running() -> None:
    made = engine()
    assert made.mode is Mode.RUNNING and not made.mode.rests and made.status()["state"] == "running"


def test_paused_it_computes_nothing_and_goes_on_when_resumed() -> None:
    made, asked = engine(), group("g", [1, 2], n=2, max_tokens=5, ignore_eos=True)
    made.submit(asked)
    made.step()
    made.pause()
    assert made.mode is Mode.PAUSED and not made.has_work
    tokens = made.counters.generated_tokens
    assert made.step() == [] and made.counters.generated_tokens == tokens
    made.resume()
    samples = run(made)
    assert [samples["g", i].token_ids.tolist() for i in range(2)] == expected(asked)


def test_a_drain_lets_what_has_begun_run_to_its_end() -> None:
    made = engine(max_num_seqs=2)
    made.submit(group("begun", [1, 2], n=2, max_tokens=5))
    made.step()
    made.submit(group("later", [3], n=1, max_tokens=5))
    assert not made.drain() and made.mode is Mode.DRAINING
    assert {sample.group_id for sample in run(made).values()} == {"begun"}
    assert made.drain() and not made.has_work
    made.resume()
    assert made.mode is Mode.RUNNING and ("later", 0) in run(made)


def test_a_drain_that_is_asked_about_again_does_not_end_a_pause() -> None:
    made = engine()
    made.drain()
    made.pause()
    made.drain()
    assert made.mode is Mode.PAUSED
    made.resume()
    assert made.mode is Mode.RUNNING


def test_a_pause_outlasts_a_sleep() -> None:
    made = engine()
    made.pause()
    made.sleep()
    assert made.mode is Mode.ASLEEP
    made.wake()
    assert made.mode is Mode.PAUSED


def test_weights_that_sleep_dropped_must_come_first() -> None:
    made = watermark_engine()
    made.sleep(2)
    made.wake()
    assert made.mode is Mode.WITHOUT_WEIGHTS and made.mode.rests
    made.refresh(weights_of(3))
    assert made.mode is Mode.RUNNING and made.version == made.scheduler.state.version == 1


def test_torn_weights_stop_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    def tear(weights: Weights, staging: Any) -> None:
        weights.torn = True
        raise WeightsTorn("injected")

    monkeypatch.setattr(Weights, "commit", tear)
    made = engine()
    with pytest.raises(WeightsTorn):
        made.refresh({}, version=1)
    made.submit(group("g", [1]))
    assert made.mode is Mode.TORN and made.has_work and made.status()["state"] == "torn"
    with pytest.raises(WeightsTorn, match="restart the engine"):
        made.step()


@pytest.mark.parametrize("mode", Mode)
def test_only_modes_without_steps_rest(mode: Mode) -> None:
    assert mode.rests == (mode in (Mode.PAUSED, Mode.ASLEEP, Mode.WITHOUT_WEIGHTS))
