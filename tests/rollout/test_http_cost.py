"""What a JSON body costs to decode is bounded before it is decoded, however it is written."""

from __future__ import annotations

import json
import random
import string
from typing import Any

import msgspec
import numpy as np
import pytest

pytest.importorskip("starlette", reason="pip install 'rl-rollout[http]'")
pytest.importorskip("uvicorn", reason="pip install 'rl-rollout[http]'")
pytest.importorskip("httptools", reason="pip install 'rl-rollout[http]'")

from rollout.http.conversation import check_messages  # noqa: E402
from rollout.http.errors import HttpError  # noqa: E402
from rollout.http.json_cost import COMMA, COSTLY, check_cost, kinds_of  # noqa: E402
from rollout.http.settings import RequestLimits  # noqa: E402

LIMITS = RequestLimits(max_body_structure=1000, max_body_values=5000)
COUNT = 1200
"""of each; more than LIMITS allow"""
COSTLY_BODIES = {
    "lists": [[] for _ in range(COUNT)],
    "objects": [{} for _ in range(COUNT)],
    "keys": {str(i): 1 for i in range(COUNT)},
    "fractions": [0.5] * COUNT,
    "exponents": "[" + ",".join(["1e3"] * COUNT) + "]",
    "EXPONENTS": "[" + ",".join(["1E3"] * COUNT) + "]",
    "a long number": "9" * 50_000,
    "long numbers": "[" + ",".join(["9" * 31] * COUNT) + "]",
    "values": [1] * 6000,
    "behind a text of quotes": ['"\\"' * 30, [[]] * COUNT],
    "behind backslashes": ["\\" * 31, [[]] * COUNT],
}
CHEAP_BODIES: dict[str, Any] = {
    "text of brackets": {"prompt": "[{:.e" * 20_000},
    "text of brackets and quotes": {"prompt": '"[\\"{' * 20_000},
    "text of backslashes": {"prompt": "\\[" * 20_000},
    "ids": {"prompt": [123_456] * 4000},
    "text of commas": {"prompt": "," * 20_000},
}


def written(body: Any) -> bytes:
    return body.encode() if isinstance(body, str) else json.dumps(body).encode()


@pytest.mark.parametrize("kind", COSTLY_BODIES)
def test_what_takes_long_to_decode_is_refused_before(kind: str) -> None:
    with pytest.raises(HttpError, match="max_body_(structure|values)"):
        check_cost(written(COSTLY_BODIES[kind]), LIMITS, "the body")


@pytest.mark.parametrize("kind", CHEAP_BODIES)
def test_texts_and_ids_are_not(kind: str) -> None:
    data = written(CHEAP_BODIES[kind])
    assert len(data) > LIMITS.max_body_structure
    check_cost(data, LIMITS, "the body")


def test_values_are_counted_as_a_decoder_sees_them() -> None:
    """Random values: their texts hold what looks like structure."""
    rng = random.Random(0)

    def value(depth: int) -> Any:
        kind = rng.randrange(6 if depth else 4)
        if kind == 4:
            return [value(depth - 1) for _ in range(rng.randrange(5))]
        if kind == 5:
            return {text(): value(depth - 1) for _ in range(rng.randrange(5))}
        return (text(), rng.randrange(10**6), rng.random(), None)[kind]

    def text() -> str:
        return "".join(rng.choice('"\\[]{}:,.eEé\n' + string.ascii_letters) for _ in range(rng.randrange(20)))

    def count(each: Any) -> tuple[int, int]:
        """Arrays, objects, keys and fractions, and commas."""
        if isinstance(each, list | dict):
            inner = [count(one) for one in (each.values() if isinstance(each, dict) else each)]
            keys = len(each) if isinstance(each, dict) else 0
            return 1 + keys + sum(a for a, _ in inner), max(0, len(each) - 1) + sum(b for _, b in inner)
        return int(isinstance(each, float)), 0

    for _ in range(300):
        made = value(5)
        data = msgspec.json.encode(made)
        kinds, (structure, commas) = kinds_of(data), count(made)
        assert np.count_nonzero(kinds == COMMA) == commas
        exponents = np.count_nonzero(kinds == COSTLY) - structure
        assert 0 <= exponents <= 50, "fractions may have an exponent as well"


def test_arguments_of_calls_count_together() -> None:
    call = {"function": {"name": "f", "arguments": "[" * 50}}
    messages = [{"role": "assistant", "content": "", "tool_calls": [call]} for _ in range(30)]
    with pytest.raises(HttpError, match="the arguments of all tool_calls"):
        check_messages(messages, LIMITS)
    check_messages(messages[:10], LIMITS)


def test_the_default_limits_allow_the_largest_requests_of_use() -> None:
    limits = RequestLimits()
    check_cost(written({"prompt": [[5, 6, 7] * 100] * limits.max_prompts}), limits, "the body")
    check_cost(written({"prompt": [12_345] * 131_072, "logit_bias": {str(i): -1.5 for i in range(1024)}}), limits, "the body")
