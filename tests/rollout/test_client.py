"""The client's promises, against a service in another thread and against a service played by hand."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import numpy as np
import pytest

from rollout.client import link
from rollout.client.api import RolloutClient
from rollout.client.connection import LinkTiming
from rollout.client.handle import OpenHandle
from rollout.client.submission import token_array
from rollout.engine.values import Limits, Sample, Sampling, TokenChunk
from rollout.service.loop import Service, ServiceTiming
from rollout.transport import errors as e
from rollout.transport import messages as m
from rollout.transport.columns import pack_progress
from rollout.transport.frames import Decoder, Frame, pack
from rollout.transport.loopback import LoopbackService
from tests.support.clock import Clock
from tests.support.fake_engine import VOCAB, FakeEngine, expected
from tests.support.played import Played, failure
from tests.support.waiting import until
from tests.support.wire import service_of

WAIT = 60.0
"""for what comes: a bound for hangs only"""
ENDLESS = Sampling(n=2, max_tokens=40_000)


@contextmanager
def serving(engine: FakeEngine | None = None, sockets: bool = False, **options: Any) -> Iterator[Callable[..., RolloutClient]]:
    """Runs a service in a thread; yields how to connect to it."""
    loopback = None if sockets else LoopbackService()
    endpoint = "tcp://127.0.0.1:*" if sockets else None
    options.setdefault("client_grace_s", WAIT)
    options.setdefault("timing", ServiceTiming(idle_poll_s=0.005))  # so that it stops soon
    service = service_of(engine or FakeEngine(step_s=0.0005), endpoint, transport=loopback, **options)
    thread = threading.Thread(target=service.run)
    thread.start()

    def connect(**options: Any) -> RolloutClient:
        options = {"connect_timeout_s": WAIT, "link_timeout_s": WAIT, **options}
        return (
            RolloutClient(transport=loopback.connect(), **options) if loopback else RolloutClient(service.endpoint, **options)
        )

    connect.service = service  # type: ignore[attr-defined]
    try:
        yield connect
    finally:
        service.stop()
        thread.join(WAIT)
        assert not thread.is_alive()


@pytest.fixture(params=[False, True], ids=["loopback", "sockets"])
def client(request: pytest.FixtureRequest) -> Iterator[RolloutClient]:
    with serving(sockets=request.param) as connect, connect(name="test") as client:
        yield client


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine(step_s=0.0005)


def tokens(samples: list[Sample]) -> list[list[int]]:
    return [sample.token_ids.tolist() for sample in samples]


# what it is for


def test_generate_yields_samples_as_they_finish(client: RolloutClient) -> None:
    prompts = [[1, 2], np.array([7]), (9, 9)]
    samplings = [Sampling(n=2, max_tokens=30), Sampling(n=1, max_tokens=5), Sampling(n=3, max_tokens=1)]
    samples = list(client.generate(prompts, samplings, timeout=WAIT))
    assert [len(sample.token_ids) for sample in samples] == [1, 1, 1, 5, 30, 30]
    by_group = {ids: [s for s in samples if s.group_id == ids] for ids in dict.fromkeys(s.group_id for s in samples)}
    for (_, group), prompt, n, count in zip(by_group.items(), ([9, 9], [7], [1, 2]), (3, 1, 2), (1, 5, 30), strict=True):
        assert tokens(group) == [expected(prompt, i, count) for i in range(n)]
        assert all(sample.prompt_tokens == len(prompt) and sample.weight_versions == [(0, 3)] for sample in group)


def test_generate_groups_yields_groups_in_order(client: RolloutClient) -> None:
    samplings = [Sampling(n=2, max_tokens=30), Sampling(n=3, max_tokens=1)]
    groups = list(client.generate_groups([[1], [2]], samplings, group_ids=["late", "early"], timeout=WAIT))
    assert [[(s.group_id, s.index) for s in group] for group in groups] == [
        [("late", 0), ("late", 1)],
        [("early", 0), ("early", 1), ("early", 2)],
    ]


def test_arrays_can_be_used_in_place(client: RolloutClient) -> None:
    ((sample,),) = client.generate_groups([[1]], Sampling(max_tokens=3), timeout=WAIT)
    assert sample.token_ids.dtype == np.int32 and sample.logprobs.dtype == np.float32
    assert sample.token_ids.flags.writeable  # torch.from_numpy warns otherwise


def test_submit_gives_a_handle(client: RolloutClient) -> None:
    handle = client.submit([5], Sampling(n=3, max_tokens=20), group_id="mine")
    assert (handle.group_id, handle.n) == ("mine", 3)
    assert sorted(tokens(list(handle.samples(WAIT)))) == sorted(expected([5], i, 20) for i in range(3))
    assert handle.done
    assert [sample.index for sample in handle.result(0)] == [0, 1, 2]
    assert len(list(handle.samples(0))) == 3  # again from the first


def test_a_wait_that_takes_too_long(client: RolloutClient) -> None:
    handle = client.submit([5], ENDLESS)
    with pytest.raises(e.RequestTimeout, match=r"0 of 2 samples after 0.02 s"):
        handle.result(0.02)
    with pytest.raises(TimeoutError):
        next(handle.samples(0.02))
    assert not handle.done
    with pytest.raises(e.RequestTimeout, match="no sample in 0.02 s; 2 are missing"):
        next(client.generate([[5]], ENDLESS, timeout=0.02))
    handle.cancel()  # it was still live
    assert len(handle.result(WAIT)) == 2


def test_cancel_returns_what_there_is(client: RolloutClient) -> None:
    handle = client.submit([5], ENDLESS)
    other = client.submit([6], Sampling(max_tokens=50))
    until(lambda: client.status(WAIT)["running"])
    handle.cancel()
    handle.cancel()
    for sample in handle.result(WAIT):
        assert sample.finish_reason == "aborted"
        assert sample.token_ids.tolist() == expected([5], sample.index, len(sample.token_ids))
    assert other.result(WAIT)[0].finish_reason == "length"
    handle.cancel()


def test_ending_the_iteration_early_cancels_the_rest(client: RolloutClient) -> None:
    for iteration in (
        client.generate([[1], [2]], [Sampling(max_tokens=1), ENDLESS], timeout=WAIT),
        client.generate_groups([[1], [2]], [Sampling(max_tokens=1), ENDLESS], timeout=WAIT),
    ):
        next(iteration)
        until(lambda: client.status(WAIT)["service"]["clients"][0]["groups"] == 1)
        iteration.close()
        until(lambda: client.status(WAIT)["service"]["clients"][0]["groups"] == 0)


def test_more_groups_than_the_service_takes_at_once_wait_their_turn(engine: FakeEngine) -> None:
    engine.limits = Limits(max_groups_per_client=3, max_samples_per_client=10)
    with serving(engine) as connect, connect() as client:
        groups = list(client.generate_groups([[i] for i in range(50)], Sampling(n=4, max_tokens=2), timeout=WAIT))
        assert [group[3].token_ids.tolist() for group in groups] == [expected([i], 3, 2) for i in range(50)]
        # one that can never fit is refused, and does not wait for the others
        running = client.submit([1], ENDLESS)
        with pytest.raises(e.InvalidRequest, match="Limits.max_n"):
            client.submit([1], Sampling(n=5000)).result(WAIT)
        with pytest.raises(e.LimitExceeded, match="max_samples_per_client"):
            running.cancel()
            client.submit([1], Sampling(n=11)).result(WAIT)


def test_no_more_tokens_are_in_flight_than_the_budget(engine: FakeEngine) -> None:
    """Seen from the engine; what waits is served all the same."""
    most: list[int] = []
    step = engine.step

    def watched() -> list[Sample]:
        most.append(sum(1 + 30 * len(children) for children in engine.groups.values()))
        return step()

    engine.step = watched  # type: ignore[method-assign]
    with serving(engine) as connect, connect(budget=200) as client:
        handles = [client.submit([i], Sampling(n=2, max_tokens=30)) for i in range(12)]
        assert all(len(handle.result(WAIT)) == 2 for handle in handles)
        with pytest.raises(e.LimitExceeded, match="budget of 200"):
            client.submit([1], Sampling(n=7, max_tokens=30))
    assert 100 < max(most) <= 200
    with pytest.raises(ValueError, match="budget=0"):
        RolloutClient(transport=LoopbackService().connect(), budget=0)


def test_cancel_before_it_was_sent(engine: FakeEngine) -> None:
    engine.limits = Limits(max_groups_per_client=1)
    with serving(engine) as connect, connect() as client:
        running, waiting = client.submit([1], ENDLESS), client.submit([2], Sampling(n=3))
        waiting.cancel()
        assert [(s.index, s.finish_reason, len(s.token_ids)) for s in waiting.result(WAIT)] == [
            (i, "aborted", 0) for i in range(3)
        ]
        running.cancel()
        running.result(WAIT)
        assert sum(engine.clients.values()) == 1


def test_two_clients_and_many_threads() -> None:
    with serving(sockets=True) as connect, connect() as one, connect() as two:
        failed: list[BaseException] = []

        def use(client: RolloutClient, number: int) -> None:
            try:
                for i in range(20):
                    (group,) = client.generate_groups([[number, i]], Sampling(n=3, max_tokens=2), timeout=WAIT)
                    assert tokens(group) == [expected([number, i], k, 2) for k in range(3)]
            except BaseException as error:
                failed.append(error)

        threads = [threading.Thread(target=use, args=(client, i)) for i, client in enumerate([one, two] * 4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(WAIT)
        assert not failed and not any(thread.is_alive() for thread in threads)


def test_info_and_status(client: RolloutClient) -> None:
    assert (client.info.model, client.info.vocab_size, client.info.version) == ("fake", VOCAB, 3)
    assert client.info.arithmetic == "fake/1"
    status = client.status()
    assert status["version"] == 3 and status["service"]["clients"][0]["name"] == "test"


# bad input


@pytest.mark.parametrize(
    ("prompt", "reason"),
    [
        ([1.5], "must be integer token ids"),
        ([True], "must be integer token ids"),
        (["a"], "must be integer token ids .*: give one text"),
        ("hello", "prompt holds text .* ids = client.encode"),
        ({"role": "user"}, "prompt holds text"),
        ([[1], [2]], "must be integer token ids"),
        (5, "must be integer token ids"),
        ([None], "must be integer token ids"),
        ([2**31], "32 bits"),
        ([-(2**31) - 1], "32 bits"),
        ([2**70], "integer token ids"),
        ([[1], [2, 3]], "prompt: "),
    ],
)
def test_prompts_that_are_none(prompt: Any, reason: str) -> None:
    with pytest.raises(e.InvalidRequest, match=reason):
        token_array(prompt)


def test_samplings_that_are_none(shared: RolloutClient) -> None:
    with pytest.raises(e.InvalidRequest, match="sampling is a dict: give Sampling"):
        shared.submit([1], {"n": 2})  # type: ignore[arg-type]


def test_numbers_of_numpy_are_numbers(shared: RolloutClient) -> None:
    sampling = Sampling(n=np.int64(2), max_tokens=np.int32(3), top_p=np.float64(0.5), ignore_eos=np.True_)  # type: ignore[arg-type]
    assert [len(sample.token_ids) for sample in shared.submit([5], sampling).result(20)] == [3, 3]


def test_numbers_of_numpy_inside_of_containers(shared: RolloutClient) -> None:
    of_numpy = Sampling(
        n=2, max_tokens=3, stop_token_ids=np.array([7, 8]), allowed_token_ids=tuple(np.arange(5, 7)),
        logit_bias={np.int64(5): np.float32(2)}, temperature=np.array(0.5),
    )  # type: ignore[arg-type]  # fmt: skip
    assert shared.submit([5], of_numpy).result(20)


def test_children_are_cancelled_by_numpy_s_numbers(shared: RolloutClient) -> None:
    handle = shared.submit([5], msgspec.structs.replace(ENDLESS, n=2))
    with pytest.raises(e.InvalidRequest, match="must be the indices of children"):
        handle.cancel([0.0])  # type: ignore[list-item]
    handle.cancel(np.arange(1))
    handle.cancel([np.int32(1)])  # type: ignore[list-item]
    assert [sample.finish_reason for sample in handle.result(WAIT)] == ["aborted"] * 2


def test_prompts_are_copied() -> None:
    prompt = np.array([1, 2], np.int32)
    copy = token_array(prompt)
    prompt[0] = 9
    assert copy.tolist() == [1, 2]


BAD: list[tuple[dict[str, Any], str]] = [
    ({"prompt": [VOCAB]}, f"token id {VOCAB}"),
    ({"max_tokens": 60_000}, "never fit the KV pool"),
    ({"group_id": "x" * 129}, "Limits.max_id_bytes"),
    ({"prompt": ["a", "b"]}, "tokenize first: ids = client.encode"),
    ({"n": 2000}, "Limits.max_n"),
    ({"stop_token_ids": (VOCAB,)}, f"stop_token_ids holds {VOCAB}: the model's token ids"),
    ({"group_id": 7}, "cannot be sent"),
    ({"group_id": "\ud800"}, "cannot be sent"),
]
"""refused by the service, by the wire, and what cannot be sent at all; the whole table: tests/engine/test_bad_groups.py"""


@pytest.mark.parametrize(("bad", "reason"), BAD, ids=[str(bad)[:40] for bad, _ in BAD])
def test_bad_input_is_a_typed_error_of_that_group_alone(bad: dict[str, Any], reason: str, shared: RolloutClient) -> None:
    fields = dict(bad)
    prompt, group_id = fields.pop("prompt", [1]), fields.pop("group_id", None)
    sampling = Sampling(**{"max_tokens": 3, **fields})
    running = shared.submit([4], Sampling(max_tokens=20))
    with pytest.raises(e.RolloutError, match=reason) as caught:
        shared.submit(prompt, sampling, group_id).result(WAIT)
    assert isinstance(caught.value, ValueError) and type(caught.value) in (e.InvalidRequest, e.LimitExceeded)
    with pytest.raises(type(caught.value), match=reason):
        list(shared.generate([prompt], sampling, group_ids=None if group_id is None else [group_id], timeout=WAIT))
    assert tokens(running.result(WAIT)) == [expected([4], 0, 20)]


@pytest.fixture(scope="module")
def shared() -> Iterator[RolloutClient]:
    with serving() as connect, connect() as client:
        yield client


def test_a_live_id_of_this_client(client: RolloutClient) -> None:
    first = client.submit([1], ENDLESS, "same")
    with pytest.raises(e.IdConflict, match="group 'same': this client has a live group"):
        client.submit([1], ENDLESS, "same").result(WAIT)
    assert not first.done
    first.cancel()
    first.result(WAIT)
    assert tokens(client.submit([2], Sampling(max_tokens=1), "same").result(WAIT)) == [expected([2], 0, 1)]


def test_as_many_of_each(client: RolloutClient) -> None:
    with pytest.raises(ValueError, match="2 prompts, 1 samplings, 2 group_ids"):
        next(client.generate([[1], [2]], [Sampling()]))
    with pytest.raises(ValueError, match="2 prompts, 2 samplings, 1 group_ids"):
        next(client.generate_groups([[1], [2]], group_ids=["a"]))
    assert list(client.generate([])) == []


def test_samples_of_a_failed_step_are_delivered_as_such(engine: FakeEngine) -> None:
    engine.crash_on = 13
    with serving(engine) as connect, connect() as client:
        (group,) = client.generate_groups([[13]], Sampling(n=2), timeout=WAIT)
        assert [(s.finish_reason, s.error) for s in group] == [
            ("error", "engine.step failed: RuntimeError: scripted crash")
        ] * 2
        assert client.submit([1], Sampling(max_tokens=1)).result(WAIT)[0].finish_reason == "length"


# the end of a client, the end of a service


def test_close_ends_what_is_open(engine: FakeEngine) -> None:
    with serving(engine, client_grace_s=10 * WAIT) as connect:
        client = connect()
        handle = client.submit([1], ENDLESS)
        client.status(WAIT)
        client.close()
        for use in (lambda: handle.result(WAIT), lambda: client.submit([1]).result(WAIT), lambda: client.status(WAIT)):
            with pytest.raises(e.ClientClosed):
                use()
        handle.cancel()
        client.close()
        until(lambda: engine.aborted)  # at once: the grace time is longer than this waits


def test_nobody_there() -> None:
    with pytest.raises(e.ServiceLost, match="no service at tcp://127.0.0.1:9 within 0.2 s: is `rollout serve` running"):
        RolloutClient("tcp://127.0.0.1:9", connect_timeout_s=0.2)


def test_somebody_else_there() -> None:
    with pytest.raises(e.ServiceLost, match="accepts connections but did not answer"):
        RolloutClient(transport=LoopbackService().connect(), connect_timeout_s=0.1)


def test_an_address_or_a_transport() -> None:
    with pytest.raises(ValueError, match="either an address or a transport"):
        RolloutClient()
    with pytest.raises(ValueError, match="must be tcp://HOST:PORT"):
        RolloutClient("localhost")


def test_another_protocol_version(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving() as connect:
        service: Service = connect.service  # type: ignore[attr-defined]
        welcomed = service._hello
        monkeypatch.setattr(service, "_hello", lambda peer, hello: welcomed(peer, msgspec.structs.replace(hello, protocol=1)))
        with pytest.raises(e.VersionMismatch, match="the client has protocol 1, the service 5: install the same version"):
            connect()


def test_too_many_clients(engine: FakeEngine) -> None:
    engine.limits = Limits(max_clients=1)
    with serving(engine) as connect, connect():
        with pytest.raises(e.Busy, match="Limits.max_clients"):
            connect()


def test_a_service_that_stops_returns_what_it_has(engine: FakeEngine) -> None:
    for sockets in (False, True):
        with serving(engine, sockets) as connect:
            client = connect()
            handle = client.submit([1], ENDLESS)
            client.status(WAIT)
        assert [sample.finish_reason for sample in handle.result(WAIT)] == ["aborted"] * 2
        client.close()


# a service played by hand


def let_it_turn(clock: Clock) -> None:
    """The client's I/O thread goes around its loop, and more than once."""
    seen = clock.asked
    until(lambda: clock.asked > seen + 10)


@pytest.fixture
def clock() -> Clock:
    """Time as the client's I/O thread sees it: it stands until the test moves it."""
    return Clock()


def turning(clock: Clock) -> dict[str, Any]:
    """Options of a client whose I/O thread looks at this clock, and often."""
    return {"clock": clock.monotonic, "timing": LinkTiming(poll_s=0.005)}


@pytest.fixture
def played() -> Iterator[Played]:
    played = Played()
    yield played
    played.client.close()


def wanted(hello: m.Hello) -> int:
    return 0 if hello.groups is None else len(hello.groups)


def test_each_sample_is_acked_and_repeats_change_nothing(played: Played) -> None:
    handle = played.client.submit([1], Sampling(n=2), "g")
    assert played.get(m.Submit).group_id == "g"
    played.send(played.sample("g", 1), played.sample("g", 1, first=50), played.sample("g", 0))
    assert tokens(handle.result(WAIT)) == [[0, 1, 2]] * 2
    played.send(played.sample("g", 0), played.sample("unknown", 0))
    acked: list[tuple[str, int]] = []
    while len(acked) < 5:
        acked += played.get(m.Ack).samples
    assert acked == [("g", 1), ("g", 1), ("g", 0), ("g", 0), ("unknown", 0)]  # nobody needs to send them again


def test_heartbeats_come_while_nothing_happens(clock: Clock) -> None:
    played = Played(**turning(clock))
    for _ in range(3):
        clock.now += LinkTiming().heartbeat_s
        played.get(m.Heartbeat)
    let_it_turn(clock)
    assert not played.end.receive(0), "one a second"
    played.client.close()


def test_a_session_that_the_service_has_forgotten_is_set_up_again(played: Played) -> None:
    handle = played.client.submit([1], Sampling(), "g")
    cancelled = played.client.submit([1], Sampling(), "c")
    first = [played.get(m.Submit), played.get(m.Submit)]
    cancelled.cancel()
    played.get(m.Abort)
    played.send(m.Refused(e.NoSession.kind, "who are you"))
    hello = played.get(m.Hello)
    assert {row.tobytes() for row in hello.groups} == {m.digest(submit) for submit in first}
    played.welcome(hello)
    assert [played.get(m.Submit).group_id, played.get(m.Submit).group_id] == ["g", "c"]
    assert played.get(m.Abort).group_ids == ["c"]
    played.send(played.sample("g", 0), played.sample("c", 0))
    assert handle.result(WAIT) and cancelled.result(WAIT)


def test_what_the_service_still_has_is_not_sent_again(played: Played) -> None:
    handles = [played.client.submit([1], Sampling(), name) for name in ("kept", "lost")]
    kept, lost = played.get(m.Submit), played.get(m.Submit)
    played.send(m.Refused(e.NoSession.kind, "who are you"))
    played.welcome(played.get(m.Hello), groups=m.digests([m.digest(kept)]))
    assert m.digest(played.get(m.Submit)) == m.digest(lost) == handles[1].digest
    status = threading.Thread(target=lambda: pytest.raises(e.ClientClosed, played.client.status, WAIT))
    status.start()
    assert isinstance(played.get(m.Submit | m.StatusRequest), m.StatusRequest)  # and no second one
    played.client.close()
    status.join(WAIT)


def test_a_group_is_there_before_what_its_caller_asks_next(played: Played) -> None:
    handle = played.client.submit([1], Sampling(), "g")
    with pytest.raises(e.RequestTimeout):
        played.client.status(0)
    assert isinstance(played.get(m.Submit | m.StatusRequest), m.Submit)
    assert isinstance(played.get(m.Submit | m.StatusRequest), m.StatusRequest) and not handle.done


def test_an_outdated_welcome_is_none(played: Played) -> None:
    """After an error the client starts over; the answer to an older Hello must not let it go on as if that were agreed."""
    handle = played.client.submit([1], Sampling(), "g")
    played.get(m.Submit)
    played.send_frames([b"\xc1 nonsense"])
    assert isinstance(failure(handle), e.ProtocolError)
    again = played.client.submit([2], Sampling(), "g")
    hello = played.get(m.Hello)
    assert wanted(hello) == 0  # the service drops the first
    played.welcome(msgspec.structs.replace(hello, number=hello.number - 1))
    played.send(played.sample("g", 0, first=50))  # of the first group, still on its way
    played.welcome(hello)
    assert played.get(m.Submit).prompt.tolist() == [2]
    played.send(played.sample("g", 0))
    assert tokens(again.result(WAIT)) == [[0, 1, 2]]


def test_an_open_status_is_asked_again(played: Played) -> None:
    got: list[Any] = []
    thread = threading.Thread(target=lambda: got.append(played.client.status(WAIT)))
    thread.start()
    first = played.get(m.StatusRequest)
    played.send(m.Refused(e.NoSession.kind, "who are you", request_id=first.request_id))
    played.welcome(played.get(m.Hello))
    again = played.get(m.StatusRequest)
    assert again.request_id == first.request_id
    played.send(m.StatusReply(again.request_id, b'{"a": 1}'), m.StatusReply(again.request_id, b"{}"), m.StatusReply(99, b"{}"))
    thread.join(WAIT)
    assert got == [{"a": 1}]


def test_a_status_that_is_given_up_is_not_asked_again(played: Played) -> None:
    with pytest.raises(e.RequestTimeout, match="no status within 0.02 s"):
        played.client.status(0.02)
    late = played.get(m.StatusRequest)
    played.send(m.StatusReply(late.request_id, b"{}"))
    handle = played.client.submit([1], Sampling(), "g")  # the thread lives
    played.get(m.Submit)
    played.send(played.sample("g", 0))
    handle.result(WAIT)


def test_refusals_go_to_whom_they_are_about(played: Played) -> None:
    one, two, three = (played.client.submit([1], Sampling(), name) for name in ("one", "two", "three"))
    for _ in range(3):
        played.get(m.Submit)
    played.send(m.Refused("busy", "later", "one"), m.Refused("made_up", "new", "two"), m.Refused("busy", "x", "unknown"))
    assert type(failure(one)) is e.Busy and str(failure(one)) == "group 'one': later"
    assert type(failure(two)) is e.RolloutError and "made_up: new" in str(failure(two))
    assert not three.done
    played.send(m.Refused("group_failed", "about nobody in particular"))
    assert type(failure(three)) is e.GroupFailed and three.group_id == "three"


@pytest.mark.parametrize(
    "frames",
    [
        [b""],
        [b"\xff"],
        [*pack(m.Heartbeat())],
        [*pack(m.Alive(1, 1)), b"unnamed"],
        [*pack(m.StatusReply(1, b"[]"))],
        [*pack(m.StatusReply(1, b"{"))],
        [*pack(m.StatusReply(1, b"[" * 100_000))],
        [*pack(m.StatusReply(1, b"\xff"))],
    ],
)
def test_nonsense_from_the_service_is_told_to_everybody_who_waits(played: Played, frames: list[Frame]) -> None:
    handle = played.client.submit([1], Sampling(n=2), "g")
    played.get(m.Submit)
    status: list[Exception] = []

    def ask() -> None:
        try:
            played.client.status(WAIT)
        except Exception as error:
            status.append(error)

    thread = threading.Thread(target=ask)
    thread.start()
    played.get(m.StatusRequest)
    played.send_frames(frames)
    assert "the service sent an invalid message" in str(failure(handle))
    thread.join(WAIT)
    assert isinstance(status[0], e.ProtocolError)
    played.welcome(played.get(m.Hello))  # and the connection goes on
    again = played.client.submit([1], Sampling(), "g")
    played.get(m.Submit)
    played.send(played.sample("g", 0))
    again.result(WAIT)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"index": 7}, "sample 7 of a group of 2"),
        ({"index": -1}, "sample -1 of a group of 2"),
        ({"token_ids": np.full(3, VOCAB, np.int32)}, f"token_ids with {VOCAB}"),
        ({"logprobs": np.full(3, np.nan, np.float32)}, "logprobs with nan"),
        ({"finish_reason": "length"}, "finish_reason 'length' after 3 tokens"),
        ({"finish_reason": "scored"}, "finish_reason 'scored'"),
        ({"weight_versions": [(0, 0)]}, "weight_versions"),
        ({"prompt_tokens": 999}, "prompt_tokens 999"),
    ],
)
def test_a_sample_that_cannot_be_is_an_error_of_its_group(played: Played, fields: dict[str, Any], reason: str) -> None:
    """Nothing of it is data. Others go on, and the service drops the rest of it: the id may be used again."""
    handle, other = played.client.submit([1], Sampling(n=2), "g"), played.client.submit([1], Sampling(), "other")
    for _ in range(2):
        played.get(m.Submit)
    played.send(played.sample("g", **{"index": 0, **fields}))
    error = failure(handle)
    assert type(error) is e.NotBelieved and error.group_id == "g" and reason in str(error)
    assert not handle.finished and not other.done
    hello = played.get(m.Hello)
    assert wanted(hello) == 1
    played.welcome(hello, hello.groups)
    again = played.client.submit([1], Sampling(), "g")
    played.get(m.Submit)
    played.send(played.sample("other", 0), played.sample("g", 0))
    assert len(other.result(WAIT)) == len(again.result(WAIT)) == 1


def test_new_tokens_that_cannot_be_are_an_error_of_their_group(played: Played) -> None:
    handle, other = played.client.submit([1], Sampling(stream_every=2), "g"), played.client.submit([1], Sampling(), "other")
    for _ in range(2):
        played.get(m.Submit)
    tokens = dict(token_ids=np.array([3], np.int32), logprobs=np.array([np.nan], np.float32), weight_versions=[(0, 1)])
    played.send(pack_progress(1, {"g": [TokenChunk(index=0, first=0, seed=7, **tokens)]}))
    assert "chunk of child 0 has logprobs with nan" in str(failure(handle)) and not handle.partial_samples()
    hello = played.get(m.Hello)
    played.welcome(hello, hello.groups)
    played.send(played.sample("other", 0))
    other.result(WAIT)


def test_an_answer_to_another_kind_of_request_is_none(played: Played) -> None:
    future = played.client._session.link.request(m.WeightsRequest)
    played.send(m.Done(played.get(m.WeightsRequest).request_id))
    with pytest.raises(e.NotBelieved, match="the service answered with a Done instead of a StatusReply"):
        future.result(WAIT)


def test_a_service_does_not_become_another_one_without_a_restart(played: Played) -> None:
    handle = played.client.submit([1], Sampling(), "g")
    played.get(m.Submit)
    played.send(m.Refused(e.NoSession.kind, "who are you"))
    info = ("played", 10 * VOCAB, 9999, (), 1, Limits(), ())
    played.send(m.Welcome(m.PROTOCOL, played.get(m.Hello).number, played.incarnation, *info))
    assert f"vocab_size of the service changed from {VOCAB} to {10 * VOCAB}" in str(failure(handle))


def test_a_restarted_service_is_told(played: Played) -> None:
    handle = played.client.submit([1], Sampling(), "g")
    played.get(m.Submit)
    played.send(m.Refused(e.NoSession.kind, "who are you"))
    hello = played.get(m.Hello)
    played.incarnation = "two"
    played.welcome(hello)
    error = failure(handle)
    assert type(error) is e.ServiceRestarted and "was restarted, so its open groups are lost: submit them again" in str(error)
    assert played.client.info.incarnation == "two"
    played.client.submit([1], Sampling(), "h")
    assert played.get(m.Submit).group_id == "h"


def test_a_loop_that_stands_still(clock: Clock) -> None:
    played = Played(stall_timeout_s=3.0, **turning(clock))
    handle = played.client.submit([1], Sampling(), "g")
    for _ in range(4):  # longer than the timeout, but it says something
        clock.now += 2.0
        played.send(m.Alive(0, 1))
        until(lambda: played.client._session.link._connection.last_received_at == clock.now)
        assert not handle.done
    clock.now += 3.0
    let_it_turn(clock)
    assert not handle.done
    clock.now += 0.1
    error = failure(handle)
    assert type(error) is e.ServiceLost and "its loop said nothing for 3.0 s" in str(error)
    while wanted(hello := played.get(m.Hello)):
        pass
    played.welcome(hello)  # it moves again
    again = played.client.submit([1], Sampling(), "g")
    assert played.get(m.Submit).group_id == "g"
    played.send(played.sample("g", 0))
    again.result(WAIT)
    played.client.close()


def test_a_service_that_never_comes_back(clock: Clock) -> None:
    played = Played(link_timeout_s=3.0, **turning(clock))
    handle = played.client.submit([1], Sampling(), "g")
    played.get(m.Submit)
    played.end.close()
    clock.now += 3.0
    let_it_turn(clock)
    assert not handle.done
    clock.now += 0.1
    error = failure(handle)
    assert type(error) is e.ServiceLost and "dead or unreachable: no connection for 3.0 s" in str(error)
    let_it_turn(clock)
    later = played.client.submit([1])
    clock.now += 2.9
    let_it_turn(clock)
    assert not later.done, "it has a time-out of its own"
    clock.now += 0.2
    assert type(failure(later)) is e.ServiceLost
    played.client.close()


def test_a_refused_hello_is_not_repeated_in_a_hurry(clock: Clock) -> None:
    played = Played(**turning(clock))
    first = played.client.submit([1], Sampling())
    played.send(m.Refused(e.NoSession.kind, "who are you"))
    played.get(m.Hello)
    played.send(m.Refused("busy", "too many clients"))
    assert type(failure(first)) is e.Busy
    handle = played.client.submit([1], Sampling())
    clock.now += LinkTiming().hello_retry_s - 0.1
    let_it_turn(clock)
    assert not any(b"hello" in bytes(frames[0]) for _, frames in played.end.receive(0)) and not handle.done
    clock.now += 0.2
    assert played.get(m.Hello)
    played.client.close()


def test_a_mistake_in_the_io_thread_leaves_nobody_waiting(played: Played, monkeypatch: pytest.MonkeyPatch) -> None:
    handle = played.client.submit([1], Sampling(), "g")
    played.get(m.Submit)
    monkeypatch.setattr(OpenHandle, "add_samples", lambda self, samples: 1 / 0)
    played.send(played.sample("g", 0))
    assert "I/O thread failed: ZeroDivisionError" in str(failure(handle))
    assert "ZeroDivisionError" in str(failure(played.client.submit([1])))


def test_a_client_decodes_nothing_of_its_own(played: Played, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a submit checks it checks before it packs; only the I/O thread decodes, and only what the service sends."""
    decoding: list[str] = []
    unpack = Decoder.unpack

    def spied(self: Decoder[Any], frames: Any) -> Any:
        decoding.append(threading.current_thread().name)
        return unpack(self, frames)

    monkeypatch.setattr(Decoder, "unpack", spied)
    handle = played.client.submit([1], Sampling(), "g")
    assert decoding == []
    played.get(m.Submit)
    played.send(played.sample("g", 0))
    handle.result(WAIT)
    assert "rollout-client" in decoding


def test_ids_made_up_are_never_twice(played: Played) -> None:
    handles = [played.client.submit([1]) for _ in range(100)]
    assert len({handle.group_id for handle in handles}) == 100


def test_status_must_be_an_object() -> None:
    assert link._status_dict(json.dumps({"a": 1}).encode()) == {"a": 1}
    with pytest.raises(ValueError, match="must be a JSON object"):
        link._status_dict(b"[1]")
