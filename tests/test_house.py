"""What one must read to follow the core stays within its budgets; `make check` holds the part that runs nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.house import ROOT, closure, lines_of, modules_of

FILES = {
    "rollout/__init__.py": "",
    "rollout/a.py": "import os\nimport typing\nif typing.TYPE_CHECKING:\n    from rollout import b\nfrom rollout import c\n",
    "rollout/b.py": "",
    "rollout/c.py": "def f():\n    from rollout import b\ntry:\n    import rollout.engine.d\nexcept ImportError:\n    pass\n",
    "engine/__init__.py": "from . import e\n",
    "engine/d.py": "",
    "engine/e.py": "\n\n",
}


@pytest.fixture
def known(tmp_path: Path) -> dict[str, Path]:
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "rollout/engine").symlink_to("../engine")
    return modules_of(tmp_path)


def test_a_closure_is_what_an_import_reads(known: dict[str, Path]) -> None:
    assert len(known) == len(FILES), "a linked folder once"
    assert closure("rollout.a", known) == {
        "rollout",
        *(f"rollout.{each}" for each in ("a", "c", "engine", "engine.d", "engine.e")),
    }
    assert lines_of("rollout.a", known) == 5 + 6 + 1 + 2 and lines_of("rollout.b", known) == 0
    with pytest.raises(KeyError):
        closure("rollout.nowhere", known)


def figures(*words: str, program: str = "from tests.house import main") -> tuple[int, dict[str, dict[str, int]]]:
    """Run `tests.house` in a process of its own, in which no test has chosen an arithmetic."""
    command = [sys.executable, "-c", f"{program}; import sys; sys.exit(main(['--json', *sys.argv[1:]]))", *words]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=200)
    assert done.stdout, done.stderr[-3000:]
    return done.returncode, json.loads(done.stdout.splitlines()[-1])


def test_the_core_stays_within_its_budgets() -> None:
    status, found = figures("--run")
    assert status == 0, {name: each for name, each in found.items() if each["figure"] > each["budget"]}
    assert len(found) == 11 and all(each["figure"] > 0 for each in found.values())


def test_more_than_the_budget_is_an_error() -> None:
    status, found = figures(
        program="import tests.house as house; from tests.house import main; house.BUDGETS['rollout.client.api'] = 9"
    )
    assert status == 1 and found["rollout.client.api"]["figure"] > 1_000
