"""docs/promises.md names, for each promise, tests that exist, and a control."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TEST = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")
FILE = re.compile(r"`((?:engine|transport|rollout)/[\w/]+\.(?:py|c))`")


def sections() -> dict[str, str]:
    """The text of each promise, by its name."""
    _, *parts = re.split(r"^## (P\d+)$", (ROOT / "docs/promises.md").read_text(), flags=re.MULTILINE)
    return dict(zip(parts[::2], parts[1::2], strict=True))


@cache
def functions(path: str) -> set[str]:
    """Names of the tests in a file, those in classes included."""
    return {node.name for node in ast.walk(ast.parse((ROOT / path).read_text())) if isinstance(node, ast.FunctionDef)}


def missing(text: str) -> list[str]:
    """Tests and files that a text names and that do not exist."""
    tests = [
        f"{path}::{name}" for path, name in TEST.findall(text) if not (ROOT / path).exists() or name not in functions(path)
    ]
    return tests + [path for path in FILE.findall(text) if not (ROOT / path).exists()]


def test_every_promise_of_the_table_has_a_section() -> None:
    listed = re.findall(r"^\| (P\d+) \|", (ROOT / "docs/promises.md").read_text(), re.MULTILINE)
    assert listed == [f"P{i}" for i in range(1, 27)] == list(sections())


@pytest.mark.parametrize("promise", [f"P{i}" for i in range(1, 27)])
def test_a_promise_names_tests_and_a_control_that_exist(promise: str) -> None:
    text = sections()[promise]
    before, control = text.split("- Control: ")
    assert TEST.search(before) and (TEST.search(control) or control.startswith("none"))
    assert FILE.search(before) and not missing(text)


@cache
def nightly(path: str) -> set[str]:
    """Names of the tests in a file that are marked long as a whole; those with some long parameters are not among them."""
    tree = ast.parse((ROOT / path).read_text())
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    return {node.name for node in functions if "pytest.mark.long" in map(ast.unparse, node.decorator_list)}


def in_the_default_tier(text: str) -> list[str]:
    """Tests that a text names and that `make test` runs."""
    return [f"{path}::{name}" for path, name in TEST.findall(text) if name not in nightly(path)]


@pytest.mark.parametrize("promise", [f"P{i}" for i in range(1, 27)])
def test_make_test_runs_a_test_of_each_promise_and_a_control(promise: str) -> None:
    before, control = sections()[promise].split("- Control: ")
    assert in_the_default_tier(before) and (in_the_default_tier(control) or control.startswith("none"))


def test_a_promise_that_only_the_nightly_tier_tests_is_seen() -> None:
    assert not in_the_default_tier("`tests/endurance/test_endurance.py::test_a_minute_of_endurance`")


def test_a_test_that_does_not_exist_is_seen() -> None:
    assert missing("`tests/test_promises.py::test_of_nothing`, `engine/nothing.py`, `tests/test_promises.py::missing`") == [
        "tests/test_promises.py::test_of_nothing",
        "engine/nothing.py",
    ]
