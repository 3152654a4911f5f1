"""Which weights computed the KV that a sample attended to: said where it does not follow from the tokens' versions."""

from __future__ import annotations

import random

import msgspec
import numpy as np
import pytest

from rollout.engine.engine import Engine
from rollout.engine.scheduling.sequence import kv_at_end
from rollout.engine.values import PartialSample, Sample, TokenColumns
from tests.support.tiny import tiny, tiny_engine
from tests.support.toy import group, run

PROMPT = [*range(5, 16)]


def refreshed(kv: str, steps: int = 4, **sampling: object) -> tuple[Engine, Sample]:
    """Return a sample that lived through a refresh after `steps` steps, and its engine."""
    engine = tiny_engine(drafts=0, overlap_steps=False)
    engine.submit(group("g", PROMPT, n=1, max_tokens=12, seed=1, ignore_eos=True, **sampling))
    for _ in range(steps):
        engine.step()
    engine.refresh(tiny("llama", seed=1), version=3, kv=kv)  # type: ignore[arg-type]
    (sample,) = run(engine).values()
    return engine, sample


def test_kv_that_is_kept_is_named() -> None:
    """Version 3 drew tokens 4 and later; it computed the KV of token 3, and version 0 that of all before."""
    _, sample = refreshed("keep")
    assert sample.weight_versions == [(0, 0), (4, 3)]
    assert sample.kv_versions == [(4, 0, 0), (4, len(PROMPT) + 3, 3)]


def test_nothing_is_said_where_it_follows() -> None:
    """Of one version, or with all KV computed again."""
    _, sample = refreshed("recompute")
    assert sample.weight_versions == [(0, 0), (4, 3)] and sample.kv_versions == []
    (plain,) = run(tiny_engine(), [group("g", PROMPT, n=1, max_tokens=5, seed=1)]).values()
    assert plain.kv_versions == []


def test_a_prompt_of_older_weights_is_named() -> None:
    """Of another group, and of the turn before."""
    engine, sample = refreshed("keep")
    longer = group("next", [*PROMPT, *sample.token_ids.tolist(), 9], n=1, max_tokens=3, seed=1, max_kv_lag=9)
    (late,) = run(engine, [longer]).values()
    assert late.weight_versions == [(0, 3)] and late.kv_versions[:2] == [(0, 0, 0), (0, 14, 3)]
    turn = msgspec.structs.replace(group("turn", longer.prompt.tolist(), n=1, max_tokens=3, seed=1), after=("g", 0))
    (after,) = run(engine, [turn]).values()
    assert after.kv_versions == late.kv_versions and after.token_ids.tolist() == late.token_ids.tolist()
    (fresh,) = run(engine, [group("fresh", [4, *longer.prompt.tolist()], n=1, max_tokens=3, seed=1)]).values()
    assert fresh.kv_versions == [], "the negative control: nothing of it was known"


def test_a_child_that_continues_says_what_it_had_attended_to() -> None:
    """All its KV is computed by the weights that continue it."""
    _, sample = refreshed("keep")
    had = PartialSample(index=0, **sample.slice(0, 8).columns())
    assert had.kv_versions == sample.kv_versions
    engine = tiny_engine()
    engine.refresh(tiny("llama", seed=2), version=5)
    asked = msgspec.structs.replace(group("g", PROMPT, n=1, max_tokens=12, seed=1, ignore_eos=True), partials=(had,))
    (whole,) = run(engine, [asked]).values()
    assert whole.kv_versions == [*sample.kv_versions, (8, 0, 5)]
    assert kv_at_end(whole.kv_versions) == ((0, 5),) and kv_at_end(sample.kv_versions) == ((0, 0), (14, 3))


@pytest.mark.parametrize("spans", [[(8, 0, 1)], [(3, 0, 1), (2, 0, 1)], [(0, -1, 1)], [(0, 0, -1)], [(-1, 0, 1)]])
def test_impossible_spans_are_refused(spans: list[tuple[int, int, int]]) -> None:
    _, sample = refreshed("keep")
    had = PartialSample(index=0, **sample.slice(0, 8).columns())
    asked = group("g", PROMPT, n=1, max_tokens=12, seed=1, ignore_eos=True)
    with pytest.raises(ValueError, match="has kv_versions"):
        msgspec.structs.replace(had, kv_versions=spans).validate(asked.sampling, 199)


def test_pieces_have_the_spans_of_the_whole() -> None:
    """Cut anywhere and joined again."""
    r = random.Random(0)
    for _ in range(50):
        count = r.randrange(1, 20)
        starts = sorted(r.randrange(count) for _ in range(r.randrange(5)))
        kv = [(token, r.randrange(30), r.randrange(9)) for token in starts]
        ids, zeros = np.arange(count, dtype=np.int32), np.zeros(count, np.float32)
        whole = TokenColumns(token_ids=ids, logprobs=zeros, weight_versions=[(0, 1)], kv_versions=kv)
        cuts = [0, *sorted(r.randrange(count + 1) for _ in range(3)), count]
        parts = [whole.slice(first, last) for first, last in zip(cuts, cuts[1:], strict=False)]
        assert TokenColumns.concat(parts).kv_versions == kv
