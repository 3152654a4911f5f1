"""BlockTables by example: how a sequence gets blocks of 4 tokens, fills them, finds them and gives them back."""

from __future__ import annotations

import numpy as np

from rollout.engine.kv.store import BlockStore
from rollout.engine.scheduling.block_tables import BlockTables
from rollout.engine.scheduling.counters import Counters
from rollout.engine.scheduling.queue import RunningTable
from rollout.engine.scheduling.sequence import GroupState, Sequence, Submission
from rollout.engine.values import Group, Sampling


class Setting:
    """Block tables over a small store, and sequences that run."""

    def __init__(self, device_blocks: int = 8) -> None:
        self.store = BlockStore(device_blocks, 0)
        self.running = RunningTable(4, device_blocks)
        self.counters = Counters()
        self.tables = BlockTables(4, self.store, self.counters, states=None)

    def sequence(self, *prompt: int, **sampling: int) -> Sequence:
        group = Group("g", np.array(prompt, np.int32), Sampling(**sampling))  # type: ignore[arg-type]
        seq = Sequence(GroupState(Submission(group, "", 0, 0, 0.0), frozenset()), 0)
        self.running.enter(seq)
        return seq

    def compute(self, seq: Sequence, tokens: int, version: int = 0) -> None:
        """The next `tokens` are computed."""
        start = seq.cached
        self.tables.extend(seq, start + tokens, version)
        seq.cached += tokens
        self.tables.fill(seq, start)


def test_blocks_are_taken_as_tokens_are_computed() -> None:
    s = Setting()
    seq = s.sequence(1, 2, 3, 4, 5)
    s.compute(seq, 4)
    assert len(seq.blocks) == 1
    s.compute(seq, 1)
    assert len(seq.blocks) == 2
    assert seq.table is not None and seq.table[:3].tolist() == [0, 1, 0], "the running table repeats their slots"


def test_a_block_is_indexed_once_it_is_full() -> None:
    s = Setting()
    seq = s.sequence(1, 2, 3, 4, 5)
    s.compute(seq, 3)
    assert len(s.store.index) == 0
    s.compute(seq, 2)
    assert s.store.index.holds(seq.blocks[0]) and not s.store.index.holds(seq.blocks[1])


def test_full_blocks_of_another_prompt_are_found() -> None:
    s = Setting()
    s.compute(first := s.sequence(1, 2, 3, 4, 5), 5)
    second = s.sequence(1, 2, 3, 4, 6)
    s.tables.find_cached(second, version=0)
    assert second.blocks == first.blocks[:1] and second.cached == 4
    assert s.counters.prefix_hit_tokens == 4


def test_the_last_token_of_a_prompt_is_always_computed() -> None:
    """Its logits are needed."""
    s = Setting()
    s.compute(s.sequence(1, 2, 3, 4), 4)
    again = s.sequence(1, 2, 3, 4)
    s.tables.find_cached(again, version=0)
    assert again.cached == 0


def test_a_shared_partial_block_is_copied_before_it_grows() -> None:
    s = Setting()
    s.compute(seq := s.sequence(1, 2), 2)
    shared = seq.blocks[0]
    s.store.share([shared])
    s.tables.extend(seq, 3, version=0)
    assert seq.blocks[0] is not shared and len(s.store.moves.copies) == 1


def test_a_block_in_which_versions_met_is_as_old_as_its_oldest_token() -> None:
    s = Setting()
    seq = s.sequence(*range(1, 10))
    for count, version in ((2, 3), (1, 4), (1, 5), (4, 5)):
        s.compute(seq, count, version)
    assert [block.versions for block in seq.blocks] == [((0, 3), (2, 4), (3, 5)), ((0, 5),)]
    for lag, found in ((0, 0), (1, 0), (2, 2)):
        reader = s.sequence(*range(1, 10), max_kv_lag=lag)
        s.tables.find_cached(reader, version=5)
        assert reader.blocks == seq.blocks[:found], "what follows it is found behind it only"


def test_a_step_that_is_void_leaves_no_version_behind() -> None:
    """What was planned and not computed is planned again, by other weights."""
    s = Setting()
    s.compute(seq := s.sequence(*range(1, 10)), 2, version=0)
    s.tables.extend(seq, 3, version=1)
    s.compute(seq, 1, version=2)
    assert seq.blocks[0].versions == ((0, 0), (2, 2))


def test_kv_of_older_weights_is_dropped_with_all_behind_it() -> None:
    s = Setting()
    seq = s.sequence(*range(1, 10))
    s.compute(seq, 4, version=1)
    s.compute(seq, 4, version=0)
    s.tables.drop_older(seq, oldest=1)
    assert seq.cached == 4 and len(seq.blocks) == 1


def test_truncate_gives_the_last_blocks_back() -> None:
    s = Setting()
    s.compute(seq := s.sequence(*range(1, 8)), 7)
    s.tables.truncate(seq, 1)
    assert seq.cached == 4 and s.store.device.free == 7
    assert seq.table is not None and seq.table[:2].tolist() == [seq.blocks[0].device, 0]


def test_what_only_a_failed_sequence_holds_is_not_found_again() -> None:
    s = Setting()
    s.compute(seq := s.sequence(1, 2, 3, 4, 5), 5)
    s.tables.distrust(seq)
    assert len(s.store.index) == 0
