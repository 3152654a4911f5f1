"""Every code block and command of the documentation works as printed: a test reads each page from top to bottom.

`tests/support/snippets.py` has the comments by which a page says how a block is run, `tests/support/reader.py` what is
substituted.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.reader import CHECKED, Broken, Desk, reading
from tests.support.snippets import Snippet, commands_of, snippets_of, words_of

ROOT = Path(__file__).parents[1]
PAGES = {
    str(path.relative_to(ROOT)): found
    for path in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("docs/**/*.md"))]
    if (found := snippets_of(str(path.relative_to(ROOT)), path.read_text()))
}
NIGHTLY = ("docs/client.md", "docs/http.md", "docs/ledger.md", "docs/receipts.md")
"""pages that start services of their own; of such pages, README.md, docs/cli.md and docs/install.md are in the default tier"""
MOST_EXCEPTED = 30
"""blocks and commands that no test runs, in all pages"""
PIP = " ".join(("pip", "install"))  # no sentence for test_install_sentences.py
SPAN = re.compile(r"`((?:pip|make) [^`]+)`")


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Iterator[Desk]:
    desk = Desk(tmp_path_factory.mktemp("desk"), tiny_model)
    yield desk
    desk.close()


def read(
    desk: Desk, folder: Path, snippets: list[Snippet], monkeypatch: pytest.MonkeyPatch, long: bool = False
) -> Counter[str]:
    """Read a page as in a process of its own."""
    monkeypatch.chdir(folder)
    for name in ("ROLLOUT_CACHE", "ROLLOUT_COOKIES", "WANDB_MODE"):
        monkeypatch.setenv(name, desk.environment[name])
    with reading(desk, folder, long) as reader:
        for snippet in snippets:
            reader.read(snippet)
    return reader.counts


@pytest.mark.parametrize("page", [pytest.param(each, marks=[pytest.mark.long] * (each in NIGHTLY)) for each in PAGES])
def test_a_page_works_as_printed(page: str, desk: Desk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    print(page, dict(read(desk, tmp_path, PAGES[page], monkeypatch)))


LONG = ["README.md", *(page for page, found in PAGES.items() if any(each.mark("long") is not None for each in found))]
PAGE_S = {"docs/log-prob-is-wrong.md": 3600}
"""time-outs of pages that load a model for each of many switches"""


@pytest.mark.long
@pytest.mark.parametrize("page", [pytest.param(page, marks=pytest.mark.timeout(PAGE_S.get(page, 900))) for page in LONG])
def test_a_whole_page_works_as_printed(page: str, desk: Desk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With what is marked long, and with each program in a process of its own."""
    print(page, dict(read(desk, tmp_path, PAGES[page], monkeypatch, long=True)))


def test_few_snippets_are_excepted() -> None:
    counts = Counter[str]()
    for snippet in (each for found in PAGES.values() for each in found if not each.shown):
        is_script = snippet.language != "sh" or snippet.text.startswith("#!")
        reason = snippet.mark("not run:") or ("elsewhere" if snippet.mark("elsewhere") is not None else "run")
        counts[reason] += 1 if is_script else len(commands_of(snippet))
    excepted = sum(count for reason, count in counts.items() if reason not in ("run", "elsewhere"))
    print(f"{counts.total()} blocks and commands, {excepted} excepted: {dict(counts)}")
    assert excepted <= MOST_EXCEPTED
    assert counts["run"] > 90


def test_commands_inside_sentences_exist() -> None:
    """pip and make, in README, CONTRIBUTING and docs."""
    spans = [
        (f"{path.relative_to(ROOT)}: {span}", words_of(span))
        for path in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *ROOT.glob("docs/**/*.md")]
        for span in SPAN.findall(path.read_text())
    ]
    assert len(spans) > 20
    for where, (program, *words) in spans:
        CHECKED[program](where, words)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("```python\nclient.submit([1])\n```", "NameError"),
        ("```python\nassert 1 == 2\n```", "AssertionError"),
        ("    rollout status --no-such-flag", "no-such-flag"),
        ("    no-such-program", "ends with 127"),
        (f"    {PIP} '.[no-such-extra]'", "no-such-extra"),
        (f"    {PIP} no-such-package", "pyproject.toml has no no-such-package"),
        ("    make no-such-target", "no-such-target"),
        ("    make demo NO_SUCH=1", "NO_SUCH"),
        ("```toml\n[engine]\nno_such_key = 1\n```", "no_such_key"),
        ('```json\n{"prompt": }\n```', "JSONDecodeError"),
        ("```yaml\na: [\n```", "ParserError"),
        ("<!-- snippet: prints 2 -->\n\n    echo 1", "not '2'"),
        ("<!-- snippet: prints 2 -->\n```python\nx = 1\n```", "not '2'"),
        ("```jsonl\n{}\n{\n```", "JSONDecodeError"),
        ("<!-- snippet: not run: needs GPU -->\n\n    rollout serve --no-such-flag", "no-such-flag"),
        ("<!-- snippet: not run: k8s -->\n```yaml\na: [\n```", "ParserError"),
        ("<!-- snippet: elsewhere tests/no_such_test.py -->\n\n    rollout demo", "no_such_test"),
        ("<!-- snippet: elsewhere tests/test_snippets.py -->\n\n    python -m rollout.recipes.no_such", "no_such"),
        ("<!-- snippet: file a.py -->\n```python\nfor\n```", "SyntaxError"),
    ],
)
def test_a_broken_snippet_is_found(text: str, why: str, desk: Desk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Broken, match=re.escape(why)):
        read(desk, tmp_path, snippets_of("page.md", text), monkeypatch)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("<!-- snippet: not run: too slow -->\n\n    rollout demo", "must be one of needs GPU"),
        ("<!-- snippet: skipped -->\n\n    rollout demo", "unknown word 'skipped'"),
        ("<!-- snippet: long -->\nText.\n", "without a block"),
        ("```ruby\nputs 1\n```", "language 'ruby'"),
    ],
)
def test_a_comment_that_means_nothing_is_found(text: str, why: str) -> None:
    with pytest.raises(ValueError, match=re.escape(why)):
        snippets_of("page.md", text)


def test_blocks_are_found_where_a_reader_sees_them() -> None:
    page = (
        "Text.\n\n    make demo     # one\n    make test\n\n- item\n\n    of the item\n\nText.\n\n```python\nx = 1\n```\n\n"
        "```mermaid\nflowchart LR\n```\n<!-- snippet: file a.toml; long -->\n```toml\na = 1\n```\n\n"
        "    rollout serve \\\n        --model smollm2\n\n    bash -c '\n      true'\n"
    )
    python, toml = Snippet("p", 13, "python", "x = 1\n"), Snippet("p", 21, "toml", "a = 1\n", ("file a.toml", "long"))
    commands, *others, joined = snippets_of("p", page)
    assert others == [python, toml]
    assert commands_of(commands) == ["make demo     # one", "make test"]
    assert commands_of(joined) == ["rollout serve \\\n    --model smollm2", "bash -c '\n  true'"]
