"""Shared prefixes by example: rows of one group that stand on the same full blocks of their prompt. Blocks hold 4 tokens."""

from __future__ import annotations

import numpy as np

from rollout.engine.kv.block import Block
from rollout.engine.kv.prefix import block_key, content_key
from rollout.engine.scheduling.rows import computed_by_other, shared_prefixes
from rollout.engine.scheduling.sequence import GroupState, Row, Sequence, Submission
from rollout.engine.values import Group, Sampling


def family(prompt: int, children: int, own_blocks: bool = False) -> list[Row]:
    """Decode rows of the children of a group; they hold the same blocks, or equal ones of their own."""
    group = Group("g", np.arange(1, prompt + 1, dtype=np.int32), Sampling(n=children))
    state = GroupState(Submission(group, "", 0, 0, 0.0), frozenset())
    blocks = [Block(slot, 0) for slot in range(-(-prompt // 4))]
    rows: list[Row] = []
    for index in range(children):
        seq = Sequence(state, index)
        seq.blocks = [Block(100 * index + i, 0) for i in range(len(blocks))] if own_blocks else blocks.copy()
        seq.cached = prompt
        rows.append(Row(seq, prompt, 1, 1, ()))
    return rows


def test_children_share_the_full_blocks_of_their_prompt() -> None:
    assert shared_prefixes(family(prompt=10, children=3), 4) == [(0, 3, 2)], "rows 0 to 2 share 2 blocks"


def test_a_prompt_shorter_than_a_block_shares_nothing() -> None:
    assert shared_prefixes(family(prompt=3, children=3), 4) == []


def test_a_single_row_shares_nothing() -> None:
    assert shared_prefixes(family(prompt=10, children=1), 4) == []


def test_each_group_shares_its_own() -> None:
    rows = [*family(10, 2), *family(10, 1), *family(6, 3)]
    assert shared_prefixes(rows, 4) == [(0, 2, 2), (3, 3, 1)]


def test_equal_tokens_in_blocks_of_their_own_are_not_shared() -> None:
    """A child that was reset has prefilled its prompt again."""
    assert shared_prefixes(family(10, 3, own_blocks=True), 4) == []


def test_a_row_inside_the_prompt_shares_nothing() -> None:
    rows = family(10, 2)
    assert shared_prefixes([Row(rows[0].seq, 4, 4, 0, ()), rows[1]], 4) == []


def test_a_prefix_that_another_row_of_the_step_computes_is_waited_for() -> None:
    planned: set[bytes] = set()
    first, second = family(10, 1)[0].seq, family(10, 1)[0].seq
    for seq in (first, second):
        seq.blocks, seq.cached = [], 0
    assert not computed_by_other(first, 10, planned, 4, version=0)
    one = block_key(content_key(None, first.tokens(0, 4)), ((0, 0),))
    assert planned == {one, block_key(content_key(one, first.tokens(4, 4)), ((0, 0),))}
    assert computed_by_other(second, 10, planned, 4, version=0)
    assert not computed_by_other(second, 10, planned, 4, version=1), "by other weights it is another prefix"
