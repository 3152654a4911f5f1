"""How to install is said in one way: `pip install '.[extra]'` in a checkout; then `pip install 'rl-rollout[extra]'` adds an
extra to what is installed. On the index, rollout is another project's."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "Makefile", "Dockerfile", "docs")
PLACES = (*PAGES, "engine", "transport", "rollout", "recipes", "tests", ".ci")
COMMAND = re.compile(r"\b(?:pip3?|pipx|uv)\s+(?:pip\s+)?(?:install|add|download)\b")
WORDS = re.compile(r"[^\s`]+|`")
NAME = re.compile(r"""["'(]*(rollout|rl[-_]rollout|\.(?=["'\[]|$))(\[[^\]]*\])?(?:[=<>~!]=?[^"']*)?["'),.;:]*""")
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"].keys()


def by_name(text: str) -> list[str]:
    """Commands in a text that install another project of this name, this one by its name alone, which works only once it is on
    the index, or an extra that there is not. The name may be on the next line."""
    found = []
    for command in COMMAND.finditer(text):
        words = []
        for word in WORDS.finditer(text, command.end(), command.end() + 200):
            lines = text.count("\n", command.end(), word.start())
            # on the next line only where this one has nothing but options
            if word[0] == "`" or lines > 1 or (lines == 1 and any(not one.startswith("-") for one in words)):
                break
            if word[0] not in ("#", '"'):
                words.append(word[0])
            name = NAME.fullmatch(word[0])
            if name and not right(name[1], name[2]):
                found.append(" ".join([command[0], *words]))
    return found


def right(name: str, extras: str | None) -> bool:
    """Whether a command may install `name` with `extras`, e.g. "[http,grpo]"."""
    known = extras is None or EXTRAS >= set(extras.strip("[]").split(","))
    return known and (name == "." or (name == "rl-rollout" and extras is not None))


def texts() -> list[Path]:
    files = [file for place in PLACES for file in [ROOT / place, *(ROOT / place).rglob("*")] if file.is_file()]
    kinds = {".py", ".md", ".toml", ".yaml", ".yml", ".sh", ".txt", ""}
    return [file for file in files if file.suffix in kinds and file != Path(__file__)]


def test_nobody_is_told_to_install_another_project() -> None:
    files = texts()
    assert len(files) > 300
    wrong = {str(file.relative_to(ROOT)): found for file in files if (found := by_name(file.read_text(errors="replace")))}
    assert not wrong, "say pip install '.[extra]' in the checkout, or pip install 'rl-rollout[extra]' where it is installed"


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("pip install 'rollout[http]'", 1),
        ("`pip install --no-deps rollout` is enough", 1),
        ("in words: pip install\n    rollout[ray]", 1),
        ("pip install --no-deps\n# rollout", 1),
        ("uv pip install rollout==0.1", 1),
        ("pip install rl-rollout", 1),
        ("pip install 'rl-rollout[htpp]'", 1),
        ("pip install -e '.[sereve]'", 1),
        ("Makefile: pip install --quiet '.[dev,nothing]'", 1),
        ("pip install 'rl-rollout[http]'", 0),
        ("pip install 'rl_rollout[http]'", 1),
        ("pip install .", 0),
        ("pip install -e '.[http]'\n    rollout serve", 0),
        ("`pip install -e .` and `rollout serve`", 0),
        ("pip install msgspec\nrollout http", 0),
    ],
)
def test_such_a_sentence_is_seen(text: str, count: int) -> None:
    assert len(by_name(text)) == count
