"""Groups that end when they should, children that go on anywhere: what is stopped, moved or split comes out the same."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from rollout.client.handle import PartialOutputs
from rollout.engine.engine import Engine
from rollout.engine.values import Group, Limits, PartialSample, Sample, Sampling, TokenChunk
from rollout.transport.checks import Bounds
from tests.support.equivalence import assert_same
from tests.support.nightly import Draw
from tests.support.plans import commit, launch, rows, small_scheduler, step, submit
from tests.support.simulator import END, script
from tests.support.tiny import tiny, tiny_engine
from tests.support.toy import engine as toy_engine
from tests.support.toy import group, run

Samples = dict[tuple[str, int], Sample]


def only(each: Group, indices: list[int], partials: list[Sample]) -> Group:
    return msgspec.structs.replace(each, indices=tuple(sorted(indices)), partials=tuple(map(PartialSample.of, partials)))


def interrupted(engine: Engine, each: Group, steps: int) -> list[Sample]:
    """The group after so many steps: its children as far as they have come."""
    engine.submit(each)
    samples = [sample for _ in range(steps) if engine.has_work for sample in engine.step()]
    return samples + engine.abort(each.id)


# ── children that have begun ──────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("have", [[1, 0, 0], [0, 3, 0], [2, 0, 7], [1, 2, 3], [7, 7, 7]])
def test_children_go_on_from_what_they_have(have: list[int]) -> None:
    """Fresh ones beside them draw their first token where the prompt ends; the tokens they had come back with the rest."""
    asked = group("g", range(5, 16), n=3, max_tokens=8, ignore_eos=True)
    whole = run(toy_engine(), [asked])
    partials = tuple(
        PartialSample(index=i, token_ids=s.token_ids[:k], logprobs=s.logprobs[:k], weight_versions=[(0, 0)])
        for i, k in enumerate(have)
        if (s := whole["g", i]) and k
    )
    engine = toy_engine()
    assert_same(whole, run(engine, [msgspec.structs.replace(asked, partials=partials)]))
    assert engine.counters.generated_tokens == 24 - sum(have), "nothing is drawn twice"


def stale_engine(indices: tuple[int, ...] | None, lag: int | None, cancelled: int | None = None) -> Samples:
    """Children 1 (of version 0, if that is not too old already) and 2 (of version 1) go on, 0 is fresh; version 2 comes in the
    middle of the prompt."""
    oldest = 0 if lag is None else max(0, 1 - lag)
    asked = group("g", [5 + i % 17 for i in range(80)], n=3, max_tokens=8, ignore_eos=True, max_version_lag=lag)
    whole = run(toy_engine(), [asked])
    partials = tuple(
        msgspec.structs.replace(PartialSample.of(whole["g", i]), token_ids=whole["g", i].token_ids[:3],
                                logprobs=whole["g", i].logprobs[:3], weight_versions=[(0, max(i - 1, oldest))]) for i in (1, 2)
        if indices is None or i in indices
    )  # fmt: skip
    engine = toy_engine(max_batch_tokens=32)
    engine.refresh({})
    engine.submit(msgspec.structs.replace(asked, indices=indices, partials=partials))
    assert not engine.step() and not engine.scheduler.state.groups["g"].sequences[0].output, "in the middle of the prompt"
    if cancelled is not None:
        assert not engine.abort("g", cancelled)
    engine.refresh({})
    return run(engine)


def test_a_child_that_goes_on_ends_as_stale_before_its_group_has_forked() -> None:
    got = stale_engine(None, lag=1)
    assert lengths(got) == [("length", 8), ("stale", 3), ("length", 8)]
    assert got["g", 1].weight_versions == [(0, 0)] and got["g", 2].weight_versions == [(0, 1), (3, 2)]
    assert lengths(stale_engine(None, lag=0)) == [("length", 8), ("stale", 3), ("stale", 3)]
    assert lengths(stale_engine(None, lag=2)) == lengths(stale_engine(None, lag=None)) == [("length", 8)] * 3, "the control"


def test_a_group_ends_whose_children_are_stale_or_cancelled() -> None:
    """No prompt is computed for nobody; a stale child that was cancelled is not counted twice."""
    assert lengths(stale_engine((0, 1), lag=1, cancelled=0)) == [("aborted", 0), ("stale", 3)]
    assert lengths(stale_engine((0, 1), lag=1, cancelled=1)) == [("length", 8), ("stale", 3)]


@pytest.mark.parametrize("indices", [(0,), (2,), (1, 3), (0, 2, 4)])
def test_some_children_of_a_group(indices: tuple[int, ...]) -> None:
    asked = group("g", range(5, 16), n=5, max_tokens=8)
    whole = run(toy_engine(), [asked])
    part = run(toy_engine(), [msgspec.structs.replace(asked, indices=indices)])
    assert_same({("g", i): whole["g", i] for i in indices}, part)


class Engines:
    """Engines of one model, each used again when it has nothing to do: what it did before must not matter."""

    def __init__(self, **options: Any) -> None:
        self._options = options
        self._module = tiny("llama", getattr(torch, options["dtype"]))
        self._made: dict[tuple[int, int, int], Engine] = {}

    def __call__(self, number: int, drafts: int, max_batch_tokens: int = 128) -> Engine:
        """Return engine `number` with so many drafts, with nothing to do."""
        key = number, drafts, max_batch_tokens
        if key not in self._made:
            options = {"max_num_seqs": 8, "max_batch_tokens": max_batch_tokens, "drafts": drafts, **self._options}
            self._made[key] = tiny_engine(model=self._module, **options)
        assert not self._made[key].has_work
        return self._made[key]

    @property
    def accepted(self) -> int:
        """Tokens that were drafted and stayed, in all engines."""
        return sum(engine.counters.accepted_tokens for engine in self._made.values())


def stopped_and_resumed(r: random.Random, engines: Engines) -> None:
    """A group is stopped after some steps, in some way, and its unfinished children go on elsewhere, on two engines; each
    engine has drafts or none."""
    n, seed = r.randrange(1, 7), r.randrange(1000)
    cuts = {"temperature": r.choice([0.0, 0.7, 1.0]), "top_p": r.choice([1.0, 0.9]), "raw_logprobs": r.random() < 0.5}
    cuts["top_logprobs"] = r.choice([0, 0, 3])
    asked = group("g", [r.randrange(3, 199) for _ in range(r.randrange(1, 40))], n=n, max_tokens=24, seed=seed, **cuts)
    whole = run(engines(0, drafts=0), [asked])
    for _ in range(3):
        got: Samples = {}
        way, engine = r.choice((interrupted, cut_by_siblings, split, crashed)), engines(1, r.choice([0, 6]))
        elsewhere = [engines(2 + i, r.choice([0, 6]), max_batch_tokens=r.choice([8, 128])) for i in range(2)]
        for sample in way(engine, asked, r.randrange(30)):
            ended = sample.finish_reason in ("stop", "length")
            got["g", sample.index] = sample if ended else resumed(elsewhere[sample.index % 2], asked, sample)
        engine.abort(asked.id)
        assert_same(whole, got)
        for key, sample in got.items():
            assert sample.weight_versions == whole[key].weight_versions and sample.seed == whole[key].seed
            raw = whole[key].raw_logprobs
            assert raw is None or (sample.raw_logprobs is not None and raw.tobytes() == sample.raw_logprobs.tobytes())


def cut_by_siblings(engine: Engine, each: Group, number: int) -> list[Sample]:
    """The group when enough of its children have ended by themselves: how many follows from `number`."""
    sampling = msgspec.structs.replace(each.sampling, finish_after=1 + number % each.sampling.n)
    return list(run(engine, [msgspec.structs.replace(each, sampling=sampling)]).values())


def split(engine: Engine, each: Group, steps: int) -> list[Sample]:
    """Half of the children after so many steps; the others have not begun."""
    mine = list(each.wanted)[::2]
    samples = interrupted(engine, only(each, mine, []), steps)
    return samples + [unfinished(each, None, index) for index in each.wanted if index not in mine]


def crashed(engine: Engine, each: Group, steps: int) -> list[Sample]:
    """What was streamed of the group when its engine is lost after so many steps: whole samples, and chunks of tokens."""
    known, samples, every = PartialOutputs(each), list[Sample](), 1 + steps % 5
    engine.submit(each)
    for _ in range(steps):
        if engine.has_work:
            samples += engine.step()
            since = {child.index: len(child.token_ids) for child in known.partial_samples()}
            for chunk in engine.chunks(each.id, since, every, 16):
                known.add(chunk, Bounds(engine.vocab_size, frozenset()))
    for sample in samples:
        known.end(sample.index)
    partials, gone = {child.index: child for child in known.partial_samples()}, {sample.index for sample in samples}
    return samples + [unfinished(each, partials.get(index), index) for index in each.wanted if index not in gone]


def unfinished(each: Group, partial: PartialSample | None, index: int) -> Sample:
    """A child as far as it is known."""
    return Sample(
        group_id=each.id,
        index=index,
        token_ids=np.zeros(0, np.int32) if partial is None else partial.token_ids,
        logprobs=np.zeros(0, np.float32) if partial is None else partial.logprobs,
        raw_logprobs=None if partial is None else partial.raw_logprobs,
        top_ids=None if partial is None else partial.top_ids,
        top_logprobs=None if partial is None else partial.top_logprobs,
        finish_reason="aborted",
        weight_versions=[] if partial is None else partial.weight_versions,
        prompt_tokens=len(each.prompt),
        seed=each.sampling.seed or 0,
    )


def resumed(engine: Engine, asked: Group, sample: Sample) -> Sample:
    part = only(asked, [sample.index], [sample] if len(sample.token_ids) else [])
    ((_, whole),) = run(engine, [part]).items()
    return whole


@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=pytest.mark.long), "bfloat16"])
def test_stopped_and_resumed_elsewhere(dtype: str) -> None:
    engines = Engines(dtype=dtype)
    for seed in range(24):  # six, and more where slow steps make drafts rare
        if seed >= 6 and engines.accepted > 10:
            break
        stopped_and_resumed(random.Random(seed), engines)
    assert engines.accepted > 10


@pytest.mark.long
@pytest.mark.timeout(14_400)
@pytest.mark.parametrize("prefix_cache", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_stopped_and_resumed_elsewhere_long(dtype: str, prefix_cache: bool, new_seeds: Draw) -> None:
    engines, runs = Engines(dtype=dtype, prefix_cache=prefix_cache), 0
    for seed in new_seeds(1000):
        stopped_and_resumed(random.Random(seed), engines)
        runs += 1
    assert engines.accepted > 2 * runs - 20


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("kv_tokens", [4096, 96])
def test_chunks_of_children_that_run_are_what_their_samples_begin_with(kv_tokens: int, overlap: bool) -> None:
    """Whoever looks, and however often, under pressure and over a refresh: nothing changes but what is known sooner."""
    groups = [group(f"g{i}", range(5, 9 + 4 * i), n=5, max_tokens=30, seed=i, raw_logprobs=True) for i in range(3)]
    plain = run(toy_engine(kv_tokens=kv_tokens, overlap_steps=overlap), groups)
    engine = toy_engine(kv_tokens=kv_tokens, overlap_steps=overlap)
    for each in groups:
        engine.submit(each)
    known: dict[tuple[str, int], list[TokenChunk]] = {}
    told: dict[str, dict[int, int]] = {each.id: {} for each in groups}
    got = {}
    while engine.has_work:
        got |= {(sample.group_id, sample.index): sample for sample in engine.step()}
        for each in groups:
            chunks = engine.chunks(each.id, told[each.id], 3, 7)
            assert sum(len(chunk.token_ids) for chunk in chunks) <= 7
            for chunk in chunks:
                assert chunk.first == told[each.id].get(chunk.index, 0)
                told[each.id][chunk.index] = chunk.first + len(chunk.token_ids)
                known.setdefault((each.id, chunk.index), []).append(chunk)
    assert_same(plain, got)
    assert len(known) > 10 and engine.chunks("none", {}, 1, 10) == []
    for key, chunks in known.items():
        for name in ("token_ids", "logprobs", "raw_logprobs"):
            joined, whole = np.concatenate([getattr(chunk, name) for chunk in chunks]), getattr(got[key], name)
            assert joined.tobytes() == whole[: len(joined)].tobytes()


def test_spans_of_a_chunk_count_from_its_first_token() -> None:
    engine, asked = toy_engine(), group("g", range(5, 16), n=1, max_tokens=20, ignore_eos=True)
    engine.submit(asked)
    for version in (0, 2, 3):
        engine.scheduler.refresh(version, "keep")
        for _ in range(4):
            engine.step()
    assert engine.chunks("g", {}, 1, 99)[0].weight_versions == [(0, 0), (4, 2), (8, 3)]
    assert engine.chunks("g", {0: 3}, 1, 99)[0].weight_versions == [(0, 0), (1, 2), (5, 3)]
    assert engine.chunks("g", {0: 5}, 1, 4)[0].weight_versions == [(0, 2), (3, 3)]
    assert engine.chunks("g", {0: 8}, 1, 99)[0].weight_versions == [(0, 3)]
    assert engine.chunks("g", {0: 8}, 9, 99) == []


def test_another_seed_would_be_noticed() -> None:
    """The negative control."""
    asked = group("g", range(5, 16), n=2, max_tokens=12, seed=1, ignore_eos=True)
    whole = run(tiny_engine(), [asked])
    stopped = interrupted(tiny_engine(), asked, 5)
    wrong = msgspec.structs.replace(asked, sampling=msgspec.structs.replace(asked.sampling, seed=2))
    with pytest.raises(AssertionError):
        assert_same(whole, run(tiny_engine(), [only(wrong, [0, 1], stopped)]))


def test_under_newer_weights_the_spans_say_so() -> None:
    engine = toy_engine()
    asked = group("g", range(5, 16), n=2, max_tokens=8, ignore_eos=True)
    stopped = interrupted(engine, asked, 4)
    engine.scheduler.refresh(3, "keep")
    for sample in run(engine, [only(asked, [0, 1], stopped)]).values():
        assert sample.weight_versions == [(0, 0), (len(stopped[0].token_ids), 3)] and len(sample.token_ids) == 8


def test_children_that_go_on_share_the_prompt() -> None:
    """Each prefills its own tokens; the prompt is computed once, by the first of them or by the fresh ones."""
    engine, asked = toy_engine(), group("g", range(5, 21), n=3, max_tokens=12, ignore_eos=True)
    stopped = interrupted(toy_engine(), asked, 6)
    run(engine, [only(asked, [0, 1, 2], stopped)])
    had = sum(len(sample.token_ids) for sample in stopped)
    assert engine.counters.prefill_tokens <= 16 + had


def partial_with(**changed: Any) -> PartialSample:
    fields = {"token_ids": np.array([5, 6], np.int32), "logprobs": np.zeros(2, np.float32), "weight_versions": [(0, 0)]}
    return PartialSample(**{"index": 0, **fields, **changed})


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"token_ids": np.array([5, 700], np.int32)}, "holds token id 700"),
        ({"token_ids": np.array([-1, 5], np.int32)}, "holds token id -1"),
        ({"token_ids": np.arange(9, dtype=np.int32), "logprobs": np.zeros(9, np.float32)}, "max_tokens=8"),
        ({"token_ids": np.zeros(0, np.int32), "logprobs": np.zeros(0, np.float32)}, "max_tokens=8"),
        ({"token_ids": np.array([5, 6], np.int64)}, "int64"),
        ({"token_ids": np.array([0, 5], np.int32)}, "has tokens after stop token 0 at position 0"),
        ({"logprobs": np.zeros(3, np.float32)}, "logprobs float32"),
        ({"weight_versions": []}, "weight_versions"),
        ({"weight_versions": [(1, 0)]}, "weight_versions"),
        ({"weight_versions": [(0, 0), (2, 1)]}, "weight_versions"),
        ({"weight_versions": [(0, -1)]}, "below 0"),
        ({"index": 2}, "must be requested"),
        ({"top_ids": None}, r"top_ids none: must be int32 \[2, 3\]"),
        ({"top_ids": np.zeros((2, 3), np.int64)}, "top_ids int64"),
        ({"top_ids": np.full((2, 3), 23, np.int32)}, "top_ids outside of 0 to 22"),
        ({"top_logprobs": np.zeros((2, 4), np.float32)}, "top_logprobs float32"),
    ],
)
def test_what_cannot_go_on_is_refused(changed: dict[str, Any], reason: str) -> None:
    engine, asked = toy_engine(), group("g", [5, 6], n=2, max_tokens=8, top_logprobs=3)
    top = {"top_ids": np.zeros((2, 3), np.int32), "top_logprobs": np.zeros((2, 3), np.float32)}
    with pytest.raises(ValueError, match=reason):
        engine.submit(msgspec.structs.replace(asked, partials=(partial_with(**{**top, **changed}),)))
    assert not engine.has_work, "nothing is allocated"
    engine.submit(msgspec.structs.replace(asked, partials=(partial_with(**top),)))


@pytest.mark.parametrize("indices", [(), (2,), (-1,), (1, 0), (0, 0)])
def test_indices_that_are_none_of_the_group_are_refused(indices: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="indices="):
        toy_engine().submit(msgspec.structs.replace(group("g", [5], n=2), indices=indices))


@pytest.mark.parametrize("others", [True, False])
def test_a_child_that_is_complete_comes_back_at_once(others: bool) -> None:
    """It counts among those that have ended by themselves. So whatever was cut may go on, also what was cut too late."""
    whole = run(toy_engine(), [natural()])
    late = run(toy_engine(), [natural(finish_after=1)])
    cut = [sample for sample in late.values() if sample.finish_reason == "cut"]
    done = whole["g", 0]
    engine, indices = toy_engine(), [0, *(sample.index for sample in cut if sample.index)] if others else [0]
    engine.submit(only(natural(), indices, [sample for sample in [done, *cut] if sample.index in indices][: len(indices)]))
    (first,) = engine.step()
    assert_same({("g", 0): done}, {("g", 0): first})
    assert_same({("g", i): whole["g", i] for i in indices[1:]}, run(engine))
    with pytest.raises(ValueError, match="finish_after=1: 1 of the partial samples"):
        engine.submit(only(natural(finish_after=1), [0, 1], [done]))


def test_a_child_from_weights_too_old_is_refused() -> None:
    engine = toy_engine()
    engine.scheduler.refresh(5, "keep")
    engine.weights.version = 5
    asked = msgspec.structs.replace(group("g", [5, 6], n=2, max_tokens=8, max_version_lag=2), partials=(partial_with(),))
    with pytest.raises(ValueError, match="max_version_lag=2"):
        engine.submit(asked)


def test_one_child_is_cancelled() -> None:
    """The others do not notice."""
    engine, asked = toy_engine(), group("g", range(5, 16), n=3, max_tokens=8, ignore_eos=True)
    whole = run(toy_engine(), [asked])
    engine.submit(asked)
    for _ in range(5):
        assert engine.step() == []
    (ended,) = engine.abort("g", 1)
    assert (ended.index, ended.finish_reason) == (1, "aborted") and 0 < len(ended.token_ids) < 8
    assert engine.abort("g", 1) == engine.abort("g", 7) == engine.abort("none", 0) == []
    rest = run(engine)
    assert_same({key: whole[key] for key in (("g", 0), ("g", 2))}, rest)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("cancelled", [[0], [2], [0, 1], [3], [0, 3]])
def test_children_cancelled_before_the_fork_end_there(cancelled: list[int], overlap: bool) -> None:
    """Child 3 has begun already; the first one prefills the prompt for all."""
    asked = group("g", range(5, 16), n=4, max_tokens=8, ignore_eos=True)
    whole = run(toy_engine(), [asked])
    partial = msgspec.structs.replace(whole["g", 3], token_ids=whole["g", 3].token_ids[:2], logprobs=whole["g", 3].logprobs[:2])
    engine = toy_engine(overlap_steps=overlap)
    engine.submit(msgspec.structs.replace(asked, partials=(PartialSample.of(partial),)))
    for index in cancelled:
        assert engine.abort("g", index) == []
    got = run(engine)
    assert [key[1] for key, sample in sorted(got.items()) if sample.finish_reason == "aborted"] == cancelled
    assert all(len(got["g", index].token_ids) <= 2 for index in cancelled)
    assert 3 not in cancelled or got["g", 3].token_ids.tolist() == partial.token_ids.tolist()
    kept = {key: sample for key, sample in got.items() if key[1] not in cancelled}
    assert_same({key: whole[key] for key in kept}, kept)


def test_a_group_whose_children_are_all_cancelled_ends_at_once() -> None:
    engine = toy_engine()
    engine.submit(group("g", range(5, 16), n=2))
    assert engine.abort("g", 1) == []
    assert [sample.finish_reason for sample in engine.abort("g", 0)] == ["aborted"] * 2
    assert not engine.has_work


# ── when a group ends ─────────────────────────────────────────────────────────────────────────────────────────────────────


def lengths(samples: Samples) -> list[tuple[str, int]]:
    return [(sample.finish_reason, len(sample.token_ids)) for _, sample in sorted(samples.items())]


def natural(**options: Any) -> Group:
    """Children that end by themselves after different numbers of tokens."""
    return group("g", [7, 8, 9], **{"n": 6, "max_tokens": 60, "seed": 3, **options})


def test_the_rest_is_cut_when_enough_have_ended() -> None:
    whole = run(toy_engine(), [natural()])
    by_length = sorted((len(sample.token_ids), index) for (_, index), sample in whole.items())
    assert by_length[2][0] < by_length[3][0], "the third to end does so before the fourth"
    got = run(toy_engine(), [natural(finish_after=3)])
    first = {index for _, index in by_length[:3]}
    for (_, index), sample in got.items():
        assert sample.finish_reason == (whole["g", index].finish_reason if index in first else "cut")
        assert sample.token_ids.tolist() == whole["g", index].token_ids.tolist()[: by_length[2][0]], "all that it had, in step"
        assert len(sample.logprobs) == len(sample.token_ids) and sample.weight_versions == [(0, 0)]


def test_of_those_that_end_in_one_step_the_lower_index_counts() -> None:
    got = run(toy_engine(), [group("g", [7, 8], n=4, max_tokens=5, ignore_eos=True, finish_after=2)])
    assert lengths(got) == [("length", 5), ("length", 5), ("cut", 5), ("cut", 5)]


def test_no_child_is_cut_too_short() -> None:
    whole = run(toy_engine(), [natural()])
    least = max(len(sample.token_ids) for sample in whole.values()) - 1
    got = run(toy_engine(), [natural(finish_after=1, min_len_to_cut=least)])
    for key, sample in got.items():
        ended = len(whole[key].token_ids) <= least
        assert (sample.finish_reason, len(sample.token_ids)) == ((whole[key].finish_reason, len(whole[key].token_ids)) if ended
                                                                 else ("cut", least))  # fmt: skip


@pytest.mark.parametrize(("least", "ends"), [(0, 0), (3, 0), (5, 2), (10, 2)])
def test_a_complete_child_that_need_not_be_cut_counts(least: int, ends: int) -> None:
    """Up to `min_len_to_cut` tokens, whether it ends in the step in which enough have ended, as child 1, or later, as 2."""
    scheduler, own, ended = small_scheduler(64), np.array([[5, 5, 6, 30]]), Samples()
    sampling = Sampling(n=4, max_tokens=30, finish_after=1, min_len_to_cut=least)
    scheduler.submit(Group("0", np.array([7, 8], np.int32), sampling), "", 1, frozenset({END}))
    while scheduler.state.has_work:
        plan = launch(scheduler)
        for sample in commit(scheduler, plan, script(scheduler, plan, own)):
            ended["0", sample.index] = sample
    got = lengths(ended)
    assert got[:2] == [("stop", 5), ("stop" if ends else "cut", 5)]
    assert got[2:] == [("stop", 6) if least > 5 else ("cut", 5), ("cut", max(5, least))]


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("kv_tokens", [4096, 96])
def test_cut_children_leave_nothing_behind(kv_tokens: int, overlap: bool) -> None:
    engine = toy_engine(kv_tokens=kv_tokens, overlap_steps=overlap)
    groups = [natural(finish_after=k) for k in (1, 3, 6)]
    run(engine, [msgspec.structs.replace(each, id=f"g{i}") for i, each in enumerate(groups)])
    engine.scheduler.state.store.forget_cached()
    assert not engine.scheduler.state.store.device.used


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize("paused", [False, True])
def test_a_deadline_ends_the_group(paused: bool) -> None:
    engine, clock = toy_engine(), Clock()
    engine.scheduler.state.clock = clock
    engine.submit(group("late", range(5, 9), n=2, max_tokens=50, ignore_eos=True, deadline_s=10))
    engine.submit(group("other", range(5, 9), n=1, max_tokens=12, ignore_eos=True, deadline_s=11))
    for _ in range(3):
        assert engine.step() == []
    if paused:
        engine.pause()
    clock.now += 10.5
    assert engine.has_work
    ended = engine.step()
    assert [(s.group_id, s.index, s.finish_reason, len(s.token_ids)) for s in ended] == [
        ("late", 0, "deadline", 3),
        ("late", 1, "deadline", 3),
    ]
    assert ended[0].seconds == 10.5
    engine.resume()
    assert run(engine)["other", 0].finish_reason == "length"
    clock.now += 10
    assert engine.step() == [] and not engine.has_work, "a deadline that has gone by is forgotten with its group"


def test_a_deadline_counts_for_a_group_that_has_not_started() -> None:
    engine, clock = toy_engine(), Clock()
    engine.scheduler.state.clock = clock
    engine.submit(group("g", [5, 6], n=3, deadline_s=1))
    clock.now += 2
    assert [(s.index, s.finish_reason, len(s.token_ids)) for s in engine.step()] == [(i, "deadline", 0) for i in range(3)]


def test_deadlines_of_groups_that_have_ended_are_forgotten() -> None:
    """A client that gives each group a year does not fill the memory; a deadline that still counts is kept."""
    engine, clock = toy_engine(), Clock()
    engine.scheduler.state.clock = clock
    engine.submit(group("late", range(5, 9), n=1, max_tokens=50, ignore_eos=True, deadline_s=10))
    for number in range(500):
        engine.submit(group(f"g{number}", [5, 6], n=1, max_tokens=1, deadline_s=3e7))
        engine.abort(f"g{number}")
    assert len(engine.scheduler.state.deadlines) < 100
    clock.now += 11
    assert [sample.finish_reason for sample in engine.step()] == ["deadline"]


def test_who_starts_first() -> None:
    """By priority, whoever came first; equal ones in turn."""
    scheduler = small_scheduler(max_num_seqs=1)
    for name, priority in (("a", 0), ("b", -1), ("c", 2), ("d", 2)):
        submit(scheduler, name, [1, 2, 3], max_tokens=1, priority=priority)
    assert [step(scheduler)[0][0] for _ in range(4)] == ["c", "d", "a", "b"]


@pytest.mark.parametrize("priorities", [(0, 0, 0, 0, 0), (0, 3, -1, 3, 2)])
def test_samples_do_not_depend_on_priorities(priorities: tuple[int, ...]) -> None:
    """Nor does anything get lost: under pressure, with and without host memory."""
    roomy = run(toy_engine(kv_tokens=4096), [msgspec.structs.replace(natural(seed=i), id=f"g{i}") for i in range(5)])
    asked = [msgspec.structs.replace(natural(seed=i, priority=priority), id=f"g{i}") for i, priority in enumerate(priorities)]
    for host in (0, 0.0001):
        engine = toy_engine(kv_tokens=96, cpu_offload_gib=host)
        assert_same(roomy, run(engine, asked))
        assert engine.counters.recompute_preemptions + engine.counters.offloads >= 3


def test_who_is_preempted_first() -> None:
    scheduler = small_scheduler(max_num_seqs=2)
    submit(scheduler, "low", [1, 2, 3], max_tokens=9, priority=-1)
    submit(scheduler, "high", [1, 2, 3], max_tokens=9)
    step(scheduler)
    last = max(scheduler.state.running, key=lambda seq: seq.rank)
    assert last.state.group.id == "low", "although it is the older one"


@pytest.mark.parametrize(
    ("sampling", "reason"),
    [
        ({"finish_after": 0}, "finish_after=0: must be None or at least 1"),
        ({"finish_after": 3}, "between 1 and n=2"),
        ({"min_len_to_cut": 1}, "without finish_after"),
        ({"finish_after": 1, "min_len_to_cut": 9}, "max_tokens=8"),
        ({"deadline_s": 0.0}, "positive, finite"),
        ({"deadline_s": float("nan")}, "positive, finite"),
        ({"deadline_s": float("inf")}, "positive, finite"),
        ({"priority": 10**7}, "priority="),
    ],
)
def test_policies_that_make_no_sense_are_refused(sampling: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        group("g", [5], n=2, max_tokens=8, **{k: v for k, v in sampling.items()}).validate(Limits(), 199, 512)


def test_more_than_the_wanted_children_cannot_end() -> None:
    asked = msgspec.structs.replace(group("g", [5], n=4, finish_after=3), indices=(0, 1))
    with pytest.raises(ValueError, match="at most the 2 requested"):
        asked.validate(Limits(), 199, 512)


def test_the_seed_comes_back() -> None:
    engine = toy_engine()
    engine.submit(Group("g", np.array([5, 6], np.int32), Sampling(n=2, max_tokens=4)))
    one, other = run(engine).values()
    assert one.seed == other.seed
    again = run(toy_engine(), [group("g", [5, 6], n=2, max_tokens=4, seed=one.seed)])
    assert [s.token_ids.tolist() for s in again.values()] == [one.token_ids.tolist(), other.token_ids.tolist()]


def test_a_fork_draws_for_the_wanted_children() -> None:
    scheduler = small_scheduler()
    submit(scheduler, "g", [11, 12, 13], n=3)
    plan = scheduler.plan()
    assert rows(scheduler, plan) == [("g", 0, 0, 3, 3)] and plan.sampling["index"].tolist() == [0, 1, 2]
