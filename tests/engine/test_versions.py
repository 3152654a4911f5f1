"""Versions of torch and transformers outside the range are refused in a sentence; the package asks for the same ranges."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest

from rollout.engine.cuda import compiled
from rollout.engine.forward import versions
from tests.support.tiny import tiny_engine


@pytest.mark.parametrize("found", ["2.10.1", "2.14.0", "3.0.0+cu130"])
def test_another_version_is_refused(found: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "version", lambda name: found if name == "torch" else "5.20.0")
    with pytest.raises(ValueError, match=r"torch .* is not supported, 2\.11 to 2\.13 are: pip install 'torch>=2\.11,<2\.14'"):
        tiny_engine()


@pytest.mark.parametrize(("torch", "transformers"), [("2.11.0+cu130", "5.17.0"), ("2.13.2", "5.24.1")])
def test_both_ends_are_accepted(torch: str, transformers: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "version", {"torch": torch, "transformers": transformers}.__getitem__)
    versions.check_versions()


def test_the_package_asks_for_the_same() -> None:
    project: dict[str, Any] = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    assert all(versions.requirement(name) in extras["serve"] + extras["text"] for name in versions.SUPPORTED)
    (oldest, newest) = compiled.SUPPORTED
    assert any(each.startswith(f"triton>={oldest[0]}.{oldest[1]},<{newest[0]}.{newest[1] + 1};") for each in extras["dev"])
