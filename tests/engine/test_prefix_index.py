"""The prefix index by example: full blocks found by their tokens, what came before them, and the weights that computed them."""

from __future__ import annotations

import numpy as np

from rollout.engine.kv.block import Block, Versions
from rollout.engine.kv.prefix import PrefixIndex, block_key, content_key


def ids(*tokens: int) -> np.ndarray:
    return np.array(tokens, np.int32)


def add(index: PrefixIndex, parent: Block | None, tokens: np.ndarray, version: int = 0, later: Versions = ()) -> Block:
    block = Block(0, version)
    block.later = later
    block.content = content_key(parent.key if parent else None, tokens)
    block.key = block_key(block.content, block.versions)
    index.add(block)
    return block


def test_a_block_is_found_by_its_tokens() -> None:
    index = PrefixIndex()
    block = add(index, None, ids(1, 2))
    assert index.find(None, ids(1, 2), oldest=0) is block
    assert index.find(None, ids(2, 1), oldest=0) is None


def test_equal_tokens_behind_another_prefix_are_another_block() -> None:
    index = PrefixIndex()
    first, other = add(index, None, ids(1, 2)), add(index, None, ids(3, 4))
    after = add(index, first, ids(5, 6))
    assert index.find(first.key, ids(5, 6), oldest=0) is after
    assert index.find(other.key, ids(5, 6), oldest=0) is None


def test_kv_of_other_weights_is_found_only_as_far_back_as_asked() -> None:
    index = PrefixIndex()
    old = add(index, None, ids(1, 2), version=3)
    assert index.find(None, ids(1, 2), oldest=4) is None
    assert index.find(None, ids(1, 2), oldest=3) is old
    new = add(index, None, ids(1, 2), version=4)
    assert index.find(None, ids(1, 2), oldest=3) is new, "the newest there is"


def test_versions_that_met_in_a_block_are_part_of_its_key() -> None:
    index = PrefixIndex()
    blocks = [add(index, None, ids(1, 2, 3), 3, later) for later in ((), ((1, 4),), ((2, 4),), ((1, 4), (2, 5)), ((1, 5),))]
    assert len(index) == 5 and len({block.key for block in blocks}) == 5
    assert index.find(None, ids(1, 2, 3), oldest=4) is None, "its first token is of version 3"
    assert index.find(None, ids(1, 2, 3), oldest=3) is blocks[4], "of equally old ones that which went on with the newest"
    for block in blocks:
        index.remove(block)
    assert index.find(None, ids(1, 2, 3), oldest=0) is None


def test_of_two_equal_blocks_the_first_stays() -> None:
    index = PrefixIndex()
    first, second = add(index, None, ids(1, 2)), add(index, None, ids(1, 2))
    assert index.holds(first) and not index.holds(second) and len(index) == 1
    index.remove(second)
    assert index.holds(first), "removing the one that is not there changes nothing"


def test_a_removed_block_is_not_found() -> None:
    index = PrefixIndex()
    block = add(index, None, ids(1, 2))
    index.remove(block)
    assert index.find(None, ids(1, 2), oldest=0) is None and not index.keys()
