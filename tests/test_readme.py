"""The README is short, and so are its programs; tests/test_snippets.py runs them."""

from __future__ import annotations

import pytest

from tests.support.readme import readme_program


@pytest.mark.parametrize(("name", "most"), [("example.py", 15), ("train.py", 30)])
def test_the_programs_are_short(name: str, most: int) -> None:
    assert len(readme_program(name).splitlines()) <= most
