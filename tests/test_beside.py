"""Two halves of a suite in two processes: one count, one closing line, one exit status."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
HERE = "import pytest\n@pytest.mark.parametrize('i', range(3))\ndef test_here(i): pass\n"


def both(folder: Path, beside: str, *more: str) -> tuple[int, str]:
    """Exit status and output of three tests here and `beside` there."""
    for name, source in (("here", HERE), ("there", beside)):
        (folder / name).mkdir()
        (folder / name / f"test_{name}.py").write_text(source)
    (folder / "pyproject.toml").write_text('[tool.pytest.ini_options]\ntestpaths = ["."]\n')
    command = [sys.executable, "-m", "pytest", "-p", "tests.support.beside", "--beside=there", *more]
    env = {"PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=120)
    return done.returncode, done.stdout


@pytest.mark.parametrize(
    ("beside", "more", "status", "said"),
    [
        ("def test_there(): assert 1 == 2", (), 1, ("1 failed, 3 passed", "assert 1 == 2", "FAILED there/test_there.py")),
        ("def test_there(): pass", ("-k", "there or 1"), 0, ("2 passed, 2 deselected",)),
        ("import os\ndef test_there(): os._exit(0)", (), 1, ("1 failed, 3 passed", "ended with exit status 0")),
        ("import pytest\ndef test_there(): pytest.skip('not today')", ("-ra",), 0, ("3 passed, 1 skipped", "not today")),
        ("import nowhere", (), 1, ("1 failed, 3 passed", "No module named 'nowhere'")),
        ("def test_there(): assert False", ("here",), 0, ("3 passed",)),
    ],
    ids=[
        "the other fails",
        "both are filtered",
        "the other ends early",
        "the other skips",
        "nothing to import",
        "paths run here",
    ],
)
def test_one_run(tmp_path: Path, beside: str, more: tuple[str, ...], status: int, said: tuple[str, ...]) -> None:
    code, output = both(tmp_path, beside, *more)
    assert code == status, output
    assert all(each in output for each in said), output
    assert ("side by side: the others" in output) == (more != ("here",)), output
    assert " passed" in output.splitlines()[-1]
