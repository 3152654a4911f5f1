"""Which of a client's sequences goes first where slots or KV are scarce, and is preempted last (docs/decisions/pressure.md).

    first_come         the oldest group; in it, the child that has come least far
    least_far          the child that has come least far, of any group
    longest_expected   the group whose children are expected to get longest, as those that have ended tell; then as first_come
    longest_last       the child with most tokens left, of any group; but the longest one of each group last of all, in time

`Sampling.priority` goes before any of them, and samples do not depend on them. Ideas: least_far is least attained service
(Kleinrock 1976), so that nobody starts late and then runs alone; longest_expected is Seer's (arXiv 2511.14617). longest_last is
for children whose lengths are known (`Sampling.lengths`) and a trainer that goes on with all but one of each group; where they
are not known and `max_tokens` is everywhere the same, it is least_far.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

Rank = tuple[int, ...]
"""sorts whoever goes first to the front"""
Age = tuple[int, int]
"""sorts oldest first: numbers of the group that a conversation began with, and of the group itself"""


class Candidate(NamedTuple):
    """What is known of a child."""

    age: Age
    """of its group"""
    drawn: int
    """tokens"""
    number: int
    """index of the child"""
    expected: int
    """tokens that children of its group are expected to get, by those that have ended"""
    left: int
    """tokens that it may still draw"""


Order = Callable[[Candidate], Rank]


def first_come(child: Candidate) -> Rank:
    return *child.age, child.drawn, child.number


def least_far(child: Candidate) -> Rank:
    return child.drawn, *child.age, child.number


def longest_expected(child: Candidate) -> Rank:
    return -child.expected, *child.age, child.drawn, child.number


def longest_last(child: Candidate) -> Rank:
    return -child.left, *child.age, child.number


WORTH = 1.25
"""places that a child which goes last would have to take, times its tokens, for each token of work that is left: with 1 all end
as soon as with the longest first, with more what is waited for ends sooner, and all a little later"""


def is_due(left: int, longest: int, work: int, places: int) -> bool:
    """True if a child that goes last has to start now, or all would end much later for it: it has as many tokens `left` to draw
    as the `longest` of all others, and as there would be steps, were all `work`, in tokens, done on so many places. That is the
    latest start of the critical path method (Kelley and Walker 1959), asked at each step."""
    return left >= longest and left * places >= WORTH * work


ORDERS: dict[str, Order] = {
    "first_come": first_come,
    "least_far": least_far,
    "longest_expected": longest_expected,
    "longest_last": longest_last,
}
"""by `EngineConfig.order`"""
