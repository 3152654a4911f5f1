"""Scheduling by example: the state goes in, the rows of the next plan come out. Blocks hold 4 tokens, a step 8.

A row reads (group, child, start, count, samples): compute `count` tokens of the child from position `start` on, then sample.
"""

from __future__ import annotations

import random
from typing import Any

import msgspec
import numpy as np
import pytest

from rollout.engine import worker
from rollout.engine.forward.batch import Batch
from rollout.engine.forward.sampling import SamplingBatch
from rollout.engine.scheduling.plan import Plan
from rollout.engine.scheduling.scheduler import Scheduler
from tests.support.clock import Clock
from tests.support.plans import commit, launch, rows, sent, small_scheduler, step, submit
from tests.support.toy import engine as toy_engine
from tests.support.toy import group, run


def test_a_long_prompt_is_prefilled_in_chunks() -> None:
    scheduler = small_scheduler()
    submit(scheduler, "g", range(1, 21))
    assert step(scheduler) == [("g", 0, 0, 8, 0)]
    assert step(scheduler) == [("g", 0, 8, 8, 0)]
    assert step(scheduler) == [("g", 0, 16, 4, 1)], "the last chunk samples the first token"
    assert step(scheduler) == [("g", 0, 20, 1, 1)], "decode"


def test_the_time_to_the_first_token_is_counted_once_a_group() -> None:
    """From its arrival, over all chunks of its prompt and its wait; neither later tokens nor siblings count."""
    scheduler, clock = small_scheduler(), Clock(100.0)
    scheduler.state.clock = clock
    submit(scheduler, "g", range(1, 21), n=2)
    clock.now += 3.0
    for _ in range(3):
        assert scheduler.state.counters.first_tokens == 0
        clock.now += 0.5
        step(scheduler)
    counters = scheduler.state.counters
    assert (counters.first_tokens, counters.first_token_seconds) == (1, 4.5)
    clock.now += 7.0
    step(scheduler)
    submit(scheduler, "h", [21, 22, 23])
    clock.now += 2.0
    step(scheduler)
    assert (counters.first_tokens, counters.first_token_seconds) == (2, 6.5)


def test_a_plan_names_tokens_and_blocks() -> None:
    scheduler = small_scheduler()
    submit(scheduler, "g", [11, 12, 13, 14, 15, 16], temperature=0.5)
    plan = launch(scheduler)
    assert plan.token_ids.tolist() == [11, 12, 13, 14, 15, 16]
    assert plan.block_table.tolist() == [[0, 1]]
    assert plan.sampling["temperature"].tolist() == [0.5] and plan.positions.tolist() == [0]
    commit(scheduler, plan, token=17)
    plan = launch(scheduler)
    assert plan.token_ids.tolist() == [17] and plan.positions.tolist() == [1], "decode computes the token sampled last"


def test_a_whole_prompt_forks_into_its_children() -> None:
    scheduler = small_scheduler()
    submit(scheduler, "g", [11, 12, 13, 14, 15, 16], n=3)
    plan = launch(scheduler)
    assert rows(scheduler, plan) == [("g", 0, 0, 6, 3)], "one prefill, a sample for each child"
    assert plan.sampling["index"].tolist() == [0, 1, 2]
    commit(scheduler, plan)
    plan = launch(scheduler)
    assert rows(scheduler, plan) == [("g", 0, 6, 1, 1), ("g", 1, 6, 1, 1), ("g", 2, 6, 1, 1)]
    full, partial = plan.block_table.T.tolist()
    assert full == [0, 0, 0], "the full block of the prompt is shared"
    assert len(set(partial)) == 3, "each child writes its own copy of the partial one"
    assert plan.moves.copies == [(1, partial[0]), (1, partial[1])], "the last owner keeps the original"


def test_decode_goes_before_prefill() -> None:
    scheduler = small_scheduler()
    submit(scheduler, "old", [1, 2, 3])
    step(scheduler)
    submit(scheduler, "new", range(1, 21))
    assert step(scheduler) == [("old", 0, 3, 1, 1), ("new", 0, 0, 7, 0)], "7 of the 8 tokens are left for the prompt"
    assert step(scheduler) == [("old", 0, 4, 1, 1), ("new", 0, 7, 7, 0)]


def test_children_that_find_no_place_wait() -> None:
    scheduler = small_scheduler(max_num_seqs=2)
    submit(scheduler, "g", [1, 2, 3], n=3, max_tokens=2)
    step(scheduler)
    assert step(scheduler) == [("g", 0, 3, 1, 1), ("g", 1, 3, 1, 1)]
    assert step(scheduler) == [("g", 2, 3, 1, 1)]


def test_rows_that_stand_on_the_same_blocks_are_named() -> None:
    scheduler = small_scheduler()
    submit(scheduler, "alone", [1, 2, 3])
    step(scheduler)
    submit(scheduler, "fork", range(1, 7), n=3)
    step(scheduler)
    plan = launch(scheduler)
    assert [row.group for row in rows(scheduler, plan)] == ["alone", "fork", "fork", "fork"]
    assert plan.shared == ((1, 3, 1),), "three rows from row 1 on share one block"


def two_sequences_in_five_blocks(host_blocks: int) -> Scheduler:
    """Sequences that would grow to 4 blocks each. Each has filled 2 now, and decodes."""
    scheduler = small_scheduler(device_blocks=5, host_blocks=host_blocks, prefix_cache=False)
    submit(scheduler, "old", [1] * 6, max_tokens=8, priority=1)
    submit(scheduler, "young", [2] * 6, max_tokens=8)
    while min((seq.cached for seq in scheduler.state.running), default=0) < 8:
        step(scheduler)
    return scheduler


def test_a_preempted_sequence_comes_back_with_its_blocks() -> None:
    """The younger one leaves for host memory while the older one grows."""
    scheduler = two_sequences_in_five_blocks(host_blocks=5)
    plan = launch(scheduler)
    assert [row.group for row in rows(scheduler, plan)] == ["old"] and len(plan.moves.offloads) == 2
    commit(scheduler, plan)
    while "old" in scheduler.state.groups:
        assert [row.group for row in step(scheduler)] == ["old"]
    plan = launch(scheduler)
    assert rows(scheduler, plan) == [("young", 0, 8, 1, 1)], "decode goes on where it stopped"
    assert [host for host, _ in plan.moves.restores] == [0, 1] and plan.block_table.tolist()[0][:2] == [0, 1]


def test_without_host_memory_a_preempted_sequence_is_prefilled_again() -> None:
    scheduler = two_sequences_in_five_blocks(host_blocks=0)
    while "old" in scheduler.state.groups:
        assert [row.group for row in step(scheduler)] == ["old"]
    plan = launch(scheduler)
    assert rows(scheduler, plan) == [("young", 0, 0, 8, 0)], "prompt and output, in chunks"
    assert plan.token_ids.tolist() == [2] * 6 + [9] * 2
    commit(scheduler, plan)
    assert step(scheduler) == [("young", 0, 8, 1, 1)] and scheduler.state.counters.recomputed_tokens == 8


def test_a_prompt_seen_before_starts_behind_its_cached_blocks() -> None:
    scheduler = small_scheduler()
    submit(scheduler, "first", [*range(1, 9), 20])
    step(scheduler), step(scheduler)
    submit(scheduler, "second", [*range(1, 9), 30])
    assert step(scheduler)[-1] == ("second", 0, 8, 1, 1), "two full blocks are found in the prefix index"


def test_two_prompts_alike_are_prefilled_once() -> None:
    scheduler = small_scheduler(max_batch_tokens=32)
    submit(scheduler, "first", [*range(1, 9), 20])
    submit(scheduler, "second", [*range(1, 9), 30])
    assert step(scheduler) == [("first", 0, 0, 9, 1)], "the second waits for the first"
    assert step(scheduler) == [("first", 0, 9, 1, 1), ("second", 0, 8, 1, 1)]


def test_clients_take_turns_whatever_they_have_queued() -> None:
    scheduler = small_scheduler(max_num_seqs=2)
    for i in range(5):
        submit(scheduler, f"many{i}", [i + 1], client="a", max_tokens=2)
    submit(scheduler, "one", [9], client="b", max_tokens=2)
    assert [row.group for row in step(scheduler)] == ["many0", "one"]


def test_a_client_that_holds_every_place_gives_some_up() -> None:
    scheduler = small_scheduler(max_num_seqs=2)
    submit(scheduler, "wide", [1, 2, 3], client="a", n=2)
    step(scheduler)
    assert [row.group for row in step(scheduler)] == ["wide", "wide"]
    submit(scheduler, "other", [4, 5], client="b")
    assert step(scheduler) == [("wide", 0, 4, 1, 1), ("other", 0, 0, 2, 1)]


def test_a_token_that_is_not_read_yet_is_named_by_its_draw() -> None:
    """Steps overlap: the next plan is made before the last step's tokens are known."""
    scheduler = small_scheduler()
    submit(scheduler, "g", [11, 12, 13], n=2)
    step(scheduler, token=14)
    first = launch(scheduler)
    assert first.token_ids.tolist() == [14, 14] and len(first.pending_tokens) == 0
    second = launch(scheduler)
    assert rows(scheduler, second) == [("g", 0, 4, 1, 1), ("g", 1, 4, 1, 1)]
    assert second.pending_tokens.tolist() == [0, 1], "both tokens of the plan …"
    assert second.pending_draws.tolist() == [0, 1], "… are draws 0 and 1 of the step in flight"
    assert second.token_ids.tolist() == [0, 0]
    commit(scheduler, first, token=15)
    assert [seq.pending_draw for seq in scheduler.state.running] == [0, 1], "those of the second step"
    commit(scheduler, second, token=16)
    assert [(seq.last_token, seq.pending_draw) for seq in scheduler.state.running] == [(16, None)] * 2


def test_min_tokens_forbids_what_would_end_the_child() -> None:
    scheduler = small_scheduler()
    submit(scheduler, "g", [1, 2], n=2, min_tokens=2)
    assert [launch_and_commit(scheduler).forbidden for _ in range(3)] == [((0, (0,)), (1, (0,))), ((0, (0,)), (1, (0,))), ()]


def launch_and_commit(scheduler: Scheduler) -> Plan:
    plan = launch(scheduler)
    commit(scheduler, plan)
    return plan


# ── a plan is a value ─────────────────────────────────────────────────────────────────────────────────────────────────
def test_later_steps_do_not_change_a_plan() -> None:
    scheduler = small_scheduler(device_blocks=5, host_blocks=5)
    submit(scheduler, "g", range(1, 6), n=3, max_tokens=8)
    kept = []
    while scheduler.state.has_work:
        plan = launch(scheduler)
        kept.append((plan, plan.encode()))
        commit(scheduler, plan)
    assert all(plan.encode() == data for plan, data in kept)


def test_a_plan_with_a_live_object_cannot_be_sent() -> None:
    """The negative control of every test that sends plans."""
    scheduler = small_scheduler()
    submit(scheduler, "g", [1, 2])
    plan = launch(scheduler)
    with pytest.raises(TypeError, match="a plan holds a Sequence"):
        plan._replace(shared=(scheduler.state.running[0],)).encode()  # type: ignore[arg-type]


def raw(value: Any) -> bytes:
    """Return the bytes of arrays in tuples."""
    return msgspec.msgpack.encode(value, enc_hook=lambda array: (array.dtype.str, array.shape, array.tobytes()))


def same_batches(one: Batch, other: Batch) -> None:
    """Asserts that two batches are equal, array by array."""
    for kind, a, b in ((Batch, one, other), (SamplingBatch, one.sampling, other.sampling)):
        for name in kind.__slots__:
            left, right = getattr(a, name), getattr(b, name)
            if isinstance(left, SamplingBatch):
                continue
            if hasattr(left, "dtype"):
                assert left.dtype == right.dtype and left.shape == right.shape, name
                assert np.array_equal(np.asarray(left), np.asarray(right)), name
            elif name in ("adjust", "cuts"):
                assert raw(left) == raw(right), name
            else:
                assert left == right, name


def random_run(seed: int) -> dict[Any, Any]:
    """Samples of random groups through a toy engine with little KV; every other one overlaps its steps."""
    r = random.Random(seed)
    e = toy_engine(kv_tokens=r.choice([96, 256]), cpu_offload_gib=r.choice([0, 0.001]), overlap_steps=seed % 2 == 1)
    base = [r.randrange(1, 23) for _ in range(30)]
    for i in range(8):
        options = r.choice(
            [
                {},
                {"n": 5, "max_tokens": 20, "ignore_eos": True, "raw_logprobs": True},
                {"min_tokens": 5, "n": 3},
                {"n": 3, "repetition_penalty": 1.2, "logit_bias": {4: 1.0}, "max_tokens": 20},
            ]
        )
        e.submit(group(f"g{i}", [*base[: r.randrange(30)], r.randrange(1, 23)], **{"seed": i, **options}))
    samples = run(e)
    assert e.counters.failed_steps == 0, "see the log"
    return {key: (s.token_ids.tolist(), s.logprobs.tobytes(), s.finish_reason) for key, s in samples.items()}


def test_a_batch_is_the_same_of_a_plan_that_was_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    build, built = Batch.build, 0

    def both(plan: Plan, *rest: Any) -> Batch:
        nonlocal built
        batch, built = build(plan, *rest), built + 1
        same_batches(batch, build(sent(plan), *rest))
        return batch

    monkeypatch.setattr(worker.Batch, "build", staticmethod(both))
    for seed in range(2):
        random_run(seed)
    assert built > 50


def test_an_engine_whose_plans_are_sent_samples_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = [random_run(seed) for seed in range(4)]
    plan = Scheduler.plan
    monkeypatch.setattr(Scheduler, "plan", lambda self: None if (made := plan(self)) is None else sent(made))
    assert [random_run(seed) for seed in range(4)] == plain
