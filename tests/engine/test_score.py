"""Log-probs of given tokens: equal to the bit to those that generation gave, whatever stands beside them."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from rollout.engine.engine import Engine
from rollout.engine.forward.batch import Batch
from rollout.engine.forward.sampling import SamplingBatch, launch_draws
from rollout.engine.scheduling import scheduler
from rollout.engine.values import Group, PartialSample, Sample, Sampling
from tests.support.draws import cuts_of
from tests.support.invariants import check
from tests.support.tiny import tiny_engine
from tests.support.toy import engine as toy_engine
from tests.support.toy import group, run

Samples = dict[tuple[str, int], Sample]
OPTIONS: dict[str, dict[str, Any]] = {
    "roomy": {},
    "small chunks": {"max_batch_tokens": 64},
    "one at a time": {"max_num_seqs": 1},
    "preemptions by recompute": {"kv_tokens": 320, "prefix_cache": False},
    "offload": {"kv_tokens": 320, "cpu_offload_gib": 0.01},
    "overlapped": {"overlap_steps": True},
}


def to_score(asked: Group, samples: Samples) -> Group:
    """The same group, whose children's tokens are given."""
    partials = [PartialSample.of(samples[asked.id, index]) for index in asked.wanted]
    asked_for = {"raw_logprobs": None, "top_ids": None, "top_logprobs": None}
    blank = [msgspec.structs.replace(child, logprobs=np.zeros_like(child.logprobs), **asked_for) for child in partials]
    return msgspec.structs.replace(asked, partials=tuple(blank), score=True)


def given(id: str, prompt: list[int], *completions: list[int], **sampling: Any) -> Group:
    """A group to score."""
    partials = [
        PartialSample(
            index=i, token_ids=np.array(each, np.int32), logprobs=np.zeros(len(each), np.float32), weight_versions=[(0, 0)]
        )
        for i, each in enumerate(completions)
    ]
    options = {"n": len(completions), "max_tokens": max(map(len, completions)), "seed": 1, **sampling}
    return Group(id, np.array(prompt, np.int32), Sampling(**options), None, tuple(partials), score=True)


def mixture(r: random.Random, count: int) -> list[Group]:
    """Groups of all ways to draw; some of their prompts are alike."""
    base, groups = [r.randrange(3, 199) for _ in range(30)], []
    for number in range(count):
        cuts = {
            "temperature": r.choice([0.0, 0.7, 1.0]),
            "top_p": r.choice([1.0, 0.9]),
            "top_k": r.choice([0, 20]),
            "min_tokens": r.choice([0, 5]),
            "raw_logprobs": r.random() < 0.5,
            "top_logprobs": r.choice([0, 3]),
            **r.choice([{}, {}, {"repetition_penalty": 1.3}, {"frequency_penalty": 0.7}, {"logit_bias": {5: 3.0}}]),
        }
        prompt = base[: r.randrange(30)] + [r.randrange(3, 199) for _ in range(r.randrange(1, 20))]
        groups.append(group(f"g{number}", prompt, n=r.randrange(1, 5), max_tokens=r.randrange(5, 25), seed=number, **cuts))
    return groups


def assert_scored(want: Samples, got: Samples) -> None:
    """Tokens, log-probs and raw log-probs are the same to the bit."""
    assert want.keys() == got.keys()
    for key, sample in want.items():
        scored = got[key]
        assert scored.finish_reason == "scored" and scored.token_ids.tolist() == sample.token_ids.tolist()
        assert scored.logprobs.tobytes() == sample.logprobs.tobytes(), f"{key}: log-probs differ in some bit"
        for name in ("raw_logprobs", "top_ids", "top_logprobs"):
            given, drawn = getattr(scored, name), getattr(sample, name)
            assert (given is None) == (drawn is None) and (given is None or given.tobytes() == drawn.tobytes()), (
                f"{key}: {name}"
            )


@pytest.mark.some(3)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", OPTIONS)
def test_scores_are_what_generation_gave(name: str, dtype: str) -> None:
    """Beside groups that draw, on an engine of its own and on the one that drew them."""
    groups = mixture(random.Random(name), 8)
    drawing = tiny_engine(dtype=dtype)
    want = run(drawing, groups)
    scoring = [to_score(each, want) for each in groups]
    assert_scored(want, run(drawing, scoring))
    engine = tiny_engine(dtype=dtype, **OPTIONS[name])
    others = mixture(random.Random(1), 3)
    beside = run(engine, [*scoring, *(msgspec.structs.replace(each, id=f"o{each.id}") for each in others)])
    assert_scored(want, {key: sample for key, sample in beside.items() if not key[0].startswith("o")})
    assert engine.counters.scored_tokens == sum(len(sample.token_ids) for sample in want.values())


def test_a_shift_by_one_position_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control: logits of the token before are those of another distribution."""
    groups = mixture(random.Random(0), 2)
    want = run(tiny_engine(), groups)
    build = Batch.build

    def shifted(*args: Any) -> Batch:
        batch = build(*args)
        assert isinstance(batch, Batch)
        if batch.num_logits > 1:
            batch.logits_at[1:] = batch.logits_at[:-1].clone()
        return batch

    monkeypatch.setattr(Batch, "build", shifted)
    with pytest.raises(AssertionError, match="in some bit"):
        assert_scored(want, run(tiny_engine(), [to_score(each, want) for each in groups]))


def test_a_prompt_is_prefilled_once_and_nothing_is_drawn() -> None:
    engine = toy_engine(max_batch_tokens=64)
    run(engine, [given("g", [*range(1, 21)], *([[i + 1] * 9 for i in range(8)]), ignore_eos=True)])
    assert engine.counters.prefill_tokens == 20 + 7 * 4, "only what is in no whole block is prefilled again"
    assert (engine.counters.generated_tokens, engine.counters.scored_tokens) == (0, 72)
    assert engine.counters.first_tokens == 0, "nothing was sampled"


def test_few_logits_are_in_memory_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """64 completions of a thousand tokens: their logits would take gigabytes."""
    groups = mixture(random.Random(5), 6)
    want, scoring, most, build = run(tiny_engine(), groups), tiny_engine(), [0], Batch.build

    def seen(*args: Any) -> Batch:
        batch = build(*args)
        most[0] = max(most[0], batch.num_logits)
        return batch

    monkeypatch.setattr(Batch, "build", seen)
    monkeypatch.setattr(scheduler, "MAX_SCORES", 7)
    assert_scored(want, run(scoring, [to_score(each, want) for each in groups]))
    assert most == [7]


def test_stop_tokens_are_scored_like_others_and_impossible_ones_are_infinitely_unlikely() -> None:
    engine = tiny_engine()
    (sample,) = run(engine, [given("g", [5, 6, 7], [2, 9, 2, 2, 11])]).values()
    assert len(sample.logprobs) == 5 and np.isfinite(sample.logprobs).all()
    (cut,) = run(engine, [given("g", [5, 6, 7], [*range(20, 60)], top_k=1)]).values()
    assert np.isneginf(cut.logprobs).any() and cut.finish_reason == "scored"
    (forbidden,) = run(engine, [given("g", [5, 6, 7], [9, 2, 9, 2], min_tokens=3)]).values()
    assert np.isneginf(forbidden.logprobs).tolist() == [False, True, False, False]


@pytest.mark.parametrize("native", [True, False])
def test_given_tokens_beside_drawn_ones(native: bool) -> None:
    """One batch has both, in C and in torch: a draw is what it would be alone, and giving what it draws gives its log-prob."""
    from rollout.engine.cpu.kernels import choose

    kernel = choose().kernels if native else None
    logits = torch.randn(6, 97, generator=torch.Generator().manual_seed(0)) * 3
    temperature = np.array([1, 1, 0.7, 0.7, 0, 0], np.float32)
    batch = SamplingBatch(
        logits_row=np.arange(6), temperature=temperature, cuts=cuts_of([Sampling(), Sampling(top_k=5)] * 3),
        uniform=np.linspace(0.1, 0.9, 6), forbidden=[], raw=True,
    )  # fmt: skip
    drawn = launch_draws(logits, batch, kernel).read()
    for i in range(6):
        uniform = batch.uniform.copy()
        uniform[i] = -1.0 - drawn.tokens[i]
        again = launch_draws(logits, replace(batch, uniform=uniform), kernel).read()
        assert [a.tobytes() for a in again if a is not None] == [d.tobytes() for d in drawn if d is not None]
        uniform[i] = -1.0 - (drawn.tokens[i] + 1) % 97
        other = launch_draws(logits, replace(batch, uniform=uniform), kernel).read()
        assert other.tokens[i] == (drawn.tokens[i] + 1) % 97 and other.logprobs[i] != drawn.logprobs[i]


def test_a_refresh_in_the_middle_shows_in_the_spans() -> None:
    engine = tiny_engine(max_batch_tokens=64, max_num_seqs=1)
    engine.submit(given("g", [*range(5, 15)], [*range(20, 150)]))
    engine.step()
    engine.refresh(engine.model.module, version=3)  # type: ignore[attr-defined]
    (sample,) = run(engine).values()
    assert sample.weight_versions == [(0, 0), (55, 3)]


def test_an_abort_gives_back_what_was_scored() -> None:
    engine = tiny_engine(max_batch_tokens=64, max_num_seqs=1)
    engine.submit(given("g", [*range(5, 15)], [*range(20, 150)]))
    engine.step()
    (sample,) = engine.abort("g")
    assert sample.finish_reason == "aborted" and len(sample.logprobs) == len(sample.token_ids) == 55
    check(engine.scheduler)


def drawn_again(asked: Group, samples: Samples, **changes: Any) -> Group:
    """The same group, whose children's tokens are given and drawn again."""
    return msgspec.structs.replace(to_score(asked, samples), redraw=True, **changes)


@pytest.mark.some(3)
@pytest.mark.parametrize("name", OPTIONS)
def test_given_tokens_are_drawn_again(name: str) -> None:
    """All of them if they are right, else up to the first draw that is another token, which is the right one."""
    r, groups = random.Random(name), mixture(random.Random(name), 6)
    want = run(tiny_engine(), groups)
    assert_scored(want, run(tiny_engine(**OPTIONS[name]), [drawn_again(each, want) for each in groups]))
    wrong, first = dict(want), {}
    for key, sample in want.items():
        tokens = sample.token_ids.copy()
        first[key] = at = r.randrange(len(tokens))
        tokens[at] = (tokens[at] + 1) % 199
        wrong[key] = msgspec.structs.replace(sample, token_ids=tokens)
    engine = tiny_engine(**OPTIONS[name])
    assert_scored(prefixes(want, first), run(engine, [drawn_again(each, wrong) for each in groups]))
    check(engine.scheduler)
    again = run(engine, [msgspec.structs.replace(each, id=f"again {each.id}") for each in groups])
    for key, sample in want.items():
        after = again[f"again {key[0]}", key[1]]
        assert after.logprobs.tobytes() == sample.logprobs.tobytes(), "KV of wrong tokens was left behind"


def prefixes(samples: Samples, first: dict[tuple[str, int], int]) -> Samples:
    """The samples up to these tokens, with them."""
    columns = ("token_ids", "logprobs", "raw_logprobs", "top_ids", "top_logprobs")
    return {
        key: msgspec.structs.replace(
            sample, **{name: None if (a := getattr(sample, name)) is None else a[: first[key] + 1] for name in columns}
        )
        for key, sample in samples.items()
    }


def test_a_token_that_ends_a_child_ends_what_is_drawn_again() -> None:
    """Tokens behind it are not drawn."""
    asked = group("g", [5, 6, 7], n=1, max_tokens=20, seed=3, ignore_eos=True)
    want = run(tiny_engine(), [asked])
    tokens = want["g", 0].token_ids.tolist()
    at = next(i for i, token in enumerate(tokens) if i > 2 and token not in tokens[:i])
    ends = msgspec.structs.replace(asked.sampling, stop_token_ids=(tokens[at],))
    (again,) = run(tiny_engine(), [drawn_again(asked, want, sampling=ends)]).values()
    assert again.finish_reason == "scored" and again.token_ids.tolist() == tokens[: at + 1]
    (scored,) = run(tiny_engine(), [msgspec.structs.replace(to_score(asked, want), sampling=ends)]).values()
    assert len(scored.token_ids) == 20, "the negative control: scoring alone goes through"


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"partials": ()}, "give the tokens of all, in partials"),
        ({"score": False, "redraw": True}, "redraw=True without score"),
        ({"indices": (0, 1), "partials": "one"}, "give the tokens of all, in partials"),
        ({"sampling": Sampling(n=2, max_tokens=3, finish_after=1)}, "leave it out"),
        ({"sampling": Sampling(n=2, max_tokens=1)}, "max_tokens=1"),
    ],
)
def test_what_is_refused(change: dict[str, Any], why: str) -> None:
    engine: Engine = toy_engine()
    asked = given("g", [1, 2, 3], [4, 5, 6], [7])
    if change.get("partials") == "one":
        change = {**change, "partials": asked.partials[:1]}
    with pytest.raises(ValueError, match=why):
        engine.submit(msgspec.structs.replace(asked, **change))
    assert not engine.scheduler.state.groups and not engine.has_work
