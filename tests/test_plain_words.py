"""Documentation in plain words: short entry pages, and none of the phrases that readers had to read twice."""

from __future__ import annotations

import re
from pathlib import Path
from re import _parser as sre  # type: ignore[attr-defined]

import pytest

ROOT = Path(__file__).parents[1]
HELP = ("rollout/config.py", "rollout/commands/arguments.py", "engine/config.py")
MOST_LINES = {"README.md": 130, "docs/architecture.md": 80, "docs/life-of-a-request.md": 40}

PHRASES = (
    r"for which they would not is",
    r"hold a step up",
    r"with what they have\b",
    r"whenever they are wanted",
    r"go the other way",
    r"the best way that both",
    r"whoever speaks",
    r"one of which may die",
    r"how are many services one",
    r"what is (told|typed)\b",
    r"is told (where|what|so|who)",
    r"what an engine does at all",
    r"\bstatus\.py` looks",
    r"what they are called",
    r"not drawn yet",
    r"guessed from what",
    r"idle goes before",
    r"waits? in silence",
    r"come home",
    r"costs itself only",
    r"refused in words",
    r"without a word",
    r"writes down of itself",
    r"takes? leave of",
    r"what a child has said",
    r"the group has said",
    r"of whatever may",
    r"judge of the seam",
    r"served wrong looks like",
    r"who computes a model",
    r"tokens that somebody gives",
    r"one that lasts longer",
    r"past it only that client suffers",
    r"nobody is asked for a key",
    r"it is not of use as it is",
    r"is not as the others",
    r"\b(step|loop|part|service|process) (that )?stands\b",
    r"whoever asks this",
    r"it comes twice",
    r"goes on behind",
    r"soft resets?\b",
    r"\b(who|what)ever (asks|has|is|it|can|may|runs?|was|the|else)\b",
    r"\b(no|some|any|every)body\b",
    r"\b(can|could|cannot) be had\b",
    r"\b(is|are|was|were) (told|said)\b",
    r"\bstands? (for itself|beside|behind|still)\b",
    r"\b(it|that|they|which|so) (goes|go|went) on\b",
    r"\bbeside (it|them|each|others?|the (compute|step|steps))\b",
    r"\bof (another|a) kind\b(?! of)",
    r"\bin company\b",
    r"\b(is|are|was|were) not taken\b",
    r"\bthe seam\b",
    r"\b(whoever|who) (came|comes|knows|said|says|asks)\b",
    r"\b(is|are) told\b",
    r"\bhas forgotten\b",
    r"\bsaid (goodbye|hello)\b",
    r"\bwhere (these|this|that) pays?\b",
    r"\bwhat (travels|comes|comes? of|stands|lies|is left) (is|are|of|for|behind|there)\b",
    r"\bliv(ed|es?|ing) through\b",
    r"\bmeets? (its|their|it|them|the (context|state|weights?|next)|V)\b",
    r"\broutes? travels?\b",
    r"\bmakes? it of what\b",
    r"\b(lies?|lay) (beside|behind)\b",
    r"\bbehind (its|the) (end|last|first|state|tokens?|window|beginning)\b",
    r"\bseen at once\b",
    r"\bnothing else knows\b",
    r"\bgo(es)? back behind\b",
    r"\bha(s|ve) no bits of\b",
    r"\bthe runs? parts?\b",
    r"\bin vain\b",
    r"\ball the same\b",
)
"""regular expressions, matched without regard to case and line breaks"""
ROOMS = ("engine", "transport", "rollout", "recipes")
"""folders whose docstrings, comments and messages are checked too, but for measurements (rollout/bench)"""


def required(phrase: str) -> str:
    """Return the longest run of letters that every match has: looking for it first is ten times faster."""
    runs = [""]
    for kind, what in sre.parse(phrase):
        runs = [*runs[:-1], runs[-1] + chr(what)] if kind is sre.LITERAL else [*runs, ""]
    return max(runs, key=len).lower()


REQUIRED = {phrase: required(phrase) for phrase in PHRASES}


def found(text: str) -> list[str]:
    """List the phrases that occur in a text."""
    plain = re.sub(r"\s+", " ", text)
    lower = plain.lower()
    return [phrase for phrase in PHRASES if REQUIRED[phrase] in lower and re.search(phrase, plain, re.IGNORECASE)]


def pages() -> list[Path]:
    docs = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("docs/**/*.md")), *(ROOT / name for name in HELP)]
    sources = [path for room in ROOMS for path in sorted((ROOT / room).rglob("*.*")) if path.suffix in (".py", ".c", ".h")]
    return [*docs, *(path for path in sources if ROOT / "rollout/bench" not in path.parents)]


@pytest.mark.parametrize("name", MOST_LINES)
def test_entry_pages_are_short(name: str) -> None:
    assert len((ROOT / name).read_text().splitlines()) <= MOST_LINES[name]


def test_no_phrase_returns() -> None:
    assert len(pages()) > 350
    wrong = {str(path.relative_to(ROOT)): phrases for path in pages() if (phrases := found(path.read_text()))}
    assert not wrong, "say who does what to what, in the field's words"


@pytest.mark.parametrize(
    "text",
    [
        "Blocks come\nhome: after everything has ended, all of both pools is free.",
        "`metrics/`, `commands/` | what is told; what is typed |",
        "bytes kept for one client; past it only that client suffers",
        "*soft reset*: drop KV, prefill again later.",
        "memory that whoever has it may read",
        "nobody waits for it",
        "a library that can be had here",
        "which kernel runs is told in the status",
        "copies run beside the compute",
        "a norm of another kind",
        "a sample that lived\nthrough a refresh",
        "a query meets its context unit by unit",
        "engine/, transport/ and recipes/ lie beside this folder",
        "the state behind its last token",
    ],
)
def test_a_phrase_is_seen(text: str) -> None:
    assert found(text)


def test_plain_sentences_pass() -> None:
    assert not found("KV blocks do not leak. Requests wait in a queue. A client that was idle gets temporary priority.")
    assert not found("Copies overlap with compute. The status shows which kernel runs, and why no better one is available.")


def test_every_page_is_in_the_navigation() -> None:
    listed = set(re.findall(r"^ +- ([\w/.-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE))
    assert listed == {str(path.relative_to(ROOT / "docs")) for path in ROOT.glob("docs/**/*.md")}


def test_every_public_name_has_an_entry() -> None:
    """Names that packages export, against the `:::` entries of docs/api."""
    entries = "\n".join(path.read_text() for path in ROOT.glob("docs/api/*.md"))
    documented = set(re.findall(r"^::: [\w.]+\.(\w+)$", entries, re.MULTILINE))
    assert "::: rollout.transport.errors\n" in entries
    documented |= set(re.findall(r"^class (\w+)", (ROOT / "transport/errors.py").read_text(), re.MULTILINE))
    for package in ("rollout", "engine", "rollout/exact", "rollout/client"):
        source = (ROOT / package / "__init__.py").read_text()
        exported = set(re.findall(r'"(\w+)"', source.split("__all__ = [")[1].split("]")[0])) - {"__version__"}
        assert exported <= documented, package
