"""What a replica sends is compared with what was asked; one that lies, forgets or stands still is dead."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np
import pytest

from rollout.config import Config, FleetConfig
from rollout.engine.values import Group, Sample, Sampling, TokenChunk
from rollout.fleet.event_queue import EventQueue
from rollout.fleet.fleet import Fleet
from rollout.fleet.join_listener import JoinListener
from rollout.fleet.launcher import Host, Launcher, RouterFolder
from rollout.fleet.open_groups import OpenGroup
from rollout.fleet.replica import Replica, State
from rollout.fleet.replica_status import MAX_MISSING, ProgressWatch, ReplicaStatus, read_status
from rollout.fleet.retries import candidates
from rollout.fleet.scaling import Scaling
from rollout.fleet.timing import Timing
from rollout.transport.messages import MOST_REPLICAS
from tests.support.fleet import Threads, check, collect, fleet_of, prompt, refresh, step_until

REPLACE = msgspec.structs.replace
Change = Callable[[Sample], Sample]


def group(i: int, **sampling: Any) -> Group:
    return Group(f"g{i}", prompt(i), Sampling(**{"n": 4, "max_tokens": 20, "seed": i, **sampling}))


def lies(threads: Threads, change: Callable[[list[Sample]], Sequence[Sample]], name: str = "r0") -> None:
    """Have what a replica's engine returns changed before it is sent."""
    engine = threads.engines[name]
    step = engine.step
    engine.step = lambda: change(step())


def dead(fleet: Fleet) -> list[str]:
    """Why each replica that is dead is so."""
    return [one["why"] for one in fleet.status()["replicas"] if one["state"] == "dead"]


QUICK = Timing(status_s=0.0, poll_s=0.01)
"""a status is requested at each poll, and the router polls often"""
STILL_S = 60.0


def put(name: str, value: float) -> Change:
    """Make a change of the first element of a column."""

    def change(sample: Sample) -> Sample:
        column = getattr(sample, name).copy()
        column[:1] = value
        return REPLACE(sample, **{name: column})

    return change


def field(**fields: Any) -> Change:
    return lambda sample: REPLACE(sample, **fields)


NONE: dict[str, Any] = dict(token_ids=np.zeros(0, np.int32), logprobs=np.zeros(0, np.float32), weight_versions=[])
LIES: dict[str, tuple[Change, str]] = {
    "vocab": (put("token_ids", 10**6), "token_ids with 1000000"),
    "negative": (put("token_ids", -5), "token_ids with -5"),
    "nan": (put("logprobs", math.nan), "logprobs with nan"),
    "positive": (put("logprobs", 3.0), "logprobs with 3.0"),
    "toolong": (
        lambda one: REPLACE(one, token_ids=np.tile(one.token_ids, 50), logprobs=np.tile(one.logprobs, 50)),
        "1000 tokens",
    ),
    "lengths": (lambda one: REPLACE(one, logprobs=one.logprobs[:-1]), "logprobs"),
    "empty": (field(finish_reason="stop", **NONE), "finish_reason 'stop' after 0"),
    "scored": (field(finish_reason="scored"), "finish_reason 'scored'"),
    "stale": (field(finish_reason="stale"), "finish_reason 'stale'"),
    "cut": (lambda one: REPLACE(one, finish_reason="cut", token_ids=one.token_ids[:1], logprobs=one.logprobs[:1]), "'cut'"),
    "version": (field(weight_versions=[(0, 77)]), "77 never was"),
    "older": (field(weight_versions=[(0, 0)]), "ascend from 1"),
    "spans": (field(weight_versions=[(5, 3), (2, 9)]), "weight_versions"),
    "seed": (field(seed=5_000), "seed 5000"),
    "prompt": (field(prompt_tokens=999_999), "prompt_tokens 999999"),
    "index": (field(index=99), "sample 99"),
    "top": (field(top_ids=np.zeros((20, 2), np.int32), top_logprobs=np.zeros((20, 2), np.float32)), "top_ids"),
}


@pytest.mark.some(8)
@pytest.mark.parametrize("lie", LIES)
def test_a_replica_that_lies_is_dead_and_its_children_run_elsewhere(lie: str) -> None:
    change, why = LIES[lie]
    with fleet_of(2) as (fleet, threads):
        refresh(fleet, 1)
        threads.again = False
        lies(threads, lambda samples: [change(sample) for sample in samples])
        for i in range(8):
            fleet.submit(group(i))
        check(collect(fleet, 32).values())
        (reason,) = dead(fleet)
        assert why in reason and threads.replaced == ["r0"]


def test_lies_reach_the_trainer_where_nobody_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control."""
    monkeypatch.setattr("rollout.client.handle.check_sample", lambda *arguments: None)
    with fleet_of(2) as (fleet, threads):
        lies(threads, lambda samples: [LIES["vocab"][0](sample) for sample in samples])
        for i in range(8):
            fleet.submit(group(i))
        assert any((sample.token_ids >= 997).any() for sample in collect(fleet, 32).values())


def test_streamed_tokens_of_a_replica_that_lies_are_not_gone_on_from() -> None:
    """New tokens of children that run are checked as well; the children begin again."""

    def wrong(chunk: TokenChunk) -> TokenChunk:
        return REPLACE(chunk, logprobs=chunk.logprobs * np.float32(math.nan)) if chunk.first > 40 else chunk

    with fleet_of(2, step_s=0.001) as (fleet, threads):
        threads.again = False
        engine = threads.engines["r0"]
        chunks = engine.chunks
        engine.chunks = lambda *given: [wrong(chunk) for chunk in chunks(*given)]
        for i in range(6):
            fleet.submit(group(i, max_tokens=200, stream_every=8))
        check(collect(fleet, 24).values())
        assert "logprobs with nan" in dead(fleet)[0] and threads.engines["r1"].made["generated_tokens"] == 24 * 200


def test_the_sibling_s_tokens_are_noticed_where_they_were_streamed() -> None:
    def swapped(samples: list[Sample]) -> list[Sample]:
        return [REPLACE(sample, index=sample.index ^ 1) for sample in samples]

    with fleet_of(2, step_s=0.001) as (fleet, threads):
        threads.again = False
        lies(threads, swapped)
        for i in range(6):
            fleet.submit(group(i, max_tokens=60, stream_every=8))
        check(collect(fleet, 24).values())
        assert "than the tokens that were streamed of it" in dead(fleet)[0]


@pytest.mark.parametrize(
    ("status", "why"),
    [
        ({}, "groups"),
        ({"groups": "many"}, "groups"),
        ({"groups": -1}, "groups"),
        ({"kv": {"used": math.nan}}, "nan"),
        ({"kv": {"used": 10**30}}, "which is no count"),
        ({"kv": {"stale_token_ratio": 1e39}}, "float32"),
        ({"weights": [1, 2]}, "weights"),
        ({"weights": {"resident_bytes": "all"}}, "resident_bytes"),
        ({"deep": [[[[[[[[[1]]]]]]]]]}, "levels"),
    ],
)
def test_a_status_that_is_none(status: dict[str, Any], why: str) -> None:
    with fleet_of(2, timing=QUICK) as (fleet, threads):
        threads.again = False
        engine = threads.engines["r0"]
        true = engine.status
        engine.status = lambda: {**true(), **status} if status else {}
        step_until(fleet, lambda: dead(fleet), "it is noticed")
        assert why in dead(fleet)[0]
        fleet.submit(group(1))
        check(collect(fleet, 4).values())


def test_a_status_may_hold_what_the_router_does_not_know() -> None:
    known = {"groups": 1, "steps": 2, "generated_tokens": 3}
    assert read_status({**known, "new": [1.5, None, True, "x", {"a": {}}]}) == ReplicaStatus(1, 2, 3)


@pytest.mark.parametrize("mean", [-3e38, 1.6e29])
def test_a_mean_may_be_any_float32(mean: float) -> None:
    """Only counts are below 2**63. An honest replica's mean of log-probs is no count, and does not end it."""
    status = {"groups": 1, "steps": 2, "generated_tokens": 3}
    assert read_status({**status, "metrics": {"rollout/logprob_mean": mean}}) == ReplicaStatus(1, 2, 3)


# one that never answers


def test_a_replica_that_forgets_groups_is_found() -> None:
    """It lives, answers, and never gives them back."""
    with fleet_of(2, timing=QUICK) as (fleet, threads):
        threads.again = False
        lies(threads, lambda samples: [sample for sample in samples if sample.seed % 2])
        for i in range(10):
            fleet.submit(group(i))
        check(collect(fleet, 40).values())
        assert "it has lost groups" in dead(fleet)[0]


def test_a_replica_that_computes_nothing_is_found() -> None:
    with fleet_of(2, timing=msgspec.structs.replace(QUICK, no_progress_s=0.2)) as (fleet, threads):
        threads.again = False
        threads.engines["r0"].step = lambda: time.sleep(0.001) or []
        for i in range(10):
            fleet.submit(group(i))
        check(collect(fleet, 40).values())
        assert "it has computed nothing" in dead(fleet)[0]


def test_replicas_that_rest_or_take_long_are_not_found_wanting() -> None:
    """Paused, asleep, and in a step that takes longer than one may stand still."""
    with fleet_of(2, timing=msgspec.structs.replace(QUICK, no_progress_s=0.3)) as (fleet, threads):
        fleet.pause()
        for i in range(4):
            fleet.submit(group(i))
        asked = {name: counted(engine) for name, engine in threads.engines.items()}
        step_until(fleet, lambda: all(len(times) > 20 for times in asked.values()), "statuses while paused")
        step_until(fleet, lambda: all(times[-1] - times[0] > 0.6 for times in asked.values()), "for longer than that")
        long, engine = [0.4, 0.4], threads.engines["r0"]
        step = engine.step
        engine.step = lambda: (time.sleep(long.pop() if long else 0.0), step())[1]
        fleet.resume()
        check(collect(fleet, 16).values())
        fleet.sleep()
        fleet.submit(group(5))
        asked = {name: counted(engine) for name, engine in threads.engines.items()}
        step_until(fleet, lambda: all(times and times[-1] - times[0] > 0.6 for times in asked.values()), "asleep")
        fleet.wake()
        check(collect(fleet, 4).values())
        assert not threads.replaced


def counted(engine: Any) -> list[float]:
    """Note when the engine's status is asked for."""
    times, status = list[float](), engine.status
    engine.status = lambda: (times.append(time.monotonic()), status())[1]
    return times


def test_what_the_statuses_of_a_replica_say() -> None:
    progress = ProgressWatch(STILL_S)

    def check(groups: int, steps: int, sent: int | None, requested: float, arrived: float | None = None) -> str:
        return progress.check(ReplicaStatus(groups, steps, 1), sent, requested, requested if arrived is None else arrived)

    for _ in range(MAX_MISSING - 1):
        assert not check(1, 1, 2, 0.0)
    assert not check(2, 1, 2, 0.0), "they were on their way"
    for _ in range(MAX_MISSING - 1):
        assert not check(1, 1, 2, 0.0)
    assert "1 of 2" in check(1, 1, 2, 0.0)
    progress = ProgressWatch(STILL_S)
    assert not check(2, 1, 2, 10.0)
    assert not check(2, 1, 2, 10.0 + 0.9 * STILL_S)
    assert not check(2, 2, 2, 10.0 + 2 * STILL_S), "a step has ended"
    assert not check(2, 2, None, 10.0 + 9 * STILL_S), "it may not run"
    assert not check(2, 2, 2, 10.0 + 9.9 * STILL_S)
    assert "computed nothing" in check(2, 2, 2, 10.0 + 10.1 * STILL_S)
    assert not check(2, 3, 2, 0.0, 100.0)
    assert not check(2, 3, 2, 101.0, 101.0 + 9 * STILL_S), "the router read the answer late"
    assert "computed nothing" in check(2, 3, 2, 100.1 + STILL_S)


def test_a_replica_that_gives_everything_back_is_given_nothing() -> None:
    """As one does that stops; one that goes on so is dead. Its children run elsewhere."""
    with fleet_of(2, timing=msgspec.structs.replace(QUICK, stopping_s=0.05)) as (fleet, threads):
        threads.again = False
        engine = threads.engines["r0"]
        engine.step = lambda: [one for child in list(engine.children) for one in engine.abort(child.group.id, child.index)]
        number = 0

        def lost() -> bool:
            nonlocal number
            number += 1
            fleet.submit(group(number, n=1))
            return bool(dead(fleet))

        ended = step_until(fleet, lost, "it is lost")
        ended += collect(fleet, number - len(ended)).values()
        check(ended)
        assert "failed on 3 groups in a row" in dead(fleet)[0]


# errors


def test_errors_are_tried_again_by_child() -> None:
    """One replica fails on all, another is well: nothing is lost."""
    with fleet_of(2, faults={"r0": "errors"}) as (fleet, _):
        for i in range(4):
            fleet.submit(group(i, n=16, max_tokens=8))
        check(collect(fleet, 64).values())


def test_each_child_is_tried_three_times() -> None:
    with fleet_of(1, faults={"r0": "errors"}) as (fleet, threads):
        fleet.submit(group(1, n=8, max_tokens=2))
        assert {sample.finish_reason for sample in collect(fleet, 8).values()} == {"error"}
        assert threads.engines["r0"].made["generated_tokens"] == 8 * 2 * 3


def test_one_replica_s_refusal_is_not_everybody_s() -> None:
    """A group that one does not take, as it has no room for it, runs on another; the replica is well."""
    with fleet_of(2) as (fleet, threads):

        def refuse(group: Group, client: str = "") -> None:
            raise ValueError("it can never fit the KV pool")

        threads.engines["r0"].submit = refuse
        for i in range(8):
            fleet.submit(group(i))
        check(collect(fleet, 32).values())
        assert not threads.replaced


def replica(name: str, state: State = State.SERVING, load: int = 0, failing: bool = False) -> Replica:
    one = Replica(name, EventQueue())
    one.state, one.load = state, load
    one.failing |= {"g"} if failing else set()
    return one


def test_one_that_has_failed_is_given_one_group_at_a_time() -> None:
    well, failing, busy = replica("a", load=9), replica("b", failing=True), replica("c", load=1, failing=True)
    one = OpenGroup.of(group(1), "", 0.0)
    assert candidates(one, [well, failing, busy]) == {"a": well, "b": failing}
    assert candidates(one, [busy]) == {"c": busy}, "there is no other"
    one.failed_on |= {"a", "b"}
    assert candidates(one, [well, failing]) == {"a": well, "b": failing}
    one.failed_on = {"b"}
    assert candidates(one, [well, failing, busy]) == {"a": well}


# fewer


def test_those_go_that_are_of_least_use() -> None:
    now = [0.0]
    launcher = Launcher(lambda name: ["false"], [Host()] * 6, RouterFolder(), clock=lambda: now[0])
    now[0] = -1.0  # nothing is started
    names = [f"local-{i}" for i in range(6)]
    states = [State.DEAD, State.SERVING, State.STALE, State.SERVING, None, State.SERVING]
    replicas = {name: replica(name, state) for name, state in zip(names, states, strict=True) if state is not None}
    replicas["local-1"].load = 5
    scaling = Scaling(JoinListener(), launcher, replicas)
    draining = lambda: [int(name[-1]) for name, one in replicas.items() if one.draining]  # noqa: E731
    try:
        scaling.change("scale", 5, "")
        assert draining() == [0], "the one that is dead"
        scaling.change("scale", 4, "")
        assert len(launcher.names) == 4 and "local-4" not in launcher.names, "the one that starts"
        scaling.change("scale", 2, "")
        assert draining() == [0, 2, 5], "of equal ones the newest"
        scaling.change("scale", 1, "")
        assert not replicas["local-1"].draining, "the one that has work"
        scaling.poll(1)
        removed = {one.name for one in launcher.poll() if one.removed}
        assert removed == {*names} - {"local-1"} and launcher.names == ["local-1"]
    finally:
        launcher.close()


def test_a_dead_replica_goes_before_one_that_serves() -> None:
    with fleet_of(2) as (fleet, threads):
        threads.again = False
        threads.die("r0")
        step_until(fleet, lambda: dead(fleet))
        named = list[str]()
        threads.scale = lambda count, use: named.extend(sorted(["r0", "r1"], key=use)) or named[:1]  # type: ignore[method-assign]
        fleet.change_replicas("scale", 1, "")
        assert named == ["r0", "r1"]
        fleet.submit(group(1))
        check(collect(fleet, 4).values())


def test_replicas_and_threads_have_a_bound() -> None:
    assert FleetConfig(replicas=MOST_REPLICAS).replicas == MOST_REPLICAS
    with pytest.raises(ValueError, match=f"replicas=100000: must be 0 .* to {MOST_REPLICAS}"):
        FleetConfig(replicas=100_000)
    with pytest.raises(ValueError, match="threads=100000: must be 1 to"):
        msgspec.convert({"engine": {"threads": 100_000}}, Config)
