"""What the README shows."""

from __future__ import annotations

from pathlib import Path

from tests.support.snippets import snippets_of

ROOT = Path(__file__).parents[2]


def readme_program(name: str) -> str:
    """Return a program, as printed."""
    (found,) = [each for each in snippets_of("README.md", (ROOT / "README.md").read_text()) if each.mark("file") == name]
    return found.text
