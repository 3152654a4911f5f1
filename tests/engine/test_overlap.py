"""Steps that overlap: the next one is launched before the last one is read, and the samples are the same."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from rollout.engine import engine as engine_module
from rollout.engine import pipeline, worker
from rollout.engine.cpu import device
from rollout.engine.cpu.exact_modules import plain_products
from rollout.engine.cuda.memory import to_device, to_host
from rollout.engine.engine import Engine
from rollout.engine.forward.batch import Batch
from rollout.engine.forward.sampling import PendingTokens, SamplingBatch, launch_draws
from rollout.engine.kv.pages import PagedKV
from rollout.engine.memory import HostMemory
from rollout.engine.scheduling.scheduler import Scheduler
from rollout.engine.scheduling.sequence import Sequence
from rollout.engine.values import Group, Sample
from rollout.engine.weights.live import Weights, WeightsTorn
from tests.support.equivalence import assert_same
from tests.support.harness import random_schedule
from tests.support.invariants import check
from tests.support.tiny import tiny_engine
from tests.support.toy import ToyModel, expected, group, run
from tests.support.toy import engine as toy_engine

ENDLESS = {"max_tokens": 40, "ignore_eos": True}


def overlapped(model: ToyModel | None = None, **options: object) -> Engine:
    return toy_engine(model, overlap_steps=True, **options)


def mixture() -> list[Group]:
    """Children that end by a stop token, at different lengths, after one token; prompts alike and longer than a step."""
    long = [1 + i % 22 for i in range(70)]
    return [
        group("stops", [3, 1, 4], n=8, max_tokens=30, seed=3),
        group("once", [5, 6], n=5, max_tokens=1, seed=4),
        group("long", long, n=3, max_tokens=20, seed=5, min_tokens=4),
        group("alike", long, n=2, max_tokens=9, seed=6, temperature=0.0),
        group("alone", [7], n=1, max_tokens=25, seed=7),
        *(group(f"late{i}", [9, i + 1], n=2, max_tokens=3 + 5 * i, seed=i) for i in range(4)),
    ]


class Record:
    """What the host does, in order: ("launch", step), ("read", step). `fail_at`: steps whose draws cannot be read."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.events: list[tuple[str, int]] = []
        self.fail_at: set[int] = set()
        self.steps = 0
        monkeypatch.setattr(device, "launch_draws", self.launch)

    def launch(self, logits: torch.Tensor, batch: SamplingBatch, native: Any) -> PendingTokens:
        self.steps += 1
        step, draws = self.steps, launch_draws(logits, batch, native)
        self.events.append(("launch", step))

        def read() -> Any:
            self.events.append(("read", step))
            if step in self.fail_at:
                raise RuntimeError("injected failure of a device")
            return draws.read()

        return PendingTokens(draws.tokens, read)


@pytest.mark.parametrize(
    "options",
    [{}, {"max_num_seqs": 3}, {"kv_tokens": 100}, {"kv_tokens": 100, "cpu_offload_gib": 0.001}, {"prefix_cache": False}],
    ids=["roomy", "few places", "preemptions by recompute", "offload", "no prefix cache"],
)
def test_the_samples_are_the_same(options: dict[str, Any]) -> None:
    plain, over = toy_engine(**options), overlapped(**options)
    assert_same(run(plain, mixture()), run(over, mixture()))
    assert over.counters.generated_tokens == plain.counters.generated_tokens
    assert over.counters.unused_draws > 0 and not plain.counters.unused_draws
    assert "kv_tokens" not in options or over.counters.recompute_preemptions + over.counters.offloads > 0


def test_a_prompt_is_prefilled_once_also_by_a_step_in_flight() -> None:
    """The second group comes when the prefill of the first is under way."""
    long = [1 + i % 22 for i in range(64)]
    for e in (toy_engine(), overlapped()):
        e.submit(group("first", [*long, 1], n=2))
        e.step()
        run(e, [group("second", [*long, 2], n=2)])
        assert e.counters.prefill_tokens <= 66 + 32, "what is in flight was not found"


def test_every_step_is_launched_before_the_one_before_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    record = Record(monkeypatch)
    e = overlapped()
    got = run(e, [group("g", [1, 2, 3], n=4, **ENDLESS)])
    last = record.steps
    want = [("launch", 1), ("read", 1), ("launch", 2)]  # the fork: its children are not there before it is read
    for step in range(3, last + 1):
        want += [("launch", step), ("read", step - 1)]
    assert record.events == [*want, ("read", last)] and last == e.counters.steps
    assert [got["g", i].token_ids.tolist() for i in range(4)] == expected(group("g", [1, 2, 3], n=4, **ENDLESS))
    assert e.counters.unused_draws == 0, "the longest length is known ahead"


def test_one_by_one_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control."""
    record = Record(monkeypatch)
    run(toy_engine(), [group("g", [1, 2, 3], n=4, **ENDLESS)])
    assert record.events == [(kind, step) for step in range(1, record.steps + 1) for kind in ("launch", "read")]


def in_flight(e: Engine, *groups: Group, steps: int = 6) -> list[Sample]:
    for each in groups:
        e.submit(each)
    samples = [sample for _ in range(steps) for sample in e.step()]
    assert e.pipeline.in_flight
    return samples


def finish(e: Engine) -> list[Sample]:
    samples = []
    while e.has_work:
        samples += e.step()
        check(e.scheduler)
    assert not e.pipeline.in_flight and not e.scheduler.state.store.used
    return samples


def test_abort_with_a_step_in_flight() -> None:
    e = overlapped()
    assert not in_flight(e, group("gone", [1, 2], n=3, **ENDLESS), group("stays", [3], n=2, **ENDLESS))
    gone = e.abort("gone")
    check(e.scheduler)
    want = expected(group("gone", [1, 2], n=3, **ENDLESS))
    assert [sample.token_ids.tolist() for sample in gone] == [tokens[: len(gone[0].token_ids)] for tokens in want]
    assert len(gone[0].token_ids) >= 4
    stays = sorted(finish(e), key=lambda sample: sample.index)
    assert [sample.token_ids.tolist() for sample in stays] == expected(group("stays", [3], n=2, **ENDLESS))
    assert e.counters.unused_draws == 3


def test_abort_of_all_with_a_step_in_flight() -> None:
    e = overlapped()
    in_flight(e, group("g", [1, 2], n=3, **ENDLESS))
    assert len(e.abort("g")) == 3 and e.has_work
    assert finish(e) == []


def test_abort_of_a_prompt_whose_fork_is_in_flight() -> None:
    e = overlapped()
    in_flight(e, group("g", [1, 2], n=3), steps=1)
    assert [len(sample.token_ids) for sample in e.abort("g")] == [0, 0, 0]
    assert finish(e) == []


@pytest.mark.parametrize("rest", ["pause", "sleep", "refresh", "drain"])
def test_what_stops_the_engine_lands_the_step_first(rest: str) -> None:
    """Nothing is drawn twice, nothing lost, and no token is named after the version that follows it."""
    e = overlapped(cpu_offload_gib=0.001)
    some = [group("a", [1, 2], n=3, **ENDLESS), group("b", [3, 4, 5], n=2, **ENDLESS)]
    in_flight(e, *some)
    drawn = e.counters.generated_tokens
    if rest == "pause":
        e.pause()
        assert e.has_work and e.step() == [] and not e.has_work
        e.resume()
    elif rest == "sleep":
        e.sleep(1)
        assert not e.has_work
        e.wake()
    elif rest == "refresh":
        e.refresh({}, version=7)
    else:
        assert not e.drain() and e.has_work
    if rest != "drain":
        assert not e.pipeline.in_flight and e.counters.generated_tokens == drawn + 5
    check(e.scheduler)
    got = {(sample.group_id, sample.index): sample for sample in finish(e)}
    for each in some:
        assert [got[each.id, i].token_ids.tolist() for i in range(each.sampling.n)] == expected(each)
    if rest == "refresh":
        assert {tuple(sample.weight_versions) for sample in got.values()} == {((0, 0), (drawn // 5 + 1, 7))}


def test_a_child_that_ends_in_the_step_that_a_refresh_lands() -> None:
    e = overlapped()
    assert not in_flight(e, group("g", [1, 2], n=1, max_tokens=3, ignore_eos=True), steps=4)
    e.refresh({}, version=1)
    assert e.has_work
    (sample,) = e.step()
    assert sample.finish_reason == "length" and sample.weight_versions == [(0, 0)]
    assert finish(e) == []


def test_draws_that_cannot_be_read_end_the_groups_of_their_step(monkeypatch: pytest.MonkeyPatch) -> None:
    record = Record(monkeypatch)
    record.fail_at = {5}
    e = overlapped()
    samples = run(e, [group("g", [1, 2, 3], n=4, **ENDLESS)])
    assert {sample.error for sample in samples.values()} == {"RuntimeError: injected failure of a device"}
    assert {len(sample.token_ids) for sample in samples.values()} == {4}
    again = group("again", [1, 2, 3], n=4, **ENDLESS)
    samples = run(e, [again])
    assert [samples["again", i].token_ids.tolist() for i in range(4)] == expected(again)
    assert e.counters.failed_steps == 1 and e.counters.unused_draws == 4


class Garbage(ToyModel):
    """What its first forward writes is wrong."""

    def forward(self, batch: Batch, kv: PagedKV, backend: object) -> torch.Tensor:
        logits = super().forward(batch, kv, backend)
        if self.forwards == 1:
            kv.data[batch.slots // kv.block_size, 0, 0, 0, batch.slots % kv.block_size] = 77.0
        return logits


@pytest.mark.parametrize("overlap", [False, True], ids=["one by one", "overlapped"])
@pytest.mark.parametrize("aborted", [False, True], ids=["taken over", "aborted"])
def test_what_could_not_be_read_is_not_found_again(aborted: bool, overlap: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The KV of a step that failed on the device: no group reads it, neither one that found it meanwhile nor a later one."""
    Record(monkeypatch).fail_at = {1}
    e = toy_engine(Garbage(), overlap_steps=overlap)
    prompt = [1 + i % 22 for i in range(20)]
    e.submit(group("failed", [*prompt, 1], n=1))
    first = e.step()
    if aborted:
        first += e.abort("failed")
    assert e.counters.failed_steps == (not overlap)
    meanwhile, later = (group(name, [*prompt, at], n=1, ignore_eos=True) for at, name in enumerate(("meanwhile", "later"), 2))
    samples = {sample.group_id: sample for sample in first} | {key[0]: sample for key, sample in run(e, [meanwhile]).items()}
    assert samples["failed"].finish_reason == ("aborted" if aborted and overlap else "error")
    if overlap:
        assert samples["meanwhile"].finish_reason == "error", "it had taken the prefix over"
    else:
        assert samples["meanwhile"].token_ids.tolist() == expected(meanwhile)[0]
    assert run(e, [later])["later", 0].token_ids.tolist() == expected(later)[0]


def test_a_drain_waits_for_the_samples_that_a_refresh_landed() -> None:
    e = overlapped()
    assert not in_flight(e, group("g", [1, 2], n=1, max_tokens=3, ignore_eos=True), steps=4)
    e.refresh({}, version=1)
    assert not e.drain()
    assert len(e.step()) == 1 and e.drain()


def test_a_torn_refresh_takes_no_finished_sample_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def tear(weights: Weights, staging: Any) -> None:
        weights.torn = True
        raise WeightsTorn("injected")

    monkeypatch.setattr(Weights, "commit", tear)
    e = overlapped()
    assert not in_flight(e, group("g", [1, 2], n=1, max_tokens=3, ignore_eos=True), steps=4)
    with pytest.raises(WeightsTorn):
        e.refresh({}, version=1)
    (sample,) = e.step()
    assert sample.finish_reason == "length" and not e.has_work
    e.submit(group("next", [1]))
    with pytest.raises(WeightsTorn):
        e.step()


def test_seconds_are_those_of_the_step_that_was_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slow step's wait is booked to it, not to the one that was launched meanwhile; and all waits are booked."""
    slow, seconds, now = {1, 7}, 0.2, [0.0]

    def perf_counter() -> float:
        now[0] += 1e-6
        return now[0]

    class Slow(Record):
        def launch(self, logits: torch.Tensor, batch: SamplingBatch, native: Any) -> PendingTokens:
            draws, wait = super().launch(logits, batch, native), seconds * (self.steps in slow)

            def read() -> Any:
                now[0] += wait
                return draws.read()

            return PendingTokens(draws.tokens, read)

    Slow(monkeypatch)
    for module in (engine_module, pipeline, worker):
        monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=perf_counter))
    e = overlapped()
    run(e, [group("g", range(1, 20), n=4, max_tokens=5, ignore_eos=True)])
    assert 0 < e.counters.decode_seconds < 0.001, "the first step is no decode step"
    assert e.counters.step_seconds == pytest.approx(seconds, abs=0.001)
    run(e, [group("again", range(1, 20), n=4, max_tokens=5, ignore_eos=True)])
    assert e.counters.steps == 10 and e.counters.step_seconds == pytest.approx(2 * seconds, abs=0.001)
    assert e.counters.decode_seconds == pytest.approx(seconds, abs=0.001), "the seventh is one"
    assert e.counters.step_seconds >= e.counters.model_seconds + e.counters.sample_seconds >= 2 * seconds


def test_a_forward_that_fails_does_not_take_the_step_before_with_it() -> None:
    model = ToyModel()
    model.fail_at = {5}
    e = overlapped(model, max_num_seqs=4)
    samples = run(e, [group("g", [1, 2, 3], n=4, **ENDLESS)])
    assert {(sample.finish_reason, len(sample.token_ids)) for sample in samples.values()} == {("error", 4)}
    assert_same(run(e, mixture()), run(toy_engine(max_num_seqs=4), mixture()))


def test_a_copy_that_fails_with_a_step_in_flight() -> None:
    e = overlapped(kv_tokens=60, cpu_offload_gib=0.0001)
    move, calls, flying = e.worker.kv.move, [0], [0]

    def broken(moves: Any, *spans: Any) -> Any:
        calls[0] += bool(moves)
        if moves and calls[0] % 3 == 0:
            flying[0] += len(e.pipeline.in_flight)
            move(type(moves)(offloads=moves.offloads))
            raise MemoryError("injected failure of a copy")
        return move(moves, *spans)

    e.worker.kv.move = broken  # type: ignore[method-assign]
    groups = [group(f"g{i}", range(1, 9), n=4, max_tokens=16, seed=i, ignore_eos=True) for i in range(4)]
    samples = run(e, groups)
    assert e.counters.failed_moves > 2 and flying[0] > 0
    for each in groups:
        assert [samples[each.id, i].token_ids.tolist() for i in range(4)] == expected(each)


def test_nan_in_a_step_in_flight_ends_its_child_only() -> None:
    class Sick(ToyModel):
        def forward(self, *args: Any) -> torch.Tensor:
            logits = super().forward(*args)
            if self.forwards == 5:
                logits[1] = torch.nan
            return logits

    got = run(overlapped(Sick()), [group("g", [1, 2, 3], n=3, **ENDLESS)])
    want = expected(group("g", [1, 2, 3], n=3, **ENDLESS))
    assert [got["g", i].finish_reason for i in range(3)] == ["length", "error", "length"]
    assert got["g", 1].token_ids.tolist() == want[1][:4]
    assert [got["g", i].token_ids.tolist() for i in (0, 2)] == [want[0], want[2]]


class Waits(TorchDispatchMode):
    """Notes the operators that bring a value to the host, for which it would have to wait for a device."""

    ASKING = ("_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "unique", "equal.default")

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen += [name for name in self.ASKING if name in str(operator)]
        return operator(*args, **(kwargs or {}))


class NoAttention:
    def attend(self, layer: int, query: torch.Tensor, *_: Any) -> torch.Tensor:
        return torch.zeros_like(query)


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3_text", "mixtral"])
def test_the_forward_of_a_decode_step_asks_for_no_value(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And neither does what gives it the tokens that are still pending. tests/gpu has the same with a device."""
    e = tiny_engine(name, attention="reference", overlap_steps=True)
    e.submit(group("g", range(5, 40), n=4, max_tokens=10, ignore_eos=True))
    for _ in range(4):
        e.step()
    model: Any = e.model
    plain_products(model.module)  # as on a device: experts of ours on the CPU read which rows they get
    monkeypatch.setattr(model, "forward", lambda batch, kv, _: model.forward_transformers(batch, kv, NoAttention()))
    with Waits() as waits:
        e.pipeline.execute(e.scheduler.plan())
    flight = e.pipeline.in_flight[-1]
    assert waits.seen == [] and len(flight.result.draws.tokens) == 4
    with Waits() as waits:
        assert (flight.result.draws.tokens.float().mean() > 1e9).item() is False
    assert waits.seen == ["_local_scalar_dense"]


def test_arrays_keep_their_values_on_the_way() -> None:
    some = [np.arange(5), np.array([-7]), np.arange(0)]
    for sent in (HostMemory().send(some), to_device(some, torch.device("cpu"))):
        assert [each.tolist() for each in sent] == [each.tolist() for each in some]
    tensor = torch.arange(6).view(2, 3)
    assert to_host(tensor)().tolist() == tensor.tolist()


def test_arrays_go_to_cuda_from_pinned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """From pageable memory the host would wait until all that was launched before has run."""
    seen: list[object] = []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: seen.append("pinned") or self)  # type: ignore[func-returns-value]
    monkeypatch.setattr(torch.Tensor, "to", lambda self, *args, **how: seen.append(how) or self)  # type: ignore[func-returns-value]
    to_device([np.arange(5), np.array([7])], torch.device("cuda"))
    assert seen == ["pinned", {"non_blocking": True}]


def never_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """a sequence is stopped while a token of it is pending"""
    stop_sequences = Scheduler._stop_sequences

    def blind(self: Scheduler) -> bool:
        in_flight, self.state.in_flight = self.state.in_flight, {}
        try:
            return stop_sequences(self)
        finally:
            self.state.in_flight = in_flight

    monkeypatch.setattr(Scheduler, "_stop_sequences", blind)


def takes_the_newest(monkeypatch: pytest.MonkeyPatch) -> None:
    """a token that becomes known takes the place of the one that is still pending"""
    append = Sequence.append

    def wrong(self: Sequence, token: int, *rest: Any) -> None:
        append(self, token, *rest)
        self.pending_draw = None

    monkeypatch.setattr(Sequence, "append", wrong)


def forgets_who_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """rows of children that have ended are taken note of"""
    monkeypatch.setattr(Sequence, "ended", property(lambda self: False, lambda self, value: None))


def counts_from_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    """a pending token is looked for at the first draw of the step"""
    expect = Sequence.expect
    monkeypatch.setattr(Sequence, "expect", lambda self, draw: expect(self, 0))


def fills_what_is_pending(monkeypatch: pytest.MonkeyPatch) -> None:
    """a block goes into the index before its last token is known"""
    launched = Scheduler.launched

    def wrong(self: Scheduler, plan: Any) -> None:
        pending = [(seq, seq.pending) for seq in self.sequences_of(plan)]
        for seq, _ in pending:
            seq.pending = 0
        launched(self, plan)
        for seq, count in pending:
            seq.pending += count

    monkeypatch.setattr(Scheduler, "launched", wrong)


@pytest.mark.parametrize(
    "mutant",
    [never_waits, takes_the_newest, forgets_who_ended, counts_from_zero, fills_what_is_pending],
    ids=lambda mutant: mutant.__doc__,
)
def test_mutants_are_caught(mutant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control of the random schedules, half of which overlap."""
    mutant(monkeypatch)
    with pytest.raises((AssertionError, KeyError, IndexError, ValueError)):
        for seed in range(400):
            random_schedule(seed)
