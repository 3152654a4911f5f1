"""Preemption by example: who stops when blocks run out, who gives slots to another client, what leaves the device."""

from __future__ import annotations

import numpy as np

from rollout.engine.kv.block import PoolCounts
from rollout.engine.scheduling.build import open_state
from rollout.engine.scheduling.fairness import over_share
from rollout.engine.scheduling.preemption import evict_idle, offload, preempt
from rollout.engine.scheduling.sequence import GroupState, Sequence, Submission
from rollout.engine.values import Group, Sampling
from tests.support.configs import engine_config


class Setting:
    """Blocks of 4 tokens; running sequences, each with 4 tokens cached in a block of its own, made oldest first."""

    def __init__(self, device_blocks: int, sequences: int, host_blocks: int = 0, clients: str = "", **config: int) -> None:
        options = {"block_size": 4, "lookahead_blocks": 1, "min_run_tokens": 0, "max_num_seqs": 4, **config}
        self.state = open_state(engine_config(**options), PoolCounts(device_blocks, host_blocks, 300), lambda: 0.0)  # type: ignore[arg-type]
        self.store, self.running = self.state.store, self.state.running
        for number in range(sequences):
            self._run(number, clients[number : number + 1])

    def _run(self, number: int, client: str) -> None:
        group = Group(f"g{number}", np.array([1, 2, 3, 4], np.int32), Sampling())
        seq = Sequence(GroupState(Submission(group, client, number, 0, 0.0), frozenset()), 0)
        seq.blocks, seq.cached = [self.store.allocate(version=0)], 4
        self.state.table.enter(seq, self.state.config.advanced.min_run_tokens)

    def victims(self) -> list[Sequence]:
        return preempt(self.state).stops


def test_while_blocks_last_nobody_is_preempted() -> None:
    s = Setting(device_blocks=6, sequences=3)
    decision = preempt(s.state)
    assert not decision.stops and decision.room == 0


def test_the_youngest_group_is_preempted_first() -> None:
    """Three need a block each and one is free: preempting the youngest frees its block, and the other two can grow."""
    s = Setting(device_blocks=4, sequences=3)
    assert s.victims() == [s.running[2]]


def test_of_a_group_the_child_that_came_furthest_is_preempted_first() -> None:
    """A group is done with its last child, so the one that is behind goes on."""
    s = Setting(device_blocks=3, sequences=2)
    for seq, tokens in zip(s.running, (9, 2), strict=True):
        seq.state = s.running[0].state
        seq.output = [1] * tokens
    assert s.victims() == [s.running[0]]


def test_the_oldest_group_is_never_preempted() -> None:
    s = Setting(device_blocks=1, sequences=1)
    assert s.victims() == []


def test_who_has_just_come_back_is_spared_if_others_can_go() -> None:
    s = Setting(device_blocks=4, sequences=3, min_run_tokens=8)
    s.running[1].output = [1] * 8
    assert s.victims() == [s.running[1]]


def test_idle_blocks_leave_before_anybody_is_preempted() -> None:
    s = Setting(device_blocks=4, sequences=3, host_blocks=1)
    waiting = s.running[-1]
    s.state.stop(waiting)
    decision = preempt(s.state)
    assert not decision.stops and evict_idle(s.state, decision.room)
    assert waiting.blocks[0].device is None and waiting.blocks[0].host == 0, "offloaded"


def test_a_client_with_more_than_its_share_gives_a_place_up() -> None:
    s = Setting(device_blocks=8, sequences=4, clients="aaab", max_num_seqs=4)
    chosen = over_share(s.state, "b", {"b": 1})
    assert chosen == [s.running[2]], "the last in rank of client a"


def test_a_client_that_has_its_share_gets_no_more() -> None:
    s = Setting(device_blocks=8, sequences=4, clients="aabb", max_num_seqs=4)
    assert over_share(s.state, "b", {"b": 5}) == []


def test_a_stopped_sequence_is_offloaded() -> None:
    s = Setting(device_blocks=2, sequences=1, host_blocks=1)
    (seq,) = s.running
    s.state.stop(seq)
    assert offload(s.state, seq)
    assert seq.blocks[0].host == 0 and s.store.device.free == 2 and seq.offloads == 1


def test_blocks_that_others_use_stay_on_the_device() -> None:
    s = Setting(device_blocks=2, sequences=1, host_blocks=1)
    (seq,) = s.running
    s.store.share(seq.blocks)
    s.store.activate(seq.blocks[0], full=True)
    s.state.stop(seq)
    assert offload(s.state, seq) and seq.blocks[0].device is not None


def test_without_room_in_host_memory_nothing_is_offloaded() -> None:
    s = Setting(device_blocks=2, sequences=1, host_blocks=0)
    (seq,) = s.running
    s.state.stop(seq)
    assert not offload(s.state, seq) and seq.blocks[0].device is not None
