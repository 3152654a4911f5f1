"""Digests and error kinds: what the two ends have to agree on besides the bytes."""

from __future__ import annotations

import inspect
from typing import Any

import msgspec
import numpy as np
import pytest

from rollout.engine.values import Limits, PartialSample, Sample, Sampling, TokenChunk
from rollout.transport import errors
from rollout.transport.columns import (
    pack_partials,
    pack_progress,
    pack_samples,
    unpack_partials,
    unpack_progress,
    unpack_samples,
)
from rollout.transport.frames import Decoder, pack
from rollout.transport.messages import DIGEST_BYTES, Ended, Progress, SamplesDone, Submit, digest
from tests.support.wire_fuzz import PARTIALS, same

SUBMIT = Submit("g", np.array([1, 2, 3], np.int32), Sampling(n=2), 4)


def test_equal_submits_have_equal_digests() -> None:
    again = Submit("g", np.array([1, 2, 3], np.int32), Sampling(n=2), 4)
    assert digest(SUBMIT) == digest(again) and len(digest(SUBMIT)) == DIGEST_BYTES


@pytest.mark.parametrize(
    "change",
    [
        {"group_id": "h"},
        {"serial": 5},
        {"prompt": np.array([1, 2, 4], np.int32)},
        {"prompt": np.array([[1, 2, 3]], np.int32)},
        {"prompt": np.array([1, 2, 3], np.uint32)},
        {"sampling": Sampling(n=3)},
        {"indices": (0, 1)},
        {"partials": pack_partials(PARTIALS)},
        {"sampling": Sampling(n=2, stop_token_ids=(1,))},
    ],
)
def test_any_difference_changes_the_digest(change: dict[str, object]) -> None:
    assert digest(msgspec.structs.replace(SUBMIT, **change)) != digest(SUBMIT)


def test_what_children_have_changes_the_digest() -> None:
    """Each array of it counts."""
    packed = pack_partials(PARTIALS)
    assert packed is not None
    submits = [msgspec.structs.replace(SUBMIT, partials=packed)]
    for name in packed.__struct_fields__:
        if isinstance(value := getattr(packed, name), list):
            other: Any = [value[0] + np.uint8(1), *value[1:]]
        else:
            other = value.copy()
            other.reshape(-1)[0] += 1
        submits.append(msgspec.structs.replace(SUBMIT, partials=msgspec.structs.replace(packed, **{name: other})))
    assert len({digest(submit) for submit in submits}) == 11


def test_begun_children_arrive_as_they_were_sent() -> None:
    sent = msgspec.structs.replace(SUBMIT, partials=pack_partials(PARTIALS))
    frames = [bytes(frame) for frame in pack(sent)]
    got = unpack_partials(Decoder[Submit](Submit, Limits()).unpack(frames).partials, 2)
    assert all(map(same, got, PARTIALS)) and len(got) == 2
    assert pack_partials([]) is None and unpack_partials(None, 0) == ()


@pytest.mark.parametrize(
    "change",
    [
        {"indices": np.zeros(2, np.int64)},
        {"indices": np.zeros(3, np.int32)},
        {"lengths": np.array([3], np.int32)},
        {"lengths": np.array([3, 2], np.int32)},
        {"lengths": np.array([5, -1], np.int32)},
        {"lengths": np.array([2**31 - 1, 2**31 - 1], np.int32)},
        {"token_ids": np.zeros((4, 1), np.int32)},
        {"logprobs": np.zeros(3, np.float32)},
        {"logprobs": np.zeros(4, np.float64)},
        {"raw_logprobs": np.zeros(5, np.float32)},
        {"top_ids": np.zeros((3, 2), np.int32)},
        {"top_ids": np.zeros((4, 2), np.int64)},
        {"top_logprobs": np.zeros(4, np.float32)},
        {"top_logprobs": np.zeros((4, 2), np.float64)},
        {"spans": np.zeros((1, 2), np.int64)},
        {"spans": np.zeros((5, 3), np.int64)},
        {"spans": np.array([[2, 0, 0]], np.int64)},
        {"spans": np.array([[-1, 0, 0]], np.int64)},
    ],
)
def test_begun_children_that_do_not_fit_are_refused(change: dict[str, np.ndarray]) -> None:
    packed = pack_partials(PARTIALS)
    assert packed is not None
    with pytest.raises(errors.InvalidRequest, match="partials"):
        unpack_partials(msgspec.structs.replace(packed, **change), 2)
    with pytest.raises(errors.InvalidRequest, match="at most 1"):
        unpack_partials(packed, 1)


CHUNKS = {
    "g": [
        TokenChunk(**msgspec.structs.asdict(child), first=first, seed=7) for child, first in zip(PARTIALS, (4, 0), strict=True)
    ],
    "h": [TokenChunk(**msgspec.structs.asdict(PARTIALS[1]), first=9, seed=2**62)],
}


def test_chunks_arrive_as_they_were_sent() -> None:
    frames = [bytes(frame) for frame in pack(pack_progress(1, CHUNKS))]
    got = unpack_progress(Decoder[Progress](Progress, Limits()).unpack(frames), 3)
    assert [group_id for group_id, _ in got] == ["g", "g", "h"]
    assert all(same(one, other) for (_, one), other in zip(got, [*CHUNKS["g"], *CHUNKS["h"]], strict=True))


def test_most_probable_tokens_of_some_groups_leave_the_columns_whole() -> None:
    """Those who asked for fewer, or for none, get columns that their client cuts off."""
    (one, other), (without,) = CHUNKS["g"], [msgspec.structs.replace(CHUNKS["h"][0], top_ids=None, top_logprobs=None)]
    assert one.top_ids is not None and one.top_logprobs is not None
    fewer = msgspec.structs.replace(one, top_ids=one.top_ids[:, :1], top_logprobs=one.top_logprobs[:, :1])
    got = [chunk for _, chunk in unpack_progress(pack_progress(1, {"g": [fewer, other], "h": [without]}), 3)]
    assert [chunk.top_ids.shape[1] for chunk in got if chunk.top_ids is not None] == [2, 2, 2]
    assert same(got[1], other) and got[0].top_ids is not None and np.array_equal(got[0].top_ids[:, :1], fewer.top_ids)


def test_raw_logprobs_of_some_groups_leave_the_columns_whole() -> None:
    without = [msgspec.structs.replace(chunk, raw_logprobs=None) for chunk in CHUNKS["h"]]
    got = unpack_progress(pack_progress(1, {"g": CHUNKS["g"], "h": without}), 3)
    assert all(same(one, other) for (_, one), other in zip(got[:2], CHUNKS["g"], strict=True))
    assert got[2][1].raw_logprobs is not None and got[2][1].token_ids.tolist() == [40]


@pytest.mark.parametrize(
    "change",
    [
        {"groups": np.zeros(3, np.int64)},
        {"groups": np.zeros(2, np.int32)},
        {"groups": np.array([0, 0, 2], np.int32)},
        {"groups": np.array([0, -1, 1], np.int32)},
        {"firsts": np.zeros((3, 1), np.int32)},
        {"firsts": np.array([0, 0, -1], np.int32)},
        {"seeds": [7]},
        {"seeds": [7, -1]},
        {"seeds": [7, 2**63]},
        {"group_ids": ["g"]},
        {"children": pack_partials(PARTIALS)},
    ],
)
def test_columns_of_progress_that_do_not_fit_are_refused(change: dict[str, object]) -> None:
    with pytest.raises(errors.ProtocolError):
        unpack_progress(msgspec.structs.replace(pack_progress(1, CHUNKS), **change), 3)
    with pytest.raises(errors.ProtocolError, match="at most 2"):
        unpack_progress(pack_progress(1, CHUNKS), 2)


def done_of(child: PartialSample, **fields: Any) -> Sample:
    more = {"group_id": "", "finish_reason": "length", "prompt_tokens": 5, "seed": 7, "seconds": 0.5, **fields}
    return Sample(**msgspec.structs.asdict(child), **more)


SAMPLES = [
    done_of(PARTIALS[0], offloads=3),
    done_of(PARTIALS[1], prompt_tokens=9, seed=2**62, finish_reason="stop", stopped_by="x", text_end=4),
    done_of(PARTIALS[1], finish_reason="error", error="why"),
]
SCORED = [
    msgspec.structs.replace(SAMPLES[0], ranks=np.arange(1, 1 + len(SAMPLES[0].token_ids), dtype=np.int32)),
    *SAMPLES[1:],
]


@pytest.mark.parametrize("samples", [SAMPLES, SCORED], ids=["sampled", "scored"])
def test_samples_arrive_as_they_were_sent(samples: list[Sample]) -> None:
    packed = pack_samples(["g", "h", "g"], samples)
    frames = [bytes(frame) for frame in pack(packed)]
    got = unpack_samples(Decoder[SamplesDone](SamplesDone, Limits()).unpack(frames))
    assert [sample.group_id for sample in got] == ["g", "h", "g"]
    for one, other in zip(got, samples, strict=True):
        for name in set(Sample.__struct_fields__) - {"group_id"}:
            assert np.array_equal(getattr(one, name), getattr(other, name)), name
    plain = msgspec.structs.replace(SAMPLES[0], raw_logprobs=None, top_ids=None, top_logprobs=None)
    assert plain.layout != SAMPLES[0].layout == SAMPLES[2].layout
    assert unpack_samples(pack_samples(["g"], [plain]))[0].raw_logprobs is None


@pytest.mark.parametrize(
    "change",
    [
        {"token_ids": np.zeros(4, np.int32)},
        {"token_ids": np.zeros(5, np.int64)},
        {"logprobs": np.zeros((5, 1), np.float32)},
        {"raw_logprobs": np.zeros(6, np.float32)},
        {"top_ids": np.zeros(5, np.int32)},
        {"top_logprobs": np.zeros((4, 2), np.float32)},
        {"group_ids": ["g"]},
        {"seeds": [7]},
        {"seeds": [7, -1]},
        {"seeds": [7, 2**63]},
        {"prompt_tokens": [5, 9, 5]},
        {"ended": [Ended(2, 0, 5, "stop", [], 0.0, 0, None, None, None, None)]},
        {"ended": []},
        {"ranks": np.ones(4, np.int32)},
        {"ranks": np.ones(5, np.int64)},
        {"ranks": np.ones((5, 1), np.int32)},
    ],
)
def test_columns_of_samples_that_do_not_fit_are_refused(change: dict[str, object]) -> None:
    with pytest.raises(errors.ProtocolError):
        unpack_samples(msgspec.structs.replace(pack_samples(["g", "h", "g"], SAMPLES), **change))


def test_every_error_has_a_kind_that_comes_back() -> None:
    classes = [error for _, error in inspect.getmembers(errors, inspect.isclass) if issubclass(error, errors.RolloutError)]
    assert len({error.kind for error in classes}) == len(classes) == len(errors.KINDS)
    for error in classes:
        back = errors.from_wire(error.kind, "why", "g")
        assert type(back) is error and back.group_id == "g" and str(back) == "group 'g': why"
    assert str(errors.from_wire("of_a_newer_service", "why")) == "of_a_newer_service: why"


def test_the_tree_in_the_docstring_is_the_tree() -> None:
    for error in errors.KINDS.values():
        if error is not errors.RolloutError:
            line = next(line for line in (errors.__doc__ or "").splitlines() if f"─ {error.__name__} " in line)
            assert line.endswith(f" {error.kind}")
    assert issubclass(errors.InvalidRequest, ValueError)
    assert issubclass(errors.ServiceRestarted, errors.ServiceLost) and issubclass(errors.ServiceLost, ConnectionError)
    assert issubclass(errors.RequestTimeout, TimeoutError)
