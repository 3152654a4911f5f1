"""Which groups of a client a turn may name, and what is given up when one cannot be named any more."""

from __future__ import annotations

import tracemalloc

from hypothesis import given
from hypothesis import strategies as st

from rollout.service.names import Names, engine_name, number_of

GROUPS = st.lists(st.tuples(st.integers(0, 30).map(str), st.booleans()), max_size=200)
MOST_BYTES = 180
"""that a group may take; its two strings would be 250"""


@given(GROUPS, st.integers(1, 8))
def test_the_newest_groups_can_be_named_and_twice_as_many_at_most(groups: list[tuple[str, bool]], least: int) -> None:
    names, owners = Names(7), dict[str, str]()
    for number, (group_id, keeps) in enumerate(groups):
        names.add(group_id, engine_name(7, number), keeps, least)
        owners.pop(group_id, None)
        owners[group_id] = f"7.{number}"
        for newest in list(owners)[-least:]:
            assert names.turn((newest, 3)) == (owners[newest], 3)
        for older in owners:
            assert names.turn((older, 0)) in ((owners[older], 0), None)
        assert len(names) <= 2 * least
    assert names.turn(None) is None
    assert names.turn(("another client's", 0)) is None


@given(GROUPS, st.integers(1, 8))
def test_what_cannot_be_named_any_more_is_given_up_once(groups: list[tuple[str, bool]], least: int) -> None:
    names, kept, gone = Names(1), list[str](), list[str]()
    for number, (group_id, keeps) in enumerate(groups):
        kept += [engine_name(1, number)] if keeps else []
        gone += names.add(group_id, engine_name(1, number), keeps, least)
        assert sorted(gone + names.keeping()) == sorted(kept)  # nothing is lost, nothing given up that can be named
        assert names.keeping(group_id) == ([engine_name(1, number)] if keeps else [])


def test_a_group_takes_few_bytes_however_long_its_id_is() -> None:
    names, count = Names(1), 40_000
    tracemalloc.start()
    try:
        for number in range(count):
            names.add(f"{number:0200d}", engine_name(1, number), True, 65_536)
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held / count < MOST_BYTES
    assert number_of(names.keeping()[-1]) == count - 1
