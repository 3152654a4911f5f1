"""Drafts from siblings: what is guessed, when it pays, and that the samples are the same; with mutants."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest

import rollout.engine.scheduling.drafts as drafts
import rollout.engine.scheduling.output as output
import rollout.engine.scheduling.rows as planning
from rollout.engine.scheduling.block_tables import BlockTables
from rollout.engine.scheduling.drafts import FIRST, MOST_LEFT, MOST_ROWS, PLAIN_EVERY, SHARE, DraftBudget, Drafts
from rollout.engine.scheduling.ngrams import LONGEST, NgramIndex
from rollout.engine.scheduling.scheduler import Scheduler
from rollout.engine.scheduling.step_seconds import ENOUGH, REMEMBERED, StepSeconds, non_decreasing
from tests.support.harness import Harness, random_schedule
from tests.support.nightly import Draw
from tests.support.plans import commit, launch, rows, small_scheduler, step, submit

PROMPT = -1


def drafts_of(scheduler: Scheduler) -> Drafts:
    assert isinstance(scheduler.drafts, Drafts)
    return scheduler.drafts


def texts(*said: list[int], prompt: tuple[int, ...] = (50,)) -> NgramIndex:
    made = NgramIndex()
    made.add(PROMPT, np.array(prompt, np.int32), 1000)
    for index, tokens in enumerate(said):
        made.add(index, tokens, 1000, behind=PROMPT)
    return made


# ── what is guessed ───────────────────────────────────────────────────────────────────────────────────────────────────────
def test_the_continuation_of_the_longest_match() -> None:
    made = texts([1, 2, 3, 4, 5, 6], [9, 2, 3, 7, 7], [8, 1, 2, 3])
    assert made.draft(made.end(2), 3) == ((4, 5, 6), 3)
    assert made.draft(made.end(2), 2) == ((4, 5), 3)


def test_of_equal_matches_what_most_have_and_then_the_latest() -> None:
    made = texts([1, 2, 5, 6], [1, 2, 7, 8], [1, 2, 5, 9], [0, 1, 2])
    assert made.draft(made.end(3), 3) == ((5, 9), 2)


def test_prompt_and_own_text_are_looked_at() -> None:
    made = texts([7, 8], prompt=(3, 4, 5, 6, 7, 8, 9, 3, 4))
    assert made.draft(made.end(0), 2) == ((9, 3), 2)
    own = texts([1, 2, 3, 1, 2])
    assert own.draft(own.end(0), 4) == ((3, 1, 2), 2)


def test_where_a_pair_never_stood_the_last_token_says_what_may_follow() -> None:
    made = texts([1, 2, 3, 4], [9, 2, 3, 5], [8, 2])
    assert made.draft(made.end(2), 3) == ((3, 5), 1)
    longer = texts([1, 2, 6], [2, 7], [2, 7], [8, 1, 2])
    assert longer.draft(longer.end(3), 1) == ((6,), 2), "a longer match goes before many shorter ones"


def test_nothing_is_guessed_behind_what_never_stood_there() -> None:
    made = texts([1, 2, 3], [4, 5], [])
    assert made.draft(made.end(1), 3)[0] == made.draft(made.end(2), 3)[0] == ()
    assert NgramIndex().add(0, [], 10) == -1 and NgramIndex().draft(-1, 3)[0] == ()


def test_texts_grow_token_by_token() -> None:
    whole, grown = texts([1, 2, 3, 4, 1, 2]), texts()
    for count in range(7):
        grown.add(0, [1, 2, 3, 4, 1, 2][:count], 1000, behind=PROMPT)
    assert grown.draft(grown.end(0), 9) == whole.draft(whole.end(0), 9) == ((3, 4, 1, 2), 2)


def test_an_index_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """It begins anew with the latest of each text, and goes on finding what was said since."""
    monkeypatch.setattr(drafts, "MOST_TOKENS", 64)
    scheduler = small_scheduler(64, drafts=4, max_batch_tokens=32)
    submit(scheduler, "g", [1, 2, 3], n=2, max_tokens=200)
    most = 0
    for number in range(120):
        step(scheduler, 1 + number % 7)
        most = max([most, *map(len, drafts_of(scheduler).indexes.values())])
    assert 32 < most < 64 + 20 and scheduler.state.counters.drafted_tokens > 0


# ── when it pays ──────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_what_is_right_is_trusted_more() -> None:
    made = NgramIndex()
    before = made.acceptance(3, 2)
    for _ in range(50):
        made.learn(3, [True, False])
    after = made.acceptance(3, 2)
    assert after[0] > 0.9 > before[0] and after[1] < before[1] and len(after) == 2
    for _ in range(1000):
        made.learn(LONGEST + 3, [False])
    assert made.acceptance(LONGEST, 1)[0] < 0.05, "what is longer than can be told counts with the longest"


def table(took: Callable[[int], float], sizes: Iterable[int] = range(1, 65), times: int = ENOUGH) -> StepSeconds:
    """Steps of so many tokens, each so many times."""
    seconds = StepSeconds()
    for size in [size for size in sizes for _ in range(times)]:
        seconds.add(size, took(size))
    return seconds


def test_seconds_of_sizes_between_and_beyond() -> None:
    seconds = StepSeconds()
    assert seconds.of(np.arange(1, 4)).tolist() == [1, 1, 1], "nothing is known: every size is worth a try"
    seconds = table(lambda size: 1.0, [1])
    assert seconds.of(np.array([1, 5])).tolist() == [1, 1]
    for _ in range(ENOUGH):
        assert seconds.of(np.array([1, 5])).tolist() == [1, 1] and not seconds.knows(9), "few steps are no price"
        seconds.add(9, 5.0)
    assert seconds.of(np.array([1, 5, 9, 13, 26])).tolist() == [1, 3, 5, 5, 10] and seconds.knows(9), "some more are tried"
    for _ in range(REMEMBERED + 64):
        seconds.add(1, 1.0)
    assert seconds.of(np.array([1, 5])).tolist() == [1, 1], "what was long ago is tried again"
    seconds.add(10_000, 9.0)


@pytest.mark.parametrize("at", [1, 4, 5, 16, 64])
@pytest.mark.parametrize("outlier", [1e-3, 1e3])
def test_a_single_outlier_changes_nothing(at: int, outlier: float) -> None:
    """Wherever it is, however few steps of that size were seen: neither that size nor any other has another price."""
    wanted = table(lambda size: 10.0 + size)
    for before in range(ENOUGH + 1):
        seconds = table(lambda size: 10.0 + size, [size for size in range(1, 65) if size != at])
        for number in range(ENOUGH + 1):
            seconds.add(at, outlier if number == before else 10.0 + at)
        assert np.allclose(seconds.of(np.arange(1, 65)), wanted.of(np.arange(1, 65)))


def test_what_a_step_takes_as_it_is_comes_first() -> None:
    """Below the smallest size that is known each token costs its share: else a smaller step would seem to take as long, and
    what it is filled up with would seem to be free."""
    seconds = table(lambda size: 10.0 + size, [16, 32])
    assert seconds.of(np.array([4, 8, 16, 24])).tolist() == [6.5, 13, 26, 34]
    scheduler = small_scheduler(32, drafts=6, max_batch_tokens=16)
    drafts_of(scheduler).seconds = seconds
    likely(scheduler)
    assert [drafted(scheduler) for _ in range(3)] == [0, 0, 0]


@pytest.mark.parametrize(("right", "left"), [(0, FIRST - 4 * 0.9 + 4 * SHARE * 2), (4, MOST_LEFT)])
def test_what_guesses_may_lose_is_counted(right: int, left: float) -> None:
    """Of steps with two rows and six guesses in them: each right one saves half a step, all six take 0.9 s."""
    account, prices = DraftBudget(), table(lambda size: 0.7 + 0.15 * size, [2, 8])
    for _ in range(4):
        account.note(2, 8, 2.0)
        account.accepted += right
        account.close(prices)
        account.close(prices)
    assert account.left == pytest.approx(left)


def test_a_step_that_is_not_known_costs_no_more_than_its_share() -> None:
    """A pause of the machine is no price of guesses."""
    account, prices = DraftBudget(), table(lambda size: 1.0, [1])
    account.note(1, 4, 60.0)
    account.close(prices)
    assert account.left == pytest.approx(FIRST - 3.0 + SHARE * 60)


def test_nothing_is_drafted_while_nothing_may_be_lost() -> None:
    scheduler = small_scheduler(32, drafts=6, max_batch_tokens=16)
    drafts_of(scheduler).seconds = table(lambda size: 0.1 + 1e-6 * size)
    likely(scheduler)
    drafts_of(scheduler).budget.left = -1.0
    assert [drafted(scheduler) for _ in range(3)] == [0, 0, 0] and drafts_of(scheduler).budget.left > -1.0 - 1e-9
    drafts_of(scheduler).budget.left = 1.0
    assert drafted(scheduler) > 0, "the control"
    drafts_of(scheduler).seconds, drafts_of(scheduler).budget.left = table(lambda size: 0.1 + 0.02 * size), 0.05
    assert drafted(scheduler) <= 2, "as many as it can bear"


def overlapping(left: float) -> Scheduler:
    """A scheduler whose steps overlap, of a machine where more tokens cost nothing; one child runs. left: of the budget."""
    scheduler = small_scheduler(32, drafts=6, max_batch_tokens=16, overlap_steps=True)
    drafts_of(scheduler).seconds = table(lambda size: 0.1)
    drafts_of(scheduler).overlapped = table(lambda size: 0.09)
    likely(scheduler)
    drafts_of(scheduler).budget.left = left
    return scheduler


def test_a_step_with_drafts_is_read_before_the_next_plan() -> None:
    """Also where the next one is to have none; after that, steps overlap."""
    scheduler = overlapping(1.0)
    plan = launch(scheduler)
    assert rows(scheduler, plan)[0].count > 1
    drafts_of(scheduler).budget.left = -1.0
    assert scheduler.plan() is None
    commit(scheduler, plan, 4)
    first, second = launch(scheduler), launch(scheduler)
    assert [rows(scheduler, each)[0].count for each in (first, second)] == [1, 1] and len(second.pending_tokens) == 1


def test_an_overlap_ends_for_drafts_that_the_budget_pays() -> None:
    """A step with no draft that ends an overlap costs what it takes longer, and is no gain where it is shorter."""
    scheduler = overlapping(-1.0)
    first = launch(scheduler)
    assert not scheduler.drafts.wanted(scheduler.state.running)
    drafts_of(scheduler).budget.left = 1.0
    assert scheduler.plan() is None, "the next step may have drafts"
    drafts_of(scheduler).overlapped = StepSeconds()
    assert scheduler.plan() is not None, "what the end of an overlap costs is not known"
    commit(scheduler, first, 4)
    for seconds, left in ((0.1, FIRST + SHARE * 0.1 - 0.01), (0.05, FIRST + SHARE * 0.05), (60.0, FIRST + SHARE * 60 - 0.09)):
        account = DraftBudget()
        account.note(1, 1, seconds)
        account.close(table(lambda size: 0.1) if seconds == 0.1 else table(lambda size: 0.1, [64]), table(lambda size: 0.09))
        assert account.left == pytest.approx(min(MOST_LEFT, left))


def test_noise_does_not_add_up() -> None:
    """Prices rise with the sizes, as they must, and what is noise is no price: the largest of many values is no bound for those
    behind it."""
    random = np.random.default_rng(0)
    known = table(lambda size: 10 + random.uniform(-1, 1), times=9).of(np.arange(1, 65))
    assert (np.diff(known) >= 0).all() and abs(known.mean() - 10) < 0.3 and known[56] - known[8] < 0.4
    assert non_decreasing([1.0, 3.0, 2.0, 2.0, 5.0], [1, 1, 1, 2, 1]) == [1.0, 2.25, 2.25, 2.25, 5.0]
    assert non_decreasing([4.0, 2.0], [3, 1]) == [3.5, 3.5] and non_decreasing([], []) == []


@pytest.mark.parametrize(
    ("took", "least", "most"),
    [
        (lambda tokens: 1.0, 6, 6),
        (lambda tokens: 10.0 + 0.1 * tokens, 5, 6),
        (lambda tokens: 14.0 + 1.2 * tokens, 1, 4),
        (lambda tokens: float(tokens), 0, 0),
    ],
)
def test_as_much_is_drafted_as_pays(took: Callable[[int], float], least: int, most: int) -> None:
    """By the table alone, no clock: all where tokens are free, nothing where each costs its share."""
    scheduler = small_scheduler(32, drafts=6, max_batch_tokens=16)
    drafts_of(scheduler).seconds = table(took, [1, 2, 3, 4, 5, 6, 7, 8])
    drafts_of(scheduler).budget.left = 100.0
    likely(scheduler)
    counts = [drafted(scheduler) for _ in range(3)]  # the prior's chances: 0.26, 0.34 … of a match of 2, 3 …
    assert least <= counts[0] <= most, counts


def likely(scheduler: Scheduler, **sampling: Any) -> None:
    """A child that runs, of a group whose prompt says all that follows."""
    submit(scheduler, "g", [*range(1, 9), 1, 2], max_tokens=40, **sampling)
    step(scheduler, 3)


def drafted(scheduler: Scheduler) -> int:
    """Tokens that the next plan drafts."""
    plan = launch(scheduler)
    count = sum(row.count - 1 for row in rows(scheduler, plan))

    commit(scheduler, plan, 4)
    return count


def test_a_row_carries_the_draft() -> None:
    scheduler = small_scheduler(drafts=3, max_batch_tokens=16)
    likely(scheduler)
    assert drafted(scheduler) == 3


@pytest.mark.parametrize(
    ("why", "config", "sampling"),
    [
        ("it is off", {"drafts": 0}, {}),
        ("the group races", {}, {"n": 2, "finish_after": 1}),
        ("the budget of the step", {"max_batch_tokens": 4, "max_num_seqs": 4, "n": 4}, {"n": 4}),
    ],
)
def test_no_drafts(why: str, config: dict[str, Any], sampling: dict[str, Any]) -> None:
    config.pop("n", None)
    scheduler = small_scheduler(32, **{"drafts": 3, "max_batch_tokens": 16, **config})
    submit(scheduler, "g", [*range(1, 9), 1, 2], max_tokens=40, **sampling)
    while scheduler.state.counters.generated_tokens < 4:
        step(scheduler, 3)
    assert drafted(scheduler) == 0, why


def test_no_drafts_beside_prefill_or_with_many_rows() -> None:
    scheduler = small_scheduler(32, drafts=3, max_batch_tokens=16)
    likely(scheduler)
    submit(scheduler, "other", range(30, 42))
    plan = launch(scheduler)
    assert [row.count for row in rows(scheduler, plan)] == [1, 12]
    wide = small_scheduler(400, drafts=3, max_num_seqs=MOST_ROWS + 1, max_batch_tokens=128)
    likely(wide, n=MOST_ROWS + 1)
    assert drafted(wide) == 0


def test_what_does_not_pay_is_not_drafted() -> None:
    """Steps take as long as they have tokens: a guess is never worth its time, once that is known."""
    h = Harness(512, 0, block_size=4, max_num_seqs=4, max_batch_tokens=64, drafts=6)
    clock = [0.0]
    h.scheduler.state.clock = lambda: clock[0]
    h.submit("g", [1, 2, 3, 4, 5, 1, 2, 3], n=4, max_tokens=400, seed=1)
    early = 0
    for number in range(4 * PLAIN_EVERY):
        plan = h.scheduler.plan()
        h.move(plan.moves, None)
        h.scheduler.state.store.moved()
        for seq in h.scheduler.state.running:
            h.oldest.setdefault(seq.state.group.id, 0)
        drawn = h.compute(plan)
        h.scheduler.launched(plan)
        clock[0] += plan.num_tokens
        h.take(h.scheduler.commit(plan, drawn))
        early = h.scheduler.state.counters.drafted_tokens if number == PLAIN_EVERY else early
    late = h.scheduler.state.counters.drafted_tokens - early
    assert 0 < early and late < early, "it goes on drafting though that costs as much as it gives"


def test_blocks_of_a_draft_that_was_wrong_are_given_back() -> None:
    scheduler = small_scheduler(6, drafts=6, block_size=2, max_batch_tokens=16)
    submit(scheduler, "g", [1, 2, 1, 2, 1], max_tokens=7)
    for token in (2, 7, 7, 7):
        plan = launch(scheduler)

        commit(scheduler, plan, token)
        (seq,) = scheduler.state.running
        assert len(seq.blocks) == -(-seq.cached // 2)


# ── the same samples ──────────────────────────────────────────────────────────────────────────────────────────────────────
def guessing(seed: int, drafts: int) -> Harness:
    """Groups whose texts can be guessed, of stop tokens and lengths of all kinds, some refreshed, over a pool of some size."""
    r = random.Random(seed)
    h = Harness(
        r.choice([24, 64]), r.choice([0, 20]), block_size=r.choice([1, 2, 4]), max_num_seqs=r.choice([2, 8]),
        max_batch_tokens=32, overlap=r.random() < 0.5, drafts=drafts,
    )  # fmt: skip
    for number in range(6):
        prompt = [1 + i % 5 for i in range(r.randrange(1, 9))]
        h.submit(f"g{number}", prompt, n=r.choice([1, 3]), max_tokens=r.choice([1, 5, 14]), seed=1 + 2 * r.randrange(99))
    for number in range(40):
        h.step()
        h.check()
        if number % 13 == 12:
            h.refresh(r.choice(["keep", "recompute"]))
    h.finish()
    return h


def test_schedules_with_drafts_and_without() -> None:
    """Every sample is what it must be (`Harness.finish`), and drafts save steps."""
    accepted = drafted = 0
    for seed in range(16):
        with_drafts, without = guessing(seed, 6), guessing(seed, 0)
        accepted += with_drafts.scheduler.state.counters.accepted_tokens
        drafted += with_drafts.scheduler.state.counters.drafted_tokens
        assert not without.scheduler.state.counters.drafted_tokens
        for key, sample in without.got.items():
            got = with_drafts.got[key]
            assert got.token_ids.tolist() == sample.token_ids.tolist() and got.logprobs.tolist() == sample.logprobs.tolist()
            assert got.finish_reason == sample.finish_reason
    assert drafted > accepted > 80


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_schedules_with_drafts_long(new_seeds: Draw) -> None:
    for seed in new_seeds(4000):
        guessing(seed, 6)


def patch_accept(monkeypatch: pytest.MonkeyPatch) -> None:
    """a draft is accepted without a look at what was drawn"""

    def trusting(state: Any, row: Any, draws: Any, first: int) -> Any:
        return append_run(state, row, draws, first, trusted=row.seq.given is None)

    monkeypatch.setattr(output, "_append_run", trusting)


def patch_counter(monkeypatch: pytest.MonkeyPatch) -> None:
    """all draws of a row have the counter of its last token"""
    look_ahead = planning._look_ahead

    def last(samples: np.ndarray, expected: Any, positions: np.ndarray) -> Any:
        kept = positions.copy()
        result = look_ahead(samples, expected, positions)
        positions[:] = kept
        return result

    monkeypatch.setattr(planning, "_look_ahead", last)


def patch_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """a child goes on behind its stop token where a draft was right about it"""

    def deaf(state: Any, row: Any, draws: Any, first: int) -> Any:
        return append_run(state, row, draws, first, deaf=True)

    monkeypatch.setattr(output, "_append_run", deaf)


def patch_settle(monkeypatch: pytest.MonkeyPatch) -> None:
    """KV of rejected tokens counts as computed"""
    settle = BlockTables.settle
    monkeypatch.setattr(BlockTables, "settle", lambda self, seq, cached: settle(self, seq, len(seq.blocks) * self.block_size))


def patch_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """blocks of rejected tokens stay"""

    def keep(self: BlockTables, seq: Any, cached: int) -> None:
        start, seq.cached = seq.cached, cached
        self.fill(seq, start)

    monkeypatch.setattr(BlockTables, "settle", keep)


def patch_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """drafts go beyond the length of a child"""
    guess = Drafts._draft

    def beyond(self: Drafts, seq: Any) -> Any:
        limit, seq.limit = seq.limit, seq.limit + 9
        try:
            return guess(self, seq)
        finally:
            seq.limit = limit

    monkeypatch.setattr(Drafts, "_draft", beyond)
    patch_ended(monkeypatch)


def append_run(state: Any, row: Any, draws: Any, first: int, trusted: bool = False, deaf: bool = False) -> Any:
    """`output._append_run` of the mutants. trusted: whatever was sampled counts as expected. deaf: no end stops it."""
    seq, had, reason = row.seq, len(row.seq.output), None
    for at in range(row.draws):
        reason = output._append(state, seq, draws, first + at) or reason
        wrong = at == len(row.expected) or (draws.each[first + at][0] != row.expected[at] and not trusted)
        if wrong or (reason is not None and not deaf):
            break
    if reason != "error":
        state.tables.settle(seq, seq.cached + len(seq.output) - had - 1)
    return reason


MUTANTS: list[Callable[[pytest.MonkeyPatch], None]] = [
    patch_accept, patch_counter, patch_ended, patch_settle, patch_blocks, patch_last,
]  # fmt: skip


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__doc__)
def test_mutants_are_caught(mutant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    mutant(monkeypatch)
    with pytest.raises((AssertionError, KeyError, IndexError, AttributeError, TypeError)):
        for seed in range(120):
            guessing(seed, 6)


def test_groups_that_race_end_alike_with_drafts_and_without(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which children are the first does not depend on what was guessed; the control drafts for them too."""

    def cut(drafts: int) -> list[tuple[str, int, int]]:
        h = Harness(128, 0, block_size=4, max_num_seqs=16, max_batch_tokens=64, drafts=drafts)
        for number in range(8):
            h.submit(f"g{number}", [1, 2, 3, 4, 5, 1], n=5, max_tokens=30, finish_after=2, seed=2 * number + 1)
        h.finish()
        return sorted((id, index, len(sample.token_ids)) for (id, index), sample in h.got.items())

    plain = cut(0)
    assert cut(6) == plain
    monkeypatch.setattr(drafts, "may_draft", lambda seq: seq.state.forked and seq.given is None and not seq.pending)
    assert cut(6) != plain


def test_the_random_schedules_draft() -> None:
    """Else they would show nothing."""
    counted = [random_schedule(seed).scheduler.state.counters for seed in range(30)]
    assert sum(each.drafted_tokens for each in counted) > sum(each.accepted_tokens for each in counted) > 20


def test_an_index_goes_with_its_group() -> None:
    scheduler, indexes = small_scheduler(32, drafts=3, max_batch_tokens=16), 0
    submit(scheduler, "g", [*range(1, 9), 1, 2], n=2, max_tokens=6)
    while scheduler.state.has_work:
        step(scheduler, 3)
        indexes = max(indexes, len(drafts_of(scheduler).indexes))
    assert indexes == 1 and not scheduler.state.groups
    submit(scheduler, "h", [1, 2, 3], max_tokens=6)
    while scheduler.state.has_work:
        step(scheduler, 3)
    gc.collect()
    assert [state.group.id for state in drafts_of(scheduler).indexes] in ([], ["h"])
