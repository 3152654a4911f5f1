"""Parts of the client's I/O thread and of the service's loop, each without sockets, threads or a clock."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import msgspec
import numpy as np
import pytest

from rollout.client.connection import AckQueue, ConnectionState, LinkTiming
from rollout.client.handle import OpenHandle
from rollout.client.link import CallQueue
from rollout.client.pending import OpenGroups, PendingRequests, WeightHistory
from rollout.client.submission import check_budget, group_of, scored_group, sendable
from rollout.engine.values import Limits, Sample, Sampling
from rollout.service.loop import SilenceClock
from rollout.transport.checks import Bounds
from rollout.transport.errors import ClientClosed, LimitExceeded, NotBelieved, WeightsRefused

TIMING = LinkTiming()

# the connection, as the client sees it


def test_a_new_connection_is_greeted_and_hello_is_repeated_until_welcome() -> None:
    connection = ConnectionState(now=0.0)
    connection.connected(connections=1, now=5.0)
    assert connection.hello_number == 1 and connection.hello_due(5.0) and not connection.hello_due(5.1)
    assert connection.hello_due(5.0 + TIMING.hello_retry_s)
    connection.welcomed(8.0)
    assert connection.ready and not connection.hello_due(100.0)


def test_heartbeats_are_due_each_second_once_welcome_has_come() -> None:
    connection = ConnectionState(now=0.0)
    connection.connected(1, 0.0)
    assert not connection.heartbeat_due(10.0), "not before Welcome"
    connection.welcomed(10.0)
    assert not connection.heartbeat_due(10.0 + TIMING.heartbeat_s - 0.1) and connection.heartbeat_due(10.0 + TIMING.heartbeat_s)
    assert not connection.heartbeat_due(10.0 + TIMING.heartbeat_s)


def test_another_connection_is_greeted_again_the_same_one_is_not() -> None:
    connection = ConnectionState(now=0.0)
    connection.connected(1, 0.0)
    connection.welcomed(0.0)
    connection.connected(1, 1.0)
    assert connection.ready and connection.hello_number == 1
    connection.connected(2, 2.0)
    assert not connection.ready and connection.hello_number == 2 and connection.last_received_at == 2.0


def test_an_outage_counts_from_the_last_connection_while_somebody_waits() -> None:
    connection = ConnectionState(now=0.0)
    connection.connected(1, 10.0)
    assert connection.disconnected(13.0) == 3.0
    connection.idle(13.0)
    assert connection.disconnected(14.0) == 1.0


def test_a_hello_on_its_way_is_outdated_without_another_one_in_a_hurry() -> None:
    connection = ConnectionState(now=0.0)
    connection.connected(1, 0.0)
    assert connection.hello_due(0.0)
    connection.resync(0.0)
    assert connection.hello_number == 2 and not connection.hello_due(TIMING.hello_retry_s - 0.1)
    assert connection.hello_due(TIMING.hello_retry_s)


# requests and calls


def test_a_request_is_answered_once_and_asked_for_again_until_then() -> None:
    requests, future = PendingRequests(), Future[Any]()
    assert not requests
    requests.add(7, [b"frames"], future, str)
    assert requests and list(requests.frames()) == [[b"frames"]]
    requests.answer(7, "done")
    requests.answer(7, "done again")
    assert future.result(0) == "done" and not requests and not list(requests.frames())


def test_an_answer_that_is_an_error_is_raised_and_who_gave_up_is_not_waited_for() -> None:
    requests, failing, given_up = PendingRequests(), Future[Any](), Future[Any]()
    requests.add(1, [], failing, str)
    requests.add(2, [], given_up, str)
    given_up.cancel()
    assert len(list(requests.frames())) == 1
    requests.answer(1, WeightsRefused("no"))
    with pytest.raises(WeightsRefused):
        failing.result(0)
    assert not requests, "the other one's caller has given up"
    requests.answer(2, "too late")
    assert given_up.cancelled()


def test_calls_wait_for_the_thread_and_fail_in_their_own_once_it_has_ended() -> None:
    woken: list[bool] = []
    made: list[Any] = []
    calls = CallQueue(lambda: woken.append(True))
    calls.put(made.append, 1)
    assert woken == [True] and not made
    calls.run()
    assert made == [1]
    calls.put(made.append, 2)
    calls.end(ClientClosed("closed"))
    assert made == [1, 2], "what waited is not lost"
    calls.put(lambda argument: made.append((argument, type(calls.ended))), 3)
    assert made[2] == (3, ClientClosed) and len(woken) == 2


def test_calls_that_wake_nobody_are_made_with_the_next_that_does() -> None:
    woken: list[bool] = []
    made: list[Any] = []
    calls = CallQueue(lambda: woken.append(True))
    calls.wake()
    assert not woken, "nothing waits"
    for i in range(3):
        calls.put(made.append, i, wake=False)
    assert not woken
    calls.wake()
    calls.wake()
    assert woken == [True], "once is enough"
    calls.run()
    assert made == [0, 1, 2]
    calls.put(made.append, 3, wake=False)
    calls.put(made.append, 4)
    assert woken == [True, True], "what waits unheard keeps nobody from being heard"
    calls.run()
    assert made == [0, 1, 2, 3, 4]


# the service's clock


def test_the_clock_moves_at_most_half_the_grace_time_a_turn() -> None:
    clock = SilenceClock(now_s=100.0, grace_s=10.0)
    clock.advance(101.0)
    assert clock.now == 1.0
    clock.advance(1000.0)  # the process was suspended
    assert clock.now == 6.0


def test_patience_is_doubled_while_messages_wait_to_be_taken() -> None:
    clock = SilenceClock(now_s=0.0, grace_s=10.0)
    clock.advance(5.0)
    assert clock.patience_s == 10.0
    clock.advance(6.0)
    assert clock.patience_s == 20.0, "not everything was taken for more than half the grace time"
    clock.catch_up()
    assert clock.patience_s == 10.0


# the groups that are open


def handle(name: str, n: int = 2, max_tokens: int = 10, priority: int = 0) -> OpenHandle:
    group = group_of(name, [5, 6], Sampling(n=n, max_tokens=max_tokens, priority=priority))
    return sendable(group, serial=1, require_version=0, limits=Limits())


def sample(name: str, index: int) -> Sample:
    return Sample(
        group_id=name, index=index, token_ids=np.zeros(1, np.int32), logprobs=np.zeros(1, np.float32), finish_reason="stop",
        weight_versions=[(0, 0)], prompt_tokens=2,
    )  # fmt: skip


def sent(groups: OpenGroups) -> list[str]:
    return [each.group_id for each in iter(lambda: groups.pop_sendable(Limits()), None)]


def test_groups_over_the_budget_wait_until_children_have_come_back() -> None:
    """A prompt of 2 and two children of 10 are 22 tokens; a child that comes back leaves 12."""
    groups = OpenGroups(WeightHistory(), budget=50)
    groups.bounds = Bounds(1, frozenset({0}))
    for name in "abcd":
        assert groups.add(handle(name))
    assert sent(groups) == ["a", "b"]
    groups.add_samples([sample("a", 0)])
    groups.add_samples([sample("a", 0)])  # a repeated one changes nothing
    assert sent(groups) == []
    groups.add_samples([sample("b", 1)])
    assert sent(groups) == ["c"], "12 + 12 + 22 are within 50"
    groups.add_samples([sample("a", 1)])
    assert sent(groups) == [], "12 + 22 + 22 are not"
    groups.remove(groups.sent["b"])  # failed
    assert sent(groups) == ["d"]
    groups.clear()
    assert groups._sent_tokens == groups._sent_samples == 0


@pytest.mark.parametrize("indices", [None, (1, 2)])
def test_what_is_in_flight_is_the_prompt_and_the_most_of_each_child_that_is_missing(indices: Any) -> None:
    group = group_of("g", [5, 6], Sampling(n=3, max_tokens=10), indices)
    one = sendable(group, serial=1, require_version=0, limits=Limits())
    left = dict.fromkeys(group.wanted, 10)
    for index in [None, *group.wanted]:
        if index is not None:
            one.add_sample(sample("g", index))
            one.add_sample(sample("g", index))  # a repeated one changes nothing
            del left[index]
        assert one.in_flight == 2 + sum(left.values())


def test_of_samples_that_come_together_all_are_handed_out_or_none() -> None:
    one, told = handle("g", n=3), list[int]()
    one.listen(lambda handle, sample: told.append(sample.index if sample is not None else -1))
    with pytest.raises(ValueError, match="sample 3 of a group of 3"):
        one.add_samples([sample("g", 0), sample("g", 3)])
    assert not told and not one.finished
    one.add_samples([sample("g", 2), sample("g", 0), sample("g", 2)])  # a repeated one changes nothing
    assert told == [2, 0] and not one.done
    one.add_samples([sample("g", 0), sample("g", 1)])
    assert told == [2, 0, 1] and one.done


def test_a_group_whose_samples_do_not_fit_each_other_gives_its_budget_back() -> None:
    """Too few children ended by themselves: nothing of the last message is taken."""
    groups = OpenGroups(WeightHistory(), budget=40)
    groups.bounds = Bounds(1, frozenset({0}))
    for name, finish_after in (("a", 2), ("b", None)):
        group = group_of(name, [5, 6], Sampling(n=3, max_tokens=10, finish_after=finish_after))
        assert groups.add(sendable(group, serial=1, require_version=0, limits=Limits()))
    assert sent(groups) == ["a"]
    one, cut = groups.sent["a"], {"finish_reason": "cut"}
    groups.add_samples([sample("a", 0)])
    before = one.in_flight
    with pytest.raises(ValueError, match="2 children were cut"):
        one.add_samples([msgspec.structs.replace(sample("a", index), **cut) for index in (1, 2)])
    assert one.in_flight == before == 22 and one.arrived == 1
    groups.add_samples([msgspec.structs.replace(sample("a", index), **cut) for index in (1, 2)])
    assert isinstance(one.error, NotBelieved) and groups._sent_tokens == 0
    assert sent(groups) == ["b"]


def test_samples_that_are_complete_are_not_copied() -> None:
    one = handle("g")
    whole = sample("g", 0)
    one.add_sample(whole)
    assert one.finished[0] is whole
    one.configuration = "0f"
    one.add_sample(sample("g", 1))
    assert one.finished[1].configuration == "0f"


def test_what_the_service_will_refuse_costs_the_client_nothing() -> None:
    """The children are not counted one by one."""
    groups = OpenGroups(WeightHistory())
    group = group_of("g", [5, 6], Sampling(n=10**12, max_tokens=10))
    groups.add(sendable(group, serial=1, require_version=0, limits=Limits()))
    assert sent(groups) == ["g"]


def test_without_a_budget_all_are_sent() -> None:
    groups = OpenGroups(WeightHistory())
    for name in "abcd":
        groups.add(handle(name))
    assert sent(groups) == ["a", "b", "c", "d"]


def test_of_those_that_wait_a_higher_priority_goes_first() -> None:
    groups = OpenGroups(WeightHistory(), budget=22)
    for name, priority in (("a", 0), ("b", -1), ("c", 2), ("d", 2)):
        groups.add(handle(name, priority=priority))
    order = []
    while some := sent(groups):
        order += some
        groups.remove(groups.sent[some[0]])
    assert order == ["c", "d", "a", "b"]


def test_a_group_that_alone_is_over_the_budget_is_refused() -> None:
    check_budget(handle("g"), 22)
    check_budget(handle("g", n=1000), None)
    with pytest.raises(LimitExceeded, match="2 x max_tokens 10 are over the client's budget of 21"):
        check_budget(handle("g"), 21)


# acks


def test_acks_wait_for_each_other_but_not_for_long() -> None:
    acks = AckQueue()
    assert not acks and not acks.due(100.0)
    acks.samples.append(("a", 0))
    assert acks and acks.due(100.0), "the first one goes at once"
    assert [ack.samples for ack in acks.take(Limits(), 100.0)] == [[("a", 0)]]
    acks.samples += [("a", 1), ("b", 0)]
    assert acks and not acks.due(100.0 + 0.9 * TIMING.ack_s) and acks.due(100.0 + 1.1 * TIMING.ack_s)
    acks.progress = 3
    assert acks.due(100.0), "the service waits for that"
    assert [(ack.samples, ack.progress) for ack in acks.take(Limits(), 100.0)] == [([("a", 1), ("b", 0)], 0), ([], 3)]
    assert not acks


# scoring


def test_what_would_end_a_group_early_ends_no_score() -> None:
    drawn = Sampling(n=8, max_tokens=64, min_len_to_cut=2, finish_after=3, deadline_s=0.01, temperature=0.7, seed=5)
    group = scored_group("g", [1, 2], [[3, 4, 5], [6]], drawn)
    assert group.sampling == Sampling(n=2, max_tokens=3, temperature=0.7, seed=5)
