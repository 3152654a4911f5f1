"""Who goes first: a client that was idle before those that keep the engine busy, for a while; nobody starves."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from rollout.engine.config import EngineConfig
from rollout.engine.kv.block import PoolCounts
from rollout.engine.scheduling.build import open_scheduler
from rollout.engine.scheduling.credit import EXPECTED_S, LEVELS, MOST_IDLE, REFILL, RESERVE, SHORT_STEP_TOKENS, ClientCredit
from rollout.engine.scheduling.fairness import RoundRobin
from rollout.engine.scheduling.scheduler import Scheduler
from rollout.engine.scheduling.sequence import GroupState, Sequence, Submission
from rollout.engine.values import Group, Sampling
from tests.support.harness import TOKEN_S, Harness
from tests.support.plans import PlanRow, commit, launch, rows, submit

BUSY_S = 10.0
"""longer than any credit"""


def busy(shares: ClientCredit, client: str) -> None:
    """The client has work, and has had it for long."""
    shares.arrived(client, now=0.0)
    shares.computed({client: 1}, seconds=BUSY_S, held=False)


# ── credit ────────────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_a_new_client_has_full_credit() -> None:
    shares = ClientCredit(2.0)
    shares.arrived("a", now=0.0)
    assert shares.credits() == {"a": 2.0}


def test_credit_is_spent_by_the_part_of_the_steps_tokens() -> None:
    shares = ClientCredit(2.0)
    shares.arrived("a", now=0.0)
    shares.arrived("b", now=0.0)
    shares.computed({"a": 3, "b": 1}, seconds=1.0, held=False)
    assert shares.credits() == {"a": 1.25, "b": 1.75}


def test_credit_comes_back_only_without_work() -> None:
    shares = ClientCredit(2.0)
    busy(shares, "a")
    shares.arrived("a", now=100.0)
    assert shares.credits() == {"a": 0.0}, "it had work all the time"
    shares.left("a", now=101.0)
    shares.left("a", now=101.0)
    shares.arrived("a", now=101.25)
    assert shares.credits() == {"a": REFILL * 0.25}
    shares.left("a", now=102.0)
    shares.arrived("a", now=110.0)
    assert shares.credits() == {"a": 2.0}, "and no more than the most"


def test_the_foreground_is_whoever_is_on_the_highest_level() -> None:
    shares = ClientCredit(2.0)
    busy(shares, "old")
    shares.arrived("new", now=20.0)
    assert set(shares.priority({"old", "new"})) == {"new"}
    assert set(shares.priority({"old"})) == {"old"}, "the new one has nothing that may be computed"
    busy(shares, "other")
    assert set(shares.priority({"old", "other"})) == {"old", "other"}, "nobody has credit"
    shares.arrived("newer", now=20.0)
    shares.computed({"new": 1}, seconds=1.9 / LEVELS, held=True)
    assert set(shares.priority({"old", "new", "newer"})) == {"new", "newer"}, "the same level"


def test_off_nobody_goes_first() -> None:
    shares = ClientCredit(0.0)
    busy(shares, "old")
    shares.arrived("new", now=20.0)
    assert set(shares.priority({"old", "new"})) == {"old", "new"}


def test_whoever_comes_others_are_held_back_for_a_bounded_time() -> None:
    """New clients without end, each with full credit: after RESERVE × most seconds, credit ends at once, and of each further
    second the others have half."""
    shares, seconds = ClientCredit(2.0), {True: 0.0, False: 0.0}
    busy(shares, "old")
    for number in range(1000):
        shares.arrived(f"new{number}", now=20.0)
        while "old" not in shares.priority({"old", f"new{number}"}):
            shares.computed({f"new{number}": 1}, seconds=0.1, held=True)
            seconds[True] += 0.1
        shares.computed({"old": 1, f"new{number}": 1}, seconds=0.1, held=False)
        seconds[False] += 0.1
        shares.left(f"new{number}", now=20.0)
    assert seconds[True] <= RESERVE * 2.0 + seconds[False] + 0.2


def test_idle_clients_are_forgotten() -> None:
    shares = ClientCredit(2.0)
    for number in range(2 * MOST_IDLE):
        shares.arrived(f"c{number}", now=0.0)
        shares.left(f"c{number}", now=0.0)
    assert len(shares._credit) == len(shares._idle) == MOST_IDLE
    shares.arrived("last", now=EXPECTED_S)
    shares.left("last", now=EXPECTED_S)
    assert list(shares._credit) == list(shares._idle) == ["last"]


# ── short steps ───────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_steps_are_short_while_an_idle_client_may_come_back() -> None:
    shares = ClientCredit(2.0)
    busy(shares, "a")
    shares.computed({"a": 4000}, seconds=10.0, held=False)
    assert shares.most_tokens(1024, now=20.0) == 1024, "no other client is known"
    shares.arrived("b", now=20.0)
    assert shares.most_tokens(1024, now=20.0) == pytest.approx(0.1 * 400, abs=25), "it waits for the end of the step"
    shares.left("b", now=20.0)
    assert shares.most_tokens(1024, now=20.0 + EXPECTED_S / 2) < 100
    assert shares.most_tokens(1024, now=20.0 + EXPECTED_S) == 1024
    assert shares.most_tokens(16, now=20.0) == 16


def test_steps_of_clients_that_all_keep_busy_are_long() -> None:
    shares = ClientCredit(2.0)
    busy(shares, "a")
    busy(shares, "b")
    shares.computed({"a": 4000}, seconds=10.0, held=False)
    assert shares.most_tokens(1024, now=20.0) == 1024


def test_a_short_step_has_a_least_size() -> None:
    shares = ClientCredit(2.0)
    busy(shares, "a")
    shares.arrived("b", now=0.0)
    shares.computed({"a": 512}, seconds=1000.0, held=False)
    assert shares.most_tokens(1024, now=0.0) == SHORT_STEP_TOKENS


def sequences(client: str, first: int, count: int) -> list[Sequence]:
    group = Group("g", np.array([1], np.int32), Sampling())
    numbers = range(first, first + count)
    return [Sequence(GroupState(Submission(group, client, number, 0, 0.0), frozenset()), 0) for number in numbers]


def test_sequences_take_turns_in_equal_parts_for_each_client() -> None:
    turns, many, few = RoundRobin(), sequences("many", 0, 9), sequences("few", 9, 2)
    taken = [turns.take([*many, *few], 6) for _ in range(3)]
    assert all(turn[-2:] == few for turn in taken), "both of the two, each time"
    assert [seq for turn in taken for seq in turn[:-2]] == [*many[:8], many[0], many[1], many[2], many[8]]
    assert turns.take(few, 6) == few


# ── scheduling ────────────────────────────────────────────────────────────────────────────────────────────────────────────
def harness(device_blocks: int = 64, host_blocks: int = 64, **config: Any) -> Harness:
    options = {"block_size": 4, "max_num_seqs": 8, "max_batch_tokens": 64, "min_run_tokens": 100, "foreground_s": 2.0, **config}
    return Harness(device_blocks, host_blocks, **options)


def keep_busy(h: Harness, groups: int = 4) -> None:
    """A client with more than fits, until it has no credit."""
    for number in range(groups):
        assert h.submit(f"many{number}", [7 + number] * 40, "many", n=8, max_tokens=150, seed=number)
    while h.scheduler.state.credit.credits()["many"]:
        h.step()
        h.check()


def answer(h: Harness, number: int = 0) -> int:
    """A client that was idle comes with a small group. Returns the steps until that is done."""
    before = h.scheduler.state.counters.generated_tokens
    assert h.submit(f"few{number}", [3, number + 5, 4], "few", n=2, max_tokens=8, seed=number)
    for step in range(1, 2000):
        h.step()
        h.check()
        if f"few{number}" not in h.scheduler.state.groups and not (h.flight and h.overlap):
            return step
    raise AssertionError(f"few is not done after {h.scheduler.state.counters.generated_tokens - before} tokens")


@pytest.mark.some(4)
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(("device", "host"), [(400, 0), (64, 64), (64, 400), (64, 0)])
def test_a_small_group_does_not_wait_behind_huge_work(device: int, host: int, overlap: bool) -> None:
    """Slots and blocks are all taken; the small group takes as many steps as alone, one or two more where steps overlap."""
    alone = answer(harness(device, host))
    h = harness(device, host, overlap=overlap)
    keep_busy(h)
    took = []
    for number in range(5):
        h.now += 1.0
        took.append(answer(h, number))
        for _ in range(10):
            h.step()
            h.check()
    assert max(took) <= alone + 2 * overlap + 1
    h.finish()


def test_without_foreground_a_small_group_waits() -> None:
    """The negative control."""
    alone = answer(harness(foreground_s=0.0))
    h = harness(foreground_s=0.0)
    keep_busy(h)
    for _ in range(10):
        h.step()
    assert answer(h) > 2 * alone


def test_samples_are_the_same() -> None:
    """To the bit, whoever goes first; `Harness.finish` compares each with what it must be."""
    got = []
    for foreground_s in (0.0, 0.05, 2.0):
        h = harness(foreground_s=foreground_s)
        for number in range(3):
            h.submit(f"many{number}", [7 + number] * 40, "many", n=4, max_tokens=60, seed=number)
        for number in range(4):
            h.now += 1.0
            for _ in range(5):
                h.step()
            h.submit(f"few{number}", [3, number], "few", n=2, max_tokens=8, seed=number)
        h.finish()
        got.append({key: sample.token_ids.tolist() for key, sample in h.got.items()})
    assert got[0] == got[1] == got[2]


def test_while_there_is_room_those_held_back_lose_nothing() -> None:
    """KV stays on the device, nothing is computed again, and they go on as they were."""
    h = harness(device_blocks=600, host_blocks=0)
    keep_busy(h, groups=1)
    ran = {seq.age for seq in h.scheduler.state.running}
    answer(h)
    while any(seq.held for seq in h.scheduler.state.waiting):
        h.step()
    assert h.scheduler.state.counters.recomputed_tokens == h.scheduler.state.counters.recompute_preemptions == 0
    assert ran == {seq.age for seq in h.scheduler.state.running}


def test_two_clients_that_keep_busy_are_computed_side_by_side() -> None:
    """They spend their credit once; from then on no step leaves one of them out."""
    h = harness(device_blocks=600)
    for client in ("a", "b"):
        assert h.submit(client, [7], client, n=4, max_tokens=150, seed=1)
    while any(h.scheduler.state.credit.credits().values()):
        h.step()
    began = h.now
    while len(h.scheduler.state.groups) == 2:
        assert set(h.scheduler.state.table.of_client) == {"a", "b"} and not h.scheduler.state.others_wait
        h.step()
    assert h.now > began


def test_a_client_that_always_comes_back_leaves_others_their_time() -> None:
    """It asks again at once: its credit does not come back, and the others go on. With pauses it is held to a part as well."""
    for pause, least in ((0.0, 0.5), (0.1, 0.2)):
        h = harness(device_blocks=600, max_num_seqs=16)
        keep_busy(h)
        drawn, few, number, began = h.scheduler.state.counters.generated_tokens, 0, 0, h.now
        while h.now < began + 60 and any(id.startswith("many") for id in h.scheduler.state.groups):
            if not any(id.startswith("few") for id in h.scheduler.state.groups):
                h.now += pause
                number += 1
                assert h.submit(f"few{number}", [3, number % 90 + 5], "few", n=2, max_tokens=8, seed=number)
            h.step()
        few = sum(len(s.token_ids) for s in h.got.values() if s.group_id.startswith("few"))
        all_drawn = h.scheduler.state.counters.generated_tokens - drawn
        assert all_drawn - few >= least * all_drawn, f"{few} of {all_drawn} tokens for the client that came back"


def test_draining_a_client_that_may_not_begin_holds_nobody_back() -> None:
    h = harness()
    keep_busy(h, groups=1)
    h.scheduler.state.admitting = False
    h.submit("few", [3], "few", n=1, max_tokens=4)
    h.step()
    assert set(h.scheduler.state.table.of_client) == {"many"}


def short_scheduler(device_blocks: int = 4000) -> tuple[Scheduler, list[float]]:
    """A scheduler with steps of 256 tokens, and its clock."""
    now = [0.0]
    config = EngineConfig(kv_tokens=1, block_size=4, max_batch_tokens=256, max_num_seqs=128)
    return open_scheduler(config, PoolCounts(device_blocks, 0, 400), lambda: now[0]), now


def timed_step(scheduler: Scheduler, now: list[float]) -> list[PlanRow]:
    plan = launch(scheduler)
    planned = rows(scheduler, plan)
    now[0] += plan.num_tokens * TOKEN_S
    commit(scheduler, plan)
    return planned


def test_only_the_blocks_that_are_needed_leave() -> None:
    """Without host memory, over a full pool: what is computed again is the KV that the small group took, to whole blocks."""
    scheduler, now = short_scheduler(device_blocks=55)
    submit(scheduler, "many", range(1, 121), "many", max_tokens=100)
    for _ in range(90):
        timed_step(scheduler, now)
    assert scheduler.state.credit.credits() == {"many": 0.0} and scheduler.state.store.available == 2
    submit(scheduler, "few", range(200, 216), "few", max_tokens=8)
    while scheduler.state.groups:
        timed_step(scheduler, now)
    assert 0 < scheduler.state.counters.recomputed_tokens <= 24


def test_chunks_are_short_beside_a_client_that_may_come_back() -> None:
    """Alone a client has all of a step; once another was there, SHORT_STEP_TOKENS, as 0.1 s computes fewer."""
    scheduler, now = short_scheduler()
    submit(scheduler, "a", range(1, 1001), "a")
    assert [row.count for row in timed_step(scheduler, now)] == [256]
    submit(scheduler, "b", [5], "b", max_tokens=1)
    timed_step(scheduler, now)
    assert "b" not in scheduler.state.groups
    assert [row.count for row in timed_step(scheduler, now)] == [SHORT_STEP_TOKENS]
    now[0] += EXPECTED_S
    assert [row.count for row in timed_step(scheduler, now)] == [256]


def test_decode_takes_turns_in_short_steps() -> None:
    """100 children, SHORT_STEP_TOKENS a step: after four steps each had one or two, and a fork's draws are bounded as well."""
    scheduler, now = short_scheduler()
    submit(scheduler, "b", [5], "b", max_tokens=100, n=1)
    for _ in range(80):
        timed_step(scheduler, now)
    scheduler.state.abort("b")
    for number in range(100):
        submit(scheduler, f"a{number}", [5, number + 1], "a", max_tokens=100)
    while scheduler.state.waiting:
        assert sum(row.count for row in timed_step(scheduler, now)) <= SHORT_STEP_TOKENS
    drawn = [len(seq.output) for seq in scheduler.state.running]
    for _ in range(4):
        assert len(timed_step(scheduler, now)) == SHORT_STEP_TOKENS
    more = [len(seq.output) - before for seq, before in zip(scheduler.state.running, drawn, strict=True)]
    assert set(more) == {1, 2} and sum(more) == 4 * SHORT_STEP_TOKENS


def test_forks_in_short_steps_take_turns() -> None:
    scheduler, now = short_scheduler()
    submit(scheduler, "b", [5], "b", max_tokens=100)
    for _ in range(80):
        timed_step(scheduler, now)
    scheduler.state.abort("b")
    for number in range(3):
        submit(scheduler, f"a{number}", [5, number + 1], "a", n=40, max_tokens=100)
    assert [row.samples for row in timed_step(scheduler, now)] == [40]
