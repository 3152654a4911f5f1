"""Columns of a child: cutting and joining them loses nothing."""

from __future__ import annotations

import random

import numpy as np
import pytest

from rollout.engine.values import COLUMNS, TokenColumns, no_tokens
from tests.support.wire_fuzz import same


def columns(r: random.Random, tokens: int, raw: bool = True, k: int = 2) -> TokenColumns:
    starts = sorted({0, *(r.randrange(tokens) for _ in range(r.randrange(4)))}) if tokens else []
    version = r.randrange(3)
    spans = [(start, version := version + 1 + r.randrange(2)) for start in starts]
    return TokenColumns(
        token_ids=np.array([r.randrange(99) for _ in range(tokens)], np.int32),
        logprobs=np.array([-r.random() for _ in range(tokens)], np.float32),
        weight_versions=spans,
        raw_logprobs=np.array([-r.random() for _ in range(tokens)], np.float32) if raw else None,
        top_ids=np.array([r.randrange(99) for _ in range(tokens * k)], np.int32).reshape(-1, k) if k else None,
        top_logprobs=np.zeros((tokens, k), np.float32) if k else None,
    )


def versions(of: TokenColumns) -> list[int]:
    """The weight version of each token."""
    spans = dict(of.weight_versions)
    made: list[int] = []
    for at in range(len(of.token_ids)):
        made.append(spans[at] if at in spans else made[-1])
    return made


@pytest.mark.parametrize("seed", range(60))
def test_slices_hold_their_tokens_and_joined_again_are_the_whole(seed: int) -> None:
    r = random.Random(seed)
    whole = columns(r, r.randrange(1, 12), raw=r.random() < 0.5, k=r.choice((0, 2)))
    length = len(whole.token_ids)
    cuts = [0, *sorted(r.randrange(length + 1) for _ in range(r.randrange(4))), length]
    parts = [whole.slice(first, last) for first, last in zip(cuts, cuts[1:], strict=False)]
    for part, first, last in zip(parts, cuts, cuts[1:], strict=False):
        assert part.token_ids.tolist() == whole.token_ids[first:last].tolist()
        assert versions(part) == versions(whole)[first:last] and part.layout == whole.layout
        assert all(0 <= start < len(part.token_ids) for start, _ in part.weight_versions)
    assert same(TokenColumns.concat(parts), whole)
    assert same(whole.slice(0), whole) and same(whole.slice(0, length + 5), whole)


def test_joined_columns_own_their_memory() -> None:
    """A small part kept for long does not hold the message that it came in."""
    whole = columns(random.Random(0), 9)
    kept = TokenColumns.concat([whole.slice(2, 4)])
    assert not any(np.shares_memory(getattr(kept, name), getattr(whole, name)) for name in COLUMNS)
    assert np.shares_memory(whole.slice(2, 4).token_ids, whole.token_ids)


def test_an_optional_array_that_a_part_lacks_is_dropped() -> None:
    r = random.Random(1)
    both = TokenColumns.concat([columns(r, 3), columns(r, 2, raw=False)])
    assert both.raw_logprobs is None and both.layout == (False, 2, None) and len(both.token_ids) == 5
    assert no_tokens().nbytes == 0 and no_tokens().layout == (False, 0, None)
    assert columns(r, 3).nbytes == 3 * (4 + 4 + 4 + 8 + 8)
