"""The program in the README and the file in docs/configuration.md work as printed."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from rollout.config import load
from tests.support.readme import readme_example

ROOT = Path(__file__).parents[1]


def test_the_readme_example_is_short() -> None:
    assert len(readme_example().splitlines()) <= 15


def test_the_readme_example_runs_as_printed(tiny_service: str, tmp_path: Path) -> None:
    script = tmp_path / "example.py"
    script.write_text(readme_example())
    done = subprocess.run([sys.executable, script, tiny_service], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    children = re.findall(r"^#(\d+) (\d) (?:stop|length) -\d+\.\d\d  ", done.stdout, re.MULTILINE)
    assert len(children) == 8 and len({group for group, _ in children}) == 2, done.stdout


def test_the_configuration_guide_is_accepted(tmp_path: Path) -> None:
    (toml,) = re.findall(r"```toml\n(.*?)```", (ROOT / "docs/configuration.md").read_text(), re.DOTALL)
    (tmp_path / "rollout.toml").write_text(toml)
    assert load(tmp_path / "rollout.toml").engine.kv_gib == 4.0
