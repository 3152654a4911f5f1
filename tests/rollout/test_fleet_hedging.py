"""The last children run twice: the first one counts, the second one is compared, and nothing else changes."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from engine.types import Group, Sample, Sampling
from rollout.config import FleetConfig
from rollout.fleet import hedging
from rollout.fleet.fleet import Fleet
from rollout.fleet.hedging import difference
from rollout.metrics.meters import EngineMeter
from tests.support.fleet import Threads, check, collect, fed, fleet_of, front_of, prompt, step_until
from tests.support.hash_engine import manifest_of, weights_of

ROOT = Path(__file__).parents[2]
SLOW_S, FAST_S = 0.02, 0.0005


@pytest.fixture(autouse=True)
def old_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hedging, "OLD_S", 0.0)


def group(i: int, **sampling: Any) -> Group:
    return Group(f"g{i}", prompt(i), Sampling(**{"n": 3, "max_tokens": 60, "seed": i, **sampling}))


def where(fleet: Fleet, threads: Threads, name: str = "g1") -> tuple[Any, Any]:
    """The engine that runs a group, and the other one."""
    (part,) = fleet._groups.open[name].parts
    return tuple(threads.engines[one] for one in (part.replica.name, "10"[int(part.replica.name)]))  # type: ignore[return-value]


def told(fleet: Fleet) -> dict[str, int]:
    return {name: fleet.status()["fleet"][name] for name in ("hedged", "hedge_wins", "mismatch", "moved", "repeats")}


def settled(fleet: Fleet) -> list[Sample]:
    """Wait until nothing runs anywhere. Returns what came out meanwhile."""
    return step_until(fleet, lambda: not any(fleet._groups.at.values()), "what came second is here")


def test_the_first_one_counts_and_nobody_sees_a_difference() -> None:
    """The second replica is faster: each child comes once, from there, and the first one's are compared without a word."""
    with fleet_of(2, hedge=8) as (fleet, threads):
        fleet.submit(group(1))
        slow, fast = where(fleet, threads)
        slow.step_s, fast.step_s = SLOW_S, FAST_S
        check(collect(fleet, 3).values())
        assert settled(fleet) == [] and fast.made["generated_tokens"] == 180 and slow.made["generated_tokens"] < 180
        assert told(fleet) == {"hedged": 3, "hedge_wins": 3, "mismatch": 0, "moved": 0, "repeats": 0}
        assert slow.aborts and not fast.aborts and not fleet._groups.open


def test_the_second_one_may_also_come_second() -> None:
    with fleet_of(2, hedge=8, step_s=0.004) as (fleet, threads):
        fleet.submit(group(1))
        _, other = where(fleet, threads)
        other.step_s = 5 * SLOW_S
        check(collect(fleet, 3).values())
        assert settled(fleet) == []
        assert told(fleet) == {"hedged": 3, "hedge_wins": 0, "mismatch": 0, "moved": 0, "repeats": 0}


@pytest.mark.parametrize("first_wins", [False, True])
def test_a_replica_that_makes_other_tokens_is_an_alarm(first_wins: bool, caplog: pytest.LogCaptureFixture) -> None:
    """Negative control: the hedge's replica has other weights than it says. Nothing is doubled."""
    caplog.set_level(logging.ERROR)
    with fleet_of(2, hedge=8, step_s=0.004) as (fleet, threads):
        fleet.submit(group(1))
        one, other = where(fleet, threads)
        other.key += 1
        (one if not first_wins else other).step_s = 5 * SLOW_S
        got = collect(fleet, 3)
        assert settled(fleet) == [] and len(got) == 3
        assert told(fleet)["mismatch"] == 3 and "token_ids from token 0 on" in fleet.status()["fleet"]["last_mismatch"]
        assert [record.message.split(" mismatch=")[0] for record in caplog.records] == ["replicas make different samples"] * 3


def test_a_refresh_in_between_is_no_mismatch_and_wins_nothing() -> None:
    """The two are at different tokens when it comes: what the hedge makes is another sample, and is dropped."""
    with fleet_of(2, hedge=8, step_s=0.002) as (fleet, threads):
        fleet.submit(group(1, max_tokens=200))
        one, other = where(fleet, threads)
        step_until(fleet, lambda: len(fleet._groups.open["g1"].parts) == 2 and other.made["generated_tokens"] > 30)
        one.step_s = other.step_s = SLOW_S
        weights = weights_of(1)
        staging = fleet.stage(manifest_of(weights), version=1)
        assert not step_until(fleet, fed(staging, weights)) and not step_until(fleet, lambda: fleet.commit(staging))
        staging.close()
        one.step_s, other.step_s = 0.002, FAST_S
        check(collect(fleet, 3).values())
        assert settled(fleet) == [] and told(fleet)["hedge_wins"] == told(fleet)["mismatch"] == 0 and told(fleet)["hedged"] == 3


def test_the_first_replica_dies_and_the_second_goes_on() -> None:
    with fleet_of(2, hedge=8, step_s=0.004) as (fleet, threads):
        fleet.submit(group(1, max_tokens=150))
        one, other = where(fleet, threads)
        step_until(fleet, lambda: len(fleet._groups.open["g1"].parts) == 2)
        threads.again = False
        threads.die(next(name for name, engine in threads.engines.items() if engine is one))
        check(collect(fleet, 3).values())
        assert told(fleet)["moved"] == 0 and other.made["generated_tokens"] == 450, "it did not run a third time"


def test_it_goes_on_from_what_was_streamed() -> None:
    with fleet_of(2, hedge=8, step_s=0.004) as (fleet, threads):
        fleet._groups.hedging._most = 0
        fleet.submit(group(1, max_tokens=120, stream_every=8))
        one, other = where(fleet, threads)
        (part,) = fleet._groups.open["g1"].parts
        step_until(fleet, lambda: sum(len(child.token_ids) for child in part.handle.begun()) > 150, "streamed")
        fleet._groups.hedging._most = 8
        one.step_s, other.step_s = SLOW_S, FAST_S
        check(collect(fleet, 3).values())
        assert told(fleet)["hedge_wins"] == 3 and other.made["generated_tokens"] < 360 - 150


def test_who_is_not_run_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """More children than that, a group that counts them, a young one, and any group without the option."""
    with fleet_of(2, hedge=3, step_s=0.002) as (fleet, _):
        fleet.submit(group(1, n=4, max_tokens=200))
        fleet.submit(group(2, n=3, finish_after=3))
        monkeypatch.setattr(hedging, "OLD_S", 60.0)
        fleet.submit(group(3, n=1))
        collect(fleet, 8)
        assert told(fleet)["hedged"] == 0
    monkeypatch.setattr(hedging, "OLD_S", 0.0)
    with fleet_of(2, step_s=0.002) as (fleet, _):
        fleet.submit(group(1, max_tokens=300))
        collect(fleet, 3)
        assert told(fleet)["hedged"] == 0
    with pytest.raises(ValueError, match="hedge=-1: must be 0"):
        FleetConfig(hedge=-1)


def test_an_abort_brings_each_child_once() -> None:
    with fleet_of(2, hedge=8, step_s=0.004) as (fleet, _):
        fleet.submit(group(1, max_tokens=50_000))
        step_until(fleet, lambda: len(fleet._groups.open["g1"].parts) == 2)
        assert fleet.abort("g1") == []
        got = collect(fleet, 3)
        assert {sample.finish_reason for sample in got.values()} == {"aborted"}
        assert settled(fleet) == [] and told(fleet)["mismatch"] == 0


def test_deaths_and_hedges_at_random() -> None:
    """Each child comes once, as one service makes it, and no two differ."""
    with fleet_of(3, hedge=40, step_s=0.001) as (fleet, threads):
        for round in range(4):
            for i in range(4):
                fleet.submit(msgspec.structs.replace(group(i, max_tokens=40 + 60 * i), id=f"g{i}"))
            threads.engines[str(round % 3)].step_s = 0.01
            step_until(fleet, lambda: fleet._groups.hedging.hedged > 0)
            threads.die(str((round + 1) % 3))
            got = {key for key in fleet._groups.open}
            check(collect(fleet, sum(len(fleet._groups.open[name].left) for name in got)).values())
            step_until(fleet, lambda: fleet.status()["fleet"]["serving"] == 3)
        assert settled(fleet) == []
        assert told(fleet)["mismatch"] == told(fleet)["repeats"] == 0 < told(fleet)["hedged"]


def sample(tokens: list[int], reason: Any = "length", spans: Any = ((0, 1),), logprob: float = -0.5) -> Sample:
    logprobs = np.full(len(tokens), logprob, np.float32)
    return Sample(
        group_id="g",
        index=0,
        token_ids=np.array(tokens, np.int32),
        logprobs=logprobs,
        finish_reason=reason,
        weight_versions=list(spans),
        prompt_tokens=1,
    )


@pytest.mark.parametrize(
    ("one", "other", "why"),
    [
        (sample([1, 2, 3]), sample([1, 2, 3]), ""),
        (sample([1, 2, 3]), sample([1, 2], "aborted"), ""),
        (sample([], "aborted", ()), sample([1, 2]), ""),
        (sample([1, 2, 3]), sample([1, 5, 3], spans=((0, 1), (1, 2))), ""),
        (sample([1, 2], logprob=float("nan")), sample([1, 2], logprob=float("nan")), ""),
        (sample([1, 2, 3]), sample([1, 2, 4]), "token_ids from token 2 on, 3 and 4"),
        (sample([1, 2, 3]), sample([9], "aborted"), "token_ids from token 0 on"),
        (sample([1, 2]), sample([1, 2], logprob=-0.25), "logprobs from token 0 on"),
        (sample([1, 2]), sample([1, 2, 3]), "the end"),
        (sample([1, 2], "stop"), sample([1, 2, 3], "aborted"), "the end"),
        (sample([1, 2], "stop"), sample([1, 2], "length"), "the end"),
        (sample([1, 2], "stop"), sample([1, 2], "aborted"), ""),
    ],
)
def test_what_is_a_difference(one: Sample, other: Sample, why: str) -> None:
    for a, b in ((one, other), (other, one)):
        found = difference(a, b)
        assert bool(found) == bool(why) and (found.startswith(why[:9]))


def test_the_metrics_of_a_front_are_those_of_the_table() -> None:
    with fleet_of(1) as (fleet, _), front_of(fleet):
        meter = EngineMeter(30.0)
        meter.add(fleet.status(), 0.0)
        told = {name for name in meter.row() if name.startswith("fleet/")}
    assert told == set(re.findall(r"^\| `(fleet/\w+)` \|", (ROOT / "docs/metrics.md").read_text(), re.MULTILINE)) != set()
