"""The changes that a worked page shows, applied to a copy of the sources.

    ```diff
    --- engine/values/sampling.py
         min_p: float = 0.0
    +    top_a: float = 0.0
    @@
    …
    ```

`---` names a file, `@@` begins another place in it. Lines with a space or `-` must stand together in the file, exactly once.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
SOURCES = ("engine", "transport", "recipes", "rollout", "tests", "docs")
LEFT_OUT = shutil.ignore_patterns("__pycache__", "*.so", "*.png", "*.jsonl")


class Misfit(Exception):
    """A change whose place is not in the file, or not once."""


class Change(NamedTuple):
    """Lines of a file that become others."""

    path: str
    old: str
    new: str


def changes_of(page: str) -> list[Change]:
    """List the changes in a page's blocks, in order. Raises Misfit if one names no file or no place."""
    found = []
    for block in re.findall(r"^```diff\n(.*?)^```", page, re.MULTILINE | re.DOTALL):
        for name, hunks in re.findall(r"^--- (\S+)\n(.*?)(?=^--- |\Z)", block, re.MULTILINE | re.DOTALL):
            for hunk in hunks.split("@@\n"):
                lines = [line or " " for line in hunk.splitlines()]
                old, new = ("".join(f"{line[1:]}\n" for line in lines if line[0] in kinds) for kinds in (" -", " +"))
                if not old:
                    raise Misfit(f"{name}: a change without a place: {hunk}")
                found.append(Change(name, old, new))
    return found


def apply(change: Change, root: Path) -> None:
    """Change a file below `root`. Raises Misfit."""
    path = root / change.path
    text = f"\n{path.read_text()}" if path.is_file() else ""
    if (count := text.count(f"\n{change.old}")) != 1:
        raise Misfit(f"{change.path} has {count} times:\n{change.old}")
    path.write_text(text.replace(f"\n{change.old}", f"\n{change.new}")[1:])


def copy_sources(to: Path) -> None:
    """Copy the sources with their links."""
    for name in SOURCES:
        shutil.copytree(ROOT / name, to / name, symlinks=True, ignore=LEFT_OUT)
    for name in ("pyproject.toml", "README.md", "CONTRIBUTING.md", "CHANGELOG.md"):
        shutil.copy(ROOT / name, to)
