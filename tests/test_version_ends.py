"""The supported ranges of torch, Triton and transformers are tested at their ends: `python -m tests.support.version_ends`."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tests.support import version_ends


def test_the_newest_end_is_what_runs_here() -> None:
    """As pip's own index gives it; a machine may have older versions within the range."""
    found, newest, oldest = version_ends.versions_of(sys.executable), version_ends.wanted(1), version_ends.wanted(0)

    def number(text: str) -> tuple[int, ...]:
        return tuple(map(int, text.split(".")))

    assert all(number(oldest[name]) <= number(found[name]) <= number(newest[name]) for name in found)
    assert all((version_ends.ROOT / name).is_file() for name in version_ends.TESTS)


def test_an_environment_of_other_versions_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OLDEST", "python-of-the-oldest")
    monkeypatch.setattr(version_ends, "versions_of", lambda python: version_ends.wanted(1))
    assert version_ends.run("oldest", []) == 2 and "python-of-the-oldest" in capsys.readouterr().err


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_the_oldest_end() -> None:
    if not (Path(version_ends.OLDEST).exists() or "OLDEST" in os.environ):
        pytest.skip("no environment of the oldest versions: python -m tests.support.version_ends makes one")
    assert version_ends.run("oldest", []) == 0
