"""Rates that decisions rest on: noise and short measurements do not turn them."""

from __future__ import annotations

import pytest

from rollout.engine.scheduling.counters import Rate


def test_nothing_is_said_of_little() -> None:
    rate = Rate(800)
    assert rate.add(99, 1.0) == 0
    assert rate.add(10, 0.1) == pytest.approx(100, rel=0.1)


def test_a_short_measurement_weighs_little() -> None:
    """A copy of two blocks that was interrupted for 4 ms, after one of 500."""
    rate = Rate(512)
    before = rate.add(500, 0.05)
    assert rate.add(2, 0.004) > 0.9 * before


def test_it_follows_what_lasts() -> None:
    rate = Rate(512)
    rate.add(5000, 5.0)
    for _ in range(50):
        now = rate.add(100, 0.01)
    assert now == pytest.approx(10_000, rel=0.1)


def test_no_time_is_no_rate() -> None:
    assert Rate(8).add(100, 0.0) == 0
