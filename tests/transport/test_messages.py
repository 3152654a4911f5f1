"""Digests and error kinds: what the two ends have to agree on besides the bytes."""

from __future__ import annotations

import inspect

import msgspec
import numpy as np
import pytest

from engine.types import Sampling
from transport import errors
from transport.messages import DIGEST_BYTES, Submit, digest

SUBMIT = Submit("g", np.array([1, 2, 3], np.int32), Sampling(n=2, temperature=float("nan")), 4)


def test_equal_submits_have_equal_digests() -> None:
    again = Submit("g", np.array([1, 2, 3], np.int32), Sampling(n=2, temperature=float("nan")), 4)
    assert digest(SUBMIT) == digest(again) and len(digest(SUBMIT)) == DIGEST_BYTES


@pytest.mark.parametrize(
    "change",
    [
        {"group_id": "h"},
        {"serial": 5},
        {"prompt": np.array([1, 2, 4], np.int32)},
        {"prompt": np.array([[1, 2, 3]], np.int32)},
        {"prompt": np.array([1, 2, 3], np.uint32)},
        {"sampling": Sampling(n=3, temperature=float("nan"))},
        {"sampling": Sampling(n=2, temperature=float("nan"), stop_token_ids=(1,))},
    ],
)
def test_any_difference_changes_the_digest(change: dict[str, object]) -> None:
    assert digest(msgspec.structs.replace(SUBMIT, **change)) != digest(SUBMIT)


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
            assert f" {error.kind} " in line
    assert issubclass(errors.InvalidRequest, ValueError)
    assert issubclass(errors.ServiceRestarted, errors.ServiceLost) and issubclass(errors.ServiceLost, ConnectionError)
    assert issubclass(errors.RequestTimeout, TimeoutError)
