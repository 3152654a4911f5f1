"""The index of docs/decisions: the first paragraph of each page. `python -m tests.support.decisions` writes it."""

from __future__ import annotations

import re
from pathlib import Path

FOLDER = Path(__file__).parents[2] / "docs/decisions"
LONGEST = 320
"""characters of a decision"""


def decision_of(text: str) -> tuple[str, str]:
    """Return the title and the decision of a page: its first paragraph, in one line. Raises ValueError if it is none."""
    match = re.match(r"# ([^\n]+)\n\n(.+?)\n\n", text, re.DOTALL)
    if not match:
        raise ValueError("a page begins with its title and one paragraph, the decision")
    title, line = match[1], " ".join(match[2].split())
    sentences = re.findall(r"[.:](?= |$)", line)
    if not line.endswith(".") or len(line) > LONGEST or len(sentences) > 3 or line.startswith(("<", "|", "-")):
        raise ValueError(f"{title}: the first paragraph is the decision, one or two sentences, at most {LONGEST} characters")
    return title, line


def index() -> str:
    """Return the lines of the index, in the order of the README, new pages last."""
    page = (FOLDER / "README.md").read_text()
    names = re.findall(r"^- \[.*?\]\((\S+?\.md)\)", page, re.MULTILINE)
    names += sorted({path.name for path in FOLDER.glob("*.md")} - {"README.md", *names})
    found = [(name, *decision_of((FOLDER / name).read_text())) for name in names if (FOLDER / name).is_file()]
    return "".join(f"- [{title}]({name}): {line}\n" for name, title, line in found)


def written() -> str:
    """Return the README as it should be."""
    page = (FOLDER / "README.md").read_text()
    return page[: page.index("\n- [") + 1] + index()


if __name__ == "__main__":
    (FOLDER / "README.md").write_text(written())
