"""Turns of a conversation: which KV the next one takes over, for how long it is kept, and who goes first."""

from __future__ import annotations

import tracemalloc
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rollout.engine.kv.block import Block
from rollout.engine.kv.versions import KVVersions
from rollout.engine.scheduling.conversation import MAX_PINNED_RATIO, ConversationIndex, digest
from rollout.engine.scheduling.preemption import evict_idle
from rollout.engine.values import Group, Limits, Sampling
from tests.support.harness import VOCAB, Harness

SIZE = 16
PROMPT = [7 + i % 80 for i in range(100)]
TOOL = [3 + i % 80 for i in range(30)]


def harness(device_blocks: int = 64, host_blocks: int = 0, **options: Any) -> Harness:
    return Harness(device_blocks, host_blocks, **{"block_size": SIZE, "max_batch_tokens": 256, "max_num_seqs": 8, **options})


def run(h: Harness, id: str, prompt: list[int], refresh_at: int | None = None, kv: str = "keep", **options: Any) -> int:
    """Run a group to its end, with a refresh before step `refresh_at`. Returns how many tokens were prefilled for it."""
    before = h.scheduler.state.counters.prefill_tokens
    assert h.submit(id, prompt, **{"max_tokens": 100, "seed": 1, "ignore_eos": True, **options})
    for number in range(1000):
        if id not in h.scheduler.state.groups:
            break
        if number == refresh_at:
            h.refresh(kv)
        h.step()
        h.check()
    assert (id, 0) in h.got
    return h.scheduler.state.counters.prefill_tokens - before


def next_turn(h: Harness, hint: bool = True, **options: Any) -> int:
    """Run the turn behind the first child of "one". Returns how many tokens were prefilled, of 230."""
    after = ("one", 0) if hint else None
    return run(h, "two", [*h.history(("one", 0)), *TOOL], after=after, max_tokens=4, **options)


# ── which KV ──────────────────────────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(
    ("kv_ttl_s", "refresh_at", "between", "prefilled"),
    [
        (0.0, None, False, 38),  # 192 of the 199 tokens that have KV lie in whole blocks
        (0.0, 30, False, 38),  # a block in which two versions met is one of them
        (0.0, 30, True, 38),
        (60.0, None, False, 31),  # the last token of a turn never had KV
        (60.0, 30, True, 31),
    ],
)
def test_a_turn_prefills_what_is_new(kv_ttl_s: float, refresh_at: int, between: bool, prefilled: int, overlap: bool) -> None:
    h = harness(overlap=overlap)
    run(h, "one", PROMPT, refresh_at, kv_ttl_s=kv_ttl_s)
    if between:
        h.refresh("keep")
    assert next_turn(h) == prefilled
    h.finish()


def test_without_the_hint_it_reads_no_kv_of_older_weights() -> None:
    """Unless `max_kv_lag` says so, and then past the block in which two versions met."""
    for lag, prefilled in ((0, 230), (1, 38)):
        h = harness()
        run(h, "one", PROMPT, refresh_at=30)
        assert next_turn(h, hint=False, max_kv_lag=lag) == prefilled
        h.finish()


@pytest.mark.parametrize("kv_ttl_s", [0.0, 60.0])
@pytest.mark.parametrize("kv", ["recompute", "abort"])
def test_kv_that_a_refresh_wants_computed_again_is_not_taken_over(kv: str, kv_ttl_s: float) -> None:
    h = harness()
    run(h, "one", PROMPT, kv_ttl_s=kv_ttl_s)
    h.refresh(kv)
    assert len(h.scheduler.state.pinned) == 0 and next_turn(h) == 230
    h.finish()


@pytest.mark.parametrize("after", [("one", 0), ("one", 3), ("none", 0), ("one", -1)])
def test_somebody_elses_turn_is_one_that_does_not_exist(after: tuple[str, int]) -> None:
    """Nothing tells a client whether another one has a group of that id."""
    h = harness()
    run(h, "one", PROMPT, client="a", kv_ttl_s=60.0)
    h.refresh("keep")
    assert run(h, "two", [*h.history(("one", 0)), *TOOL], client="b", after=after, max_tokens=4) == 230
    assert len(h.scheduler.state.pinned) == 1, "and it is not superseded"
    h.finish()


def test_a_turn_reads_only_its_own_conversation() -> None:
    """Another one's KV of the same prompt, by the same old weights, stays out of reach."""
    h = harness()
    run(h, "other", PROMPT, seed=2)
    h.refresh("keep")
    run(h, "one", PROMPT)
    h.refresh("keep")
    assert next_turn(h) == 38
    h.scheduler.state.store.forget_cached()
    run(h, "third", PROMPT, seed=2)
    h.refresh("keep")
    assert run(h, "four", [*h.history(("one", 0)), *TOOL], after=("one", 0), max_tokens=4) == 230
    h.finish()


def old_kv_pinned(lag: int) -> Harness:
    """A turn that read KV from before a refresh with kv="abort", as its `max_kv_lag` allows, and is pinned with it."""
    h = harness()
    run(h, "zero", PROMPT, max_tokens=1)
    h.refresh("abort")
    assert run(h, "one", PROMPT, kv_ttl_s=60.0, max_kv_lag=lag) == (4 if lag else 100)
    return h


@pytest.mark.parametrize(("lag", "prefilled"), [(0, 230), (1, 31)])
def test_kept_kv_that_is_too_old_is_read_only_as_far_as_the_next_turn_allows(lag: int, prefilled: int) -> None:
    """And where it is read, its sample says so."""
    h = old_kv_pinned(lag=1)
    assert next_turn(h, max_kv_lag=lag) == prefilled
    assert h.got["two", 0].kv_versions == ([(0, 0, 0), (0, 96, 1)] if lag else [])
    h.finish()


def test_kept_kv_of_live_weights_is_read_in_any_case() -> None:
    h = old_kv_pinned(lag=0)
    assert next_turn(h) == 31 and h.got["two", 0].kv_versions == []
    h.finish()


def test_a_partial_child_continues_the_kept_kv_of_its_tokens() -> None:
    """However old, as a turn does; its sample says which weights computed it."""
    h = harness()
    run(h, "one", PROMPT, kv_ttl_s=60.0)
    h.refresh("keep")
    assert run(h, "two", PROMPT, partials={0: 100}, after=("one", 0), max_tokens=101) == 0
    assert h.got["two", 0].kv_versions == [(100, 0, 0), (100, 199, 1)]
    h.finish()


def test_the_kept_kv_of_a_name_is_that_of_its_newest_turn() -> None:
    """A turn of the same name that keeps nothing takes the place of one that kept KV of older weights."""
    h = harness()
    run(h, "one", PROMPT, kv_ttl_s=60.0)
    del h.got["one", 0]
    h.refresh("keep")
    run(h, "one", PROMPT)
    assert len(h.scheduler.state.pinned) == 0
    next_turn(h)
    assert h.got["two", 0].kv_versions == []
    h.finish()


def test_another_history_takes_over_what_is_the_same() -> None:
    h = harness()
    run(h, "one", PROMPT, kv_ttl_s=60.0)
    history = h.history(("one", 0))
    history[150] = (history[150] + 1) % VOCAB
    assert run(h, "two", [*history, *TOOL], after=("one", 0), max_tokens=4) == 230 - 144
    assert len(h.scheduler.state.pinned) == 0
    h.finish()


def test_another_history_reads_nothing_old() -> None:
    """Although somebody computed just its tokens by just the versions of the turn that it names."""
    h = harness()
    run(h, "one", PROMPT, kv_ttl_s=60.0)
    edited = h.history(("one", 0))
    edited[50] = (edited[50] + 1) % VOCAB
    run(h, "other", edited, max_tokens=4)
    h.refresh("keep")
    assert run(h, "two", [*edited, *TOOL], after=("one", 0), max_tokens=4) == 230
    h.finish()


def test_a_refresh_in_the_middle_of_the_prefill_spares_what_was_there() -> None:
    """What the turn itself has prefilled is computed again, as in any prompt; with it its first block, which it began."""
    h = harness(max_batch_tokens=16)
    run(h, "one", PROMPT, kv_ttl_s=60.0)
    prefilled = next_turn(h, refresh_at=1)
    assert prefilled == 16 + 38, "of tokens 199 to 214, and all from the block of token 192 on"
    h.finish()


def test_branches_behind_a_tool() -> None:
    h = harness()
    run(h, "one", PROMPT, kv_ttl_s=60.0, n=3)
    assert len(h.scheduler.state.pinned) == 3
    assert next_turn(h, n=4, kv_ttl_s=60.0) == 31
    assert run(h, "three", [*h.history(("two", 2)), *TOOL], after=("two", 2), max_tokens=4) == 31
    assert next_turn_again(h) == 38, "a turn that is superseded is not kept, but found"
    h.finish()


def next_turn_again(h: Harness) -> int:
    return run(h, "again", [*h.history(("one", 0)), *TOOL[::-1]], after=("one", 0), max_tokens=4)


# ── for how long ──────────────────────────────────────────────────────────────────────────────────────────────────────
def test_kept_kv_ends_with_its_time_or_with_its_client() -> None:
    h = harness()
    for id, kv_ttl_s in (("one", 50.0), ("two", 10.0), ("three", 50.0)):
        run(h, id, [*PROMPT, len(id)], kv_ttl_s=kv_ttl_s)
    used = h.scheduler.state.store.used
    h.now += 20.0
    assert h.scheduler.overdue
    h.step()
    assert [seq.state.group.id for seq in h.scheduler.state.pinned] == ["one", "three"] and not h.scheduler.overdue
    h.scheduler.state.abort("one")
    h.scheduler.state.abort("three", 1)
    assert [seq.state.group.id for seq in h.scheduler.state.pinned] == ["three"], "an index that it does not have"
    h.scheduler.state.abort("three", 0)
    h.check()
    assert used and h.scheduler.state.store.used == 0 and h.scheduler.state.store.available == 64
    h.finish()


def test_a_child_that_was_aborted_is_not_kept() -> None:
    h = harness()
    assert h.submit("one", PROMPT, max_tokens=100, ignore_eos=True, kv_ttl_s=60.0)
    for _ in range(10):
        h.step()
    h.take(h.scheduler.state.abort("one"))
    assert len(h.scheduler.state.pinned) == 0 and h.scheduler.state.store.used == 0


def test_kept_kv_leaves_for_host_memory_first_and_is_dropped_last() -> None:
    """Beside a prefix cache that goes as well."""
    h = harness(device_blocks=32, host_blocks=16)
    run(h, "one", PROMPT, kv_ttl_s=1e3)
    run(h, "cached", [90, *PROMPT])
    blocks = [block for seq in h.scheduler.state.pinned for block in seq.blocks]
    assert len(blocks) == 13 and all(block.host is None for block in blocks)
    h.scheduler.state.store.begin()
    assert evict_idle(h.scheduler.state, 32)
    h.move(h.scheduler.state.store.moves, None)
    h.scheduler.state.store.moved()
    assert all(block.device is None and block.host is not None for block in blocks)
    assert len(h.scheduler.state.pinned) == 1 and next_turn(h, kv_ttl_s=1e3) == 31
    h.finish()


def test_kv_of_a_sequence_that_waits_is_dropped_before_kept_kv() -> None:
    """Where there is no host memory; the control needs more room than the other's KV is."""
    for need, kept in ((25, 1), (26, 0)):
        h = harness(device_blocks=32)
        run(h, "one", PROMPT, max_tokens=2, kv_ttl_s=1e3)
        assert h.submit("waits", PROMPT[::-1], max_tokens=20, seed=3, ignore_eos=True)
        for _ in range(5):
            h.step()
        (seq,) = h.scheduler.state.running
        h.scheduler.state.store.begin()
        h.scheduler.state.stop(seq)
        assert evict_idle(h.scheduler.state, need)
        assert len(h.scheduler.state.pinned) == kept and any(block.lost for block in seq.blocks)
        h.scheduler.state.store.moved()
        h.finish()


def test_where_nothing_else_gives_way_kept_kv_does() -> None:
    h = harness(device_blocks=20)
    run(h, "one", PROMPT, kv_ttl_s=1e3, max_tokens=20)
    assert len(h.scheduler.state.pinned) == 1
    run(h, "two", [*PROMPT[::-1], *PROMPT], max_tokens=60)
    assert len(h.scheduler.state.pinned) == 0
    h.finish()


def test_what_is_kept_is_bounded_and_the_greedy_give_way() -> None:
    h = harness(device_blocks=64)
    run(h, "modest", [1, *PROMPT], client="a", max_tokens=2, kv_ttl_s=1e3)
    for number in range(8):
        run(h, f"greedy{number}", [2 + number, *PROMPT], client="b", max_tokens=2, kv_ttl_s=1e3)
        assert len(h.scheduler.state.pinned.blocks) <= MAX_PINNED_RATIO * 64
    assert [seq.state.group.id for seq in h.scheduler.state.pinned] == ["modest", "greedy5", "greedy6", "greedy7"]
    h.finish()


@pytest.mark.parametrize("kv_ttl_s", [-1.0, 3600.1, float("nan"), float("inf")])
def test_a_time_that_cannot_be_kept_is_refused(kv_ttl_s: float) -> None:
    with pytest.raises(ValueError, match="kv_ttl_s"):
        Sampling(kv_ttl_s=kv_ttl_s).validate(Limits(), VOCAB)


# ── who goes first ────────────────────────────────────────────────────────────────────────────────────────────────────
def test_a_turn_goes_before_fresh_prompts_and_behind_those_that_have_begun() -> None:
    h = harness(max_num_seqs=1)
    run(h, "one", PROMPT, client="a")
    assert h.submit("running", [1, 2, 3], client="a", max_tokens=50, ignore_eos=True)
    h.step()
    for id, after in (("fresh", None), ("turn", ("one", 0)), ("theirs", ("one", 0))):
        client = "b" if id == "theirs" else "a"
        prompt = [*h.history(("one", 0)), *TOOL] if after else PROMPT
        assert h.submit(id, prompt, client=client, max_tokens=1, after=after)
    h.finish()
    done = [id for id, _ in h.got]
    assert done.index("turn") < done.index("fresh") and done.index("running") < done.index("fresh")


# ── versions ──────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_versions_of_a_table_and_of_its_blocks() -> None:
    blocks = [Block(i, version) for i, version in enumerate((3, 3, 4, 6))]
    blocks[1].later, blocks[2].later = ((1, 4),), ((2, 5), (3, 6))
    for tokens, spans in ((16, ((0, 3), (5, 4), (10, 5), (11, 6))), (11, ((0, 3), (5, 4), (10, 5))), (4, ((0, 3),)), (0, ())):
        versions = KVVersions.of([block.versions for block in blocks], tokens, 4)
        assert versions == (tokens, spans)
        for i, block in enumerate(blocks):
            known = min(4, tokens - 4 * i)
            assert versions.of_block(i, 4) == tuple(span for span in block.versions if span[0] < known)
    assert KVVersions(6, ((0, 1),)).of_block(1, 4) == ((0, 1),)


# ── what is remembered ────────────────────────────────────────────────────────────────────────────────────────────────
def ended(id: str, index: int, since: int, tokens: int = 40, version: int = 3) -> Any:
    """Make what `ConversationIndex.note` reads of a child."""
    group = SimpleNamespace(id=id)
    blocks = [SimpleNamespace(versions=((0, version),)) for _ in range(0, tokens, SIZE)]
    return SimpleNamespace(
        state=SimpleNamespace(client="c", age=(since, since), group=group),
        index=index,
        num_prompt=tokens,
        output=[1],
        cached=tokens,
        blocks=blocks,
        tokens=lambda first, end: np.arange(first, end, dtype=np.int32),
    )


def continuing(after: tuple[str, int], tokens: int = 60) -> Group:
    return Group("next", np.arange(tokens, dtype=np.int32), Sampling(max_tokens=1), after=after)


def test_the_newest_turns_are_remembered_and_of_a_name_the_newest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollout.engine.scheduling.conversation.MAX_TURNS", 8)
    turns, since = ConversationIndex(SIZE), dict[tuple[str, int], list[int]]()
    for number in range(50):
        id, index = f"{number * 7 % 5}", number % 3  # names come again
        turns.note(ended(id, index, number))
        since.setdefault((id, index), []).append(number)
        for child, numbers in since.items():
            found = turns.find(continuing(child), "c")
            assert (found.since if found else None) == (numbers[-1] if numbers[-1] > number - 8 else None)
    assert turns.find(continuing(("0", 2)), "another") is None
    assert turns.find(continuing(("never", 0)), "c") is None


def test_a_turn_comes_back_as_it_was_noted() -> None:
    turns = ConversationIndex(SIZE)
    turns.note(ended("a", 1, since=2**40, version=2**40))
    found = turns.find(continuing(("a", 1)), "c")
    assert found is not None
    assert found == ("c", 2**40, KVVersions(40, ((0, 2**40),)), digest(np.arange(40, dtype=np.int32)))
    other = Group("next", np.arange(1, 61, dtype=np.int32), Sampling(max_tokens=1), after=("a", 1))
    found = turns.find(other, "c")
    assert found is not None and found.kv is None  # other tokens: nothing of its KV is read


def test_a_turn_takes_few_bytes() -> None:
    turns, count = ConversationIndex(SIZE), 20_000
    tracemalloc.start()
    try:
        for number in range(count):
            turns.note(ended(f"1.{number}/{number}", number % 8, number))
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held / count < 120  # 470 as objects
