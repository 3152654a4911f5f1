"""Admission: which waiting sequence is next, and when there is room to start it.

The cost of preemption by recompute is bounded when a sequence starts: one whose KV could be dropped starts when there is room
for all tokens that it has to compute and for a part of those that it then samples, in addition to the growth of the running
sequences (docs/decisions/pressure.md).
"""

from __future__ import annotations

from itertools import chain, islice

from rollout.engine.scheduling.fairness import first_waiting
from rollout.engine.scheduling.preemption import can_offload, evict_each, growths
from rollout.engine.scheduling.sequence import Sequence
from rollout.engine.scheduling.state import SchedulerState

COMPUTED_PER_SAMPLED = 8
"""most tokens of KV that a preemption may drop, for each token sampled before it: bounds the work of recomputation"""


def next_sequence(state: SchedulerState) -> Sequence | None:
    """Return the sequence that is next to start."""
    seq = first_waiting(state)
    return seq if seq is None or state.running or state.others_wait else first_alone(state, seq)


def first_alone(state: SchedulerState, seq: Sequence) -> Sequence:
    """Choose the sequence to start if nothing runs and `seq` is next in the queue. If `seq` needs slots that hold idle KV of
    waiting sequences, and that KV cannot be offloaded, start the first in rank of those sequences instead, so that their KV is
    not computed again. So clients take turns by groups, not by children."""
    fresh = [sum(block.host is None for block in store.idle) for store in state.kv_stores]
    beside = available(state, room_for(state, seq, state.config.most_tokens))
    if not any(fresh) or beside or can_offload(state, fresh, fresh[0] * state.config.block_tokens):
        return seq
    idle = (other for other in state.waiting if other.started and other.blocks and other.blocks[0] in state.store.idle)
    return min(idle, key=lambda other: other.rank, default=seq)


def start(state: SchedulerState, seq: Sequence, budget: int) -> bool:
    """Start a waiting sequence if its blocks and its next chunk, of at most `budget` tokens, fit in addition to the running
    sequences. Returns whether it was started. If copies run ahead, its blocks must be on the device already, unless nothing
    else runs."""
    state.tables.cut_lost(seq)
    state.tables.find_in_use(seq, state.version)
    if state.copies_ahead and state.running and any(absent(state, seq)):
        return False
    if not fits(state, seq, state.running, budget) or not state.has_slot(seq):
        return False
    state.start(seq, least_run(state, seq))
    return True


def fits(state: SchedulerState, seq: Sequence, running: list[Sequence], budget: int) -> bool:
    """Return whether a waiting sequence can start while `running` continue: there are slots for it (`room_for`) and a reserve
    for those (`reserve_for`). If nothing runs, idle blocks of other waiting sequences are evicted for it."""
    room, missing = room_for(state, seq, budget), absent(state, seq)
    goes_on = seq.held and not any(missing) and not could_be_lost(state, seq)
    if available(state, room if goes_on else plus(room, reserve_for(state, seq, running))):
        return True
    if running:
        return False
    # nothing runs, so no block will be freed: room for one block at a time is enough
    evict_each(state, [max(slots, least + 1) for slots, least in zip(room, missing, strict=True)], {*seq.blocks, *seq.window})
    begins = seq.cached % state.config.block_tokens == 0
    return available(state, [least + (slots > least and begins) for slots, least in zip(room, missing, strict=True)])


def make_room(state: SchedulerState, budget: int) -> None:
    """Evict idle blocks for the next sequence; if some clients have or had priority over others, for all sequences that can
    start in a step of `budget` tokens. Call it at the beginning of a plan, because its restores and copies need slots."""
    seq = next_sequence(state)
    slots = min(state.config.most_seqs, budget) - len(state.running)
    if seq is None or not any(store.idle for store in state.kv_stores) or slots <= 0:
        return
    upcoming = [seq]
    if state.others_wait or seq.held:
        upcoming = [*islice(state.waiting.of(state.clients, started=not state.admitting), slots)]
    mine = {block for seq in upcoming for block in (*seq.blocks, *seq.window)}
    room = [store.available + sum(block not in mine for block in store.idle) for store in state.kv_stores]
    budget -= len(state.running)
    need, starting = [0] * len(room), 0
    for seq in upcoming:
        reserve = [1] * len(room) if starting else reserve_for(state, seq, state.running)
        more = plus(need, plus(room_for(state, seq, budget), reserve))
        if budget <= 0 or any(slots > most for slots, most in zip(more, room, strict=True)):
            break
        need = more
        budget -= seq.uncached
        starting += 1
    evict_each(state, need, mine)


def prefetch(state: SchedulerState, budget: int) -> None:
    """If copies run ahead, copy blocks of the sequences that the next step can start to the device during this step, in the
    order of the queue. budget: tokens of a step."""
    first, running = next_sequence(state), list(state.running)
    places = min(state.config.most_seqs, budget) - len(running)
    if not state.copies_ahead or first is None or not running:
        return
    others = (seq for seq in state.waiting.of(state.clients, started=not state.admitting) if seq is not first)
    for seq in islice(chain((first,), others), max(0, places)):
        state.tables.cut_lost(seq)
        if not fits(state, seq, running, budget - len(running)):
            return
        for store, blocks in state.tables.held(seq):
            for block in blocks:
                if block.device is None:
                    store.prefetch(block)
        running.append(seq)


# ── room ──────────────────────────────────────────────────────────────────────────────────────────────────────────────────
def least_run(state: SchedulerState, seq: Sequence) -> int:
    """Return how many tokens a waiting sequence samples before it may be preempted, if it starts now. It is preempted earlier
    only if nothing else frees memory."""
    least = state.config.advanced.min_run_tokens
    if not could_be_lost(state, seq):
        return least
    part = -(-seq.uncached // COMPUTED_PER_SAMPLED)
    return max(least, min(part, seq.limit - seq.length))


def could_be_lost(state: SchedulerState, seq: Sequence) -> bool:
    """Return whether a waiting sequence has more than a token to compute, and its KV would be dropped if it were preempted
    then."""
    blocks = -(-seq.length // state.config.block_tokens)
    each = [blocks] if state.windows is None else [blocks, min(blocks, state.windows.most)]
    return seq.uncached > 1 and not can_offload(state, each, seq.length)


def room_for(state: SchedulerState, seq: Sequence, budget: int) -> list[int]:
    """Return how many slots of each store of KV a waiting sequence needs for its blocks that are not on the device and for new
    blocks. The new blocks are those of its next token or chunk if preempting it would lose no KV; otherwise those of all tokens
    that it has to compute and of its least run."""
    lost = could_be_lost(state, seq)
    cached = cached_after(seq, least_run(state, seq)) if lost else seq.cached + min(seq.uncached, budget)
    return plus(absent(state, seq), growths(state, [(seq, cached)]))


def reserve_for(state: SchedulerState, seq: Sequence, running: list[Sequence]) -> list[int]:
    """Return how many slots of each store of KV to keep free for `running` when `seq` starts. If preempting `seq` would lose no
    KV: one for each of them, so that `seq` is not preempted at once (together at most a thirty-second of the pool), and the
    rest of the least run of those whose KV could be dropped. Otherwise the slots that they need until `seq` is prefilled and
    has made its least run."""
    least = state.config.advanced.min_run_tokens
    if not could_be_lost(state, seq):
        owed = (other for other in running if other.ran < other.least_run > least)
        reserved = growths(state, ((other, cached_after(other, other.least_run - other.ran)) for other in owed))
        return plus(reserved, [min(len(running), 1 + store.device.size // 32) for store in state.kv_stores])
    to_compute = seq.uncached + sum(other.uncached for other in running if other.uncached > 1)
    steps = least_run(state, seq) - (-to_compute // (state.config.most_tokens - len(running)))
    children = ((other, cached_after(other, steps)) for other in running for _ in range(other.num_next_samples))
    return growths(state, children)


def cached_after(seq: Sequence, sampled: int) -> int:
    """Return how many tokens have KV when a sequence has sampled so many more."""
    return min(seq.length + sampled, seq.limit) - 1


def absent(state: SchedulerState, seq: Sequence) -> list[int]:
    """Return how many blocks of a sequence are not on the device, of each store of KV."""
    return [sum(block.device is None for block in blocks) for _, blocks in state.tables.held(seq)]


def available(state: SchedulerState, slots: list[int]) -> bool:
    """Return whether so many slots of each store of KV are available."""
    return all(store.available >= each for store, each in zip(state.kv_stores, slots, strict=True))


def plus(one: list[int], other: list[int]) -> list[int]:
    """Add slots of each store."""
    return [a + b for a, b in zip(one, other, strict=True)]
