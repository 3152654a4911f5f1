"""Random schedules over both pools and the index, and mutants of the store that they must catch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import msgspec
import numpy as np
import pytest

from rollout.engine.kv import prefix
from rollout.engine.kv.block import Block, BlockCopies, BlockPool, OutOfBlocks, SlotCounts
from rollout.engine.kv.store import BlockStore
from rollout.engine.scheduling import block_tables, conversation, output, rows, states
from rollout.engine.scheduling.block_tables import BlockTables, FoundPrefix
from rollout.engine.scheduling.conversation import ConversationIndex, FinishedTurn, PinnedKV, TurnId
from rollout.engine.scheduling.plan import Plan, SampledTokens
from rollout.engine.scheduling.queue import RunningTable
from rollout.engine.scheduling.scheduler import Scheduler
from rollout.engine.scheduling.sequence import GroupState, Row, Sequence
from rollout.engine.scheduling.state import SchedulerState
from rollout.engine.scheduling.states import StateSlots
from rollout.engine.scheduling.stopping import LogitRules, TokenCounts
from rollout.engine.scheduling.stops import Stops
from rollout.engine.scheduling.windows import FoundWindow, WindowBlocks
from rollout.engine.values import FinishReason, Group, PartialSample, Sample, Sampling
from tests.support.harness import Harness, conversations, random_schedule, tight_schedule
from tests.support.nightly import Draw


def over_seeds(schedule: Callable[[int], Any], first: int, count: int) -> None:
    """Run a schedule with so many seeds. The first that fails ends it."""
    for seed in range(first, first + count):
        named(schedule, seed)


def named(schedule: Callable[[int], Any], seed: int) -> None:
    """Run a schedule; an error names its seed."""
    try:
        schedule(seed)
    except Exception as error:
        name = getattr(schedule, "func", schedule).__name__
        raise AssertionError(f"{name}({seed}): {error!r}") from error


def test_random_schedules() -> None:
    """40 schedules of 50 operations: nothing lost, nothing leaked, nothing wrong, whatever fails in between."""
    over_seeds(random_schedule, 0, 40)


@pytest.mark.long
@pytest.mark.timeout(14_400)
@pytest.mark.parametrize("part", range(2))
@pytest.mark.parametrize(
    ("schedule", "count"),
    [
        pytest.param(random_schedule, 20_000, id="random"),
        pytest.param(tight_schedule, 2_500, id="tight"),
        pytest.param(conversations, 10_000, id="conversations"),
        pytest.param(partial(random_schedule, recurrent=True), 10_000, id="recurrent"),
        pytest.param(partial(conversations, recurrent=True), 10_000, id="recurrent conversations"),
        pytest.param(partial(random_schedule, windows=True), 10_000, id="windows"),
        pytest.param(partial(conversations, windows=True), 10_000, id="conversations with windows"),
        pytest.param(partial(tight_schedule, windows=True), 2_500, id="tight windows"),
        pytest.param(partial(random_schedule, recurrent=True, windows=True), 5_000, id="both"),
        pytest.param(partial(conversations, recurrent=True, windows=True), 5_000, id="conversations with both"),
    ],
)
def test_new_random_schedules(schedule: Callable[[int], Any], count: int, part: int, new_seeds: Draw) -> None:
    """170,000 in all, a sixth of an hour of one core for each 10,000."""
    for seed in new_seeds(count):
        named(schedule, seed)


def test_random_conversations() -> None:
    """20 schedules of turns: a turn reads KV of the one that it continues, and no other that is older than it may be."""
    over_seeds(conversations, 0, 20)


def test_random_schedules_of_recurrent_state() -> None:
    """20 schedules each: a row begins with the state of exactly the tokens before it, whatever was moved, lost or shared."""
    over_seeds(partial(random_schedule, recurrent=True), 0, 20)
    over_seeds(partial(conversations, recurrent=True), 0, 20)


def test_random_schedules_of_windows() -> None:
    """20 schedules each: a row finds the KV of its window, whatever was moved, lost, shared or found; nothing stays behind
    it."""
    over_seeds(partial(random_schedule, windows=True), 0, 20)
    over_seeds(partial(conversations, windows=True), 0, 20)


def test_random_schedules_of_windows_beside_recurrent_state() -> None:
    """20 schedules each: what one kind of layer cannot continue from, no kind does."""
    over_seeds(partial(random_schedule, recurrent=True, windows=True), 0, 20)
    over_seeds(partial(conversations, recurrent=True, windows=True), 0, 20)


def test_tight_pools_of_windows_finish() -> None:
    """8 pools in which a window and two blocks fit once or twice: no sequence waits for ever."""
    over_seeds(partial(tight_schedule, windows=True), 0, 8)


@pytest.mark.parametrize("length", [16, 17, 18])
def test_equal_prompts_continue_from_one_snapshot(length: int) -> None:
    """Whether they end with a block, a token behind one or elsewhere. The first two compute the prompt one after the other, the
    others begin behind its last junction together."""
    h = Harness(400, 0, slots=SlotCounts(40, 0), block_size=4, max_num_seqs=16, max_batch_tokens=256)
    for number in range(8):
        assert h.submit(f"g{number}", [*range(1, length + 1)], max_tokens=1, seed=number)
    steps = 0
    while h.scheduler.state.groups:
        h.step()
        steps += 1
    assert steps == 3 and h.scheduler.state.counters.prefix_hit_tokens == 6 * ((length - 1) // 4 * 4)


def test_the_snapshot_of_a_sequence_that_failed_is_not_continued(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second prompt leaves a snapshot behind, and then has no finite logits."""
    h = Harness(400, 0, slots=SlotCounts(40, 0), block_size=4, max_num_seqs=16, max_batch_tokens=256)
    compute, found = h.compute, []

    def not_finite(plan: Plan) -> SampledTokens:
        sampled = compute(plan)
        return sampled._replace(finite=np.zeros(len(sampled.tokens), bool))

    for number, each in enumerate((compute, not_finite, compute, compute)):
        monkeypatch.setattr(h, "compute", each)
        assert h.submit(f"g{number}", [*range(1, 19)], max_tokens=1, seed=number)
        while h.scheduler.state.groups:
            h.step()
            h.check()
        found.append(h.scheduler.state.counters.prefix_hit_tokens)
    assert h.got["g1", 0].finish_reason == "error" and found == [0, 0, 0, 16]


@pytest.mark.parametrize("host", [0, 50])
def test_kv_is_offloaded_only_where_its_state_has_a_place(host: int) -> None:
    """Four sequences have all the slots and outgrow the pool of KV. The first to be preempted is copied or prefilled again."""
    h = Harness(16, 200, slots=SlotCounts(4, host), block_size=4, max_num_seqs=4, max_batch_tokens=32, prefix_cache=False)
    for number in range(4):
        assert h.submit(f"g{number}", [number + 1] * 5, seed=2 * number, ignore_eos=True, max_tokens=40)
    counters = h.scheduler.state.counters
    while not (counters.offloads or counters.recompute_preemptions):
        h.step()
    assert (h.copied_blocks > 0) == (counters.offloads > 0) == bool(host)
    h.finish()


@pytest.mark.parametrize("host", [0, 50])
def test_kept_kv_is_offloaded_only_where_its_state_has_a_place(host: int) -> None:
    """The slots are those of a kept turn and of the sequence that runs."""
    h = Harness(16, 200, slots=SlotCounts(2, host), block_size=4, max_num_seqs=1, max_batch_tokens=32, prefix_cache=False)
    for number in range(2):
        assert h.submit(f"g{number}", [number + 1] * 5, seed=2 * number, ignore_eos=True, max_tokens=40, kv_ttl_s=1000.0)
        while f"g{number}" in h.scheduler.state.groups:
            h.step()
    assert (h.copied_blocks > 0) == bool(host)


def test_a_row_up_to_a_junction_leaves_no_snapshot() -> None:
    """Where a row ends is asked as often as one likes; a snapshot is left once, at the junction."""
    h = Harness(400, 0, slots=SlotCounts(40, 0), block_size=4, max_num_seqs=16, max_batch_tokens=256)
    assert h.submit("g", [*range(1, 19)], max_tokens=30)
    h.step()
    (seq,), slots = h.scheduler.state.running, h.scheduler.state.states
    assert slots is not None and seq.cached == 18
    seq.junction = 16
    assert rows.tokens_to_junction(seq, 5) == 5 and seq.junction == 16
    seq.junction = 20
    assert [rows.tokens_to_junction(seq, count) for count in (5, 1)] == [2, 1]
    slots.pass_junction(seq)
    assert seq.junction == 20 and not len(slots.store.index)
    h.step()
    h.step()
    assert seq.cached == 20
    slots.pass_junction(seq)
    assert not seq.junction and len(slots.store.index) == 1


def test_tight_pools_finish() -> None:
    """8 pools of 1.0 to 1.5 times the largest sequence: everything finishes, and no child is preempted without bound."""
    over_seeds(tight_schedule, 0, 8)


@pytest.mark.parametrize("fail", [False, True])
def test_mirrors_that_never_succeed_stop_nobody(fail: bool) -> None:
    """On CUDA, where full blocks are copied ahead of pressure."""
    h = Harness(16, 16, mirror_ahead=True, block_size=4, max_num_seqs=8, max_batch_tokens=32)
    h.mirrors_fail = fail
    for number in range(4):
        assert h.submit(f"g{number}", [number + 1] * 9, n=3, max_tokens=40, seed=number)
    h.finish()
    assert (h.scheduler.state.counters.failed_moves > 0) == fail and (h.copied_blocks > 0 or fail)


def test_a_schedule_that_fails_is_named() -> None:
    with pytest.raises(AssertionError, match=r"fails_at_seven\(7\): AssertionError\('seven'\)"):
        over_seeds(fails_at_seven, 0, 20)


def fails_at_seven(seed: int) -> None:
    if seed == 7:
        raise AssertionError("seven")


def patch_release(monkeypatch: pytest.MonkeyPatch) -> None:
    """skip a release of a device slot"""
    release, calls = BlockPool.release, [0]

    def skip(self: BlockPool, slot: int, read: bool = False) -> None:
        calls[0] += 1
        if calls[0] % 7:
            release(self, slot, read)
        else:
            self.holder[slot] = None

    monkeypatch.setattr(BlockPool, "release", skip)


def patch_share(monkeypatch: pytest.MonkeyPatch) -> None:
    """fork without counting"""
    monkeypatch.setattr(BlockStore, "share", lambda self, blocks: None)


def replace_key(monkeypatch: pytest.MonkeyPatch, name: str, key: Callable[..., bytes]) -> None:
    for module in (prefix, rows, block_tables):
        if hasattr(module, name):
            monkeypatch.setattr(module, name, key)


def patch_hash(monkeypatch: pytest.MonkeyPatch) -> None:
    """the key forgets the block before"""
    key = prefix.content_key
    replace_key(monkeypatch, "content_key", lambda parent, tokens: key(b"x" if parent else None, tokens))


def patch_version(monkeypatch: pytest.MonkeyPatch) -> None:
    """the key forgets the versions"""
    key = prefix.block_key
    replace_key(monkeypatch, "block_key", lambda content, versions: key(content, ()))


def patch_older_version(monkeypatch: pytest.MonkeyPatch) -> None:
    """the key of a block in which versions met forgets the older ones"""
    key = prefix.block_key
    replace_key(monkeypatch, "block_key", lambda content, versions: key(content, ((0, versions[-1][1]),)))


def patch_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """write into a shared partial block instead of a copy"""

    def extend(self: BlockTables, seq: Sequence, cached: int, version: int) -> None:
        while len(seq.blocks) < -(-cached // self.block_size):
            seq.add_block(self.store.allocate(version))

    monkeypatch.setattr(BlockTables, "extend", extend)


def patch_restore(monkeypatch: pytest.MonkeyPatch) -> None:
    """a restored block is not copied back"""
    activate = BlockStore.activate

    def forget(self: BlockStore, block: object, full: bool) -> None:
        activate(self, block, full)  # type: ignore[arg-type]
        self.moves.restores.clear()

    monkeypatch.setattr(BlockStore, "activate", forget)


def patch_stale_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """the copy of a partial block in host memory outlives a restore"""
    activate = BlockStore.activate
    monkeypatch.setattr(BlockStore, "activate", lambda self, block, full: activate(self, block, True))


def patch_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    """after a failed copy the destination is trusted"""
    failed = BlockStore.move_failed

    def trust(self: BlockStore) -> set[object]:
        failed(self)
        return set()

    monkeypatch.setattr(BlockStore, "move_failed", trust)


def patch_failed_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """after a failed copy the host's half is trusted"""
    failed = BlockStore.move_failed

    def trust(self: BlockStore) -> set[object]:
        self.placement.to_host.clear()
        return failed(self)  # type: ignore[return-value]

    monkeypatch.setattr(BlockStore, "move_failed", trust)


def patch_disown(monkeypatch: pytest.MonkeyPatch) -> None:
    """an owner too many leaves"""
    release = BlockStore.release
    calls = [0]

    def twice(self: BlockStore, block: object, used: bool) -> None:
        calls[0] += 1
        release(self, block, used)  # type: ignore[arg-type]
        if calls[0] % 11 == 0 and block.owners > block.users:  # type: ignore[attr-defined]
            release(self, block, False)  # type: ignore[arg-type]

    monkeypatch.setattr(BlockStore, "release", twice)


def patch_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """restores before offloads"""
    move = Harness.move

    def wrong(self: Harness, moves: BlockCopies, stop: int | None) -> None:
        move(self, BlockCopies(restores=moves.restores), stop)
        move(self, replace(moves, restores=[]), stop)

    monkeypatch.setattr(Harness, "move", wrong)


def patch_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """a preempted sequence's blocks leave without a copy when host memory is full, and it is not told"""
    monkeypatch.setattr(Block, "lost", property(lambda self: False))


def patch_enter(monkeypatch: pytest.MonkeyPatch) -> None:
    """two sequences in one place"""
    enter = RunningTable.enter

    def crowd(self: RunningTable, seq: Sequence, least_run: int) -> None:
        enter(self, seq, least_run)
        if len(self._free) > 1:
            assert seq.place is not None
            self._free.append(seq.place)

    monkeypatch.setattr(RunningTable, "enter", crowd)


def patch_recompute(monkeypatch: pytest.MonkeyPatch) -> None:
    """a group whose KV is computed again takes the old one back, as far as a new sample may"""
    monkeypatch.setattr(GroupState, "readable_from", lambda self, version: version - self.group.sampling.max_kv_lag)


def patch_new_lag(monkeypatch: pytest.MonkeyPatch) -> None:
    """a new sample finds KV older than its lag allows"""
    monkeypatch.setattr(GroupState, "readable_from", lambda self, version: self.oldest_kv)


def patch_resumed(monkeypatch: pytest.MonkeyPatch) -> None:
    """a child that goes on computes another token than the last one that it had"""
    take_over = Sequence._take_over

    def wrong(self: Sequence, partial: PartialSample | None) -> None:
        take_over(self, partial)
        if partial is not None:
            self.last_token = partial.token_ids[-1] + 1

    monkeypatch.setattr(Sequence, "_take_over", wrong)


def patch_fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """children draw by their place in the fork instead of their index"""
    init = GroupState.__init__

    def by_place(self: GroupState, *args: Any) -> None:
        init(self, *args)
        self.fresh = list(range(len(self.fresh)))

    monkeypatch.setattr(GroupState, "__init__", by_place)


def patch_uncut(monkeypatch: pytest.MonkeyPatch) -> None:
    """a group goes on although enough of its children have ended"""
    monkeypatch.setattr(GroupState, "first_k_pending", property(lambda self: self.group.sampling.finish_after is not None))


def patch_stale(monkeypatch: pytest.MonkeyPatch) -> None:
    """a child that waits for its group to fork goes on, however old"""
    end_stale = Scheduler._finish_stale

    def of_sequences(self: Scheduler, state: GroupState) -> list[Sample]:
        waiting, state.resumed = state.resumed, {}
        samples = end_stale(self, state)
        state.resumed = waiting
        return samples

    monkeypatch.setattr(Scheduler, "_finish_stale", of_sequences)


def patch_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """a complete child is cut however few tokens it has"""
    end = SchedulerState.finish

    def cut(self: SchedulerState, seq: Sequence, reason: FinishReason, error: str | None = None) -> Sample:
        done = reason in ("stop", "length") and seq.state.group.sampling.finish_after is not None
        return end(self, seq, "cut" if done and not seq.state.first_k_pending else reason, error)

    monkeypatch.setattr(SchedulerState, "finish", cut)


def patch_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    """a table goes on to name the blocks of a sequence that has left"""

    def clear(self: RunningTable, seq: Sequence) -> None:
        assert seq.place is not None
        self._free.append(seq.place)
        seq.place, seq.table = None, None

    monkeypatch.setattr(RunningTable, "_clear", clear)


def patch_top(monkeypatch: pytest.MonkeyPatch) -> None:
    """a child keeps the most probable tokens of another one's draw"""
    append_top = TokenCounts.append_top
    monkeypatch.setattr(TokenCounts, "append_top", lambda self, top, draw: append_top(self, top, draw // 2))


def patch_partial_top(monkeypatch: pytest.MonkeyPatch) -> None:
    """a child that goes on forgets the most probable tokens that it had"""
    of = TokenCounts.of
    monkeypatch.setattr(TokenCounts, "of", lambda sampling, rules, stops, partial: of(sampling, rules, stops, None))


def patch_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """a token is not counted"""
    append = TokenCounts.append
    monkeypatch.setattr(TokenCounts, "append", lambda self, token: append(self, token) if token % 7 else None)


def patch_pending(monkeypatch: pytest.MonkeyPatch) -> None:
    """a draw that depends on a token is launched before the token is known"""
    monkeypatch.setattr(rows, "counts_tokens", lambda seq: False)


def patch_adjusted(monkeypatch: pytest.MonkeyPatch) -> None:
    """where a group forks, one child alone has its logits changed"""
    adjustment = TokenCounts.adjustment
    monkeypatch.setattr(TokenCounts, "adjustment", lambda self, first, draws: adjustment(self, first, 1))


def patch_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """a turn may read what another conversation of its client may"""

    def find(self: ConversationIndex, group: Group, client: str) -> FinishedTurn | None:
        some = (msgspec.msgpack.decode(packed, type=FinishedTurn) for packed in self._packed if packed is not None)
        return next((turn for turn in some if turn.client == client), None) if group.after else None

    monkeypatch.setattr(ConversationIndex, "find", find)


def patch_any_client(monkeypatch: pytest.MonkeyPatch) -> None:
    """a turn of another client is found"""
    find = ConversationIndex.find

    def of_owner(self: ConversationIndex, group: Group, client: str) -> FinishedTurn | None:
        turn = self._newest(group.after) if group.after else None
        return None if turn is None else find(self, group, turn.client)

    monkeypatch.setattr(ConversationIndex, "find", of_owner)


def patch_own_recomputed(monkeypatch: pytest.MonkeyPatch) -> None:
    """a turn reads its old KV after a refresh that has KV computed again"""
    monkeypatch.setattr(ConversationIndex, "forget_kv", lambda self, version: None)


def patch_own_tail(monkeypatch: pytest.MonkeyPatch) -> None:
    """what a turn has computed itself is its own, however old"""
    monkeypatch.setattr(BlockTables, "_is_own", lambda self, seq, i, oldest: seq.state.own is not None)


def patch_hand_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """a turn takes kept KV over whose tokens are not its own"""
    monkeypatch.setattr(conversation.np, "array_equal", lambda one, other: True)


def patch_keep(monkeypatch: pytest.MonkeyPatch) -> None:
    """kept blocks are lent to a turn that writes them, and kept on"""
    hand_over = PinnedKV.hand_over

    def lend(self: PinnedKV, key: TurnId | None, to: Sequence) -> None:
        seq = self._children.get(key) if key else None
        blocks, cached = ([*seq.blocks], seq.cached) if seq else ([], 0)
        hand_over(self, key, to)
        if seq is not None and key is not None and to.cached:
            seq.blocks, seq.cached, self._children[key] = blocks, cached, seq
            self._of_group.setdefault(key[0], set()).add(key[1])
            self.blocks.update(blocks)

    monkeypatch.setattr(PinnedKV, "hand_over", lend)


def patch_tail(monkeypatch: pytest.MonkeyPatch) -> None:
    """a stop string is not found across three tokens"""
    find = Stops.find

    def forgetful(self: Stops, tail: bytes, token: int) -> tuple[bytes, tuple[int, int] | None]:
        tail, found = find(self, tail, token)
        return tail[-1:], found

    monkeypatch.setattr(Stops, "find", forgetful)


def patch_partial_tail(monkeypatch: pytest.MonkeyPatch) -> None:
    """what a child had is not looked at for the beginning of a stop string"""
    of = TokenCounts.of

    def blind(
        sampling: Sampling, rules: LogitRules | None, stops: Stops | None, partial: PartialSample | None
    ) -> TokenCounts | None:
        made = of(sampling, rules, stops, partial)
        if made is not None:
            made.tail = b""
        return made

    monkeypatch.setattr(TokenCounts, "of", blind)


def patch_late_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    """a text is cut a character late"""
    text_end = Stops.text_end
    monkeypatch.setattr(Stops, "text_end", lambda self, tokens, cut: text_end(self, tokens, cut - 1))


def patch_kv_untold(monkeypatch: pytest.MonkeyPatch) -> None:
    """a sample does not say that it attended to KV of other weights"""
    monkeypatch.setattr(Sequence, "note_kv", lambda self, spans, version: None)


def patch_kv_at_refresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """KV is looked at after a refresh only, not when a sequence starts again"""
    note = output._note_kv

    def later(state: SchedulerState, seq: Sequence) -> None:
        if seq.version != state.version:
            note(state, seq)

    monkeypatch.setattr(output, "_note_kv", later)


def patch_kv_of_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    """KV of a prompt counts as computed by the weights of the first token, whatever its age"""
    note = output._note_kv

    def young(state: SchedulerState, seq: Sequence) -> None:
        if seq.spans and seq.spans[0][1] != state.version:
            note(state, seq)

    monkeypatch.setattr(output, "_note_kv", young)


def patch_kv_prefix(monkeypatch: pytest.MonkeyPatch) -> None:
    """of KV, only the newest span is recorded"""
    note = Sequence.note_kv
    monkeypatch.setattr(Sequence, "note_kv", lambda self, spans, version: note(self, spans[-1:], version))


Mutant = Callable[[pytest.MonkeyPatch], None]
SEEN_LATE = {
    "patch_older_version",
    "patch_stale",
    "patch_advance_late",
    "patch_window_draft",
    "patch_any_client",
    "patch_kv_at_refresh",
    "patch_failed",
    "patch_advance_failed",
    "patch_window_cut",
}
"""after 40 seeds or more: nightly"""


def tiered(mutants: list[Mutant]) -> list[Any]:
    """Return parameters of mutants, named by what they do wrong."""
    late = [[pytest.mark.long] if each.__name__ in SEEN_LATE else [] for each in mutants]
    return [pytest.param(each, id=each.__doc__, marks=marks) for each, marks in zip(mutants, late, strict=True)]


MUTANTS: list[Callable[[pytest.MonkeyPatch], None]] = [
    patch_release,
    patch_share,
    patch_hash,
    patch_version,
    patch_older_version,
    patch_copy,
    patch_restore,
    patch_stale_host,
    patch_failed,
    patch_failed_host,
    patch_disown,
    patch_order,
    patch_lost,
    patch_enter,
    patch_leave,
    patch_recompute,
    patch_new_lag,
    patch_resumed,
    patch_fresh,
    patch_uncut,
    patch_stale,
    patch_cut,
    patch_top,
    patch_partial_top,
    patch_own,
    patch_any_client,
    patch_own_recomputed,
    patch_own_tail,
    patch_hand_over,
    patch_keep,
    patch_counts,
    patch_pending,
    patch_adjusted,
    patch_tail,
    patch_partial_tail,
    patch_late_stop,
    patch_kv_untold,
    patch_kv_at_refresh,
    patch_kv_of_prompt,
    patch_kv_prefix,
]


@pytest.mark.some(12)
@pytest.mark.parametrize("mutant", tiered(MUTANTS))
def test_mutants_are_caught(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control: each way to break the store turns the random schedules red."""
    mutant(monkeypatch)
    with pytest.raises((AssertionError, KeyError, IndexError, AttributeError, TypeError, OutOfBlocks)):
        for seed in range(400):
            random_schedule(seed)
            conversations(seed)


def patch_state_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """a sequence that loses its KV keeps its state, which then advances twice over its tokens"""
    slots_of = StateSlots.slots_of

    def kept(self: StateSlots, rows: list[Row]) -> tuple[list[int], list[int]]:
        reads, writes = slots_of(self, rows)
        return [write if read < 0 else read for read, write in zip(reads, writes, strict=True)], writes

    monkeypatch.setattr(StateSlots, "slots_of", kept)


def patch_state_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    """a child writes the state that its siblings have not read"""
    monkeypatch.setattr(StateSlots, "_own", lambda self, state: True)


def patch_state_parent(monkeypatch: pytest.MonkeyPatch) -> None:
    """a row reads the slot of another row's state"""
    slots_of = StateSlots.slots_of

    def turned(self: StateSlots, rows: list[Row]) -> tuple[list[int], list[int]]:
        reads, writes = slots_of(self, rows)
        return [*reads[1:], *reads[:1]], writes

    monkeypatch.setattr(StateSlots, "slots_of", turned)


def patch_snapshot(monkeypatch: pytest.MonkeyPatch) -> None:
    """a snapshot is written over by the sequence that left it"""
    leave = StateSlots._leave_snapshot

    def stay(self: StateSlots, seq: Sequence) -> None:
        leave(self, seq)
        if seq.state_in is not None and seq.state_out is not None:
            seq.state_in, seq.state_out = seq.state_out, seq.state_in

    monkeypatch.setattr(StateSlots, "_leave_snapshot", stay)


def patch_snapshot_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """the key of a snapshot forgets how many blocks are before it"""
    keys = states.chained
    monkeypatch.setattr(states, "chained", lambda blocks: keys(blocks)[:1] * len(blocks))


def patch_state_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """a state that was dropped is read all the same"""
    monkeypatch.setattr(BlockTables, "cut_lost", lambda self, seq: None)


def patch_state_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """a sequence that loses its last blocks keeps the state behind them"""
    monkeypatch.setattr(StateSlots, "drop", lambda self, seq: None)


def patch_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    """a rejected draft token stays in the state"""
    accept = StateSlots.accept
    monkeypatch.setattr(StateSlots, "accept", lambda self, seq, tokens: accept(self, seq, tokens + 1))


def patch_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """an accepted draft token is missing in the state"""
    accept = StateSlots.accept
    monkeypatch.setattr(StateSlots, "accept", lambda self, seq, tokens: accept(self, seq, 1))


def patch_advanced_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """a row with drafts writes its state, which then advances again"""
    slots_of = StateSlots.slots_of

    def written(self: StateSlots, rows: list[Row]) -> tuple[list[int], list[int]]:
        reads, _ = slots_of(self, rows)
        return reads, [row.seq.state_out.device for row in rows]  # type: ignore[union-attr, misc]

    monkeypatch.setattr(StateSlots, "slots_of", written)


def patch_other_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """a state advances by the tokens of another row"""
    accept = StateSlots.accept

    def turned(self: StateSlots, seq: Sequence, tokens: int) -> None:
        accept(self, seq, tokens)
        self._advances[-1] = self._advances[-1]._replace(row=0)

    monkeypatch.setattr(StateSlots, "accept", turned)


def patch_advance_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """states advance after the copies of a plan"""
    move_all = Harness.move_all
    advance = Harness.advance

    def late(self: Harness, plan: Plan, stop: int | None) -> None:
        move_all(self, plan, stop)
        advance(self, plan)

    monkeypatch.setattr(Harness, "move_all", late)
    monkeypatch.setattr(Harness, "advance", lambda self, plan, fails=False: advance(self, plan, True) if fails else True)


def patch_advance_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    """a state that has not advanced is trusted"""
    failed = StateSlots.advances_failed
    monkeypatch.setattr(StateSlots, "advances_failed", lambda self: failed(self) and set())


STATE_MUTANTS = [
    patch_rejected,
    patch_forgotten,
    patch_advanced_twice,
    patch_other_row,
    patch_advance_late,
    patch_advance_failed,
    patch_state_kept,
    patch_state_shared,
    patch_state_parent,
    patch_snapshot,
    patch_snapshot_key,
    patch_state_lost,
    patch_state_cut,
]


@pytest.mark.some(4)
@pytest.mark.parametrize("mutant", tiered(STATE_MUTANTS))
def test_mutants_of_recurrent_state_are_caught(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control of the schedules of recurrent state."""
    mutant(monkeypatch)
    with pytest.raises((AssertionError, KeyError, IndexError, AttributeError, TypeError, OutOfBlocks)):
        for seed in range(700):
            random_schedule(seed, recurrent=True)
            conversations(seed, recurrent=True)


def patch_window_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """a block leaves the window one token too early"""
    first = WindowBlocks.first
    monkeypatch.setattr(WindowBlocks, "first", lambda self, position: first(self, position + 1))


def patch_window_draft(monkeypatch: pytest.MonkeyPatch) -> None:
    """a block leaves the window of a draft that may be rejected"""
    launched = output.launched

    def with_draft(state: SchedulerState, rows: list[Row]) -> None:
        launched(state, rows)
        for row in rows if state.windows is not None else ():
            if row.expected and row.seq.given is None:
                row.seq.cached += row.draws - 1
                state.windows.trim(row.seq)
                row.seq.cached -= row.draws - 1

    monkeypatch.setattr(output, "launched", with_draft)


def patch_window_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """a prefix is found whose window is not"""
    find = WindowBlocks.find

    def whole(self: WindowBlocks, seq: Sequence, chain: list[Block], in_use: bool) -> FoundWindow:
        return FoundWindow(len(chain), find(self, seq, chain, in_use).window)

    monkeypatch.setattr(WindowBlocks, "find", whole)


def patch_window_fork(monkeypatch: pytest.MonkeyPatch) -> None:
    """a fork does not own the blocks of its window"""
    init = WindowBlocks.__init__

    def without_share(self: WindowBlocks, *args: Any) -> None:
        init(self, *args)
        self.store.share = lambda blocks: None  # type: ignore[method-assign]

    monkeypatch.setattr(WindowBlocks, "__init__", without_share)


def patch_window_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """a sequence that is cut goes on without the window behind which it was cut"""
    monkeypatch.setattr(WindowBlocks, "covers", lambda self, seq, blocks: True)


def patch_window_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """a block of a window that was dropped is read all the same"""
    cut_lost = BlockTables.cut_lost

    def without_window(self: BlockTables, seq: Sequence) -> None:
        window, seq.window = seq.window, []
        cut_lost(self, seq)
        seq.window = window

    monkeypatch.setattr(BlockTables, "cut_lost", without_window)


def patch_window_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """blocks stay behind their window"""
    monkeypatch.setattr(WindowBlocks, "trim", lambda self, seq: None)


def patch_window_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """a child writes into the last block of a window that its siblings share"""

    def extend(self: WindowBlocks, seq: Sequence, cached: int, version: int) -> None:
        self.trim(seq)
        while seq.window_first + len(seq.window) < -(-cached // self.block_size):
            self.append(seq, self.store.allocate(version))

    monkeypatch.setattr(WindowBlocks, "extend", extend)


def patch_window_growth(monkeypatch: pytest.MonkeyPatch) -> None:
    """room is made for blocks of full attention only"""
    monkeypatch.setattr(SchedulerState, "available", property(lambda self: self.store.available))


def patch_one_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """the windows are not asked again after the states"""
    deepest = BlockTables._deepest

    def once(self: BlockTables, seq: Sequence, chain: list[Block], in_use: bool) -> FoundPrefix:
        found = deepest(self, seq, chain, in_use)
        if self.windows is None or self.states is None:
            return found
        first = self.windows.find(seq, chain, in_use)
        depth, state = self.states.find(chain[: first.depth])
        return FoundPrefix(depth, first.window, state)

    monkeypatch.setattr(BlockTables, "_deepest", once)


def patch_window_without_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """a prefix is found whose state is not"""
    deepest = BlockTables._deepest

    def without(self: BlockTables, seq: Sequence, chain: list[Block], in_use: bool) -> FoundPrefix:
        states, self.states = self.states, None
        try:
            found = deepest(self, seq, chain, in_use)
        finally:
            self.states = states
        return found

    monkeypatch.setattr(BlockTables, "_deepest", without)


BOTH_MUTANTS = [patch_one_pass, patch_window_without_state, patch_advance_failed]


@pytest.mark.parametrize("mutant", tiered(BOTH_MUTANTS))
def test_mutants_of_both_are_caught(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control of the schedules of windows beside recurrent state."""
    mutant(monkeypatch)
    with pytest.raises(AssertionError):
        over_seeds(partial(random_schedule, recurrent=True, windows=True), 0, 700)


WINDOW_MUTANTS = [
    patch_window_early,
    patch_window_draft,
    patch_window_found,
    patch_window_fork,
    patch_window_cut,
    patch_window_lost,
    patch_window_kept,
    patch_window_copy,
    patch_window_growth,
]


@pytest.mark.parametrize("mutant", tiered(WINDOW_MUTANTS))
def test_mutants_of_windows_are_caught(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control of the schedules of windows."""
    mutant(monkeypatch)
    with pytest.raises((AssertionError, KeyError, IndexError, AttributeError, TypeError, OutOfBlocks)):
        for seed in range(400):
            random_schedule(seed, windows=True)
            conversations(seed, windows=True)
            tight_schedule(seed, windows=True)


def patch_kept_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    """a turn takes kept KV over that is too old for its group"""

    def all_of_it(self: SchedulerState, seq: Sequence, turn: FinishedTurn) -> int:
        self.pinned.hand_over(seq.state.group.after, seq)
        return seq.cached

    monkeypatch.setattr(SchedulerState, "_continue", all_of_it)


def patch_kept_outside_window(monkeypatch: pytest.MonkeyPatch) -> None:
    """the last token's KV is given up although the window before it has left"""
    monkeypatch.setattr(BlockTables, "in_window", lambda self, seq, position: True)


@pytest.mark.parametrize(
    ("schedule", "mutant"),
    [
        (partial(conversations, 1000007), patch_kept_too_old),
        (partial(random_schedule, 1000043, windows=True), patch_kept_outside_window),
    ],
    ids=lambda each: getattr(each, "__doc__", None) if not isinstance(each, partial) else str(each.args[0]),
)
def test_seeds_that_failed_once(schedule: Callable[[], Any], mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    """Mistakes that one schedule in a thousand shows; each is made again as the control."""
    schedule()
    mutant(monkeypatch)
    with pytest.raises(AssertionError):
        schedule()
