"""The tiers of tests: what `@pytest.mark.some` puts into the default one."""

from __future__ import annotations

import pytest

pytest_plugins = ["pytester"]

CASES = """
import pytest

@pytest.mark.some(2)
@pytest.mark.parametrize("case", range(6))
def test_first(case): ...

@pytest.mark.some(9)
@pytest.mark.parametrize("case", range(3))
def test_second(case): ...

@pytest.mark.some(1)
@pytest.mark.parametrize("case", [0, pytest.param(1, marks=pytest.mark.long), pytest.param(2, marks=pytest.mark.long)])
def test_third(case): ...
"""


def cases(pytester: pytest.Pytester, *arguments: str) -> list[str]:
    pytester.makeconftest("from tests.conftest import pytest_collection_modifyitems")
    pytester.makepyfile(CASES)
    result = pytester.runpytest_inprocess("--collect-only", "-q", "-W", "ignore", *arguments)
    return [line.split("::")[1] for line in result.outlines if "::" in line]


def test_some_cases_are_daily_and_the_others_nightly(pytester: pytest.Pytester) -> None:
    daily = cases(pytester, "-m", "not long")
    assert daily == cases(pytester, "-m", "not long"), "always the same ones"
    assert [sum(name.startswith(test) for name in daily) for test in ("test_first", "test_second", "test_third")] == [2, 3, 1]
    assert "test_third[0]" in daily
    nightly = cases(pytester, "-m", "long")
    assert sorted([*daily, *nightly]) == sorted(cases(pytester)) and len(daily) + len(nightly) == 12


def test_a_case_that_is_named_runs(pytester: pytest.Pytester) -> None:
    left_out = next(name for name in cases(pytester, "-m", "long") if name.startswith("test_first"))
    file = next(pytester.path.glob("test_*.py")).name
    assert cases(pytester, "-m", "not long", f"{file}::{left_out}") == [left_out]
