"""A user's type checker knows the types of the public names: mypy and pyright over tests/typing."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CHECKERS = {
    "mypy": ["-m", "mypy", "--strict", "--warn-unused-ignores", "--no-error-summary", "client.py"],
    "pyright": ["-m", "pyright", "--pythonpath", sys.executable, "--project", "."],
}


def problems(checker: str, folder: Path) -> list[str]:
    """Return the lines of the errors that a checker reports in the program of a folder."""
    environment = os.environ | {"MYPYPATH": str(ROOT), "PYRIGHT_PYTHON_IGNORE_WARNINGS": "1"}
    config = ["--config-file", str(ROOT / "pyproject.toml")] if checker == "mypy" else []
    command = [sys.executable, *CHECKERS[checker], *config]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=280)
    found = [line for line in done.stdout.splitlines() if "error:" in line]
    assert (done.returncode == 0) == (not found), done.stdout + done.stderr
    return found


@pytest.mark.parametrize("checker", CHECKERS)
def test_the_types_are_what_the_program_expects(checker: str, tmp_path: Path) -> None:
    shutil.copy(ROOT / "tests/typing/client.py", tmp_path)
    config = (ROOT / "tests/typing/pyrightconfig.json").read_text()
    (tmp_path / "pyrightconfig.json").write_text(config.replace('"../.."', f'"{ROOT}"'))
    assert problems(checker, tmp_path) == []
    program = (tmp_path / "client.py").read_text()
    other = program.replace("assert_type(handle, Handle)", "assert_type(handle, Sample)").replace(
        "no_such_method()  #", "drain()  #"
    )
    (tmp_path / "client.py").write_text(other)
    found = problems(checker, tmp_path)
    assert any("Handle" in line for line in found) and len(found) >= 2, (
        "the control: another type, and a comment that hides nothing"
    )
