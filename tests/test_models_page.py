"""docs/models.md is what the stored results of the sweep say, and README says the same."""

from __future__ import annotations

import re
from pathlib import Path

from tests.support.families import FAMILIES, Outcome
from tests.support.models_page import DTYPES, PAGE, counts, layers, page, read, reason, worst_kind

README = Path(__file__).parents[1] / "README.md"


def test_the_page_is_that_of_the_results() -> None:
    found = read()
    assert list(found) == list(FAMILIES), "run python -m tests.support.models_page --sweep"
    assert PAGE.read_text() == page(found), "run python -m tests.support.models_page"


def test_no_family_is_wrong_or_unclear() -> None:
    found = read()
    for dtype in DTYPES:
        kinds = counts(found, dtype)
        assert kinds["right"] >= 105 and not kinds["wrong"] and not kinds["unclear"]


def test_readme_says_how_many_are_right() -> None:
    (said,) = re.findall(r"\[(\d+) of the (\d+) causal types[^]]*\]\(docs/models\.md\)", README.read_text())
    found = read()
    assert said == (str(sum(worst_kind(each) == "right" for each in found.values())), str(len(found)))


def test_a_family_that_is_wrong_has_a_section() -> None:
    bad = Outcome("wrong", "roomy: 1e-1 from exact on average, the plain forward 1e-6")
    right = Outcome("right", "native", 1e-6, "decoder")
    text = page({"llama": {"float32": right, "bfloat16": bad}})
    assert "## Wrong or unclear\n\n| type | what |\n| --- | --- |\n| `llama` | roomy: 1e-1 from exact" in text


def test_layers_and_reasons_are_short() -> None:
    assert layers("gemma3") == layers("gemma3_text") == "5 × sliding_attention, full_attention"
    said = "bart (bart): the engine's log-probs differ: by 4e-01 on average, of which rounding explains 5e-06"
    assert reason({"float32": Outcome("refused", said)}) == "the engine's log-probs differ (self-check)"
