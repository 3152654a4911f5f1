"""What a group may not be, and what is said then: one table. Engine, service and client have their own cases only."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from rollout.engine.types import INTEGER_FIELDS, NUMBER_FIELDS, OPTIONAL_FIELDS, Group, Limits, Sampling
from rollout.service.validation import check_sample_frames

SMALL = {"max_n": 16, "max_tokens": 100, "max_prompt_tokens": 50, "max_stop_token_ids": 2, "max_id_bytes": 20, "max_kv_lag": 3}
LIMITS = Limits(**SMALL, max_logit_bias=2, max_allowed_token_ids=3, max_stop_strings=2, max_stop_bytes=8)
VOCAB, CONTEXT = 23, 120
GOOD = {"id": "g", "prompt": np.arange(3, dtype=np.int32), "n": 2, "max_tokens": 4}
NAN, INF = float("nan"), float("inf")

BAD: list[tuple[dict[str, Any], str]] = [
    ({"prompt": []}, "prompt of 0 tokens: must be 1 to 50 (Limits.max_prompt_tokens)"),
    ({"prompt": [1] * 51}, "prompt of 51 tokens: must be 1 to 50 (Limits.max_prompt_tokens)"),
    ({"prompt": [1, VOCAB]}, "token id 23: the model's token ids are 0 to 22"),
    ({"prompt": [1, -1]}, "token id -1"),
    ({"prompt": np.array([[1]], np.int32)}, "must be int32 [prompt_tokens]"),
    ({"prompt": np.array([1.5], np.float32)}, "prompt is float32"),
    ({"prompt": np.array([1], np.int64)}, "prompt is int64"),
    ({"prompt": [1] * 40, "max_tokens": 100}, "exceeds the context of 120 tokens; lower max_tokens to 80"),
    ({"id": ""}, "group id of 0 bytes"),
    ({"id": "é" * 11}, "group id of 22 bytes: must be 1 to 20 bytes (Limits.max_id_bytes)"),
    *(({"n": bad}, f"n={bad}: must be between 1 and 16 (Limits.max_n)") for bad in (0, -1, 17, 2**62, -(2**63))),
    *(({"max_tokens": bad}, f"max_tokens={bad}: must be between 1 and 100 (Limits.max_tokens)") for bad in (0, 101, 2**40)),
    *(({"min_tokens": bad}, f"min_tokens={bad}: must be between 0 and max_tokens=4") for bad in (-1, 5)),
    *(({"temperature": bad}, f"temperature={bad}: must be 0 (greedy)") for bad in (NAN, INF, -INF, -0.1)),
    ({"temperature": 1e-9}, "temperature=1e-09: must be 0 (greedy) or between 0.001 and 100"),
    *(({"top_p": bad}, f"top_p={bad}: must be in (0, 1]") for bad in (NAN, INF, 0.0, -0.5, 1.1)),
    *(({"min_p": bad}, f"min_p={bad}: must be in [0, 1)") for bad in (NAN, -0.1, 1.0)),
    *(({"top_k": bad}, f"top_k={bad}") for bad in (-1, 2**31)),
    *(({"seed": bad}, f"seed={bad}") for bad in (-1, 2**63)),
    *(({"stop_token_ids": (bad,)}, f"stop_token_ids holds {bad}") for bad in (-1, VOCAB)),
    ({"stop_token_ids": (1, 2, 3)}, "3 entries of stop_token_ids: at most 2 (Limits.max_stop_token_ids)"),
    *(({"max_kv_lag": bad}, f"max_kv_lag={bad}: must be between 0 and 3 (Limits.max_kv_lag)") for bad in (-1, 4)),
    *(({"max_version_lag": bad}, f"max_version_lag={bad}: must be None or between 0 and 3") for bad in (-1, 4)),
    *(({"finish_after": bad}, f"finish_after={bad}: must be None or between 1 and n=2") for bad in (0, 3)),
    *(({"min_len_to_cut": bad, "finish_after": 1}, f"min_len_to_cut={bad}: must be between 0 and") for bad in (-1, 5)),
    ({"min_len_to_cut": 1}, "min_len_to_cut=1 without finish_after"),
    *(({"deadline_s": bad}, f"deadline_s={bad}: must be None or a positive") for bad in (0.0, -1.0, NAN, INF)),
    *(({"priority": bad}, f"priority={bad}: must be between") for bad in (-1_000_001, 1_000_001)),
    *(({"logit_bias": {bad: 1.0}}, f"logit_bias holds {bad}: the model's token ids are 0 to 22") for bad in (-1, VOCAB)),
    *(({"logit_bias": {1: bad}}, f"logit_bias of token 1 is {bad}: must be between") for bad in (NAN, INF, -101.0, 101)),
    ({"logit_bias": {1: 0.0, 2: 0.0, 3: 0.0}}, "3 entries of logit_bias: at most 2 (Limits.max_logit_bias)"),
    *(({"allowed_token_ids": (bad,)}, f"allowed_token_ids holds {bad}") for bad in (-1, VOCAB)),
    ({"allowed_token_ids": ()}, "allowed_token_ids=(): no token is left to sample"),
    ({"allowed_token_ids": (1, 2, 3, 4)}, "4 entries of allowed_token_ids: at most 3 (Limits.max_allowed_token_ids)"),
    *(({"repetition_penalty": bad}, f"repetition_penalty={bad}: must be between") for bad in (NAN, 0.0, -1.0, INF)),
    *(({"presence_penalty": bad}, f"presence_penalty={bad}: must be between -2 and 2") for bad in (NAN, -2.1, 2.1)),
    *(({"frequency_penalty": bad}, f"frequency_penalty={bad}: must be between -2 and 2") for bad in (INF, -2.1, 2.1)),
    ({"stop": ("a", "")}, "a stop string of 0 bytes: must be 1 to 8 (Limits.max_stop_bytes)"),
    ({"stop": ("é" * 5,)}, "a stop string of 10 bytes: must be 1 to 8 (Limits.max_stop_bytes)"),
    ({"stop": ("a", "b", "c")}, "3 stop strings: at most 2 (Limits.max_stop_strings)"),
    ({"stop": "ab"}, "stop='ab': must be a tuple of strings"),
    ({"stop": ("\ud800",)}, "must be Unicode text"),
    ({"stream_every": -1}, "stream_every=-1: must be 0 (off)"),
    *(({"kv_ttl_s": bad}, f"kv_ttl_s={bad}: must be") for bad in (NAN, -1.0, 3601.0)),
    *(({"top_logprobs": bad}, f"top_logprobs={bad}: must be between 0 and 20 (Limits.max_top_logprobs)") for bad in (-1, 21)),
    *(
        ({name: bad}, f"{name}={bad!r}: must be an integer")
        for name in INTEGER_FIELDS
        for bad in (True, 2.0, np.float32(2), "2")
    ),
    *(({name: bad}, f"{name}={bad!r}: must be a number") for name in NUMBER_FIELDS for bad in (True, "2", np.array(1.0))),
    *(({name: None}, f"{name}=None: must be a") for name in sorted({*INTEGER_FIELDS, *NUMBER_FIELDS} - OPTIONAL_FIELDS)),
    *(({name: (2.0, 1)}, f"{name} holds 2.0: must be integers") for name in ("stop_token_ids", "allowed_token_ids")),
    ({"logit_bias": {1.0: 1.0}}, "logit_bias holds 1.0: must be integers"),
    ({"logit_bias": {1: "1"}}, "logit_bias holds '1': must be numbers"),
]
"""what differs from GOOD, and what the message says"""
EITHER = {"ignore_eos", "raw_logprobs"}
"""fields of which no value is bad"""


def group(**fields: Any) -> Group:
    given = {**GOOD, **fields}
    id, prompt = given.pop("id"), given.pop("prompt")
    return Group(id, prompt if isinstance(prompt, np.ndarray) else np.array(prompt, np.int32), Sampling(**given))


@pytest.mark.parametrize(("bad", "message"), BAD, ids=[f"{i}-{message[:40]}" for i, (_, message) in enumerate(BAD)])
def test_a_bad_group_is_refused_with_the_field_and_what_would_be_right(bad: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as refused:
        group(**bad).validate(LIMITS, VOCAB, CONTEXT)
    assert message in str(refused.value)


def test_the_largest_and_smallest_that_are_good() -> None:
    for fields in (
        {},
        {"n": 16, "max_tokens": 100, "min_tokens": 100, "prompt": [VOCAB - 1] * 20, "id": "é" * 10},
        {"temperature": 0.0, "top_k": 2**31 - 1, "top_p": 1e-9, "min_p": 0.0, "seed": 2**63 - 1},
        {"stop_token_ids": (0, VOCAB - 1), "max_kv_lag": 3, "max_version_lag": 3, "finish_after": 2, "min_len_to_cut": 4},
        {"stop": ("é" * 4, "a")},
        {"logit_bias": {0: -100.0, VOCAB - 1: 100.0}, "allowed_token_ids": (0, 1, VOCAB - 1), "repetition_penalty": 0.01},
    ):
        group(**fields).validate(LIMITS, VOCAB, CONTEXT)


def test_numbers_of_numpy_are_numbers() -> None:
    for kind in (np.int64, np.int32, np.uint8):
        some = {"stop_token_ids": (kind(3),), "allowed_token_ids": tuple(np.arange(4, 7, dtype=kind))}
        group(n=kind(2), seed=kind(7), **some, logit_bias={kind(5): np.float32(2), 6: 1}).validate(LIMITS, VOCAB, CONTEXT)
    group(temperature=np.float32(0.5), top_p=np.float64(0.5), kv_ttl_s=np.int64(1)).validate(LIMITS, VOCAB, CONTEXT)


def test_what_a_frame_does_not_hold_is_the_services_to_refuse() -> None:
    sampling = Sampling(top_logprobs=20, max_tokens=100)
    with pytest.raises(ValueError, match="do not fit a frame of 6400 bytes .Limits.max_frame_bytes.; lower max_tokens to 80"):
        check_sample_frames(sampling, Limits(max_frame_bytes=6400))
    check_sample_frames(sampling, Limits(max_frame_bytes=8000))
    group(top_logprobs=20, max_tokens=100).validate(Limits(max_frame_bytes=6400), VOCAB, CONTEXT)


def test_every_field_is_in_the_table() -> None:
    fields = {field.name for field in msgspec.structs.fields(Sampling)} | {"id", "prompt"}
    assert {name for bad, _ in BAD for name in bad} == fields - EITHER
