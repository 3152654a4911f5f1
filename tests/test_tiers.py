"""The tiers of tests: what `@pytest.mark.some` puts into the default one, and slices of the nightly one."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.support import nightly

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


SLICED = """
import pytest

@pytest.mark.parametrize("case", range(3))
def test_quick(case, new_seed): assert new_seed < 2**48

def test_over_seeds(new_seeds):
    assert len([seed for seed in new_seeds(10)]) == 10

@pytest.mark.timeout(7200)
def test_too_long(): ...

@pytest.mark.timeout(7200)
def test_that_ends_early(new_seeds): assert len(list(new_seeds(10**12))) > 10
"""


def slice_of(pytester: pytest.Pytester, *arguments: str) -> pytest.RunResult:
    """Run a slice of three files with these tests."""
    pytester.makeconftest('pytest_plugins = ["tests.support.nightly"]')
    pytester.makepyfile(**{f"test_{name}": SLICED for name in "abc"})
    return pytester.runpytest_inprocess("-v", "-W", "ignore", *arguments)


def ran(result: pytest.RunResult) -> list[str]:
    return [line.split()[0] for line in result.outlines if "::" in line and "PASSED" in line]


def test_a_slice_starts_elsewhere_at_each_commit(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    """And leaves out what takes long, unless it loops over seeds, which then ends early."""
    monkeypatch.setattr("tests.support.nightly.SLICE_S", 0.05)
    results = [slice_of(pytester, "--minutes", "5", "--order", order) for order in "abcd"]
    orders = [ran(result) for result in results]
    assert all(len(each) == 15 and sorted(each) == sorted(orders[0]) for each in orders)
    assert orders[0] == ran(slice_of(pytester, "--minutes", "5", "--order", "a"))
    assert len({each[0].split("::")[0] for each in orders}) > 1
    results[0].stdout.fnmatch_lines(["seeds of the nightly tier: NIGHTLY_SEEDS=*", "a slice of 5 minutes*15 of 15 tests*"])


def test_a_slice_starts_nothing_after_its_time(pytester: pytest.Pytester) -> None:
    result = slice_of(pytester, "--minutes", "0")
    assert result.ret == pytest.ExitCode.OK and not ran(result)
    result.stdout.fnmatch_lines(["a slice of 0 minutes*: 0 of 15 tests*"])


def test_a_failure_names_the_seed(pytester: pytest.Pytester) -> None:
    pytester.makeconftest('pytest_plugins = ["tests.support.nightly"]')
    pytester.makepyfile("def test_one(new_seeds):\n    for seed in new_seeds(9):\n        assert seed % 3, seed")
    result = pytester.runpytest_inprocess("-W", "ignore")
    failing = next(line.split()[-1] for line in result.outlines if "AssertionError: " in line and line.startswith("E "))
    result.stdout.fnmatch_lines(["*the newest seed*", f"{failing}: make it a case of the default tier"])


def test_processes_share_seeds_and_count_together(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(nightly.SEEDS, "7")
    monkeypatch.setattr("tests.support.nightly.SLICE_S", 0.05)
    result = slice_of(pytester, "--minutes", "5", "-n", "2", "-k", "quick or over")
    result.stdout.fnmatch_lines(["a slice of 5 minutes*: 12 of 12 tests, NIGHTLY_SEEDS=7"])


def test_seeds_are_new_each_time_and_can_be_drawn_again(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = []
    for base in ("1", "2", "1"):
        monkeypatch.setenv(nightly.SEEDS, base)
        drawn.append([next(nightly.seeds_of(name)) for name in ("a", "b")])
    assert drawn[0] == drawn[2] and len({*drawn[0], *drawn[1]}) == 4


IGNORING = "import signal, subprocess, sys; signal.signal(signal.SIGINT, signal.SIG_IGN); "
ASK = [sys.executable, "-c", "import signal; print(signal.getsignal(signal.SIGINT) is signal.default_int_handler)"]


@pytest.mark.parametrize("heeds", [True, False])
def test_processes_of_tests_heed_ctrl_c_also_behind_an_ampersand(heeds: bool) -> None:
    start = "from tests.support.signals import heed_interrupts; heed_interrupts(); " if heeds else ""
    program = f"{IGNORING}{start}print(subprocess.run({ASK!r}, capture_output=True, text=True).stdout)"
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True).stdout
    assert said.strip() == str(heeds)
