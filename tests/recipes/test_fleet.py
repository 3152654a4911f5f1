"""`recipes/fleet.py` as a user runs it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.long
@pytest.mark.parametrize("launcher", ["host", "join"])
def test_the_recipe_loses_nothing(tiny_model: Path, launcher: str) -> None:
    words = [
        sys.executable,
        "-m",
        "rollout.recipes.fleet",
        "--model",
        str(tiny_model),
        "--dtype",
        "float32",
        "--max-tokens",
        "800",
    ]
    words += ["--launcher", launcher]
    done = subprocess.run(words, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr
    assert "32 samples, equal to the first run's" in done.stdout and "killed replica" in done.stdout
