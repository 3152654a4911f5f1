"""A command that needs what is not installed says which extra has it, in one sentence."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from rollout.commands.extras import DISTRIBUTION, EXTRA_OF, install, missing

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
NOT_AT_RUN_TIME = ("dev", "docs", "flashinfer")

WITHOUT = """
import sys
lacking = sys.argv[1].split(",")

class Lacking:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in lacking:
            raise ModuleNotFoundError("No module named " + repr(name), name=name)

sys.meta_path.insert(0, Lacking())
from rollout.commands.main import main
sys.exit(main(sys.argv[2:]))
"""
BASE = ",".join(EXTRA_OF)


def modules_of(extra: str) -> set[str]:
    named = [Requirement(line).name for line in EXTRAS[extra]]
    return {name.replace("-", "_") for name in named if name != DISTRIBUTION}


def run(lacking: str, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", WITHOUT, lacking, *words]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100)


def test_each_module_has_its_extra() -> None:
    listed = {module: extra for extra in EXTRAS if extra not in NOT_AT_RUN_TIME for module in modules_of(extra)}
    listed.pop("pip")  # which `pip install` needs too
    assert listed == EXTRA_OF
    assert PROJECT["name"] == DISTRIBUTION
    assert not {Requirement(line).name.replace("-", "_") for line in PROJECT["dependencies"]} & EXTRA_OF.keys()


@pytest.mark.parametrize(
    ("words", "module", "extra"),
    [
        (["serve", "--model", "x"], "torch", "serve"),
        (["demo"], "tqdm", "serve"),
        (["http"], "starlette", "http"),
    ],
)
def test_a_command_names_the_extra_that_it_needs(words: list[str], module: str, extra: str) -> None:
    done = run(BASE, *words)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.endswith(f"rollout {words[0]}: {module} is not installed: pip install 'rl-rollout[{extra}]'\n")
    assert "Traceback" not in done.stderr


def test_commands_of_the_client_need_no_extra() -> None:
    for words in (["status", "--timeout", "0.1", "--address", "tcp://127.0.0.1:9"], ["top", "--once", "--timeout", "0.1"]):
        done = run(BASE, *words)
        assert "no service at" in done.stderr and "not installed" not in done.stderr, done.stderr
    assert "does not exist" in run(BASE, "keys", "show", "--file", "/none").stderr


def test_a_module_that_no_extra_has_is_an_error_of_ours() -> None:
    assert missing(ModuleNotFoundError("No module named 'msgspec'", name="msgspec")) is None
    assert missing(ImportError("cannot import name")) is None
    done = run("msgspec", "status")
    assert done.returncode and "Traceback" in done.stderr and "pip install" not in done.stderr


def test_the_sentence() -> None:
    lacks = ModuleNotFoundError("No module named 'transformers.utils'", name="transformers.utils")
    assert missing(lacks) == "transformers is not installed: pip install 'rl-rollout[text]'"
    assert missing(lacks, "http") == "transformers is not installed: pip install 'rl-rollout[http]'"
    assert install("ray") == "pip install 'rl-rollout[ray]'"
