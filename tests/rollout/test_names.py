"""Which groups of a client a turn may name, and what is given up when one cannot be named any more."""

from __future__ import annotations

import tracemalloc

from hypothesis import given
from hypothesis import strategies as st

from rollout.service.group_names import GroupNames, engine_name, number_of

GROUPS = st.lists(st.tuples(st.integers(0, 30).map(str), st.booleans()), max_size=200)


@given(GROUPS, st.sampled_from([1, 2, 7, 8, 100]))
def test_the_newest_groups_can_be_named(groups: list[tuple[str, bool]], most: int) -> None:
    names, added = GroupNames(7), list[str]()
    for number, (group_id, keeps) in enumerate(groups):
        names.add(group_id, engine_name(7, number), keeps, most)
        added.append(group_id)
        newest = {added[i]: f"7.{i}" for i in range(max(0, number + 1 - most), number + 1)}
        for each in map(str, range(31)):
            assert names.turn((each, 3)) == ((newest[each], 3) if each in newest else None)
    assert names.turn(None) is None
    assert names.turn(("another client's", 0)) is None


@given(GROUPS, st.sampled_from([1, 2, 7, 8, 100]))
def test_what_cannot_be_named_any_more_is_given_up_once(groups: list[tuple[str, bool]], most: int) -> None:
    names, kept, gone = GroupNames(1), list[str](), list[str]()
    for number, (group_id, keeps) in enumerate(groups):
        kept += [engine_name(1, number)] if keeps else []
        gone += names.add(group_id, engine_name(1, number), keeps, most)
        assert sorted(gone + names.keeping()) == sorted(kept)  # nothing is lost, nothing given up twice
        assert names.keeping(group_id) == ([engine_name(1, number)] if keeps else [])
        assert all(number - number_of(each) < most for each in names.keeping())


def test_a_group_takes_few_bytes_however_long_its_id_is() -> None:
    names, count = GroupNames(1), 40_000
    tracemalloc.start()
    try:
        for number in range(count):
            names.add(f"{number:0200d}", engine_name(1, number), False, 65_536)
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held / count < 40  # two strings and their places would be 500
    assert names.turn((f"{count - 1:0200d}", 0)) == (engine_name(1, count - 1), 0)
