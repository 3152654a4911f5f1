"""uv.lock fits pyproject.toml, and names files of the package index only."""

from __future__ import annotations

import copy
import re
import tomllib
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
LOCK = tomllib.loads((ROOT / "uv.lock").read_text())
INDEX = "https://pypi.org/simple"
FILES = "https://files.pythonhosted.org/"

Wish = tuple[str, frozenset[str], str, str | None]
"""name, extras, versions, and the extra of ours that wants it"""


def wish(requirement: Requirement, extra: str | None) -> Wish:
    return requirement.name.replace("_", "-"), frozenset(requirement.extras), str(requirement.specifier), extra


def wanted(project: dict[str, Any]) -> set[Wish]:
    found = {wish(Requirement(line), None) for line in project["dependencies"]}
    return found | {wish(Requirement(line), extra) for extra, more in project["optional-dependencies"].items() for line in more}


def locked(lock: dict[str, Any]) -> set[Wish]:
    """What uv read in pyproject.toml when it made the lock."""
    (ours,) = [package for package in lock["package"] if package["name"] == "rl-rollout"]
    found = set()
    for each in ours["metadata"]["requires-dist"]:
        extra = re.search("extra == '([^']+)'", each.get("marker", ""))
        line = f"{each['name']}[{','.join(each.get('extras', []))}]{each.get('specifier', '')}"
        found.add(wish(Requirement(line), extra and extra[1]))
    return found


def strangers(lock: dict[str, Any]) -> list[str]:
    """Addresses that are not the package index's, and packages that come from elsewhere."""
    found = []
    for package in lock["package"]:
        if package["name"] != "rl-rollout" and package["source"] != {"registry": INDEX}:
            found.append(f"{package['name']}: {package['source']}")
        files = [*package.get("wheels", []), *([package["sdist"]] if "sdist" in package else [])]
        found += [file["url"] for file in files if not file["url"].startswith(FILES) or not file["hash"].startswith("sha256:")]
    return found


def test_the_lock_fits_pyproject() -> None:
    assert locked(LOCK) == wanted(PROJECT), "uv lock"
    newer = copy.deepcopy(PROJECT)
    newer["dependencies"].append("httpx>=1")
    assert locked(LOCK) != wanted(newer), "the negative control"


def test_the_lock_names_files_of_the_index_only() -> None:
    assert len(LOCK["package"]) > 50 and not strangers(LOCK)
    for source, url in (({"registry": "file:///opt/simple"}, FILES), ({"registry": INDEX}, "file:///opt/x.whl")):
        package = {"name": "x", "source": source, "wheels": [{"url": url, "hash": "sha256:0"}]}
        assert len(strangers({"package": [package]})) == 1, "the negative control"
