"""Each page of docs/decisions begins with the decision and is short, and the index has these lines."""

from __future__ import annotations

import pytest

from tests.support.decisions import FOLDER, decision_of, index, written

MOST_WORDS = 600
LISTS = {"README.md", "refused.md", "removed.md"}
"""pages that are an index or a table, with a line for each entry"""


def long_pages(words: dict[str, int]) -> list[str]:
    """List the pages with too many words, lists apart."""
    return sorted(name for name, count in words.items() if count > MOST_WORDS and name not in LISTS)


def test_the_index_has_the_first_line_of_each_page() -> None:
    assert (FOLDER / "README.md").read_text() == written(), "python -m tests.support.decisions"
    assert index().count("\n") == len(list(FOLDER.glob("*.md"))) - 1


def test_a_decision_is_read_at_once() -> None:
    """Details go to docs/internals, measurements to docs/benchmarks. Words are what `wc -w` counts."""
    words = {path.name: len(path.read_text().split()) for path in FOLDER.glob("*.md")}
    assert len(words) > 25 and words.keys() >= LISTS
    assert not long_pages(words)


def test_a_long_page_is_seen() -> None:
    assert long_pages({"a.md": MOST_WORDS, "b.md": MOST_WORDS + 1, "README.md": 5 * MOST_WORDS}) == ["b.md"]


@pytest.mark.parametrize(
    "text",
    ["# Title\n\n| a |\n\n", "# A\n\nNo end\n\n", f"# Title\n\n{'long ' * 80}.\n\n", "No title.\n\n", "# T\n\nA. B. C. D.\n\n"],
)
def test_a_page_that_does_not_begin_with_its_decision_is_seen(text: str) -> None:
    assert decision_of("# Title\n\nThe engine does it.\nSo it is.\n\nMore.\n") == ("Title", "The engine does it. So it is.")
    with pytest.raises(ValueError):
        decision_of(text)
