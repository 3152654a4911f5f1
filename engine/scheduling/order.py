"""Which of a client's sequences goes first where slots or KV are scarce, and is preempted last (docs/decisions/pressure.md).

    first_come         the oldest group; in it, the child that has come least far
    least_far          the child that has come least far, of any group
    longest_expected   the group whose children are expected to get longest, as those that have ended tell; then as first_come

`Sampling.priority` goes before any of them, and samples do not depend on them. Ideas: least_far is least attained service
(Kleinrock 1976), so that nobody starts late and then runs alone; longest_expected is Seer's (arXiv 2511.14617).
"""

from __future__ import annotations

from collections.abc import Callable

Rank = tuple[int, ...]
"""sorts whoever goes first to the front"""
Age = tuple[int, int]
"""sorts oldest first: numbers of the group that a conversation began with, and of the group itself"""
Order = Callable[[Age, int, int, int], Rank]
"""of (age of the group, tokens drawn, index of the child, tokens that children of the group are expected to get)"""


def first_come(age: Age, drawn: int, index: int, expected: int) -> Rank:
    return *age, drawn, index


def least_far(age: Age, drawn: int, index: int, expected: int) -> Rank:
    return drawn, *age, index


def longest_expected(age: Age, drawn: int, index: int, expected: int) -> Rank:
    return -expected, *age, drawn, index


ORDERS: dict[str, Order] = {"first_come": first_come, "least_far": least_far, "longest_expected": longest_expected}
"""by `EngineConfig.order`"""
