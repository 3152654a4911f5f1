"""Invariants of a scheduler and of its block store, which hold between two steps."""

from __future__ import annotations

from collections import Counter

import numpy as np

from rollout.engine.kv.block import Block
from rollout.engine.kv.placement import BlockPlacement
from rollout.engine.kv.store import BlockStore
from rollout.engine.scheduling.plan import SAMPLING
from rollout.engine.scheduling.queue import RunningTable, sampling_of, slots_of
from rollout.engine.scheduling.scheduler import Scheduler
from rollout.engine.scheduling.state import SchedulerState


def check(scheduler: Scheduler) -> None:
    """Assert that every sequence runs or waits, that every block is accounted for, and that what is pending is in flight."""
    owners: Counter[Block] = Counter()
    users: Counter[Block] = Counter()
    state = scheduler.state
    running, waiting = state.running, set(state.waiting)
    for group in state.groups.values():
        for seq in group.sequences.values():
            owners.update(seq.blocks)
            if seq.running:
                users.update(seq.blocks)
            assert (seq in waiting) != seq.running, "a sequence is lost, or waits and runs"
            assert seq.running or not seq.pending, "a sequence waits whose last token is not known yet"
            assert seq.length == seq.num_prompt + len(seq.output) + seq.pending
            assert (seq.pending_draw is not None) == bool(seq.pending)
            assert seq.last_token == [*group.group.prompt[-1:].tolist(), *seq.output[-1:]][-1]
            assert seq.cached <= seq.length and len(seq.blocks) == -(-seq.cached // state.config.block_tokens)
    for seq in state.pinned:
        owners.update(seq.blocks)
        assert seq.ended and not seq.running and len(seq.blocks) == -(-seq.cached // state.config.block_tokens)
    assert state.pinned.blocks == Counter(block for seq in state.pinned for block in (*seq.blocks, *seq.window))
    assert len(running) + len(waiting) == sum(len(group.sequences) for group in state.groups.values())
    check_table(state.table)
    check_store(state.store, owners, users)
    if state.states is not None:
        check_states(state)
    if state.windows is not None:
        check_windows(state)


def check_windows(state: SchedulerState) -> None:
    """Assert that a sequence holds the blocks that its next token attends to, and that every block is accounted for."""
    owners: Counter[Block] = Counter()
    users: Counter[Block] = Counter()
    assert state.windows is not None and state.table.windows is not None
    wanted = np.zeros_like(state.table.windows)
    for seq in [*state.running, *state.waiting, *state.pinned]:
        owners.update(seq.window)
        users.update(seq.window if seq.running else ())
        assert seq.window_first + len(seq.window) == len(seq.blocks) and seq.window_first <= state.windows.first(seq.cached)
        if seq.running:
            wanted[seq.place, seq.window_first : len(seq.blocks)] = [block.device for block in seq.window]
    assert np.array_equal(state.table.windows, wanted), "a table names other blocks than a window has"
    check_store(state.windows.store, owners, users)


def check_states(state: SchedulerState) -> None:
    """Assert that a running sequence has a slot of its own to write, that a waiting one has the state of its cached tokens or
    none, and that every slot is accounted for."""
    owners: Counter[Block] = Counter()
    users: Counter[Block] = Counter()
    assert state.states is not None
    for seq in [*state.running, *state.waiting, *state.pinned]:
        held = [block for block in (seq.state_in, seq.state_out) if block is not None]
        owners.update(held)
        users.update(held if seq.running else ())
        assert (seq.state_out is not None) == seq.running, "a sequence runs without a slot, or waits with one"
        if seq.running:
            assert seq.state_out.owners == 1 and not state.states.store.index.holds(seq.state_out), "it writes a shared state"
        else:
            assert (seq.state_in is not None) == (seq.cached > 0), "KV without a state, or a state without KV"
    check_store(state.states.store, owners, users)


def check_table(table: RunningTable) -> None:
    """Assert that the arrays of the running table agree with its sequences."""
    places = [seq.place for seq in table.sequences if seq.place is not None]
    assert sorted([*table._free, *places]) == list(range(len(table.table))), "places are lost"
    assert sorted(table.sequences, key=lambda seq: seq.age) == table.sequences
    assert table.of_client == Counter(seq.state.client for seq in table.sequences)
    wanted = np.zeros_like(table.table)
    for place, seq in zip(places, table.sequences, strict=True):
        wanted[place, : len(seq.blocks)] = slots_of(seq)
    assert np.array_equal(table.table, wanted), "a table names other blocks than its sequence has, or goes on behind them"
    sampling = np.array([sampling_of(seq) for seq in table.sequences], SAMPLING)
    assert table.sampling[places].tobytes() == sampling.tobytes()


def check_store(store: BlockStore, owners: dict[Block, int], users: dict[Block, int]) -> None:
    """Assert all invariants. owners, users: number of sequences that hold and that use each block."""
    living = check_placement(store.placement)
    for block in living | owners.keys():
        assert block.owners == owners.get(block, 0), "wrong number of owners"
        assert block.users == users.get(block, 0), "wrong number of users"
        assert block.users == 0 or block.device is not None, "a block in use is not on the device"
        cached = block.owners == 0
        assert (block in store.cached) == (cached and block.device is not None)
        assert (block in store.cached_host) == (cached and block.device is None)
        assert (block in store.idle) == (not cached and block.users == 0 and block.device is not None)
        assert not cached or store.index.holds(block), "a block has no owners and is not in the index: leaked"
    assert not store.index.keys() - {block.key for block in living}, "the index has a freed block"


def check_placement(placement: BlockPlacement) -> set[Block]:
    """Assert that slots and blocks agree. Returns all blocks that have a slot."""
    living: set[Block] = set()
    for pool, where in ((placement.device, "device"), (placement.host, "host")):
        blocks = [block for block in pool.holder if block is not None]
        assert len(blocks) + pool.free == pool.size and len(set(blocks)) == len(blocks)
        for slot, block in enumerate(pool.holder):
            assert block is None or getattr(block, where) == slot
        living.update(blocks)
    return living
