"""The waiting queue by example: fair over clients, then those that have started, then the oldest."""

from __future__ import annotations

from collections import Counter

import numpy as np

from rollout.engine.scheduling.queue import WaitingQueue
from rollout.engine.scheduling.sequence import GroupState, Sequence, Submission
from rollout.engine.values import Group, Sampling


def sequence(number: int, client: str = "", started: bool = False, output: int = 0, index: int = 0) -> Sequence:
    group = Group(f"g{number}", np.array([1], np.int32), Sampling())
    state = GroupState(Submission(group, client, number, 0, 0.0), frozenset())
    made = Sequence(state, index)
    made.started = started
    made.output = [1] * output
    return made


def order(queue: WaitingQueue, running: Counter[str] | None = None) -> list[str]:
    """Group ids in the order in which they are served, while nobody stops running."""
    running, ids = Counter(running or {}), []
    while (seq := queue.next(running)) is not None:
        queue.remove(seq, served=True)
        running[seq.state.client] += 1
        ids.append(seq.state.group.id)
    return ids


def queue_of(*sequences: Sequence) -> WaitingQueue:
    queue = WaitingQueue()
    for each in sequences:
        queue.put(each)
    return queue


def test_the_child_that_has_come_least_far_goes_first_whatever_its_group() -> None:
    children = [(1, 9), (2, 3), (3, 0), (0, 3)]
    waiting = queue_of(*(sequence(number, started=True, output=drawn) for number, drawn in children))
    assert order(waiting) == ["g3", "g0", "g2", "g1"]
    waiting = queue_of(*(sequence(number, started=True) for number, _ in children))
    assert order(waiting) == ["g0", "g1", "g2", "g3"], "the negative control: of equal ones the oldest group"


def test_the_oldest_group_goes_first() -> None:
    assert order(queue_of(sequence(2), sequence(1))) == ["g1", "g2"]


def test_who_has_started_goes_before_new_prompts() -> None:
    assert order(queue_of(sequence(1), sequence(2, started=True))) == ["g2", "g1"]


def test_of_a_group_the_child_that_is_least_far_goes_first() -> None:
    far, near = sequence(1, started=True, output=9), sequence(1, started=True, output=2, index=1)
    assert queue_of(far, near).next(Counter()) is near


def test_clients_take_turns() -> None:
    many = [sequence(i, "many") for i in range(1, 4)]
    assert order(queue_of(*many, sequence(4, "few"))) == ["g1", "g4", "g2", "g3"]


def test_the_client_that_runs_least_goes_first() -> None:
    assert order(queue_of(sequence(1, "busy"), sequence(2, "idle")), Counter(busy=2)) == ["g2", "g1"]


def test_draining_looks_only_at_those_that_have_started() -> None:
    queue = queue_of(sequence(1))
    assert queue.next(Counter(), started=True) is None
    queue.put(running := sequence(2, started=True))
    assert queue.next(Counter(), started=True) is running


def test_a_sequence_is_found_again_although_its_rank_has_changed() -> None:
    """A child of a fork waits before its first token is noted."""
    queue = queue_of(child := sequence(1, started=True), sequence(2, started=True))
    child.output.append(7)
    queue.remove(child)
    assert len(queue) == 1 and child not in list(queue)
