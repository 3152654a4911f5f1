"""What came of a group is compared with what was asked: each lie is named, and nothing that an engine makes is one."""

from __future__ import annotations

import math
import time
from typing import Any, get_args

import msgspec
import numpy as np
import pytest

from rollout.engine.values import Group, PartialSample, Refreshed, Sample, Sampling, TokenChunk
from rollout.transport import messages as m
from rollout.transport.checks import Bounds, agreed, check_chunk, check_goes_on, check_group, check_refreshed, check_sample

PROMPT = np.array([5, 6, 7], np.int32)
BOUNDS = Bounds(100, frozenset({2}), 3, lambda version: version in (3, 5, 6))
REPLACE = msgspec.structs.replace


def group(**sampling: Any) -> Group:
    return Group("g", PROMPT, Sampling(**{"n": 4, "max_tokens": 4, "seed": 7, **sampling}))


def sample(*ids: int, **fields: Any) -> Sample:
    tokens = np.array(ids or (10, 11, 12, 13), np.int32)
    fixed = dict(group_id="g", index=1, prompt_tokens=3, seed=7, weight_versions=[(0, 3)] if len(tokens) else [])
    columns = dict(token_ids=tokens, logprobs=np.full(len(tokens), -0.5, np.float32), finish_reason="length")
    return Sample(**{**fixed, **columns, **fields})


def floats(*values: float) -> np.ndarray:
    return np.array(values, np.float32)


NOTHING = dict(token_ids=np.zeros(0, np.int32), logprobs=floats(), weight_versions=[])
TOP = dict(top_ids=np.array([[1, -1]] * 4, np.int32), top_logprobs=floats(*[-0.1, -math.inf] * 4).reshape(4, 2))
HAD = PartialSample(index=1, token_ids=np.array([10, 11], np.int32), logprobs=floats(math.nan, 3.0), weight_versions=[(0, 9)])
GOES_ON = sample(logprobs=floats(math.nan, 3.0, -1, -1), weight_versions=[(0, 9), (2, 3)])
SCORED = PartialSample(index=1, token_ids=np.array([10, 11], np.int32), logprobs=floats(0, 0), weight_versions=[(0, 0)])

KEPT: dict[str, Any] = dict(weight_versions=[(0, 3), (2, 5)], kv_versions=[(2, 0, 3), (2, 4, 5)])
"""token 2 is the first one after a refresh with kv="keep": KV of position 4 is of the weights that generate it"""
LATE: dict[str, Any] = dict(weight_versions=[(0, 5)], kv_versions=[(0, 0, 3), (0, 2, 5)])
"""a prompt whose first two tokens were cached before a refresh"""
HAD_KEPT = PartialSample(
    index=1, token_ids=np.array([10, 11, 12], np.int32), logprobs=np.full(3, -0.5, np.float32), **KEPT
)  # fmt: skip
TRUE = {
    "KV kept at a refresh": (sample(**KEPT), group(), None),
    "KV of a cached prompt": (sample(**LATE), group(max_kv_lag=2), None),
    "KV of the turn before": (sample(**LATE), REPLACE(group(), after=("f", 0)), None),
    "KV computed again": (sample(**{**KEPT, "kv_versions": [*KEPT["kv_versions"], (3, 0, 5)]}), group(), None),
    "KV that another replica computed": (
        sample(**{**KEPT, "kv_versions": [*KEPT["kv_versions"], (3, 0, 5)]}),
        group(),
        HAD_KEPT,
    ),
    "whole": (sample(), group(), None),
    "of two versions": (sample(weight_versions=[(0, 3), (2, 5)]), group(), None),
    "certain": (sample(logprobs=floats(0, 2e-6, -100, -1e30)), group(), None),
    "eos": (sample(10, 2, finish_reason="stop"), group(), None),
    "stop token": (sample(10, 9, finish_reason="stop"), group(stop_token_ids=(9,), ignore_eos=True), None),
    "stop string": (sample(10, finish_reason="stop", stopped_by="x", text_end=0), group(stop=("x",)), None),
    "cut": (sample(10, finish_reason="cut"), group(finish_after=1), None),
    "late": (sample(10, finish_reason="deadline"), group(deadline_s=1.0), None),
    "stale": (sample(10, finish_reason="stale"), group(max_version_lag=0), None),
    "aborted before it began": (sample(finish_reason="aborted", **NOTHING), group(raw_logprobs=True, top_logprobs=2), None),
    "failed": (sample(finish_reason="error", error="why", **NOTHING), group(), HAD),
    "raw": (sample(raw_logprobs=floats(-1, -2, -3, -4)), group(raw_logprobs=True), None),
    "top": (sample(**TOP), group(top_logprobs=2), None),
    "goes on elsewhere": (GOES_ON, group(), HAD),
    "had all": (sample(10, 11, logprobs=floats(math.nan, 3), weight_versions=[(0, 9)]), group(max_tokens=2), HAD),
    "not drawn": (sample(10, 11, logprobs=floats(-math.inf, -1), finish_reason="scored"), REPLACE(group(), score=True), SCORED),
    "seed of the engine's": (sample(seed=2**63 - 1), group(seed=None), None),
}


@pytest.mark.parametrize("kind", TRUE)
def test_what_an_engine_makes_is_believed(kind: str) -> None:
    one, of, partial = TRUE[kind]
    check_sample(one, of, partial, BOUNDS)


LIES = [
    (sample(index=4), {}, "of a group of 4"),
    (sample(index=-1), {}, "of a group of 4"),
    (sample(prompt_tokens=999_999), {}, "prompt_tokens"),
    (sample(seed=5), {}, "seed"),
    (sample(seed=-1), {"seed": None}, "seed"),
    (sample(seconds=math.nan), {}, "seconds"),
    (sample(seconds=math.inf), {}, "seconds"),
    (sample(offloads=-1), {}, "offloads"),
    (sample(error="why"), {}, "error"),
    (sample(10, 11, 12, 1_000_000), {}, "token_ids with 1000000"),
    (sample(10, 11, 12, 100), {}, "token_ids with 100"),
    (sample(-5, 11, 12, 13), {}, "token_ids with -5"),
    (sample(*range(5)), {}, "of 5 tokens: must be at most max_tokens=4"),
    (sample(10, 11), {"max_tokens": 1}, "at most max_tokens=1"),
    (sample(token_ids=np.arange(4.0)), {}, "token_ids float64"),
    (sample(token_ids=np.zeros((4, 1), np.int32)), {}, "token_ids int32"),
    (sample(logprobs=floats(-1, -1, -1)), {}, "logprobs float32"),
    (sample(logprobs=np.zeros(4)), {}, "logprobs float64"),
    (sample(logprobs=floats(math.nan, -1, -1, -1)), {}, "logprobs with nan"),
    (sample(logprobs=floats(-1, -1, -1, 3)), {}, "logprobs with 3.0"),
    (sample(logprobs=floats(-1, -1, -1, math.inf)), {}, "logprobs with inf"),
    (sample(logprobs=floats(-1, -1, -1, -math.inf)), {}, "logprobs with -inf"),
    (sample(), {"raw_logprobs": True}, "raw_logprobs none"),
    (sample(raw_logprobs=floats(-1, -1, -1, -1)), {}, "not requested"),
    (sample(raw_logprobs=floats(-1, -1, -1, math.nan)), {"raw_logprobs": True}, "raw_logprobs with nan"),
    (sample(), {"top_logprobs": 2}, "top_ids none"),
    (sample(**TOP), {}, "top_ids"),
    (sample(**TOP), {"top_logprobs": 3}, "top_ids"),
    (sample(**{**TOP, "top_ids": np.full((4, 2), 100, np.int32)}), {"top_logprobs": 2}, "top_ids from 100"),
    (sample(**{**TOP, "top_ids": np.full((4, 2), -2, np.int32)}), {"top_logprobs": 2}, "top_ids from -2"),
    (sample(**{**TOP, "top_ids": np.full((4, 2), 1, np.int32)}), {"top_logprobs": 2}, "-inf where top_ids is -1"),
    (sample(**{**TOP, "top_logprobs": np.full((4, 2), np.nan, np.float32)}), {"top_logprobs": 2}, "top_logprobs"),
    (sample(weight_versions=[(0, 77)]), {}, "77 never was"),
    (sample(weight_versions=[(0, 4)]), {}, "4 never was"),
    (sample(weight_versions=[(0, 2)]), {}, "ascend from 3"),
    (sample(weight_versions=[(0, 5), (2, 3)]), {}, "ascend from 3"),
    (sample(weight_versions=[(0, 3), (2, 3)]), {}, "ascend from 3"),
    (sample(weight_versions=[(0, 2**64)]), {}, "ascend from 3"),
    (sample(weight_versions=[]), {}, "spans"),
    (sample(weight_versions=[(1, 3)]), {}, "spans"),
    (sample(weight_versions=[(5, 3), (2, 6)]), {}, "spans"),
    (sample(weight_versions=[(0, 3), (4, 5)]), {}, "spans"),
    (sample(finish_reason="aborted", **{**NOTHING, "weight_versions": [(0, 3)]}), {}, "spans"),
    (sample(finish_reason="stop", **NOTHING), {}, "finish_reason 'stop' after 0"),
    (sample(10, 11, finish_reason="stop"), {}, "finish_reason 'stop'"),
    (sample(10, 2, finish_reason="stop"), {"ignore_eos": True}, "finish_reason 'stop'"),
    (sample(10, 2, finish_reason="stop"), {"min_tokens": 2}, "finish_reason 'stop'"),
    (sample(10, 11), {}, "finish_reason 'length' after 2"),
    (sample(finish_reason="scored"), {}, "finish_reason 'scored'"),
    (sample(finish_reason="stale"), {}, "finish_reason 'stale'"),
    (sample(finish_reason="cut"), {}, "finish_reason 'cut'"),
    (sample(finish_reason="deadline"), {}, "finish_reason 'deadline'"),
    (sample(10, finish_reason="stop", stopped_by="y", text_end=0), {"stop": ("x",)}, "stopped_by"),
    (sample(10, finish_reason="stop", stopped_by="x"), {"stop": ("x",)}, "stopped_by"),
    (sample(stopped_by="x", text_end=0), {"stop": ("x",)}, "stopped_by"),
    (sample(10, finish_reason="stop", stopped_by="x", text_end=-1), {"stop": ("x",)}, "text_end"),
]


LIES += [
    (sample(kv_versions=spans, weight_versions=versions), {"max_kv_lag": lag}, reason)
    for spans, versions, lag, reason in [
        ([(0, 0, 99)], [(0, 3)], 0, "of all KV that token 0 of version 3 has read"),
        ([(0, 0, 3)], [(0, 3)], 0, "of all KV that token 0"),  # it follows
        ([(0, 0, 99), (0, 2, 3)], [(0, 3)], 0, "from 3 to 3 that were live; 99 cannot"),
        ([(0, 0, 4), (0, 2, 5)], [(0, 5)], 1, "4 cannot have computed KV of token 0"),  # it never was
        ([(0, 0, 3), (0, 2, 5)], [(0, 5)], 0, "from 5 to 5"),  # no lag is allowed
        ([(0, 0, 3), (0, 2, 6)], [(0, 6)], 2, "from 4 to 6"),
        ([(2, 0, 3), (2, 4, 6)], [(0, 5), (2, 6)], 0, "from 5 to 6"),  # it was no version of the child
        ([(2, 0, 6), (2, 4, 5)], [(0, 3), (2, 5)], 0, "6 cannot"),
        ([(2, 0, 3), (2, 5, 5)], [(0, 3), (2, 5)], 0, "of all KV that token 2"),  # of a position that was not computed
        ([(2, 1, 3), (2, 4, 5)], [(0, 3), (2, 5)], 0, "of all KV that token 2"),
        ([(2, 0, 3)], [(0, 3), (2, 5)], 0, "of all KV that token 2"),
        ([(2, 0, 3), (2, 4, 5), (3, 4, 5)], [(0, 3), (2, 5)], 0, "of all KV that token 3"),  # nothing new
    ]
]


@pytest.mark.parametrize(("lie", "sampling", "reason"), LIES, ids=[f"{i}-{reason[:30]}" for i, (*_, reason) in enumerate(LIES)])
def test_what_nobody_can_have_asked_for_is_named(lie: Sample, sampling: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=f"^sample -?[0-9].*{reason}"):
        check_sample(lie, group(**sampling), None, BOUNDS)


@pytest.mark.parametrize(
    ("lie", "reason"),
    [
        (sample(10, 12, 13, 14), "token_ids that do not begin"),
        (sample(10, finish_reason="aborted"), "token_ids that do not begin"),
        (sample(finish_reason="aborted", **NOTHING), "token_ids that do not begin"),
        (sample(weight_versions=[(0, 9), (2, 3)]), "logprobs that do not begin"),
        (REPLACE(GOES_ON, weight_versions=[(0, 3)]), "of the partial sample, then others"),
        (REPLACE(GOES_ON, logprobs=floats(math.nan, 3, math.nan, -1)), "logprobs with nan"),
        (REPLACE(GOES_ON, weight_versions=[(0, 9), (2, 2)]), "ascend from 3"),
    ],
)
def test_a_child_comes_back_with_what_it_had(lie: Sample, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        check_sample(lie, group(), HAD, BOUNDS)


@pytest.mark.parametrize(
    "lie",
    [
        sample(10, finish_reason="scored"),
        sample(10, 12, finish_reason="scored"),
        sample(10, 11, finish_reason="length"),
        sample(10, 11, finish_reason="scored", logprobs=floats(math.nan, -1)),
        sample(10, 11, finish_reason="scored", logprobs=floats(1, -1)),
    ],
)
def test_scored_are_the_tokens_that_were_given(lie: Sample) -> None:
    with pytest.raises(ValueError, match="sample 1"):
        check_sample(lie, REPLACE(group(), score=True), SCORED, BOUNDS)


def chunk(**fields: Any) -> TokenChunk:
    tokens = dict(token_ids=np.array([10, 11], np.int32), logprobs=floats(-1, -1), weight_versions=[(0, 3)])
    return TokenChunk(**{"index": 0, "first": 5, "seed": 7, **tokens, **fields})


@pytest.mark.parametrize("ranks", [[1], [1, 0], [1, 101], [-1, 2], [1, 2, 3], []])
def test_ranks_are_those_of_a_vocabulary(ranks: list[int]) -> None:
    scored = sample(10, 11, finish_reason="scored", ranks=np.array([1, 100], np.int32), **{
        name: array[:2] for name, array in TOP.items()})  # fmt: skip
    asked = REPLACE(group(top_logprobs=2), score=True, partials=(SCORED,), indices=(1,))
    check_sample(scored, asked, SCORED, BOUNDS)
    with pytest.raises(ValueError, match="ranks"):
        check_sample(REPLACE(scored, ranks=np.array(ranks, np.int32)), asked, SCORED, BOUNDS)
    with pytest.raises(ValueError, match="ranks"):
        check_sample(sample(ranks=np.ones(4, np.int32)), group(), None, BOUNDS)


def test_new_tokens_are_checked_as_those_of_samples() -> None:
    check_chunk(chunk(), group(), BOUNDS)
    for fields, reason in (
        ({"seed": 8}, "seed"),
        ({"logprobs": floats(-1, math.nan)}, "logprobs with nan"),
        ({"logprobs": floats(-1, 1)}, "logprobs with 1.0"),
        ({"token_ids": np.array([10, 100], np.int32)}, "token id 100"),
        ({"weight_versions": [(0, 2)]}, "weight_versions"),
        ({"weight_versions": [(0, 4)]}, "never was"),
    ):
        with pytest.raises(ValueError, match=reason):
            check_chunk(chunk(**fields), group(), BOUNDS)


def test_a_sample_goes_on_from_what_was_streamed_of_it() -> None:
    """As far as one version made both: another replica's tokens after a refresh are others."""
    streamed = PartialSample(
        index=1, token_ids=np.array([10, 99], np.int32), logprobs=floats(-0.5, -0.5), weight_versions=[(0, 3)]
    )
    with pytest.raises(ValueError, match="other token_ids than"):
        check_goes_on(sample(), streamed)
    check_goes_on(sample(), REPLACE(streamed, weight_versions=[(0, 3), (1, 5)]))
    with pytest.raises(ValueError, match="other logprobs than"):
        check_goes_on(sample(), REPLACE(streamed, token_ids=np.array([10, 11], np.int32), logprobs=floats(-0.5, -0.6)))
    check_goes_on(sample(10, finish_reason="aborted"), streamed)
    assert agreed([(0, 1), (4, 2)], [(0, 1), (3, 2)], 9) == 3
    assert agreed([(0, 1), (4, 2)], [(0, 1), (4, 2)], 9) == 9 and agreed([], [], 0) == 0 and agreed([(0, 1)], [], 2) == 0


def test_every_request_names_its_answer() -> None:
    assert set(m.ANSWERS) == {kind for kind in get_args(m.ClientMessage) if "request_id" in kind.__struct_fields__}


def test_a_refresh_is_the_one_that_was_asked_for() -> None:
    true = Refreshed(version=4, via="shm", bytes=1, seconds=0.1, staged_seconds=0.1, paused_seconds=0.0, digest="d")
    check_refreshed(true, 4)
    check_refreshed(true, None)
    for lie, version in ((true, 5), (REPLACE(true, seconds=math.nan), 4), (REPLACE(true, bytes=-1), 4)):
        with pytest.raises(ValueError):
            check_refreshed(lie, version)


def test_a_child_that_continues_keeps_what_it_had_said_of_its_kv() -> None:
    for spans in ([], [(3, 0, 5)], [(2, 0, 3), (2, 3, 5), (3, 0, 5)]):
        with pytest.raises(ValueError, match="of the partial sample, then others"):
            check_sample(sample(**{**KEPT, "kv_versions": spans}), group(), HAD_KEPT, BOUNDS)
    with pytest.raises(ValueError, match="3 cannot have computed KV of token 3"):  # it runs elsewhere, where that KV is not
        check_sample(sample(**KEPT), group(), HAD_KEPT, BOUNDS)


def test_streamed_tokens_make_no_false_claim_of_their_kv() -> None:
    columns = dict(token_ids=np.array([10, 11], np.int32), logprobs=floats(-1, -1), weight_versions=[(0, 3), (1, 5)])
    chunk = TokenChunk(index=1, first=0, seed=7, kv_versions=[(1, 0, 3), (1, 3, 5)], **columns)
    check_chunk(chunk, group(), BOUNDS)
    for spans in ([(0, 0, 99)], [(1, 0, 4)], [(1, 0, 2)], [(0, 0, 5)]):
        with pytest.raises(ValueError, match="kv_versions"):
            check_chunk(REPLACE(chunk, kv_versions=spans), group(), BOUNDS)


def test_an_end_that_cannot_have_come_yet() -> None:
    """Where the caller knows the newest version, and when the deadline ends."""
    stale, late = sample(10, finish_reason="stale"), sample(10, finish_reason="deadline")
    for newest, lag, right in ((3, 0, False), (4, 0, True), (5, 2, False), (6, 2, True)):
        bounds = BOUNDS._replace(newest_version=lambda newest=newest: newest)
        if right:
            check_sample(stale, group(max_version_lag=lag), None, bounds)
        else:
            with pytest.raises(ValueError, match="'stale'"):
                check_sample(stale, group(max_version_lag=lag), None, bounds)
    check_sample(late, group(deadline_s=9.0), None, BOUNDS._replace(deadline_at=time.monotonic()))
    with pytest.raises(ValueError, match="'deadline'"):
        check_sample(late, group(deadline_s=9.0), None, BOUNDS._replace(deadline_at=time.monotonic() + 900))


def test_children_are_cut_once_enough_have_ended() -> None:
    ends = lambda *reasons: [sample(index=i, finish_reason=reason) for i, reason in enumerate(reasons)]  # noqa: E731
    check_group(ends("stop", "length", "cut", "cut"), group(finish_after=2))
    check_group(ends("stop", "aborted", "cut", "cut"), group(finish_after=2))
    with pytest.raises(ValueError, match="3 children were cut, and 1 ended"):
        check_group(ends("stop", "cut", "cut", "cut"), group(finish_after=2))
