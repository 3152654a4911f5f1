"""What a client or a replica sends at its limit costs work that grows with its bytes, not with their square: it is counted.

Lines of Python are counted for an input of the largest size and for one of half of it (docs/limits.md has the table)."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import msgspec
import numpy as np
import pytest

from rollout.engine.scheduling.sequence import kv_at_end
from rollout.engine.types import Group, Limits, Sample, Sampling
from rollout.transport import messages as m
from rollout.transport.checks import NOTHING, check_sample
from rollout.transport.errors import RolloutError
from rollout.transport.frames import Decoder

LIMITS = Limits()
MOST_LINES = 1_000_000
"""of Python, which runs some ten million in a second"""
LINEAR = 2.5
"""times the work of half the input: twice, and what is the same for both"""


def lines_of(work: Callable[[], Any]) -> int:
    """Count the lines of Python that are run, calls of comprehensions and generators among them."""
    count = 0

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal count
        count += 1
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    except (ValueError, RolloutError):
        pass  # a refusal is an answer
    finally:
        sys.settrace(before)
    return count


def decoded(header: dict[str, Any]) -> Callable[[], object]:
    data = msgspec.msgpack.encode(header)
    assert len(data) <= LIMITS.max_header_bytes
    return lambda: Decoder(m.ClientMessage, LIMITS).unpack([data])


def spans(kind: str, count: int) -> Callable[[], object]:
    """A sample with so many spans: as many as a header holds."""
    tokens = np.zeros(count, np.int32)
    versions = [(i, i) for i in range(count)] if kind == "weights" else [(0, 1)]
    kv = {"weights": [], "positions": [(0, i, 1) for i in range(count)], "tokens": [(i, i % 2, i % 2) for i in range(count)]}[
        kind
    ]
    columns = dict(token_ids=tokens, logprobs=np.full(count, -1, np.float32), weight_versions=versions, kv_versions=kv)
    sample = Sample(group_id="g", index=0, prompt_tokens=count, seed=1, finish_reason="length", **columns)
    group = Group("g", np.zeros(count, np.int32), Sampling(n=1, max_tokens=count, seed=1, max_kv_lag=9))
    return lambda: check_sample(sample, group, None, NOTHING._replace(vocab_size=9))


PARSERS: dict[str, tuple[Callable[[int], Callable[[], object]], int]] = {
    "header of nested arrays": (lambda n: decoded({"type": "submit", "group_id": [[0]] * n}), 20_000),
    "header of unknown fields": (lambda n: decoded({"type": "hello", **{f"{i}": 0 for i in range(n)}}), 8_000),
    "header of many ids": (lambda n: decoded({"type": "abort", "group_ids": ["g"] * n}), 30_000),
    "spans of weights": (lambda n: spans("weights", n), 16_000),
    "spans of KV, by position": (lambda n: spans("positions", n), 16_000),
    "spans of KV, by token": (lambda n: spans("tokens", n), 16_000),
    "spans of KV of a partial sample": (lambda n: lambda: kv_at_end([(0, i, 1) for i in range(n)]), 16_000),
}


@pytest.mark.parametrize("parser", PARSERS)
def test_the_largest_input_costs_work_in_proportion(parser: str) -> None:
    make, most = PARSERS[parser]
    lines_of(make(most // 4))  # modules that are imported at first use
    whole, half = lines_of(make(most)), lines_of(make(most // 2))
    assert whole <= MOST_LINES and whole <= LINEAR * half + 1000


def test_work_that_grows_with_the_square_is_seen() -> None:
    """The negative control: spans that are copied for each span, as a tuple."""

    def copying(count: int) -> None:
        found: tuple[int, ...] = ()
        for i in range(count):
            found = *(each for each in found if each < i), i

    whole, half = lines_of(lambda: copying(600)), lines_of(lambda: copying(300))
    assert whole > LINEAR * half + 1000
