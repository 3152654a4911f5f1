"""Preemption when KV blocks run out: which sequences stop, and where their KV goes.

    offload      blocks of a preempted sequence that no running sequence uses go to host memory; a shared prefix is offloaded
                 with its last child
    recompute    host memory is full, or prefilling again is cheaper than copying: the KV is dropped
    mirror       full blocks are copied to host memory in advance, so that preempting copies only partial blocks
    ahead        if copies overlap with compute, room for the next step is made during this one

`rollout.engine.scheduling.admission` bounds what preemption by recompute costs. Batched offload and preemption by recompute are
ideas of transformers' continuous batching (changes #45184, #43150, #46587)."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from collections.abc import Sequence as Sequences
from itertools import islice

from rollout.engine.kv.block import Block
from rollout.engine.kv.store import BlockStore
from rollout.engine.scheduling.sequence import Sequence
from rollout.engine.scheduling.state import Decision, SchedulerState


# ── which sequences stop ──────────────────────────────────────────────────────────────────────────────────────────────────
def preempt(state: SchedulerState) -> Decision:
    """Decide which sequences are preempted so that the others have room for a step, or for two if copies run ahead. If evicting
    idle blocks makes enough room, none. Otherwise the last in rank, until the others can each grow by `lookahead_blocks`
    (together by at most a sixteenth of the pool). The first in rank is never preempted, so that one sequence always
    progresses."""
    running, stores = state.running, state.kv_stores
    if steps_ahead(state) * len(running) <= state.available:
        return Decision([])  # no sequence needs more than one block a step
    need = total = running_need(state)
    room = [store.available + len(store.idle) for store in stores]
    if need <= min(room) or len(running) <= 1:
        return Decision([], total)
    order = sorted(running, key=lambda seq: seq.rank)
    chosen: list[Sequence] = []
    ahead, most = state.config.advanced.lookahead_blocks, min(store.device.size for store in stores) // 16
    for rested in (True, False):
        for seq in reversed(order[1:]):
            stay = len(running) - len(chosen)
            enough = max(need, min(stay * ahead, most)) if rested else need
            if min(room) >= enough or stay == 1:
                return Decision(chosen, total, frees_kv=True)
            if seq not in chosen and (not rested or seq.ran >= seq.least_run):
                chosen.append(seq)
                need -= block_need(state, seq)
                for i, (_, blocks) in enumerate(state.tables.held(seq)):
                    room[i] += sum(block.users == 1 for block in blocks)
    return Decision(chosen, total, frees_kv=True)


def steps_ahead(state: SchedulerState) -> int:
    """Return for how many steps the running sequences must have room."""
    return 2 if state.copies_ahead else 1


def block_need(state: SchedulerState, seq: Sequence) -> int:
    """Return how many blocks a running sequence needs for its next token, or for two if copies run ahead."""
    last = min(seq.cached + steps_ahead(state), seq.limit - 1)
    return growth(state, seq, max(seq.cached + 1, last))


def growth(state: SchedulerState, seq: Sequence, cached: int) -> int:
    """Return how many new slots a sequence needs to have KV of so many tokens, where no block leaves a window."""
    size = state.config.block_tokens
    copied = seq.cached < cached and seq.cached % size and seq.blocks[-1].owners > 1
    return max(0, -(-cached // size) - len(seq.blocks)) + bool(copied)


def growths(state: SchedulerState, ends: Iterable[tuple[Sequence, int]]) -> list[int]:
    """Return how many new slots of each store of KV sequences need at a time until each has computed so many tokens."""
    needed = [(seq, growth(state, seq, cached)) for seq, cached in ends]
    slots, windows = [sum(each for _, each in needed)], state.windows
    if windows is not None:
        slots.append(sum(min(each, max(2, windows.most - len(seq.window))) for seq, each in needed))
    return slots


# ── where KV goes ─────────────────────────────────────────────────────────────────────────────────────────────────────────
def release_kv(state: SchedulerState, seq: Sequence) -> None:
    """Offload the KV of a stopped sequence, or drop it: preemption by recompute, which keeps leading blocks that others use."""
    if not offload(state, seq):
        state.counters.recompute_preemptions += state.tables.cut_unused(seq)


def running_need(state: SchedulerState) -> int:
    """Return how many blocks the running sequences need for a step, or for two if copies run ahead."""
    return sum(block_need(state, seq) for seq in state.running)


def evict_idle(state: SchedulerState, need: int, keep: Collection[Block] = ()) -> bool:
    """Evict idle blocks until `need` slots of each store of KV are available: see `evict_each`."""
    return evict_each(state, [need] * len(state.kv_stores), keep)


def evict_each(state: SchedulerState, need: Sequences[int], keep: Collection[Block]) -> bool:
    """Evict idle blocks, whose owners all wait, until so many slots of each store of KV are available. Returns whether they
    are. keep: blocks that stay. First blocks of pinned children are offloaded; then blocks with the fewest owners are evicted,
    since each owner would compute them again, of these the newest; pinned children are released last."""
    enough = [_evict(state, store, slots, keep) for store, slots in zip(state.kv_stores, need, strict=True)]
    return all(enough)


def _evict(state: SchedulerState, store: BlockStore, need: int, keep: Collection[Block]) -> bool:
    pinned = state.pinned
    if store.available >= need:
        return True
    pinned.offload(store, need, keep)
    while (short := need - store.available) > 0:
        candidates = eviction_candidates(state, store, short, keep)
        for block in candidates:
            if not store.offload(block):
                store.drop(block)
        if not candidates and not pinned.evict_one(store, keep):
            return False
    return True


def eviction_candidates(state: SchedulerState, store: BlockStore, short: int, keep: Collection[Block]) -> list[Block]:
    """Choose at most `short` idle blocks of a store that no pinned child owns."""
    idle, pinned = store.idle, state.pinned.blocks
    single = (block for block in reversed(idle) if block.owners == 1 and block not in keep and block not in pinned)
    chosen = [*islice(single, short)]  # nearly always enough, so that not all are sorted
    if chosen:
        return chosen
    others = (block for block in reversed(idle) if block not in keep and block not in pinned)
    return sorted(others, key=lambda block: block.owners)[:short]


def offload(state: SchedulerState, seq: Sequence) -> bool:
    """Move the idle blocks of a stopped sequence to host memory. Returns False and moves nothing if they do not fit there, if
    its recurrent state has no place, or if prefilling them again is cheaper."""
    idle = [
        (store, [block for block in blocks if block.users == 0 and block.device is not None])
        for store, blocks in state.tables.held(seq)
    ]
    if not can_offload(state, [sum(block.host is None for block in blocks) for _, blocks in idle], seq.cached):
        return False
    if state.states is not None and not state.states.has_place(seq.state_in):
        return False
    for store, blocks in idle:
        for block in blocks:
            if not store.offload(block):
                store.drop(block)
    seq.offloads += 1
    state.counters.offloads += 1
    return True


def can_offload(state: SchedulerState, blocks: Sequences[int], tokens: int) -> bool:
    """Return whether so many blocks of each store of KV, with KV of so many tokens, would be offloaded and not dropped: they
    fit into host memory, and copying pays."""
    fit = all(store.host.size and n <= store.host_available for store, n in zip(state.kv_stores, blocks, strict=True))
    return fit and state.rates.copy_pays(sum(blocks), tokens)


def free_ahead(state: SchedulerState) -> None:
    """If copies run ahead, evict cached blocks during this step, so that the next one has free slots that no copy reads: one
    for each sequence and those of a chunk, together at most a sixteenth of the pool."""
    if state.copies_ahead:
        soon = len(state.running) + state.config.most_tokens // state.config.block_tokens
        for store in state.kv_stores:
            store.free_ahead(min(soon, store.device.size // 16))


def mirror(state: SchedulerState) -> None:
    """If the pool will run out soon, copy full blocks of the sequences that would be preempted first to host memory. Blocks of
    windows are not copied ahead, since most leave their window before."""
    config, store, running = state.config, state.store, state.running
    if not config.advanced.mirror_ahead or store.available > 2 * config.advanced.lookahead_blocks * len(running):
        return
    left = config.advanced.mirror_blocks_per_step
    for seq in sorted(running, key=lambda seq: seq.rank, reverse=True):
        while left and seq.mirrored < seq.cached // config.block_tokens:
            block = seq.blocks[seq.mirrored]
            if block.host is None:
                if store.host.free <= store.host.size // 4 or not store.mirror(block):
                    return
                left -= 1
            seq.mirrored += 1
        if not left:
            return
