"""The code blocks and commands of a page, and the comments that say how a test runs them.

    <!-- snippet: file train.py; prints ratio 1 -->

A comment before a block has one or more of these words; a block without one runs.

| words | the test |
|---|---|
| none | runs Python in the page's namespace, commands one after the other; parses TOML (as a `Config`), JSON and YAML |
| `file NAME` | writes the block to NAME in the page's folder |
| `prints REGEX` | also searches what the block prints |
| `apart` | runs Python in a namespace of its own |
| `long` | runs the block in the nightly tier only |
| `output`, `drawing` | does nothing: the block is what a command prints, or a picture made of letters |
| `elsewhere PATH` | checks syntax and arguments, and that this file, whose tests run the same, exists |
| `not run: REASON` | checks syntax and arguments only; `REASONS` has the accepted reasons |

Blocks are fenced with a language, or indented by four spaces: then they are commands.
"""

from __future__ import annotations

import re
import shlex
from typing import NamedTuple

REASONS = ("needs GPU", "docker", "k8s", "slurm", "network", "several hosts", "package ")
"""what no machine of the default tier has; `package NAME`: another project's, which is not among the test dependencies"""
SHELL = ("sh", "bash", "shell")
LANGUAGES = (*SHELL, "python", "toml", "json", "jsonl", "yaml")
PICTURES = ("mermaid",)
FENCE = re.compile(r"^ *```+ *([\w+-]*)")
MARK = re.compile(r"^ *<!-- snippet: (.+?) -->$")
ITEM = re.compile(r"^ *(?:[-*+]|\d+\.) ")
WORDS = re.compile(r"file \S+|prints .+|apart|long|output|drawing|elsewhere \S+|not run: .+")


class Snippet(NamedTuple):
    """One block of a page."""

    page: str
    line: int
    """of the page, at which the text begins"""
    language: str
    text: str
    marks: tuple[str, ...] = ()

    def mark(self, word: str) -> str | None:
        """Return what follows a word of the comment; None if the comment lacks it."""
        return next((mark.removeprefix(word).strip() for mark in self.marks if mark.startswith(word)), None)

    @property
    def excepted(self) -> bool:
        """Whether neither this test nor another one runs it."""
        return self.mark("not run:") is not None

    @property
    def shown(self) -> bool:
        """Whether it is no code."""
        return self.mark("output") is not None or self.mark("drawing") is not None

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def snippets_of(page: str, text: str) -> list[Snippet]:
    """List the blocks of a page in order, without diagrams. Raises ValueError for an unknown language or word, and for a
    comment without a block."""
    found: list[Snippet] = []
    lines, marks, at, code_may_begin, in_list = text.splitlines(), "", 0, True, False
    while at < len(lines):
        line = lines[at]
        if fence := FENCE.match(line):
            end = next((i for i in range(at + 1, len(lines)) if lines[i].strip().startswith("```")), len(lines))
            if fence[1] not in PICTURES:
                found.append(_snippet(page, at + 2, fence[1], lines[at + 1 : end], marks))
            at, marks, code_may_begin = end + 1, "", True
        elif code_may_begin and not in_list and line.startswith("    "):
            end = next((i for i in range(at, len(lines)) if lines[i].strip() and not lines[i].startswith("    ")), len(lines))
            found.append(_snippet(page, at + 1, "sh", [each[4:] for each in lines[at:end]], marks))
            at, marks = end, ""
        else:
            if marks and line.strip() and not line.startswith("<!-- "):
                raise ValueError(f"{page}:{at + 1}: a snippet comment without a block after it")
            if mark := MARK.match(line):
                marks = mark[1]
            elif line.strip():
                in_list = bool(ITEM.match(line)) or (in_list and line.startswith(" "))
            code_may_begin, at = not line.strip() or bool(marks), at + 1
    return found


def _snippet(page: str, line: int, language: str, lines: list[str], comment: str) -> Snippet:
    marks = tuple(mark.strip() for mark in comment.split("; ")) if comment else ()
    snippet = Snippet(page, line, language, "\n".join(lines).rstrip() + "\n", marks)
    wrong = [mark for mark in marks if not WORDS.fullmatch(mark)]
    if wrong:
        raise ValueError(f"{snippet}: unknown word {wrong[0]!r} in a snippet comment")
    reason = snippet.mark("not run:")
    if reason is not None and not reason.startswith(REASONS):
        raise ValueError(f"{snippet}: not run: {reason!r}: must be one of {', '.join(REASONS)}")
    if language not in LANGUAGES and not snippet.shown:
        raise ValueError(f"{snippet}: language {language!r}: must be one of {', '.join(LANGUAGES)}")
    return snippet


def commands_of(snippet: Snippet) -> list[str]:
    """List the commands of a block: lines, without comments, joined where one ends in a backslash or inside quotes."""
    found, begun = [], ""
    for line in snippet.text.splitlines():
        begun = f"{begun}\n{line}" if begun else line
        if begun.endswith("\\") or not _is_closed(begun):
            continue
        if words_of(begun):
            found.append(begun)
        begun = ""
    if begun:
        raise ValueError(f"{snippet}: the last command is not complete")
    return found


def words_of(command: str) -> list[str]:
    """Split a command as a shell does, without its comment. Programs in .venv/bin have their bare names."""
    words = shlex.split(command.replace("\\\n", " "), comments=True)
    return [words[0].removeprefix(".venv/bin/"), *words[1:]] if words else []


def _is_closed(command: str) -> bool:
    try:
        shlex.split(command, comments=True)
    except ValueError:
        return False
    return True
