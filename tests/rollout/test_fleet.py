"""Many engines behind one service: routing, death, refreshes of all, and that a sample does not know which replica made it."""

from __future__ import annotations

import errno
import gc
import json
import logging
import os
import re
import signal
import sys
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import psutil
import pytest

from rollout.client.api import RolloutClient
from rollout.commands.serve_fleet import core_sets, divided
from rollout.commands.top import View
from rollout.config import Config, FleetConfig, InputError
from rollout.engine.config import EngineConfig
from rollout.engine.engine import Engine
from rollout.engine.values import Group, Limits, Mode, Sample, Sampling, WeightUpdate
from rollout.fleet import replica as replica_module
from rollout.fleet import routing
from rollout.fleet.fleet import Fleet
from rollout.fleet.groups import FleetGroups
from rollout.fleet.join_listener import JoinEndpoint, JoinListener
from rollout.fleet.launcher import Host, Launcher, RouterFolder
from rollout.fleet.replica import State
from rollout.fleet.retries import MAX_MOVES
from rollout.fleet.timing import Timing
from rollout.fleet.transaction import ReplicaTransaction
from rollout.metrics.meters import EngineMeter
from rollout.process import service_process
from rollout.service.persistence import SessionIdentity
from rollout.service.session import Session
from rollout.service.weight_export import WeightExport
from rollout.transport.errors import Busy, InvalidRequest, ServiceLost, WeightsRefused
from rollout.transport.sockets import ClientEnd, ServiceEnd
from tests.support.fleet import KEYS, WAIT, Threads, check, collect, fleet_of, prompt, refresh, router_of, step_until
from tests.support.fleet_chaos import FOUND, Chaos
from tests.support.hash_engine import TENSORS, VOCAB, HashEngine, expected, manifest_of, weights_of
from tests.support.waiting import until
from tests.support.wire import serving

ROOT = Path(__file__).parents[2]


def group(i: int, **sampling: Any) -> Group:
    return Group(f"g{i}", prompt(i), Sampling(**{"n": 4, "max_tokens": 20, "seed": i, **sampling}))


def states(fleet: Fleet) -> list[str]:
    return [one["state"] for one in fleet.status()["replicas"]]


# routing


def test_a_prefix_has_its_replica_and_keeps_it_when_others_go() -> None:
    names = ["r0", "r1", "r2", "r3"]
    first = {i: routing.ranked(prompt(i), names)[0] for i in range(200)}
    assert min(list(first.values()).count(name) for name in names) > 20, "all have some"
    for i, name in first.items():
        assert name == "r3" or routing.ranked(prompt(i), names[:3])[0] == name
    long = prompt(0, 1000)
    assert routing.ranked(long, names) == routing.ranked(np.concatenate([long[:256], prompt(9)]), names)


def test_loads_are_bounded() -> None:
    assert routing.choose(["a", "b"], {"a": 0, "b": 0}) == "a"
    assert routing.choose(["a", "b"], {"a": 100, "b": 100}) == "a"
    assert routing.choose(["a", "b"], {"a": 130, "b": 70}) == "b", "1.3 times the mean"
    assert routing.choose(["a", "b", "c"], {"a": 1000, "b": 500, "c": 0}) == "b", "the next best, not the least"


def test_a_group_is_cut_only_where_it_is_more_than_a_share() -> None:
    idle, busy = {"a": 0, "b": 0, "c": 0, "d": 0}, {"a": 10**6, "b": 10**6, "c": 10**6, "d": 10**6}
    cut = routing.parts(range(64), 100, idle)
    assert [len(part) for part in cut] == [16] * 4 and [i for part in cut for i in part] == list(range(64))
    assert routing.parts(range(31), 100, idle) == [tuple(range(31))], "a part has 16 children at least"
    assert routing.parts(range(64), 100, busy) == [tuple(range(64))]
    assert routing.parts((3, 5), 100, {"a": 0}) == [(3, 5)]


# samples


def test_a_sample_does_not_know_which_replica_made_it() -> None:
    with fleet_of(3) as (fleet, threads):
        for i in range(12):
            fleet.submit(group(i))
        fleet.submit(group(99, n=48))
        got = collect(fleet, 12 * 4 + 48)
        check(got.values())
        assert all(engine.made["generated_tokens"] for engine in threads.engines.values()), "all had something to do"
        assert fleet.status()["generated_tokens"] <= 96 * 20


def test_seeds_are_drawn_in_the_router() -> None:
    with fleet_of(2) as (fleet, _):
        fleet.submit(group(1, seed=None))
        fleet.submit(group(2, seed=None))
        got = collect(fleet, 8)
        check(got.values())
        assert len({sample.seed for sample in got.values()}) == 2


def test_clients_of_the_router_share_the_replicas() -> None:
    with fleet_of(1) as (fleet, threads):
        fleet.submit(group(1), client="7")
        fleet.submit(group(2), client="8")
        collect(fleet, 8)
        assert {name.split(".")[-1] for name in threads.engines["r0"].clients} == {"7", "8"}


def test_a_turn_goes_to_where_its_child_ran() -> None:
    with fleet_of(3) as (fleet, threads):
        fleet.submit(group(1, n=1, kv_ttl_s=60.0))
        (first,) = collect(fleet, 1).values()
        (home,) = [name for name, engine in threads.engines.items() if engine.made["generated_tokens"]]
        for i in range(2, 8):  # other prompts, all of them turns of the same child
            fleet.submit(msgspec.structs.replace(group(i, n=1), after=("g1", 0)))
            collect(fleet, 1)
        assert [name for name, engine in threads.engines.items() if engine.made["generated_tokens"]] == [home]
        assert len(threads.engines[home].after) == 6 and {index for _, index in threads.engines[home].after} == {0}
        threads.die(home)
        step_until(fleet, lambda: threads.replaced == [home] and states(fleet) == ["serving"] * 3)
        fleet.submit(msgspec.structs.replace(group(9, n=1), after=("g1", 0)))
        check(collect(fleet, 1).values())
        assert not any(engine.after for engine in threads.engines.values()), "its KV went with its replica"


def test_what_is_kept_of_a_child_is_given_up_where_it_is() -> None:
    with fleet_of(2) as (fleet, threads):
        fleet.submit(group(1, n=2, kv_ttl_s=60.0))
        collect(fleet, 2)
        assert fleet.abort("g1") == []
        until(lambda: {index for engine in threads.engines.values() for _, index in engine.aborts} == {0, 1}, "both children")


# death


def test_what_ran_on_a_lost_replica_runs_elsewhere() -> None:
    with fleet_of(3, step_s=0.002) as (fleet, threads):
        for i in range(9):
            fleet.submit(group(i, max_tokens=400))
        threads.die("r0")
        check(collect(fleet, 36).values())
        assert fleet.status()["fleet"]["moved"] > 0 and threads.replaced == ["r0"]
        step_until(fleet, lambda: states(fleet) == ["serving"] * 3, "it is back")


def test_a_group_that_seems_to_kill_replicas_ends() -> None:
    with fleet_of(2, step_s=0.01) as (fleet, threads):
        fleet.submit(group(1, max_tokens=10_000))
        for _ in range(MAX_MOVES + 1):
            step_until(fleet, lambda: fleet._groups.open["g1"].parts, "it runs")
            (part,) = fleet._groups.open["g1"].parts
            threads.die(part.replica.name)
            ended = step_until(fleet, lambda: part not in part.open.parts, "it moved")  # noqa: B023
        assert [sample.finish_reason for sample in ended] == ["error"] * 4 and "replicas were lost" in str(ended[0].error)


def repeat(fleet: Fleet) -> list[Sample]:
    """A child that comes a second time, while its siblings still run."""
    fleet.submit(group(1, n=2, max_tokens=50))
    (part,) = fleet._groups.open["g1"].parts
    tell, twice = part.handle.on_change, []

    def say_twice(handle: Any, samples: Any) -> None:
        if not twice:
            twice.append(samples)
            tell(handle, samples[:1])
        tell(handle, samples)

    part.handle.on_change = say_twice
    samples = step_until(fleet, lambda: not fleet._groups.open, "the group is done")
    return samples


def test_a_repeat_is_dropped() -> None:
    with fleet_of(1, step_s=0.001) as (fleet, _):
        assert sorted(sample.index for sample in repeat(fleet)) == [0, 1]
        assert fleet.status()["fleet"]["repeats"] == 1


def test_a_repeat_that_is_not_dropped_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control."""
    arrived = FleetGroups._arrived

    def forgetful(self: FleetGroups, part: Any, sample: Any) -> None:
        part.open.left |= {sample.index}
        part.left |= {sample.index}
        arrived(self, part, sample)

    monkeypatch.setattr(FleetGroups, "_arrived", forgetful)
    with fleet_of(1, step_s=0.001) as (fleet, _):
        assert sorted(sample.index for sample in repeat(fleet)) != [0, 1]


def test_groups_of_one_turn_are_sent_together_and_in_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    with fleet_of(1) as (fleet, threads):
        (replica,) = fleet.replicas.by_name.values()
        assert replica.link is not None
        woken, wake = list[bool](), replica.link.calls._wake
        monkeypatch.setattr(replica.link.calls, "_wake", lambda: (woken.append(True), wake()))
        order, submit = list[int](), threads.engines["r0"].submit

        def noted(group: Group, client: str = "") -> None:
            order.append(int(group.sampling.seed or 0))
            submit(group, client)

        monkeypatch.setattr(threads.engines["r0"], "submit", noted)
        for i in range(30):
            fleet.submit(group(i + 1, n=2))
        assert not woken and fleet.has_work, "the turn is not over"
        check(collect(fleet, 60).values())
        assert order == list(range(1, 31))
        assert len(woken) < 10, "not for each group"


def test_what_is_wrong_with_one_group_of_a_turn_is_no_other_s() -> None:
    with fleet_of(2) as (fleet, threads):
        wrong = msgspec.structs.replace(group(2), prompt=np.array([VOCAB], np.int32))
        for one in (group(1), wrong, group(3)):
            fleet.submit(one)
        samples = collect(fleet, 12)
        check(sample for (name, _), sample in samples.items() if name != "g2")
        refused = [sample for (name, _), sample in samples.items() if name == "g2"]
        assert {sample.finish_reason for sample in refused} == {"error"} and "token id" in str(refused[0].error)
        assert not threads.replaced


def test_a_group_may_be_ended_before_its_turn_is_over() -> None:
    with fleet_of(1, step_s=0.005) as (fleet, _):
        for i in (1, 2, 3):
            fleet.submit(group(i, max_tokens=20 if i != 2 else 10_000))
        assert fleet.abort("g2") == []
        samples = collect(fleet, 12)
        check(sample for (name, _), sample in samples.items() if name != "g2")
        assert {sample.finish_reason for (name, _), sample in samples.items() if name == "g2"} == {"aborted"}


def test_a_client_that_leaves_takes_nothing_of_the_others_along() -> None:
    """Their groups have come in the same turns, and their samples in the same messages."""
    with fleet_of(2, step_s=0.002) as (fleet, threads), router_of(fleet) as service:
        going, staying = (RolloutClient(service.endpoint) for _ in range(2))
        with going, staying:
            mine = []
            for i in range(20):
                going.submit(prompt(i), Sampling(n=8, max_tokens=20 if i % 2 else 10_000, seed=i))
                mine.append(staying.submit(prompt(i), Sampling(n=8, max_tokens=20, seed=i)))
                if i == 10:
                    going.close()
                    break
            for i, handle in enumerate(mine):
                samples = handle.result(WAIT)
                assert [sample.index for sample in samples] == list(range(8))
                assert all(sample.token_ids.tolist() == expected(prompt(i), sample, KEYS) for sample in samples)
            until(lambda: not any(engine.children for engine in threads.engines.values()), "nothing of the other runs", WAIT)
        assert fleet.status()["fleet"]["repeats"] == 0


def test_a_group_that_has_ended_holds_nothing() -> None:
    """Not even until garbage is looked for: its handle has all samples of it."""
    with fleet_of(1) as (fleet, _):
        gc.disable()
        try:
            fleet.submit(group(1))
            (part,) = fleet._groups.open["g1"].parts
            gone = weakref.ref(part.handle)
            del part
            assert len(collect(fleet, 4)) == 4
            until(lambda: gone() is None, "the handle is gone", WAIT)
        finally:
            gc.enable()


def test_a_replica_that_stops_hands_its_tokens_on() -> None:
    """In order, by SIGTERM: its children go on elsewhere from what they have."""
    with fleet_of(2, step_s=0.002) as (fleet, threads):
        fleet.submit(group(1, max_tokens=1000))
        (part,) = fleet._groups.open["g1"].parts
        first, second = threads.engines[part.replica.name], threads.engines["r1" if part.replica.name == "r0" else "r0"]
        until(lambda: first.made["steps"] > 200)
        fleet.replicas.scaling.restart(part.replica.name)
        check(collect(fleet, 4).values())
        assert second.made["generated_tokens"] <= 4 * 850, "it did not begin again"


def test_what_was_streamed_need_not_be_made_again() -> None:
    with fleet_of(2, step_s=0.002) as (fleet, threads):
        fleet.submit(group(1, max_tokens=1000, stream_every=8))
        (part,) = fleet._groups.open["g1"].parts
        step_until(
            fleet,
            lambda: len(part.handle.partial_samples()) == 4 and len(part.handle.partial_samples()[0].token_ids) > 300,
            "streamed",
        )
        told = {child.index: child for child in fleet.chunks("g1", {0: 290}, 8, 10_000)}
        assert sorted(told) == [0, 1, 2, 3] and (told[0].first, told[1].first) == (290, 0)
        second = threads.engines["r1" if part.replica.name == "r0" else "r0"]
        threads.die(part.replica.name)
        got = collect(fleet, 4)
        check(got.values())
        assert told[1].token_ids.tolist() == got["g1", 1].token_ids[: len(told[1].token_ids)].tolist()
        assert told[0].token_ids.tolist() == got["g1", 0].token_ids[290 : 290 + len(told[0].token_ids)].tolist()
        assert second.made["generated_tokens"] < 4 * 750


def test_what_was_streamed_outlives_a_link_that_ends_before_its_replica() -> None:
    with fleet_of(2, step_s=0.002) as (fleet, threads):
        fleet.submit(group(1, max_tokens=1000, stream_every=8))
        (part,) = fleet._groups.open["g1"].parts
        step_until(
            fleet,
            lambda: len(part.handle.partial_samples()) == 4 and len(part.handle.partial_samples()[0].token_ids) > 300,
            "streamed",
        )
        part.handle.fail(ServiceLost("the service is closing"))
        check(collect(fleet, 4).values())
        assert threads.engines["r1" if part.replica.name == "r0" else "r0"].made["generated_tokens"] < 4 * 750


def test_a_trainer_that_streams_sees_nothing_of_a_death() -> None:
    with fleet_of(2, step_s=0.002) as (fleet, threads), router_of(fleet) as router:
        with RolloutClient(router.endpoint, connect_timeout_s=WAIT) as client:
            handle = client.submit(prompt(1), Sampling(n=2, max_tokens=600, seed=1, stream_every=16), "g1")
            tokens: dict[int, list[int]] = {0: [], 1: []}

            def tell(handle: Any, chunk: Any) -> None:
                assert chunk.first == len(tokens[chunk.index])
                tokens[chunk.index] += chunk.token_ids.tolist()

            handle.on_tokens(tell)
            until(lambda: len(tokens[0]) > 200)
            threads.die(next(name for name, engine in threads.engines.items() if engine.children))
            samples = handle.result(WAIT)
            check(samples)
            assert all(s.token_ids.tolist()[: len(tokens[s.index])] == tokens[s.index] for s in samples)


def test_no_replica_is_left() -> None:
    with fleet_of(1) as (fleet, threads):
        threads.again = False
        threads.die("r0")
        step_until(fleet, lambda: states(fleet) == ["dead"])
        fleet.submit(group(1))
        assert fleet.status()["fleet"]["waiting"] == 1
        threads.start("r0")
        check(collect(fleet, 4).values())


def test_a_group_does_not_wait_for_ever() -> None:
    with fleet_of(1, grace_s=0.3) as (fleet, threads):
        threads.again = False
        threads.die("r0")
        step_until(fleet, lambda: states(fleet) == ["dead"])
        fleet.submit(group(1))
        ended = collect(fleet, 4).values()
        assert {sample.finish_reason for sample in ended} == {"error"}
        assert all("replica_grace_s" in str(sample.error) for sample in ended)


def test_a_replica_that_fails_again_and_again_is_replaced() -> None:
    with fleet_of(2, faults={"r0": "errors"}) as (fleet, threads):
        for i in range(12):
            fleet.submit(group(i, n=1))
        check(collect(fleet, 12).values())
        assert "r0" in threads.replaced and "r1" not in threads.replaced


def test_a_group_that_fails_everywhere_ends_as_error() -> None:
    with fleet_of(2, faults={"r0": "errors", "r1": "errors"}) as (fleet, threads):
        fleet.submit(group(1, n=1))
        ((_, sample),) = collect(fleet, 1).items()
        assert sample.finish_reason == "error" and sample.error == "scripted" and not threads.replaced


def test_a_router_without_descriptors_connects_when_it_has_some(monkeypatch: pytest.MonkeyPatch) -> None:
    """What runs on the others goes on, and the replica, which is not to blame, is not replaced."""
    with fleet_of(2, step_s=0.002) as (fleet, threads):
        fleet.submit(group(1, max_tokens=400))
        failed = list[str]()

        def fails(address: str, limits: Limits) -> ClientEnd:
            if len(failed) < 3:
                failed.append(address)
                raise OSError(errno.EMFILE, "Too many open files")
            return ClientEnd(address, limits)

        monkeypatch.setattr(replica_module, "ClientEnd", fails)
        step_until(fleet, lambda: fleet._groups.open["g1"].parts, "it runs")
        (part,) = fleet._groups.open["g1"].parts
        threads.die("r1" if part.replica.name == "r0" else "r0")
        assert len(collect(fleet, 4)) == 4
        step_until(fleet, lambda: states(fleet) == ["serving"] * 2, "the other one is connected")
        assert len(failed) == 3 and len(threads.replaced) == 1 and fleet.status()["fleet"]["deaths"] == 1


def test_a_link_that_breaks_and_heals_moves_nothing() -> None:
    with fleet_of(2, timing=Timing(lost_s=60.0, poll_s=0.02)) as (fleet, _):
        replica = fleet.replicas.by_name["r0"]
        end, replica._end = replica._end, None
        step_until(fleet, lambda: states(fleet) == ["suspect", "serving"])
        for i in range(6):
            fleet.submit(group(i))
        assert not replica.load, "a suspect is given nothing"
        replica._end = end
        step_until(fleet, lambda: states(fleet) == ["serving", "serving"])
        assert fleet.status()["fleet"]["deaths"] == 0


def test_a_link_that_stays_down_is_a_death() -> None:
    with fleet_of(2, timing=Timing(lost_s=0.3, poll_s=0.02), step_s=0.002) as (fleet, threads):
        for i in range(6):
            fleet.submit(group(i, max_tokens=300))
        fleet.replicas.by_name["r0"]._end = None
        check(collect(fleet, 24).values())
        assert threads.replaced == ["r0"]


def test_another_model_is_refused_by_name() -> None:
    with fleet_of(2) as (fleet, threads):
        threads.again = False
        threads.die("r1")
        step_until(fleet, lambda: states(fleet) == ["serving", "dead"])
        threads.start("r1")
        threads.engines["r1"].arithmetic = "other/1"
        step_until(fleet, lambda: "arithmetic 'other/1' for 'hash/1'" in fleet.status()["replicas"][1]["why"])


# refreshes


def test_a_refresh_is_everywhere() -> None:
    with fleet_of(3) as (fleet, threads):
        refreshed = refresh(fleet, 1)
        assert refreshed.version == fleet.version == 1 and {e.version for e in threads.engines.values()} == {1}
        for i in range(6):
            fleet.submit(group(i))
        got = collect(fleet, 24)
        check(got.values())
        assert {tuple(sample.weight_versions) for sample in got.values()} == {((0, 1),)}


def test_groups_that_run_go_on_over_a_refresh() -> None:
    with fleet_of(2, step_s=0.002) as (fleet, threads):
        for i in range(4):
            fleet.submit(group(i, max_tokens=400))
        until(lambda: min(engine.made["steps"] for engine in threads.engines.values()) > 20)
        refresh(fleet, 1)
        got = collect(fleet, 16)
        check(got.values())
        assert all([version for _, version in sample.weight_versions] == [0, 1] for sample in got.values())


def test_a_refresh_may_end_what_runs() -> None:
    with fleet_of(2, step_s=0.002) as (fleet, threads):
        fleet.submit(group(1, max_tokens=5000))
        until(lambda: sum(engine.made["steps"] for engine in threads.engines.values()) > 50)
        refresh(fleet, 1, kv="abort")
        got = list(fleet._groups.ended) + step_until(fleet, lambda: not fleet._groups.open)
        assert {sample.finish_reason for sample in got} <= {"aborted"}


BROKEN = {
    "holds NaN": {**weights_of(1), "w2": np.full(20_000, np.nan, np.float32)},
    "is missing": {name: values for name, values in weights_of(1).items() if name != "w3"},
    "none of the model's": {**weights_of(1), "w9": np.zeros(10, np.float32)},
}


@pytest.mark.parametrize("reason", BROKEN)
def test_content_that_is_refused_is_refused_everywhere(reason: str) -> None:
    with fleet_of(3) as (fleet, threads):
        with pytest.raises(WeightsRefused, match=reason):
            refresh(fleet, 1, weights=BROKEN[reason])
        assert fleet.version == 0 and {engine.version for engine in threads.engines.values()} == {0}
        step_until(fleet, lambda: not fleet.weights.staging)
        assert refresh(fleet, 1).version == 1, "nothing is left of it"


def test_a_router_refuses_what_it_can_tell_by_itself() -> None:
    with fleet_of(1) as (fleet, _):
        with pytest.raises(WeightsRefused, match="versions only grow"):
            fleet.stage(WeightUpdate(manifest_of(weights_of(1)), version=0))
        with pytest.raises(WeightsRefused, match="the model has"):
            fleet.stage(WeightUpdate(manifest_of({"w0": np.zeros(10_000_000, np.float32)})))
        staging = fleet.stage(WeightUpdate(manifest_of(weights_of(1))))
        with pytest.raises(Busy):
            fleet.stage(WeightUpdate(manifest_of(weights_of(1))))
        staging.close()
        step_until(fleet, lambda: not fleet.weights.staging)


def one_refuses(fleet: Fleet, threads: Threads) -> None:
    """A refresh that a single replica finds fault with."""
    look = threads.engines["r1"].stage

    def stage(*args: Any, **named: Any) -> Any:
        staging = look(*args, **named)
        staging.look = lambda: (_ for _ in ()).throw(ValueError("tensor 'w1': not what the manifest says"))
        return staging

    threads.engines["r1"].stage = stage  # type: ignore[method-assign]
    with pytest.raises(WeightsRefused, match="not what the manifest says"):
        refresh(fleet, 1)
    until(lambda: not any(engine.staged for engine in threads.engines.values()))


@pytest.mark.parametrize("refused", [True, False])
def test_pushes_that_have_ended_hold_no_memory(refused: bool) -> None:
    """They are remembered for a while, and each of these needs a larger segment than those before."""
    gc.collect()
    before = weight_maps()
    with fleet_of(1) as (fleet, _), without_collecting():
        ended = []
        for version in range(1, TENSORS + 1):
            whole = weights_of(version)
            other = {"of another model": np.zeros(1000 * version, np.float32)}
            weights = whole | other if refused else dict(list(whole.items())[:version])
            ended.append(fleet.stage(WeightUpdate(manifest_of(weights), version=version, partial=not refused)))
            with pytest.raises(WeightsRefused) if refused else nullcontext():
                refresh(fleet, version, weights, staging=ended[-1])
            step_until(fleet, lambda: not fleet.weights.staging)
        assert len(weight_maps() - before) <= 3, "what is live, what is staged next, and what the replica has read"


@contextmanager
def without_collecting() -> Iterator[None]:
    """Leave garbage that only a collection finds."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def weight_maps() -> set[str]:
    """Return the inodes of the segments for weights that this process has mapped."""
    return {line.split()[4] for line in Path("/proc/self/maps").read_text().splitlines() if "memfd:rollout-weights" in line}


def test_a_router_has_no_weights_to_share() -> None:
    with fleet_of(1) as (fleet, _):
        sharing = WeightExport(fleet)
        with pytest.raises(InvalidRequest, match="ask one of its replicas"):
            sharing.ask(Session(SessionIdentity("", "session", "a client", 1)), 7)
        assert not sharing


def test_one_refusal_is_everybody_s() -> None:
    with fleet_of(3) as (fleet, threads):
        one_refuses(fleet, threads)
        assert {engine.version for engine in threads.engines.values()} == {0}


def test_a_commit_without_prepare_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: whoever is not asked first leaves replicas of two versions."""
    monkeypatch.setattr(ReplicaTransaction, "ready", property(lambda self: bool(self.members)))
    with fleet_of(3) as (fleet, threads):
        with pytest.raises((AssertionError, pytest.fail.Exception)):
            one_refuses(fleet, threads)
        until(lambda: {engine.version for engine in threads.engines.values()} == {0, 1})


def test_a_replica_that_dies_drops_out_of_a_refresh_and_comes_back_with_it() -> None:
    with fleet_of(3) as (fleet, threads):
        staging = fleet.stage(WeightUpdate(manifest_of(weights_of(1)), version=1))
        threads.die("r1")
        refresh(fleet, 1, staging=staging)
        step_until(fleet, lambda: states(fleet) == ["serving"] * 3, "it has the live weights")
        assert threads.engines["r1"].version == 1 and threads.engines["r1"].live_digest() == fleet.weights.digest


def test_whoever_comes_later_gets_what_is_live_partial_refreshes_included() -> None:
    with fleet_of(2) as (fleet, threads):
        refresh(fleet, 1, partial=True, weights={"w1": weights_of(1)["w1"]})
        refresh(fleet, 2, partial=True, weights={"w2": weights_of(2)["w2"]})
        threads.die("r0")
        step_until(fleet, lambda: threads.replaced == ["r0"] and states(fleet) == ["serving"] * 2)
        assert threads.engines["r0"].live_digest() == threads.engines["r1"].live_digest()
        refresh(fleet, 3)
        refresh(fleet, 4, partial=True, weights={"w2": weights_of(4)["w2"]})
        threads.die("r1")
        step_until(fleet, lambda: threads.replaced == ["r0", "r1"] and states(fleet) == ["serving"] * 2)
        assert threads.engines["r0"].live_digest() == threads.engines["r1"].live_digest()


def test_all_replicas_die_and_come_back_with_the_live_weights() -> None:
    with fleet_of(2) as (fleet, threads):
        refresh(fleet, 1)
        threads.die("r0")
        threads.die("r1")
        fleet.submit(group(1))
        got = collect(fleet, 4)
        check(got.values())
        assert {tuple(sample.weight_versions) for sample in got.values()} == {((0, 1),)}, "never the base checkpoint"


def test_a_replica_with_stale_weights_is_noticed() -> None:
    """Negative control: one that says that it has them, and has not."""
    with fleet_of(2, faults={"r1": "stale"}) as (fleet, _):
        refresh(fleet, 1)
        for i in range(8):
            fleet.submit(group(i))
        got = collect(fleet, 32)
        with pytest.raises(AssertionError):
            check(got.values())


def test_a_replica_that_loses_its_weights_is_given_no_group_silently() -> None:
    """It refuses the group, since the router requires the live version, and is replaced."""
    with fleet_of(2) as (fleet, threads):
        refresh(fleet, 1)
        threads.engines["r0"].version = 0
        for i in range(8):
            fleet.submit(group(i))
        check(collect(fleet, 32).values())
        assert threads.replaced == ["r0"]


def test_the_live_digest_is_of_all() -> None:
    with fleet_of(2) as (fleet, threads):
        assert fleet.weights.live_digest() == fleet.weights.digest
        threads.engines["r1"].tensors = weights_of(5)
        assert "not the same everywhere" in fleet.weights.live_digest()


# modes


def test_pause_and_resume_are_of_all_and_of_those_that_come_later() -> None:
    with fleet_of(2) as (fleet, threads):
        fleet.pause()
        assert {engine.mode for engine in threads.engines.values()} == {Mode.PAUSED} and fleet.mode is Mode.PAUSED
        threads.die("r0")
        step_until(fleet, lambda: threads.replaced and states(fleet) == ["serving"] * 2)
        until(lambda: threads.engines["r0"].mode is Mode.PAUSED)
        fleet.submit(group(1))
        fleet.resume()
        check(collect(fleet, 4).values())


def test_drain_is_done_when_all_are() -> None:
    with fleet_of(2, step_s=0.001) as (fleet, _):
        for i in range(4):
            fleet.submit(group(i, max_tokens=100))
        step_until(fleet, fleet.drain, "all have drained")
        assert fleet.mode is Mode.DRAINING
        check(collect(fleet, 0).values())
        fleet.resume()
        assert fleet.mode is Mode.RUNNING


def test_sleep_and_wake_are_of_all() -> None:
    with fleet_of(2) as (fleet, threads):
        assert fleet.sleep(1) == 2000 and fleet.mode is Mode.ASLEEP
        assert {engine.mode for engine in threads.engines.values()} == {Mode.ASLEEP}
        with pytest.raises(ValueError, match="asleep"):
            fleet.stage(WeightUpdate(manifest_of(weights_of(1))))
        fleet.wake()
        assert {engine.mode for engine in threads.engines.values()} == {Mode.RUNNING}
        with pytest.raises(ValueError, match="nothing is asleep"):
            fleet.wake()


def test_parts_wake_alone_and_a_refresh_comes_in_between() -> None:
    """As beside a trainer on the same device; a replica that comes meanwhile is as far as the others."""
    with fleet_of(2) as (fleet, threads):
        fleet.sleep(2)
        fleet.wake(("weights",))
        assert fleet.mode is Mode.ASLEEP and [engine.asleep for engine in threads.engines.values()] == [{"kv"}, {"kv"}]
        with pytest.raises(ValueError, match="of the replicas kv is asleep"):
            fleet.wake(("weights",))
        refresh(fleet, 1)
        threads.die("r0")
        step_until(fleet, lambda: threads.replaced and states(fleet) == ["serving"] * 2)
        until(lambda: threads.engines["r0"].asleep == {"kv"} and threads.engines["r0"].version == 1, "it is told")
        fleet.submit(group(1))
        fleet.wake(("kv",))
        assert fleet.mode is Mode.RUNNING
        (version,) = {tuple(sample.weight_versions) for sample in collect(fleet, 4).values()}
        assert version == ((0, 1),)


def test_fewer_and_more_replicas() -> None:
    with fleet_of(2, step_s=0.001) as (fleet, threads):
        for i in range(4):
            fleet.submit(group(i, max_tokens=200))
        fleet.change_replicas("scale", 1, "")
        check(collect(fleet, 16).values())
        step_until(fleet, lambda: states(fleet) == ["serving"], "one has gone")
        fleet.change_replicas("scale", 3, "")
        step_until(fleet, lambda: states(fleet) == ["serving"] * 3, "two have come")


def test_all_are_restarted_in_turn_and_nothing_is_lost() -> None:
    with fleet_of(2, step_s=0.002) as (fleet, threads), router_of(fleet) as router:
        with RolloutClient(router.endpoint, connect_timeout_s=WAIT) as client:
            handles = [client.submit(prompt(i), Sampling(n=2, max_tokens=800, seed=i), f"g{i}") for i in range(4)]
            client.change_replicas("roll")
            for handle in handles:
                check(handle.result(WAIT))
            until(lambda: threads.replaced == ["r0", "r1"] and client.status()["fleet"]["serving"] == 2, "all are new")
            with pytest.raises(InvalidRequest, match="no replica '7'"):
                client.change_replicas("drain", name="7")
            with pytest.raises(InvalidRequest, match="must be 1 to"):
                client.change_replicas("scale", count=0)
            client.change_replicas("drain", name="r1")
            until(lambda: [one["name"] for one in client.status()["replicas"]] == ["r0"], "it has gone")


def test_a_service_with_one_engine_has_no_replicas() -> None:
    with serving(HashEngine()) as one, RolloutClient(one.endpoint, connect_timeout_s=WAIT) as client:
        with pytest.raises(InvalidRequest, match="--replicas"):
            client.change_replicas("roll")


# through the router's service


def test_clients_change_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """Samples, aborts with the tokens made so far, a client that goes, a status and a refresh: over real sockets."""
    import torch

    caplog.set_level(logging.ERROR)
    with fleet_of(2, step_s=0.002) as (fleet, threads), router_of(fleet) as router:
        with RolloutClient(router.endpoint, connect_timeout_s=WAIT) as client:
            named = {name: torch.from_numpy(values) for name, values in weights_of(1).items()}
            for via in ("shm", "inline"):
                assert client.refresh(named, version=fleet.version + 1, via=via, timeout=WAIT).via == via
            handles = [client.submit(prompt(i), Sampling(n=4, max_tokens=30, seed=i), f"g{i}") for i in range(6)]
            keys = {version: KEYS[1] for version in range(3)}
            for i, handle in enumerate(handles):
                for sample in handle.result(WAIT):
                    assert sample.token_ids.tolist() == expected(prompt(i), sample, keys)
            endless = client.submit(prompt(9), Sampling(n=3, max_tokens=50_000, seed=9), "g9")
            until(lambda: client.status()["running"] == 3)
            endless.cancel([1])
            client.abort_all(WAIT)
            aborted = endless.result(WAIT)
            assert {sample.finish_reason for sample in aborted} == {"aborted"} and all(len(s.token_ids) for s in aborted)
            status = client.status()
            assert [one["name"] for one in status["replicas"]] == ["r0", "r1"] and status["fleet"]["serving"] == 2
            assert client.weights_status(verify=True)["live_digest"] == client.weights_status()["digest"]
            client.submit(prompt(5), Sampling(n=2, max_tokens=50_000, seed=5))
            until(lambda: client.status()["running"] == 2)
        until(lambda: not any(engine.children for engine in threads.engines.values()))
        until(lambda: not fleet._groups.open)
    assert not caplog.records


def test_a_state_is_written_where_it_is_drawn() -> None:
    """docs/fleet.md names every state."""
    text = (ROOT / "docs/fleet.md").read_text()
    assert all(state.name in text for state in State)


# the commands


@pytest.mark.long  # `make ray` runs two replicas of a real model as well
@pytest.mark.parametrize("killed", [False, True])
def test_serve_replicas(tiny_config: Config, tmp_path: Path, killed: bool) -> None:
    """As a user runs it, with a real model: two replicas make what one engine makes, over a refresh. The router has no torch.
    killed: one of them is, and is back with the weights that were refreshed meanwhile; hash engines show that as well."""
    import torch
    from transformers import AutoModelForCausalLM

    named = AutoModelForCausalLM.from_pretrained(tiny_config.engine.model, dtype=torch.float32).state_dict()
    new = {name: tensor + 0.01 * torch.randn_like(tensor) for name, tensor in named.items()}
    prompts, samplings = [prompt(i) % 90 for i in range(6)], [Sampling(n=3, max_tokens=40, seed=i) for i in range(6)]

    def told(client: RolloutClient) -> dict[Any, Any]:
        made = client.generate_groups(prompts, samplings, timeout=WAIT)
        return {
            (i, s.index): (s.token_ids.tolist(), s.logprobs.tolist(), s.weight_versions) for i, g in enumerate(made) for s in g
        }

    with serving(Engine(tiny_config.engine)) as one, RolloutClient(one.endpoint, connect_timeout_s=WAIT) as client:
        before = told(client)
        client.refresh(new, timeout=WAIT)
        after = told(client)
    config = msgspec.structs.replace(tiny_config, fleet=FleetConfig(replicas=2))
    with service_process(config) as router, RolloutClient(router.endpoint, connect_timeout_s=WAIT) as client:
        assert "libtorch" not in Path(f"/proc/{router.pid}/maps").read_text()
        assert told(client) == before
        if killed:
            os.kill(client.status()["replicas"][0]["pid"], signal.SIGKILL)
        client.refresh(new, timeout=WAIT)
        assert told(client) == after
        until(lambda: client.status()["fleet"]["serving"] == 2, "it is back", 2 * WAIT)
        assert told(client) == after and client.status()["replicas"][0]["version"] == 1
        pids = [one["pid"] for one in client.status()["replicas"]]
        child = View("x")
        child.add(client.status(), 0.0)
        assert child.render()
    until(lambda: not any(map(psutil.pid_exists, pids)), "the replicas have ended with the router")


def test_a_process_that_ends_before_it_listens_ends_the_start() -> None:
    launcher = Launcher(lambda name: [sys.executable, "-c", "raise SystemExit(3)"], [Host()], RouterFolder())
    fleet = Fleet(JoinListener(JoinEndpoint(ServiceEnd(launcher.folder.endpoint, Limits()), launcher.admit)), launcher)
    try:
        with pytest.raises(ServiceLost, match="replica local-0: its process ended with exit status 3"):
            fleet.open(WAIT)
    finally:
        fleet.close()


def test_a_host_is_divided() -> None:
    engine = EngineConfig(model="x")
    places, one = divided(engine, 2)
    cores = [place.cores for place in places]
    assert not cores[0] & cores[1] and len(cores[0]) == len(cores[1])
    assert one.threads == max(1, len(cores[0])) and one.advanced.cpu_offload_safety_threshold == 0.4 and one.kv_gib
    assert core_sets([4, 5, 6, 7, 9], 2) == [frozenset({4, 5}), frozenset({6, 7})]
    assert core_sets([1], 3) == [frozenset()] * 3, "too few: any core"
    with pytest.raises(InputError, match="each needs one"):
        divided(EngineConfig(model="x", device="cuda"), 200)


# under an adversary


@pytest.mark.long
def test_a_short_chaos() -> None:
    found = Chaos(seed=1, replicas=4, router_lives_s=(1.0, 1.5)).run(4.0)
    print(json.dumps(found))
    assert not any(found[name] for name in FOUND), found
    assert found["kills"] and found["router_kills"] and found["refreshes"] and found["samples"] > 100


@pytest.mark.parametrize(
    ("fault", "found"),
    [
        ("stale", "unequal"),
        pytest.param("repeats", "doubled", marks=pytest.mark.long),
        pytest.param("unprepared", "mixed", marks=pytest.mark.long),
        pytest.param("lies", "alarms", marks=pytest.mark.long),
    ],
)
def test_chaos_notices(fault: str, found: str) -> None:
    """Negative controls: a replica with stale weights, repeats that are not dropped, commits of what was not prepared, lies."""
    seconds = {"stale": 100.0, "lies": 20.0}.get(fault, 6.0)
    accounts = Chaos(seed=1, replicas=3 if fault == "lies" else 2, fault=fault).run(seconds, enough=found)
    assert accounts[found], accounts


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_a_long_chaos() -> None:
    found = Chaos(seed=2, replicas=4).run(600.0)
    print(json.dumps(found))
    assert not any(found[name] for name in FOUND), found
    assert found["kills"] >= 60 and found["stops"] >= 20 and found["cuts"] >= 20 and found["router_kills"] >= 10


def test_the_metrics_of_a_router_are_those_of_the_table() -> None:
    with fleet_of(1) as (fleet, _), router_of(fleet):
        meter = EngineMeter(30.0)
        meter.add(fleet.status(), 0.0)
        emitted = {name for name in meter.row() if name.startswith("fleet/")}
    table = (Path(__file__).parents[2] / "docs/metrics.md").read_text()
    assert emitted == set(re.findall(r"^\| `(fleet/\w+)` \|", table, re.MULTILINE)) != set()
