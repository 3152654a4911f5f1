"""The command lines of all recipes: fast help with words for each option, messages, exit status."""

from __future__ import annotations

import ast
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from rollout.config import InputError
from rollout.recipes import program

RECIPES = Path(__file__).parents[2] / "recipes"
NAMES = sorted(path.stem for path in RECIPES.glob("*.py") if path.stem not in ("__init__", "policy", "program"))

HELP = """
import runpy, sys, warnings
warnings.simplefilter("ignore", RuntimeWarning)  # grpo was imported by dapo
for name in sys.argv[1:]:
    sys.argv = [name, "--help"]
    try:
        runpy.run_module(f"rollout.recipes.{name}", run_name="__main__", alter_sys=True)
    except SystemExit as end:
        assert end.code == 0, (name, end.code)
    slow = {"torch", "transformers", "wandb", "matplotlib", "trl"} & sys.modules.keys()
    assert not slow, f"--help of {name} waits for {slow}"
"""


def test_help_waits_for_no_large_package(tmp_path: Path) -> None:
    """In the control an empty module stands in for wandb, which takes seconds to import."""
    done = subprocess.run([sys.executable, "-c", HELP, *NAMES], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    for name in NAMES:
        assert f"usage: python -m rollout.recipes.{name} " in done.stdout
    (tmp_path / "wandb.py").write_text("")
    program = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import wandb\n{HELP}"
    control = subprocess.run([sys.executable, "-c", program, "grpo"], capture_output=True, text=True, timeout=300)
    assert "--help of grpo waits for {'wandb'}" in control.stderr


def without_words(source: str) -> list[str]:
    """Fields of `Options` that no docstring follows."""
    (options,) = (node for node in ast.parse(source).body if isinstance(node, ast.ClassDef) and node.name == "Options")
    silent = []
    for node, following in zip(options.body, [*options.body[1:], None], strict=True):
        told = isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant)
        if isinstance(node, ast.AnnAssign) and not told:
            silent.append(ast.unparse(node.target))
    return silent


def test_a_folder_that_is_a_file_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(InputError, match=r"--save .*: cannot be made a folder \("):
            program.make_folder_for_model(path)
        with pytest.raises(InputError, match=r"--out .*: cannot be made a folder \("):
            program.make_folder(path, "--out")


def test_every_option_has_words() -> None:
    assert len(NAMES) >= 6
    for name in NAMES:
        assert without_words((RECIPES / f"{name}.py").read_text()) == [], name
    assert without_words('class Options:\n    steps: int = 3\n    n: int = 1\n    """samples"""') == ["steps"]


@dataclass(frozen=True)
class Options:
    """What to do."""

    ending: str = "well"
    """how it ends"""


def main(options: Options) -> object:
    match options.ending:
        case "well":
            return ["rows"]
        case "badly":
            return 1
        case "refused":
            raise InputError("model 'x': is not there")
        case "stopped":
            raise KeyboardInterrupt
        case "lacking":
            raise ModuleNotFoundError("No module named 'torch'", name="torch")
    raise RuntimeError("a bug")


@pytest.mark.parametrize(
    ("ending", "status", "message"),
    [
        ("well", 0, ""),
        ("badly", 1, ""),
        ("refused", 1, "agent: model 'x': is not there\n"),
        ("lacking", 1, "agent: torch is not installed: pip install 'rl-rollout[serve]'\n"),
        ("stopped", 130, "agent: stopped\n"),
    ],
)
def test_what_ends_a_recipe_is_its_exit_status(
    ending: str, status: int, message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["agent", "--ending", ending])
    assert program.run("agent", main, Options) == status
    assert capsys.readouterr().err == message


def test_a_bug_has_a_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["agent", "--ending", "otherwise"])
    with pytest.raises(RuntimeError, match="a bug"):
        program.run("agent", main, Options)
