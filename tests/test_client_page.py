"""docs/client.md has every call, option, field and error of the client; its tables are those of the docstrings."""

from __future__ import annotations

import importlib
import re
from typing import get_args

import pytest

import rollout
from rollout.engine.values import FinishReason
from rollout.transport import errors
from tests.support.client_page import PAGE, TABLES, fields, written

REWRITE = "run python -m tests.support.client_page"


def test_the_tables_are_those_of_the_docstrings() -> None:
    page = PAGE.read_text()
    assert page == written(page), REWRITE
    assert set(re.findall(r"<!-- table: (\w+) -->", page)) == set(TABLES)


def rows(page: str, heading: str) -> list[str]:
    """First words in backticks of the rows of a section."""
    section = page.split(f"## {heading}\n")[1].split("\n## ")[0]
    return re.findall(r"^\| `(\w+)`", section, re.MULTILINE)


def test_every_error_is_on_the_page() -> None:
    assert set(rows(PAGE.read_text(), "All errors")) == {kind.__name__ for kind in errors.KINDS.values()}


def test_every_finish_reason_is_on_the_page() -> None:
    reasons = [row for row in rows(PAGE.read_text(), "Generating samples") if row in get_args(FinishReason)]
    assert sorted(reasons) == sorted(get_args(FinishReason))


@pytest.mark.parametrize("table", [table for table in TABLES.values()], ids=list(TABLES))
def test_every_row_has_a_meaning(table: str) -> None:
    _, _, *lines = table.splitlines()
    assert lines and not [line for line in lines if re.search(r"\| *\|$", line)]


def test_the_words_fit_on_one_screen() -> None:
    words = PAGE.read_text().split("## Words\n")[1].split("\n## ")[0]
    assert 8 <= len(words.strip().splitlines()) <= 15


def test_every_name_that_the_package_exports_is_on_the_page() -> None:
    page = PAGE.read_text()
    missing = [name for name in rollout.__all__ if name != "__version__" and not re.search(rf"\b{name}\b", page)]
    assert not missing
    if hasattr(rollout, "AsyncRolloutClient"):
        asynchronous = dir(importlib.import_module("rollout.client.aio").AsyncRolloutClient)
        assert {name for name in asynchronous if not name.startswith("_")} <= set(re.findall(r"`(\w+)", page))


def test_a_missing_field_is_found() -> None:
    page = PAGE.read_text()
    (line,) = re.findall(r"^\| `min_p`.*\n", page, re.MULTILINE)
    assert written(page.replace(line, "")) == page, "the table is written again with the field"


def test_a_field_without_a_docstring_is_found() -> None:
    with pytest.raises(AssertionError):
        test_every_row_has_a_meaning(fields(Undescribed))


class Undescribed:
    first: int
    """of all"""
    second: int
