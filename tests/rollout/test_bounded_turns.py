"""One turn of the loop does a bounded amount of work, whatever clients ask for: counted, not timed."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from rollout.engine.values import Group, Sample, Sampling
from rollout.fleet import event_queue
from rollout.fleet import groups as fleet_groups
from rollout.fleet.event_queue import EventQueue
from rollout.fleet.groups import FleetGroups
from rollout.fleet.join_listener import JoinListener
from rollout.fleet.replica_set import ReplicaSet
from rollout.fleet.verifier import Verification, Verifier
from rollout.service.engine_groups import EngineGroups
from rollout.service.persistence import SessionIdentity
from rollout.service.session import MAX_REPLY_BYTES, AcceptedGroup, SendLimits, Session
from tests.support.clock import Clock
from tests.support.fake_engine import FakeEngine
from tests.support.wire import Bench, Peer, submit


def frozen() -> FakeEngine:
    engine = FakeEngine()
    engine.frozen = True
    return engine


def holding(bench: Bench, peer: Peer, groups: int, n: int = 1, name: str = "g") -> None:
    """Have a client hold groups."""
    before = len(bench.engine.groups)
    for i in range(groups):
        peer.send(submit(f"{name}{i}", serial=i + 1, n=n, max_tokens=100))
        bench.turn()
    assert len(bench.engine.groups) == before + groups


def counted(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> list[Any]:
    """The calls of a method, by their first argument."""
    calls: list[Any] = []
    method: Callable[..., Any] = getattr(owner, name)

    def call(self: Any, first: Any, *rest: Any, **options: Any) -> Any:
        calls.append(first)
        return method(self, first, *rest, **options)

    monkeypatch.setattr(owner, name, call)
    return calls


def sample(index: int) -> Sample:
    return Sample(
        group_id="1.1",
        index=index,
        token_ids=np.array([1], np.int32),
        logprobs=np.zeros(1, np.float32),
        finish_reason="length",
        weight_versions=[(0, 0)],
        prompt_tokens=1,
    )


def test_a_client_is_sent_so_much_at_once_and_the_rest_at_once_after_the_others() -> None:
    session = Session(SessionIdentity("", "s", "reads fast", 1), limits=SendLimits(batch_samples=1))
    session.peer = b"p"
    accepted = AcceptedGroup("g", "1.1", b"", range(1000))
    session.hold(accepted)
    for i in range(1000):
        session.queue_sample(accepted, sample(i))
    sent: list[int] = []
    take = lambda peer, frames: sent.append(1) is None  # noqa: E731
    turns, most = 0, SendLimits().messages
    while session.flush(take):
        turns += 1
        assert len(sent) == most * turns
    assert turns == 1000 // most and len(sent) == 1000 and not session.pending


def test_the_loop_goes_on_at_once_with_what_it_has_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(send_limits=SendLimits(messages=2))
    peer = bench.client()
    holding(bench, peer, 8)
    waits: list[float] = []
    receive = bench.service._receiver.receive
    monkeypatch.setattr(bench.service._receiver, "receive", lambda wait, began: waits.append(wait) or receive(wait, began))
    bench.settle()
    while len(peer.got) < 8:
        waits.clear()
        bench.turn()
        peer.read()
        if len(peer.got) < 8:
            assert waits == [0.0]


def test_ending_everything_takes_a_session_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(frozen())
    peers = [bench.client() for _ in range(12)]
    for number, peer in enumerate(peers):
        holding(bench, peer, 10, name=f"c{number}-")
    ends = counted(monkeypatch, EngineGroups, "_abort")
    running = bench.service._running
    running.abort_all(bench.service._sessions)
    assert not ends and running.has_aborts
    most = 0
    while running.has_aborts:
        before = len(ends)
        running.process_aborts(0.0)
        most = max(most, len(ends) - before)
    assert most == 10 and len(ends) == 120 and not bench.engine.groups


def test_a_group_that_comes_after_is_not_ended_with_everything() -> None:
    bench = Bench(frozen())
    first, second = bench.client(), bench.client()
    holding(bench, first, 3)
    holding(bench, second, 3)
    running = bench.service._running
    running.abort_all(bench.service._sessions)
    asked = {held.group_id: held for session in bench.service._sessions for held in session.groups.values()}
    late = submit("late", serial=9, max_tokens=100)
    running.submit(list(bench.service._sessions)[1], late)
    running.process_aborts(None)
    assert list(bench.engine.groups) == [list(bench.service._sessions)[1].groups["late"].engine_id] and len(asked) == 3


def test_asking_again_for_the_end_of_everything_adds_nothing() -> None:
    bench = Bench(frozen())
    holding(bench, bench.client(), 3)
    for _ in range(1000):
        bench.service._running.abort_all(bench.service._sessions)
    assert len(bench.service._running._session_aborts) == 1


def test_silent_clients_are_forgotten_one_a_turn() -> None:
    bench = Bench(frozen(), client_grace_s=5.0, clock=Clock())
    peers = [bench.client() for _ in range(4)]
    for peer in peers:
        holding(bench, peer, 2, name=peer.session)
    for session in bench.service._sessions:
        session.last_received_at = -1e6
    for left in (3, 2, 1, 0):
        bench.turn()
        assert len(list(bench.service._sessions)) == left


def test_clients_that_flood_are_forgotten_one_a_turn() -> None:
    bench = Bench(frozen())
    peers = [bench.client() for _ in range(3)]
    for session in bench.service._sessions:
        session._reply_bytes = MAX_REPLY_BYTES + 1
    bench.service._flush()
    assert len(list(bench.service._sessions)) == len(peers) - 1


def test_one_message_is_taken_where_there_is_no_time_for_more() -> None:
    bench = Bench(frozen())
    peer = bench.client()
    for i in range(50):
        peer.send(submit(f"g{i}", serial=i + 1, max_tokens=100))
    receiver = bench.service._receiver
    before = receiver.messages
    assert not receiver.receive(0.0, lambda: 0.0) and receiver.messages == before + 1


def test_a_router_makes_so_many_calls_at_once() -> None:
    box, made = EventQueue(), []
    for i in range(10_000):
        box.post(lambda i=i: made.append(i))  # type: ignore[misc]
    for turn in itertools.count(1):
        box.run()
        assert len(made) == min(10_000, turn * event_queue.MAX_CALLS)
        if not box:
            break
    assert made == list(range(10_000))


def test_samples_that_come_together_count_one_by_one() -> None:
    """A call that brings many is worth as many: the turn is as long."""
    box, made = EventQueue(), []
    for i in range(20):
        box.post(lambda i=i: made.append(i), event_queue.MAX_CALLS // 4)  # type: ignore[misc]
    for turn in range(1, 6):
        box.run()
        assert len(made) == 4 * turn
    assert not box and made == list(range(20))


def test_a_router_places_so_many_children_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    router = FleetGroups(EventQueue(), ReplicaSet(JoinListener(), None, EventQueue()), Verifier(EventQueue(), Verification()))
    for i in range(40):
        router.submit(Group(f"1.{i}", np.array([1], np.int32), Sampling(n=200, max_tokens=4, seed=1)), "", 0.0)
    assert len(router.waiting) == 40
    placed = counted(monkeypatch, FleetGroups, "place")
    router.place_waiting(0.0)
    assert sum(len(one.unplaced) for one in placed) <= fleet_groups.MAX_PLACED and len(placed) == 10
    router.give_up(100.0, 0.0, 60.0)
    assert len(router.waiting) == 30 and len(router.ended) == 2000
    for _ in range(3):
        router.give_up(100.0, 0.0, 60.0)
    assert not router.waiting and not router.open


def test_a_group_larger_than_that_is_placed_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet_groups, "MAX_PLACED", 5)
    router = FleetGroups(EventQueue(), ReplicaSet(JoinListener(), None, EventQueue()), Verifier(EventQueue(), Verification()))
    for i in range(3):
        router.submit(Group(f"1.{i}", np.array([1], np.int32), Sampling(n=9, max_tokens=4, seed=1)), "", 0.0)
    router.give_up(100.0, 0.0, 60.0)
    assert len(router.waiting) == 2


def test_what_was_there_at_the_start_is_not_collected_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A full collection of a process with torch and its friends takes a fifth of a second."""
    from rollout.commands import serve

    served: list[int] = []

    class Stub:
        def run(self) -> None:
            served.append(gc.get_freeze_count())

    try:
        serve.serve_on(Stub())  # type: ignore[arg-type]
        assert served[0] > 10_000
    finally:
        gc.unfreeze()
