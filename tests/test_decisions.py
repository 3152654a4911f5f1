"""Each page of docs/decisions begins with the decision, and the index has these lines."""

from __future__ import annotations

import pytest

from tests.support.decisions import FOLDER, decision_of, index, written


def test_the_index_has_the_first_line_of_each_page() -> None:
    assert (FOLDER / "README.md").read_text() == written(), "python -m tests.support.decisions"
    assert index().count("\n") == len(list(FOLDER.glob("*.md"))) - 1


@pytest.mark.parametrize(
    "text",
    ["# Title\n\n| a |\n\n", "# A\n\nNo end\n\n", f"# Title\n\n{'long ' * 80}.\n\n", "No title.\n\n", "# T\n\nA. B. C. D.\n\n"],
)
def test_a_page_that_does_not_begin_with_its_decision_is_seen(text: str) -> None:
    assert decision_of("# Title\n\nThe engine does it.\nSo it is.\n\nMore.\n") == ("Title", "The engine does it. So it is.")
    with pytest.raises(ValueError):
        decision_of(text)
