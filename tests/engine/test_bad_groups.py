"""What a group may not be, and what is said then: one table. `Sampling` refuses what no service accepts when it is made.
Engine, service and client have their own cases only."""

from __future__ import annotations

import inspect
import re
from typing import Any

import msgspec
import numpy as np
import pytest

from rollout.engine.values import ACCEPTED, LARGEST_LIMIT, OPTIONS, Group, Limits, Sample, Sampling
from rollout.engine.values.sampling import integer_of
from rollout.service.validation import check_sample_frames

SMALL = {"max_n": 16, "max_tokens": 100, "max_prompt_tokens": 50, "max_stop_token_ids": 2, "max_id_bytes": 20, "max_kv_lag": 3}
LIMITS = Limits(**SMALL, max_logit_bias=2, max_allowed_token_ids=3, max_stop_strings=2, max_stop_bytes=8)
VOCAB, CONTEXT = 23, 120
GOOD = {"id": "g", "prompt": np.arange(3, dtype=np.int32), "n": 2, "max_tokens": 4}
NAN, INF = float("nan"), float("inf")
INTEGERS = [name for name, option in OPTIONS.items() if option.convert is integer_of]
NUMBERS = [name for name in ACCEPTED if name not in INTEGERS]
OPTIONAL = {name for name, accepted in ACCEPTED.items() if accepted.optional}

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
    *(({"n": bad}, f"n={bad}: must be at least 1") for bad in (0, -1, -(2**63), -(2**70))),
    *(({"n": bad}, f"n={bad}: must be between 1 and 16 (Limits.max_n)") for bad in (17, 2**40)),
    *(({"n": bad}, f"n={bad}: must be at most {LARGEST_LIMIT}") for bad in (2**40 + 1, 2**70)),
    ({"max_tokens": 0}, "max_tokens=0: must be at least 1"),
    *(({"max_tokens": bad}, f"max_tokens={bad}: must be between 1 and 100 (Limits.max_tokens)") for bad in (101, 2**40)),
    ({"min_tokens": -1}, "min_tokens=-1: must be at least 0"),
    ({"min_tokens": 5}, "min_tokens=5: must be between 0 and max_tokens=4"),
    *(({"temperature": bad}, f"temperature={bad}: must be 0 (greedy)") for bad in (NAN, INF, -INF, -0.1)),
    ({"temperature": 1e-9}, "temperature=1e-09: must be 0 (greedy) or between 0.001 and 100"),
    *(({"top_p": bad}, f"top_p={bad}: must be in (0, 1]") for bad in (NAN, INF, 0.0, -0.5, 1.1)),
    *(({"min_p": bad}, f"min_p={bad}: must be in [0, 1)") for bad in (NAN, -0.1, 1.0)),
    *(({"top_k": bad}, f"top_k={bad}") for bad in (-1, 2**31)),
    *(({"seed": bad}, f"seed={bad}") for bad in (-1, 2**63)),
    ({"stop_token_ids": (-1,)}, "stop_token_ids holds -1: token ids are 0 to"),
    ({"stop_token_ids": (VOCAB,)}, "stop_token_ids holds 23: the model's token ids are 0 to 22"),
    ({"stop_token_ids": (1, 2, 3)}, "3 entries of stop_token_ids: at most 2 (Limits.max_stop_token_ids)"),
    ({"max_kv_lag": -1}, "max_kv_lag=-1: must be at least 0"),
    ({"max_kv_lag": 4}, "max_kv_lag=4: must be between 0 and 3 (Limits.max_kv_lag)"),
    ({"max_version_lag": -1}, "max_version_lag=-1: must be None or at least 0"),
    ({"max_version_lag": 4}, "max_version_lag=4: must be None or between 0 and 3 (Limits.max_kv_lag)"),
    ({"finish_after": 0}, "finish_after=0: must be None or at least 1"),
    ({"finish_after": 3}, "finish_after=3: must be None or between 1 and n=2"),
    ({"min_len_to_cut": -1, "finish_after": 1}, "min_len_to_cut=-1: must be at least 0"),
    ({"min_len_to_cut": 5, "finish_after": 1}, "min_len_to_cut=5: must be between 0 and max_tokens=4"),
    ({"min_len_to_cut": 1}, "min_len_to_cut=1 without finish_after"),
    *(({"deadline_s": bad}, f"deadline_s={bad}: must be None or a positive") for bad in (0.0, -1.0, NAN, INF)),
    *(({"priority": bad}, f"priority={bad}: must be between") for bad in (-1_000_001, 1_000_001)),
    ({"logit_bias": {-1: 1.0}}, "logit_bias holds -1: token ids are 0 to"),
    ({"logit_bias": {VOCAB: 1.0}}, f"logit_bias holds {VOCAB}: the model's token ids are 0 to 22"),
    ({"logit_bias": [1]}, "logit_bias=[1]: must map token ids to numbers, e.g. {7: -100.0}"),
    *(({"logit_bias": {1: bad}}, f"logit_bias of token 1 is {bad}: must be between") for bad in (NAN, INF, -101.0, 101)),
    ({"logit_bias": {1: 0.0, 2: 0.0, 3: 0.0}}, "3 entries of logit_bias: at most 2 (Limits.max_logit_bias)"),
    ({"allowed_token_ids": (2**31,)}, "allowed_token_ids holds 2147483648: token ids are 0 to"),
    ({"allowed_token_ids": (VOCAB,)}, "allowed_token_ids holds 23: the model's token ids are 0 to 22"),
    ({"allowed_token_ids": ()}, "allowed_token_ids=(): no token is left to sample"),
    ({"allowed_token_ids": (1, 2, 3, 4)}, "4 entries of allowed_token_ids: at most 3 (Limits.max_allowed_token_ids)"),
    *(({"repetition_penalty": bad}, f"repetition_penalty={bad}: must be between") for bad in (NAN, 0.0, -1.0, INF)),
    *(({"presence_penalty": bad}, f"presence_penalty={bad}: must be between -2 and 2") for bad in (NAN, -2.1, 2.1)),
    *(({"frequency_penalty": bad}, f"frequency_penalty={bad}: must be between -2 and 2") for bad in (INF, -2.1, 2.1)),
    ({"stop": ("a", "")}, "stop holds an empty string"),
    ({"stop": ""}, "stop holds an empty string"),
    ({"stop": ("é" * 5,)}, "a stop string of 10 bytes: must be 1 to 8 (Limits.max_stop_bytes)"),
    ({"stop": ("a", "b", "c")}, "3 stop strings: at most 2 (Limits.max_stop_strings)"),
    ({"stop": 7}, "stop=7: must be a string or a tuple of strings"),
    ({"stop": None}, "stop=None: must be a string or a tuple of strings"),
    ({"stop": ("a", 7)}, "stop=('a', 7): must be a string or a tuple of strings"),
    ({"stop": ("\ud800",)}, "must be Unicode text"),
    ({"stream_every": -1}, "stream_every=-1: must be 0 (off)"),
    *(({"kv_ttl_s": bad}, f"kv_ttl_s={bad}: must be at least 0") for bad in (NAN, -1.0)),
    ({"kv_ttl_s": 3601.0}, "kv_ttl_s=3601.0: must be between 0 and 3600 (Limits.max_kv_ttl_s)"),
    ({"top_logprobs": -1}, "top_logprobs=-1: must be at least 0"),
    ({"top_logprobs": 21}, "top_logprobs=21: must be between 0 and 20 (Limits.max_top_logprobs)"),
    *(
        ({name: bad}, f"{name}={bad!r}: must be an integer")
        for name in INTEGERS
        for bad in (True, 2.5, np.float32(2.5), "2", INF)
    ),
    *(({name: bad}, f"{name}={bad!r}: must be a number") for name in NUMBERS for bad in (True, np.False_, "2", np.ones(1))),
    *(({name: None}, f"{name}=None: must be a") for name in sorted(ACCEPTED.keys() - OPTIONAL)),
    *(
        ({name: bad}, f"{name}={bad!r}: must be True or False")
        for name in ("ignore_eos", "raw_logprobs", "routed_experts")
        for bad in (1, "no", None)
    ),
    *(({name: (2.0, 1)}, f"{name} holds 2.0: must be integers") for name in ("stop_token_ids", "allowed_token_ids")),
    *(({name: 5}, f"{name}=5: must be token ids, e.g. (2, 7)") for name in ("stop_token_ids", "allowed_token_ids")),
    *(({name: "12"}, f"{name}='12': must be token ids") for name in ("stop_token_ids", "allowed_token_ids")),
    ({"logit_bias": {1.0: 1.0}}, "logit_bias holds 1.0: must be integers"),
    ({"logit_bias": {1: "1"}}, "logit_bias holds '1': must be numbers"),
]
"""what differs from GOOD, and what the message says"""
OF_THE_SERVICE = ("Limits.", "the model's token ids")
"""in messages of what only a service refuses"""


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


def of_sampling(bad: dict[str, Any]) -> bool:
    return not {"id", "prompt"} & bad.keys()


def sampling_with(**fields: Any) -> Sampling:
    return Sampling(**{"n": 2, "max_tokens": 4, **fields})


@pytest.mark.parametrize(("bad", "message"), [(bad, message) for bad, message in BAD if of_sampling(bad)])
def test_a_mistake_is_found_when_the_sampling_is_made(bad: dict[str, Any], message: str) -> None:
    """And when it is decoded or changed. What depends on the service is found there."""
    if any(words in message for words in OF_THE_SERVICE):
        sampling_with(**bad)
        return
    for made in (lambda: sampling_with(**bad), lambda: msgspec.structs.replace(sampling_with(), **bad)):
        with pytest.raises(ValueError) as refused:
            made()
        assert message in str(refused.value)


@pytest.mark.parametrize("bad", [{"n": 0}, {"temperature": -1.0}, {"stop": [""]}, {"top_k": -1}, {"finish_after": 3}])
def test_a_mistake_is_found_when_the_sampling_is_decoded(bad: dict[str, Any]) -> None:
    with pytest.raises(msgspec.ValidationError, match=next(iter(bad))):
        msgspec.json.decode(msgspec.json.encode({"n": 2, "max_tokens": 4} | bad), type=Sampling)
    with pytest.raises(msgspec.ValidationError, match="Expected `array`, got `str`"):
        msgspec.json.decode(b'{"stop": "x"}', type=Sampling)  # the wire has one form
    assert msgspec.json.decode(b'{"n": 2, "stop": ["x"]}', type=Sampling) == Sampling(n=2, stop="x")  # type: ignore[arg-type]


def test_values_in_other_types_are_converted() -> None:
    plain = Sampling(
        n=2, seed=7, temperature=1.0, top_p=0.5, kv_ttl_s=1.0, ignore_eos=True, stop_token_ids=(3,), allowed_token_ids=(4, 5),
        logit_bias={5: 2.0, 6: 1.0}, stop=("x",),
    )  # fmt: skip
    for kind in (np.int64, np.int32, np.uint8):
        of_numpy: dict[str, Any] = {
            "n": kind(2), "seed": np.array(7), "temperature": kind(1), "top_p": np.float32(0.5), "kv_ttl_s": 1,
            "ignore_eos": np.True_, "stop_token_ids": [kind(3)], "allowed_token_ids": np.arange(4, 6, dtype=kind),
            "logit_bias": {kind(5): np.float32(2), 6: 1}, "stop": np.str_("x"),
        }  # fmt: skip
        made = Sampling(**of_numpy)
        assert made == plain and repr(made) == repr(plain)
        assert msgspec.msgpack.encode(made) == msgspec.msgpack.encode(plain), "and are the same on the wire"
    from_yaml: dict[str, Any] = {"n": 2.0, "max_tokens": 4e3, "temperature": 1, "stop": ["a"], "seed": np.float64(7)}
    assert Sampling(**from_yaml) == Sampling(n=2, max_tokens=4000, stop=("a",), seed=7)
    assert type(Sampling(**from_yaml).n) is int and type(Sampling(**from_yaml).temperature) is float


def test_a_prompt_of_no_tokens_is_told_the_bound_that_holds() -> None:
    with pytest.raises(ValueError, match=r"prompt of 0 tokens: must be 1 to 119 \(the context of 120 tokens\)"):
        group(prompt=[]).validate(Limits(), VOCAB, CONTEXT)
    with pytest.raises(ValueError, match="prompt is a str: must be int32 .*tokenizer.encode"):
        Group("g", "text", Sampling()).validate(LIMITS, VOCAB, CONTEXT)  # type: ignore[arg-type]


def test_what_a_frame_does_not_hold_is_the_services_to_refuse() -> None:
    sampling = Sampling(top_logprobs=20, max_tokens=100)
    with pytest.raises(ValueError, match="do not fit a frame of 6400 bytes .Limits.max_frame_bytes.; lower max_tokens to 80"):
        check_sample_frames(sampling, Limits(max_frame_bytes=6400))
    check_sample_frames(sampling, Limits(max_frame_bytes=8000))
    group(top_logprobs=20, max_tokens=100).validate(Limits(max_frame_bytes=6400), VOCAB, CONTEXT)


def test_every_field_is_in_the_table() -> None:
    fields = {field.name for field in msgspec.structs.fields(Sampling)} | {"id", "prompt"}
    assert {name for bad, _ in BAD for name in bad} == fields


@pytest.mark.parametrize("kind", [Sampling, Sample])
def test_help_explains_every_field(kind: type[msgspec.Struct]) -> None:
    text = inspect.getdoc(kind) or ""
    explained = re.findall(r"^    (\w+): \S", text.split("Attributes:\n")[1], re.MULTILINE)
    assert sorted(explained) == sorted(kind.__struct_fields__)


def test_an_unknown_field_is_named_with_the_nearest_one() -> None:
    with pytest.raises(TypeError, match=r"Sampling has no field 'max_new_tokens'; did you mean max_tokens\?"):
        Sampling(max_new_tokens=3)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="Sampling has no field 'num_return_sequences'; it has n, max_tokens, "):
        Sampling(num_return_sequences=3)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="positional"):
        Sampling(3)  # type: ignore[misc]
