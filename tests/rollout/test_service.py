"""The service's promises, one turn of its loop at a time."""

from __future__ import annotations

import json
import logging
import threading
from typing import Any

import msgspec
import numpy as np
import pytest

from rollout.engine.values import DeviceLost, Group, Limits, Sample, Sampling
from rollout.service.loop import ServiceTiming
from rollout.service.session import MAX_REPLY_BYTES, GroupStatus, SendLimits
from rollout.transport import messages as m
from rollout.transport.columns import unpack_samples
from rollout.transport.frames import Frame, frame_bytes, pack
from tests.support.clock import Clock
from tests.support.fake_engine import VOCAB, FakeEngine, expected
from tests.support.wire import Bench, Peer, service_of, submit

LIMITS = Limits(max_n=16, max_tokens=100, max_prompt_tokens=50, max_stop_token_ids=2, max_id_bytes=20)
NO_TIME = ServiceTiming(idle_poll_s=0.0, requests_s=0.0, least_requests_s=0.0)


def ids(samples: list[Sample]) -> list[tuple[str, int]]:
    return [(sample.group_id, sample.index) for sample in samples]


def acked(samples: list[Sample]) -> m.Ack:
    return m.Ack(ids(samples))


# hello


def test_welcome_says_what_a_client_must_know() -> None:
    bench = Bench(FakeEngine(LIMITS, context=500))
    welcome = bench.connect().hello(number=7)
    assert (welcome.protocol, welcome.hello, welcome.incarnation) == (m.PROTOCOL, 7, bench.service.incarnation)
    assert (welcome.model, welcome.vocab_size, welcome.context, welcome.version) == ("fake", VOCAB, 500, 3)
    assert welcome.eos_token_ids == (1, 2) and welcome.limits == LIMITS
    assert Bench().service.incarnation != bench.service.incarnation


@pytest.mark.parametrize("message", [submit(), m.Abort([]), m.Ack([]), m.StatusRequest(1), m.Heartbeat(), m.Goodbye()])
def test_hello_comes_first(message: msgspec.Struct) -> None:
    bench = Bench()
    stranger = bench.connect().send(message)
    bench.turn()
    assert stranger.refused().kind == "no_session"
    assert not bench.engine.has_work


@pytest.mark.parametrize(
    ("protocol", "frames"),
    [
        (99, [msgspec.msgpack.encode({"type": "hello", "protocol": 99, "session": "0" * 32, "a_field_of_version_99": 1})]),
        (1, pack(m.Hello(1, "0" * 32, 1, "a client of before", groups=np.zeros((2, 16), np.uint8)))),
        (1, [msgspec.msgpack.encode({"type": "hello", "protocol": 1, "session": "0" * 32})]),
    ],
)
def test_another_protocol_version_is_told_so(protocol: int, frames: list[Frame]) -> None:
    bench = Bench()
    peer = bench.connect()
    peer.send_frames(frames)
    bench.turn()
    refused = peer.refused()
    spoken = f"has protocol {protocol}, the service {m.PROTOCOL}: install the same version at both ends"
    assert refused.kind == "version_mismatch" and spoken in refused.message
    assert not list(bench.service._sessions)


def test_without_a_protocol_there_is_no_session() -> None:
    bench = Bench()
    peer = bench.connect()
    peer.send_frames([msgspec.msgpack.encode({"type": "hello", "session": "0" * 32})])
    bench.turn()
    assert peer.refused().kind == "protocol_error" and not list(bench.service._sessions)


@pytest.mark.parametrize(
    ("hello", "kind"),
    [
        (m.Hello(m.PROTOCOL, "short"), "protocol_error"),
        (m.Hello(m.PROTOCOL, "G" * 32), "protocol_error"),
        (m.Hello(m.PROTOCOL, "0" * 32 + "\n"), "protocol_error"),
        (m.Hello(m.PROTOCOL, "0" * 32, name="x" * 21), "limit_exceeded"),
        (m.Hello(m.PROTOCOL, "0" * 32, groups=np.zeros((2, 15), np.uint8)), "invalid_request"),
        (m.Hello(m.PROTOCOL, "0" * 32, groups=np.zeros(16, np.uint8)), "invalid_request"),
        (m.Hello(m.PROTOCOL, "0" * 32, groups=np.zeros((2, 16), np.int8)), "invalid_request"),
        (m.Hello(m.PROTOCOL, "0" * 32, groups=np.zeros((4097, 16), np.uint8)), "limit_exceeded"),
    ],
)
def test_bad_hellos(hello: m.Hello, kind: str) -> None:
    bench = Bench(FakeEngine(LIMITS))
    peer = bench.connect().send(hello)
    bench.turn()
    assert peer.refused().kind == kind
    assert peer.hello().protocol == m.PROTOCOL  # nothing is held against it


def test_too_many_clients() -> None:
    bench = Bench(FakeEngine(Limits(max_clients=2)))
    first, _ = bench.client(), bench.client()
    third = bench.connect().send(m.Hello(m.PROTOCOL, "3" * 32))
    bench.turn()
    assert third.refused().kind == "busy"
    first.send(m.Goodbye())
    bench.turn()
    third.hello()


# submit


def test_samples_come_when_they_end_and_are_the_engine_s() -> None:
    bench = Bench()
    peer = bench.client().send(submit("long", [5], n=2, max_tokens=5), submit("short", [9], n=1, max_tokens=2))
    bench.turn(2)
    (short,) = peer.samples()
    assert (short.group_id, short.token_ids.tolist()) == ("short", expected([9], 0, 2))
    bench.turn(2)
    assert not peer.samples()
    bench.turn()
    long = peer.samples()
    assert ids(long) == [("long", 0), ("long", 1)]
    for sample in long:
        assert sample.token_ids.tolist() == expected([5], sample.index, 5)
        assert sample.logprobs.dtype == np.float32 and len(sample.logprobs) == 5
        assert (sample.finish_reason, sample.weight_versions, sample.prompt_tokens) == ("length", [(0, 3)], 1)


def test_a_group_is_made_and_checked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the service has checked is what the engine gets, under the engine's name."""
    made: list[Group] = []
    given: list[Group] = []
    monkeypatch.setattr(
        "rollout.service.validation.Group", lambda *fields, **more: made.append(Group(*fields, **more)) or made[-1]
    )
    bench = Bench()
    monkeypatch.setattr(bench.engine, "submit", lambda group, client: given.append(group))
    bench.client().send(submit("a", [5]), submit("b", [6]))
    bench.turn()
    assert len(given) == len(made) == 2 and all(one is other for one, other in zip(given, made, strict=True))
    assert [group.id for group in given] == ["1.1", "1.2"]


@pytest.mark.parametrize(
    ("bad", "kind", "reason"),
    [
        (submit(prompt=np.array([1.5], np.float32)), "invalid_request", "prompt is float32"),
        (submit(n=2**40), "invalid_request", "Limits.max_n"),
        (submit(group_id="é" * 11), "limit_exceeded", "a group id of 22 bytes: at most 20 (Limits.max_id_bytes)"),
    ],
    ids=["an array of another kind", "more children than the limit", "an id past the limit"],
)
def test_bad_groups_are_refused_to_that_client_alone(bad: m.Submit, kind: str, reason: str) -> None:
    """All that a group may not be: tests/engine/test_bad_groups.py."""
    bench = Bench(FakeEngine(LIMITS, context=120))
    victim, peer = bench.client(), bench.client()
    victim.send(submit("v", [7], n=2))
    peer.send(submit("before", [1]), bad, submit("after", [2]))
    bench.settle()
    refused = peer.refused()
    assert refused.kind == kind and reason in refused.message
    assert refused.group_id == (bad.group_id if kind == "invalid_request" else None)
    assert ids(peer.samples()) == [("before", 0), ("after", 0)]
    assert [sample.token_ids.tolist() for sample in victim.samples()] == [expected([7], i, 4) for i in range(2)]
    assert not victim.take(m.Refused)


def test_a_sampling_that_no_service_accepts_is_refused_to_its_group() -> None:
    bench = Bench()
    peer = bench.client()
    for sampling in ({"n": 0}, {"temperature": -1.0}, {"n": "two"}):
        header = {"type": "submit", "group_id": "bad", "prompt": [1, "int32", [1]], "sampling": sampling}
        peer.send_frames([msgspec.msgpack.encode(header), bytes(4)])
    peer.send(submit("after", [2]))
    bench.settle()
    refused = peer.take(m.Refused)
    assert [(each.kind, each.group_id) for each in refused] == [("invalid_request", "bad")] * 2 + [("protocol_error", None)]
    assert "n=0: must be at least 1" in refused[0].message and bench.service.status()["service"]["malformed"] == 1
    assert ids(peer.samples()) == [("after", 0)]


def test_what_the_engine_refuses() -> None:
    bench = Bench()
    peer = bench.client().send(submit(max_tokens=60_000))
    bench.turn()
    refused = peer.refused()
    assert (refused.kind, refused.group_id) == ("invalid_request", "g") and "never fit the KV pool" in refused.message


def test_an_engine_that_breaks_on_a_group() -> None:
    bench = Bench()
    peer = bench.client()
    bench.engine.submit = lambda group, client="": 1 / 0  # type: ignore[method-assign, assignment]
    peer.send(submit())
    bench.turn()
    refused = peer.refused()
    assert (refused.kind, refused.group_id) == ("group_failed", "g") and "ZeroDivisionError" in refused.message


def test_submit_may_be_repeated() -> None:
    bench = Bench()
    peer = bench.client().send(submit(n=2), submit(n=2))
    bench.settle()
    peer.send(submit(n=2))  # all ended, none acked: still the same group
    bench.settle()
    assert ids(peer.samples()) == [("g", 0), ("g", 1)] and not peer.take(m.Refused)
    assert sum(bench.engine.clients.values()) == 1


@pytest.mark.parametrize("other", [submit(prompt=[1, 2, 4]), submit(n=2), submit(seed=1), submit(serial=1)])
def test_a_live_id_with_other_content(other: m.Submit) -> None:
    bench = Bench()
    peer, neighbour = bench.client(), bench.client()
    peer.send(submit(), other)
    neighbour.send(other)  # ids are each client's own
    bench.settle()
    refused = peer.refused()
    assert (refused.kind, refused.group_id) == ("id_conflict", "g")
    samples = peer.samples()
    assert [sample.token_ids.tolist() for sample in samples] == [expected([1, 2, 3], 0, 4)]
    assert len(neighbour.samples()) == other.sampling.n and not neighbour.take(m.Refused)
    peer.send(acked(samples), other)  # the first is over: its id is free
    bench.settle()
    assert len(peer.samples()) == other.sampling.n and not peer.take(m.Refused)


def test_limits_on_what_one_client_has_live() -> None:
    bench = Bench(FakeEngine(Limits(max_groups_per_client=2, max_samples_per_client=5)))
    peer, other = bench.client(), bench.client()
    peer.send(submit("a", n=2), submit("b", n=4), submit("c", n=3), submit("d"))
    other.send(submit("d"))
    bench.settle()
    samples, refused = peer.samples(), peer.take(m.Refused)
    assert ids(samples) == [("a", 0), ("a", 1), ("c", 0), ("c", 1), ("c", 2)]
    assert [(r.group_id, r.kind) for r in refused] == [("b", "limit_exceeded"), ("d", "limit_exceeded")]
    assert "max_samples_per_client" in refused[0].message and "max_groups_per_client" in refused[1].message
    assert len(other.samples()) == 1
    peer.send(acked(samples), submit("b", n=4))
    bench.settle()
    assert len(peer.samples()) == 4


def test_the_engine_is_told_whose_group_it_is() -> None:
    bench = Bench()
    for peer, groups in ((bench.client(), 3), (bench.client(), 1)):
        peer.send(*(submit(str(i)) for i in range(groups)))
    bench.turn()
    assert sorted(bench.engine.clients.values()) == [1, 3]


# abort, ack, reconnect


def test_abort() -> None:
    bench = Bench()
    peer = bench.client().send(submit("a", n=2, max_tokens=9), submit("b", max_tokens=9))
    bench.turn(3)
    peer.send(m.Abort(["a", "unknown", "a"]))
    bench.turn()
    samples = peer.samples()
    assert ids(samples) == [("a", 0), ("a", 1)]
    assert [(s.finish_reason, s.token_ids.tolist()) for s in samples] == [
        ("aborted", expected([1, 2, 3], i, 3)) for i in range(2)
    ]
    bench.settle()
    assert [s.finish_reason for s in peer.samples()] == ["length"]


def test_unacked_samples_come_again_on_a_new_connection() -> None:
    bench = Bench()
    group = submit("g", n=3)
    old = bench.client().send(group)
    bench.settle()
    assert len(old.samples()) == 3
    old.send(m.Ack([("g", 1)]))
    bench.turn(3)
    assert not old.samples()  # not without a reason
    new = bench.connect(old.session)
    new.hello([group])
    assert ids(new.samples()) == [("g", 0), ("g", 2)]
    new.send(m.Ack([("g", 0), ("g", 2), ("g", 2), ("x", 0)]), group)  # over, and the same submit is a new group
    bench.settle()
    assert len(new.samples()) == 3 and sum(bench.engine.clients.values()) == 2


def test_a_repeated_hello_sends_nothing_again() -> None:
    """Its samples arrive on the connection on which they were sent; one more of them might be taken for another group's."""
    bench = Bench()
    group = submit("g", n=3)
    peer = bench.client().send(group)
    bench.settle()
    assert len(peer.samples()) == 3
    peer.hello([group])
    bench.turn(3)
    assert not peer.samples()
    peer.hello([group], number=2)  # after a connection that broke
    assert ids(peer.samples()) == [("g", 0), ("g", 1), ("g", 2)]


def test_samples_that_end_while_there_is_no_connection_wait_for_one() -> None:
    bench = Bench()
    group = submit("g", n=2)
    old = bench.client().send(group)
    bench.turn()
    old.end.close()
    bench.settle()
    new = bench.connect(old.session)
    new.hello([group])
    assert ids(new.samples()) == [("g", 0), ("g", 1)]


@pytest.mark.usefixtures("clock")  # nobody is told after a second that the service lives
def test_welcome_is_the_first_message_of_a_connection() -> None:
    bench = Bench()
    group = submit("g")
    old = bench.client().send(group)
    bench.settle()
    new = bench.connect(old.session).send(
        m.Hello(m.PROTOCOL, old.session, groups=np.frombuffer(m.digest(group), np.uint8)[None])
    )
    bench.turn()
    assert [type(message) for message in new.read()] == [m.Welcome, m.SamplesDone]


# many samples in one message


def shape(messages: list[Any]) -> list[int]:
    """Samples of each message."""
    return [len(one.ended) if isinstance(one, m.SamplesDone) else 1 for one in messages if not isinstance(one, m.Alive)]


def test_samples_that_end_together_come_together() -> None:
    """Of several groups; those with other columns apart; what is not acked comes again."""
    bench = Bench()
    groups = [submit("a", n=3), submit("b", n=2), submit("c", n=1, max_tokens=9)]
    peer = bench.client().send(*groups)
    bench.settle()
    messages = peer.read().copy()
    assert shape(messages) == [5, 1]
    together = unpack_samples(messages[0])
    assert ids(together) == [("a", 0), ("a", 1), ("a", 2), ("b", 0), ("b", 1)]
    assert [s.token_ids.tolist() for s in together] == [expected([1, 2, 3], i, 4) for i in (0, 1, 2, 0, 1)]
    peer.send(m.Ack([("a", 1), ("b", 0)]))
    bench.turn()
    again = bench.connect(peer.session)
    again.hello(groups)
    bench.turn()
    (some,) = again.take(m.SamplesDone)
    assert ids(unpack_samples(some)) == [("a", 0), ("a", 2), ("b", 1), ("c", 0)]


def test_a_message_of_samples_is_bounded() -> None:
    bench = Bench(send_limits=SendLimits(batch_samples=4))
    peer = bench.client().send(submit("a", n=9))
    bench.settle()
    assert shape(peer.read()) == [4, 4, 1]
    bench = Bench(send_limits=SendLimits(batch_bytes=400))
    peer = bench.client().send(submit("b", n=4))
    bench.settle()
    assert shape(peer.read()) == [2, 2], "192 bytes each"


def test_no_message_is_longer_than_what_its_connection_has_carried() -> None:
    """Else a link that breaks after so many bytes would never bring it."""
    bench = Bench(send_limits=SendLimits(first_bytes=192))
    peer, sizes = bench.client(), []
    for i in range(5):
        peer.send(submit(str(i), n=4))
        bench.settle()
        sizes.append(shape(peer.read()))
        peer.send(m.Ack([(str(i), index) for index in range(4)]))
        peer.got.clear()
    assert sizes == [[1] * 4, [4], [4], [4], [4]]
    group = submit("last", n=4)
    peer.send(group)
    bench.settle()
    again = bench.connect(peer.session)
    again.hello([group])
    bench.turn()
    assert shape(again.read()) == [1] * 4, "it begins anew"


def test_samples_of_a_router_wait_for_each_other_while_more_are_made() -> None:
    """Not the first one, nothing besides a reply, and nothing once the engine has no work."""
    clock = Clock(100.0)
    bench = Bench(clock=clock)
    router = bench.client(m.GATHERS)
    router.send(*(submit(str(length), n=1, max_tokens=length) for length in range(1, 9)))
    bench.turn()
    assert shape(router.read()) == [1], "the first"
    bench.turn(2)
    assert shape(router.read()) == [1], "others wait"
    clock.now += 2 * SendLimits().gather_s
    bench.turn()
    assert shape(router.read()) == [1, 2], "of the turns before: time is up before the step"
    router.send(m.StatusRequest(1))
    bench.turn()
    assert shape(router.read()) == [1, 2, 1, 1], "a reply takes them along"
    bench.settle()
    assert sum(shape(router.read())) == 9 and not bench.engine.has_work


def test_hello_ends_what_the_client_no_longer_wants() -> None:
    bench = Bench()
    keep, drop, ended = submit("keep", max_tokens=50), submit("drop", max_tokens=50), submit("ended", max_tokens=1)
    peer = bench.client().send(keep, drop, ended)
    bench.turn(2)
    again = bench.connect(peer.session)
    held = again.hello([keep, submit("never arrived")]).groups
    assert held is not None and [row.tobytes() for row in held] == [m.digest(keep)]
    assert len(bench.engine.groups) == 1 and len(bench.engine.aborted) == 1
    bench.settle()
    assert ids(again.samples()) == [("keep", 0)]
    again.send(submit("drop", [8]))  # the id is free
    bench.settle()
    assert len(again.samples()) == 1 and not again.take(m.Refused)


def test_the_old_connection_of_a_session_is_a_stranger() -> None:
    bench = Bench()
    old = bench.client()
    bench.connect(old.session).hello()
    old.send(submit())
    bench.turn()
    assert old.refused().kind == "no_session"


def test_a_connection_that_changes_its_session() -> None:
    bench = Bench()
    peer = bench.client().send(submit("g", max_tokens=50))
    bench.turn()
    first, peer.session = peer.session, "e" * 32
    peer.hello()
    bench.turn(60)
    assert not peer.samples()  # they are the first session's
    other = bench.connect(first)
    other.hello([submit("g", max_tokens=50)])
    assert len(other.samples()) == 1


def test_goodbye_ends_everything() -> None:
    bench = Bench()
    peer = bench.client().send(submit(max_tokens=50))
    bench.turn()
    peer.send(m.Goodbye(), m.Heartbeat())
    bench.turn()
    assert not bench.engine.has_work and len(bench.engine.aborted) == 1
    assert peer.refused().kind == "no_session"


# time


@pytest.fixture
def clock() -> Clock:
    return Clock(1000.0)


def test_a_client_that_vanishes_has_its_groups_aborted(clock: Clock) -> None:
    bench = Bench(client_grace_s=10, clock=clock)
    vanished, alive = bench.client(), bench.client()
    for peer in (vanished, alive):
        peer.send(submit(max_tokens=10_000))
    bench.turn()
    for _ in range(10):
        clock.now += 1
        alive.send(m.Heartbeat())
        bench.turn()
    assert not bench.engine.aborted  # 10 s are not more than 10 s
    clock.now += 1
    alive.send(m.Heartbeat())
    bench.turn(2)
    assert len(bench.engine.aborted) == 1 and len(bench.engine.groups) == 1
    status = bench.service.status()["service"]
    assert [client["number"] for client in status["clients"]] == [2]


def test_messages_that_waited_during_a_long_step_count(clock: Clock) -> None:
    bench = Bench(client_grace_s=10, clock=clock)
    peer = bench.client().send(submit(max_tokens=10))
    for _ in range(3):
        peer.send(m.Heartbeat())
        clock.now += 500  # a step, or the whole process was stopped
        bench.turn()
    assert not bench.engine.aborted
    for _ in range(3):  # and without heartbeats
        clock.now += 500
        bench.turn()
    assert bench.engine.aborted


def test_alive_is_told_once_a_second(clock: Clock) -> None:
    bench = Bench(clock=clock)
    peer = bench.client().send(submit(max_tokens=10_000))
    for _ in range(30):
        clock.now += 0.1
        peer.send(m.Heartbeat())
        bench.turn()
    alive = peer.take(m.Alive)
    assert len(alive) in (2, 3) and all(message.version == 3 for message in alive)
    assert alive[0].steps < alive[1].steps


# slow readers


def test_a_client_that_does_not_read_harms_itself_alone() -> None:
    bench = Bench(FakeEngine(), max_outbox_bytes=100_000)
    slow, quick = bench.client(), bench.client()
    for i in range(40):
        slow.send(submit(str(i), n=16, max_tokens=100))
        quick.send(submit(str(i), n=16, max_tokens=100))
        bench.settle()
        quick.send(acked(quick.samples()))
    held = bench.service.status()["service"]["clients"]
    assert held[0]["unacked_bytes"] < 100_000 + 700 * 16 + 200 * 40 * 16 and held[1]["unacked_bytes"] < 100_000
    assert not quick.take(m.Refused)

    samples: list[Sample] = []
    for _ in range(10):  # the loopback holds 256 messages at a time
        fresh = slow.samples()
        slow.send(acked(fresh))
        samples += fresh
        bench.turn()
    reasons = [sample.finish_reason for sample in samples]
    assert 100 < reasons.count("length") < 200 and reasons.count("error") >= 1
    assert all(s.error and "wait for this client to read them" in s.error for s in samples if s.finish_reason == "error")
    assert {refused.kind for refused in slow.take(m.Refused)} == {"busy"}
    slow.send(submit("again"))  # it has read: all is well
    bench.settle()
    assert [s.finish_reason for s in slow.samples()] == ["length"]


def test_running_groups_of_a_full_outbox_end() -> None:
    bench = Bench(FakeEngine(), max_outbox_bytes=1000)
    peer = bench.client().send(submit("running", max_tokens=10_000), submit("big", n=16, max_tokens=50))
    bench.settle()
    (running,) = [sample for sample in peer.samples() if sample.group_id == "running"]
    assert running.finish_reason == "error" and len(running.token_ids) == 0


def test_a_client_that_asks_without_reading_is_forgotten() -> None:
    bench = Bench()
    bench.engine.status = lambda: {"long": "x" * 100_000}  # type: ignore[method-assign]
    flood, victim = bench.client(), bench.client()
    victim.send(submit(max_tokens=10_000))
    for i in range(MAX_REPLY_BYTES // 100_000 + 300):  # 256 fit into the loopback
        flood.send(m.StatusRequest(i))
        bench.turn()
    assert [client["number"] for client in bench.service.status()["service"]["clients"]] == [2]
    assert len(bench.engine.groups) == 1


# failing steps


def test_a_step_that_raises_ends_its_groups_and_the_service_goes_on() -> None:
    bench = Bench()
    peer, other = bench.client(), bench.client()
    bench.engine.crash_on = 13
    for attempt in range(5):  # any number of times
        peer.send(submit(f"good{attempt}", [1], n=2))
        other.send(submit(f"poison{attempt}", [13]))
        bench.turn()
        for victim, samples in ((peer, 2), (other, 1)):
            errors = victim.samples()
            assert [s.finish_reason for s in errors] == ["error"] * samples
            assert all(s.error == "engine.step failed: RuntimeError: scripted crash" for s in errors)
            victim.send(acked(errors))
    peer.send(submit("g", [1]))
    bench.settle()
    assert [s.finish_reason for s in peer.samples()] == ["length"]


class Lost(FakeEngine):
    """Its device is lost."""

    def step(self) -> list[Sample]:
        raise DeviceLost("rank 1 of 2 has ended: killed by SIGKILL")


def test_a_lost_device_ends_the_service_and_no_group_is_to_blame() -> None:
    bench = Bench(Lost())
    peer = bench.client().send(submit(n=3))
    with pytest.raises(DeviceLost, match="rank 1 of 2"):
        bench.turn()
    assert not peer.samples() and bench.engine.groups


class Forgetful(FakeEngine):
    """Loses its groups when a step fails, and what it is asked to abort breaks it."""

    def step(self) -> list[Sample]:
        self.groups.clear()
        raise RuntimeError("lost it all")

    def abort(self, group_id: str) -> list[Sample]:
        raise KeyError(group_id)


def test_groups_that_the_engine_has_lost_are_failed_all_the_same() -> None:
    bench = Bench(Forgetful())
    peer = bench.client().send(submit(n=3))
    bench.turn()
    refused = peer.refused()
    assert (refused.kind, refused.group_id) == ("group_failed", "g") and "lost it all" in refused.message
    assert bench.service.status()["service"]["clients"][0]["groups"] == 0


class Stuck(FakeEngine):
    """Claims to have work, and fails at it, with nobody's group in it."""

    has_work = True  # type: ignore[assignment]

    def step(self) -> list[Sample]:
        raise RuntimeError("beyond repair")


def test_an_engine_that_fails_for_no_request_ends_the_service() -> None:
    bench = Bench(Stuck(), linger_s=0.1)
    peer = bench.connect()
    peer.send(m.Hello(m.PROTOCOL, peer.session))
    with pytest.raises(RuntimeError, match="beyond repair"):
        bench.service.run()
    (closing,) = peer.take(m.Closing)
    assert "RuntimeError: beyond repair" in closing.reason


def test_a_sample_that_nobody_waits_for_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench()
    bench.engine.submit(Group("nobody's", np.array([1], np.int32), Sampling(max_tokens=1)))
    bench.settle()
    assert "sample of an unknown group" in caplog.text


# status and malformed


def test_status_is_the_engine_s_and_the_service_s() -> None:
    bench = Bench()
    peer = bench.client().send(submit("g", n=3, max_tokens=50), m.StatusRequest(2**63))
    bench.turn()
    (reply,) = peer.take(m.StatusReply)
    status = json.loads(reply.status)
    assert reply.request_id == 2**63
    assert status["version"] == 3 and status["kv"] == {"used": 0}  # of numpy's types
    service = status["service"]
    assert service["incarnation"] == bench.service.incarnation and service["malformed"] == 0
    (client,) = service["clients"]
    assert (client["name"], client["connected"], client["groups"], client["running_samples"]) == ("tester", True, 1, 3)


def test_a_status_that_fails_is_refused_to_who_asked() -> None:
    bench = Bench()
    bench.engine.status = lambda: {"bad": object()}  # type: ignore[method-assign]
    peer = bench.client().send(submit(), m.StatusRequest(5))
    bench.settle()
    refused = peer.refused()
    assert (refused.kind, refused.request_id) == ("group_failed", 5) and "object, which is not JSON" in refused.message
    assert len(peer.samples()) == 1


def test_malformed_messages_are_counted_and_told() -> None:
    bench = Bench()
    stranger, peer = bench.connect(), bench.client()
    for sender in (stranger, peer):
        sender.send_frames([b"\xff\xff"])
        sender.send_frames([*pack(m.Heartbeat()), b"unnamed"])
    peer.send(submit())
    bench.settle()
    for sender in (stranger, peer):
        assert [refused.kind for refused in sender.take(m.Refused)] == ["protocol_error"] * 2
    assert len(peer.samples()) == 1
    assert bench.service.status()["service"]["malformed"] == 4


# the end


def run(bench: Bench) -> threading.Thread:
    thread = threading.Thread(target=bench.service.run)
    thread.start()
    return thread


def last(peer: Peer) -> list[Any]:
    """Reads until Closing, as a client does, and says goodbye."""
    for _ in range(3000):
        peer.got += [peer._decoder.unpack(frames) for frames in peer.end.receive(0.02)]
        if peer.got and isinstance(peer.got[-1], m.Closing):
            peer.send(m.Goodbye())
            return peer.got
    raise AssertionError("no Closing")


def test_stop_returns_running_samples_as_aborted() -> None:
    bench = Bench(FakeEngine(step_s=0.001), linger_s=1000)
    peer = bench.client().send(submit("g", n=2, max_tokens=10_000))
    bench.turn(3)
    thread = run(bench)
    bench.service.stop("SIGTERM")
    got = last(peer)
    thread.join(60)
    assert not thread.is_alive()  # the goodbye is enough, the linger time is not used up
    assert [type(message) for message in got if not isinstance(message, m.Alive)] == [m.SamplesDone, m.Closing]
    assert [sample.finish_reason for sample in peer.samples()] == ["aborted"] * 2 and got[-1].reason == "SIGTERM"
    assert not peer.end.send(pack(m.Heartbeat()))


def test_stop_does_not_wait_for_the_dead() -> None:
    bench = Bench(linger_s=0.2)
    bench.client()
    bench.service.stop()
    thread = run(bench)
    thread.join(60)
    assert not thread.is_alive()


def test_an_engine_that_breaks_at_the_end() -> None:
    class Broken(FakeEngine):
        def abort(self, group_id: str) -> list[Sample]:
            raise RuntimeError("no")

    bench = Bench(Broken(step_s=0.001), linger_s=1000)
    peers = [bench.client(), bench.client()]
    for peer in peers:
        peer.send(submit(max_tokens=10_000))
    bench.turn(2)
    bench.service.stop()
    thread = run(bench)
    for peer in peers:
        assert isinstance(last(peer)[-1], m.Closing)
    thread.join(60)
    assert not thread.is_alive()


def test_a_grace_time_that_no_client_could_keep() -> None:
    with pytest.raises(ValueError, match="client_grace_s=1.9: must be at least 2.0; clients send a heartbeat every second"):
        service_of(FakeEngine(), "tcp://127.0.0.1:*", client_grace_s=1.9)


def test_other_hosts_need_keys() -> None:
    with pytest.raises(ValueError, match="no keys"):
        service_of(FakeEngine(), "tcp://0.0.0.0:*")


# what one peer may cost


def test_a_turn_has_little_time_for_messages_and_takes_them_from_all_in_turn() -> None:
    bench = Bench(timing=NO_TIME)
    peer = bench.client()
    for number in range(5):
        peer.send(m.StatusRequest(number))
    answers = []
    for _ in range(5):
        bench.turn()
        answers.append(len(peer.take(m.StatusReply)))
    assert answers == [1] * 5, "the rest waits for the next turn"


def test_groups_end_in_their_turn() -> None:
    """However many one message names, and however often."""
    bench = Bench(timing=NO_TIME)
    bench.engine.frozen = True
    peer = bench.client()
    for number in range(4):
        peer.send(submit(str(number), n=3))
        bench.turn()
    peer.send(m.Abort(["unknown", *"0123", *"0123"]))
    ended = []
    for _ in range(5):
        bench.turn()
        ended.append(len(peer.samples()))
    assert ended == [3, 3, 3, 3, 0] and not bench.engine.groups


def test_samples_of_a_dropped_group_that_end_meanwhile_are_nobodys(caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench(timing=NO_TIME)
    bench.engine.frozen = True
    peer = bench.client()
    for number in range(3):
        peer.send(submit(str(number), max_tokens=1))
        bench.turn()
    bench.engine.frozen = False
    peer.send(m.Goodbye())
    bench.turn(4)
    assert not bench.engine.groups and "unknown group" not in caplog.text


def test_a_header_is_bounded_before_it_is_decoded() -> None:
    bench = Bench()
    peer = bench.client()
    for header in (b"\x91" * 900_000, msgspec.msgpack.encode({"type": "ack", "samples": [["x", i] for i in range(20_000)]})):
        peer.send_frames([header])
        bench.turn()
        refused = peer.refused()
        assert refused.kind == "protocol_error" and "Limits.max_header_bytes" in refused.message


def test_alive_reports_the_bytes_received_on_each_connection() -> None:
    bench = Bench()
    peer, other = bench.client(), bench.client()
    prompt = np.ones(90_000, np.int32)
    sent = 0
    for number in range(8):
        group = submit(str(number), prompt, serial=number)
        sent += frame_bytes(pack(group))
        peer.send(group)
        bench.turn()
    told = [alive.taken_bytes for alive in peer.take(m.Alive)]
    assert told and m.UNTAKEN_BYTES // 4 < told[-1] <= sent
    assert all(alive.taken_bytes == 0 for alive in other.take(m.Alive)), "it has sent nothing since Welcome"


def test_what_a_peer_calls_itself_does_not_reach_a_terminal(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "rollout.service")
    bench = Bench()
    peer = bench.connect()
    peer.send(m.Hello(m.PROTOCOL, peer.session, 1, "\x1b[2J\nfake line"))
    bench.turn()
    assert "\\x1b[2J\\nfake line" in caplog.text and "\x1b" not in caplog.text
    logging.getLogger("rollout.service.loop").error("raw")
    try:
        raise ValueError("\x1b[2J")
    except ValueError:
        logging.getLogger("rollout.service.loop").exception("it failed")
    assert "\x1b" not in caplog.text and "ValueError: \\x1b[2J" in caplog.text


def test_an_engine_whose_weights_cannot_be_read_is_told_and_serves_on() -> None:
    bench = Bench()
    peer = bench.client()
    peer.send(m.WeightsRequest(7, verify=True))
    bench.turn(2)
    refused = peer.refused()
    assert (refused.kind, refused.request_id) == ("group_failed", 7)
    peer.send(submit("after"))
    bench.settle()
    assert len(peer.samples()) == 1


# an engine that works elsewhere, and gives back later what was asked to end


class Elsewhere(FakeEngine):
    """Samples of aborted groups come with a later step."""

    def __init__(self) -> None:
        super().__init__()
        self.late: list[Sample] = []
        self.frozen = True

    @property
    def has_work(self) -> bool:
        return bool(self.late)

    def abort(self, group_id: str, index: int | None = None) -> list[Sample]:
        self.held = super().abort(group_id, index)
        return []

    def step(self) -> list[Sample]:
        late, self.late = self.late, []
        return late


def test_abort_all_is_answered_when_the_last_sample_has_come() -> None:
    bench = Bench(Elsewhere())
    peer = bench.client().send(submit("x", n=2, max_tokens=50))
    bench.turn()
    peer.send(m.Control(1, "abort_all"))
    bench.turn(3)
    assert not peer.take(m.Done)
    bench.engine.late = bench.engine.held  # type: ignore[attr-defined]
    bench.turn(2)
    assert [sample.finish_reason for sample in peer.samples()] == ["aborted"] * 2 and peer.take(m.Done)


def test_samples_of_a_dropped_group_may_come_late(caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench(Elsewhere())
    peer = bench.client().send(submit("x", n=2, max_tokens=50))
    bench.turn()
    peer.send(m.Goodbye())
    bench.turn(3)
    bench.engine.late = bench.engine.held  # type: ignore[attr-defined]
    bench.turn(2)
    assert "unknown group" not in caplog.text and not bench.service._running._groups.count(GroupStatus.DROPPED)
