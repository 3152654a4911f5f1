"""One page of at most 600 words for each role, from which every other page is two clicks away."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[1] / "docs"
PAGES = sorted(path.relative_to(DOCS).as_posix() for path in (DOCS / "start").glob("*.md"))
MOST_WORDS = 600
LINK = re.compile(r"\]\((?!https?:|#)([^)#\s]+\.md)")


def links(page: str, docs: Path = DOCS) -> set[str]:
    """Return the pages that a page links to, as paths in docs."""
    path = docs / page
    found = ((path.parent / each).resolve() for each in LINK.findall(path.read_text()))
    return {each.relative_to(docs.resolve()).as_posix() for each in found if each.is_relative_to(docs.resolve())}


def within(clicks: int, pages: set[str], docs: Path = DOCS) -> set[str]:
    """Return what is reached from pages by so many clicks."""
    for _ in range(clicks):
        pages = pages | {each for page in pages if (docs / page).is_file() for each in links(page, docs)}
    return pages


def test_there_is_a_page_for_each_role() -> None:
    assert PAGES == ["start/contributor.md", "start/operator.md", "start/trainer.md"]
    assert {*PAGES} <= links("index.md"), "the front page leads to them"


@pytest.mark.parametrize("page", PAGES)
def test_a_start_page_is_short_and_leads_to_the_others(page: str) -> None:
    assert len((DOCS / page).read_text().split()) <= MOST_WORDS
    assert {*PAGES} - {page} <= links(page)


def test_every_page_is_two_clicks_away() -> None:
    every = {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")}
    assert len(every) > 50
    assert every - within(2, {*PAGES}) <= {"index.md"}, "link it from a start page, or from a page that one links to"


def test_a_page_that_nobody_links_to_is_seen(tmp_path: Path) -> None:
    (tmp_path / "a.md").write_text("[b](b.md) [out](https://x/y.md)")
    (tmp_path / "b.md").write_text("[c](c.md#part)")
    (tmp_path / "c.md").write_text("[d](d.md)")
    assert within(2, {"a.md"}, tmp_path) == {"a.md", "b.md", "c.md"}
