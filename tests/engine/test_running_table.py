"""RunningTable by example: a place for each sequence that runs, its blocks and its sampling in arrays."""

from __future__ import annotations

import numpy as np
import pytest

from rollout.engine.kv.block import Block
from rollout.engine.scheduling.queue import RunningTable
from rollout.engine.scheduling.sequence import GroupState, Sequence, Submission
from rollout.engine.values import Group, Sampling
from tests.support.invariants import check_table


def sequence(number: int, blocks: list[int], client: str = "", eos: tuple[int, ...] = (0,), **sampling: float) -> Sequence:
    group = Group(f"g{number}", np.array([1, 2], np.int32), Sampling(**sampling))  # type: ignore[arg-type]
    made = Sequence(GroupState(Submission(group, client, number, 17, 0.0), frozenset(eos)), 0)
    made.blocks = [Block(slot, 0) for slot in blocks]
    return made


def test_a_sequence_that_starts_has_its_blocks_and_sampling_in_a_row() -> None:
    table = RunningTable(2, 4)
    table.enter(seq := sequence(0, [7, 3], temperature=0.5))
    assert table.table[seq.place].tolist() == [7, 3, 0, 0]
    record = table.sampling[seq.place]
    assert (record["seed"], record["prompt"], record["temperature"]) == (17, 2, 0.5)


def test_blocks_appended_to_the_sequence_show_in_the_table() -> None:
    table = RunningTable(2, 4)
    table.enter(seq := sequence(0, [7]))
    seq.add_block(Block(9, 0))
    seq.put_block(0, Block(5, 0))
    assert table.table[seq.place].tolist() == [5, 9, 0, 0]


def test_a_sequence_that_stops_leaves_an_empty_row_for_the_next() -> None:
    table = RunningTable(1, 4)
    table.enter(first := sequence(0, [7, 3]))
    table.leave(first)
    assert first.place is None and not first.running
    table.enter(second := sequence(1, [5]))
    assert table.table[second.place].tolist() == [5, 0, 0, 0]


def test_running_sequences_are_in_order_of_age_and_counted_by_client() -> None:
    table = RunningTable(3, 4)
    young, old, other = sequence(2, [], "a"), sequence(0, [], "a"), sequence(1, [], "b")
    for seq in (young, old, other):
        table.enter(seq)
    assert table.sequences == [old, other, young] and table.of_client == {"a": 2, "b": 1}
    table.leave(young)
    assert table.of_client == {"a": 1, "b": 1}


def test_min_tokens_counts_only_where_a_token_can_end_the_child() -> None:
    table = RunningTable(2, 4)
    table.enter(ends := sequence(0, [], min_tokens=3))
    table.enter(endless := sequence(1, [], eos=(), min_tokens=3))
    assert table.sampling["min_tokens"][[ends.place, endless.place]].tolist() == [3, 0]


def test_check_finds_a_block_that_the_table_does_not_name() -> None:
    """The negative control."""
    table = RunningTable(2, 4)
    table.enter(seq := sequence(0, [7]))
    check_table(table)
    seq.blocks.append(Block(9, 0))
    with pytest.raises(AssertionError, match="other blocks"):
        check_table(table)
