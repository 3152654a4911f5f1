"""What is always true between two steps. For tests and idle moments."""

from __future__ import annotations

from collections import Counter

from engine.kv.block import Block
from engine.kv.invariants import check as check_store
from engine.scheduling.scheduler import Scheduler


def check(scheduler: Scheduler) -> None:
    """Asserts that every sequence runs or waits, that every block is accounted for, and that what is pending is in flight."""
    owners: Counter[Block] = Counter()
    users: Counter[Block] = Counter()
    running, waiting = scheduler.running, set(scheduler.waiting)
    for state in scheduler.groups.values():
        for seq in state.sequences.values():
            owners.update(seq.blocks)
            if seq.running:
                users.update(seq.blocks)
            assert (seq in waiting) != seq.running, "a sequence is lost, or waits and runs"
            assert seq.running or not seq.pending, "a sequence waits whose last token is not known yet"
            assert seq.length == seq.num_prompt + len(seq.output) + seq.pending
            assert (seq.pending_draw is not None) == bool(seq.pending)
            assert seq.last_token == [*state.group.prompt[-1:].tolist(), *seq.output[-1:]][-1]
            assert seq.cached <= seq.length and len(seq.blocks) == -(-seq.cached // scheduler.block_size)
    for seq in scheduler.children.kept:
        owners.update(seq.blocks)
        assert seq.ended and not seq.running and len(seq.blocks) == -(-seq.cached // scheduler.block_size)
    assert scheduler.children.kept.blocks == Counter(block for seq in scheduler.children.kept for block in seq.blocks)
    assert len(running) + len(waiting) == sum(len(state.sequences) for state in scheduler.groups.values())
    scheduler.running_table.check()
    check_store(scheduler.store, owners, users)
