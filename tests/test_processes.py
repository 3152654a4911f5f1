"""Python is started in one place, with `-P`: a file of the current folder takes no module's place in a child process."""

from __future__ import annotations

import ast
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from rollout.engine.processes import interpreter, run_module
from tests.support.syntax import dotted

ROOT = Path(__file__).parents[1]
ROOMS = ("engine", "transport", "rollout", "recipes", "tests/bench")
HERE = "engine/processes.py"
OTHERS = {
    "rollout/bench/against.py": "names the interpreters of peers, which run files by their path",
    "rollout/bench/peers/vllm_peer.py": "a peer, which starts itself again with other variables",
}
SPAWNS = {"multiprocessing", "concurrent.futures.process", "torch.multiprocessing"}
"""modules that start Python themselves"""


def starts(source: str) -> Iterator[str]:
    """Yield what starts Python: the name of the interpreter, a list of words with -m or -c, a module that spawns."""
    if not any(word in source for word in ("executable", '"-m"', "'-m'", "python", '"-c"', "multiprocessing", "ProcessPool")):
        return  # most files: it saves the parsing
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Attribute() if dotted(node) in ("sys.executable", "sys._base_executable"):
                yield dotted(node)
            case ast.ImportFrom(module="sys") if any(alias.name == "executable" for alias in node.names):
                yield "from sys import executable"
            case ast.List() | ast.Tuple():
                words = [each.value for each in node.elts if isinstance(each, ast.Constant)]
                if {"-m", "-c"} & {word for word in words if isinstance(word, str)}:
                    yield ast.unparse(node)
                if words and isinstance(words[0], str) and words[0].split("/")[-1].startswith("python"):
                    yield ast.unparse(node)
            case ast.Import() if SPAWNS & {alias.name for alias in node.names}:
                yield ast.unparse(node)
            case ast.ImportFrom() if node.module in SPAWNS or any(a.name == "ProcessPoolExecutor" for a in node.names):
                yield ast.unparse(node)


def test_python_is_started_in_one_place() -> None:
    found = {
        where: [*starts(path.read_text())]
        for room in ROOMS
        for path in (ROOT / room).rglob("*.py")
        if (where := str(path.relative_to(ROOT))) not in OTHERS
    }
    bench = "tests/bench/train_step.py"
    assert {where for where, how in found.items() if how} == {HERE, bench}
    assert all("*interpreter()" in how for how in found[bench])


@pytest.mark.parametrize(
    "source",
    [
        "Popen([sys.executable, '-m', 'x'])",
        "from sys import executable",
        "run((python, '-m', 'rollout'))",
        "run(['python3', 'file.py'])",
        "import multiprocessing",
        "from concurrent.futures import ProcessPoolExecutor",
    ],
)
def test_each_start_is_seen(source: str) -> None:
    assert list(starts(source))


@pytest.mark.parametrize("safe", [True, False], ids=["as we start it", "control"])
def test_a_module_of_the_current_folder_is_not_run(safe: bool, tmp_path: Path) -> None:
    for name in ("numpy", "types", "http", "msgspec", "rollout"):
        (tmp_path / f"{name}.py").write_text("open('ran', 'w').close()\nraise SystemExit(7)\n")
    command = run_module("rollout", "--help")
    done = subprocess.run([word for word in command if safe or word != "-P"], cwd=tmp_path, capture_output=True)
    assert (done.returncode == 0) == safe and (tmp_path / "ran").exists() != safe
    assert interpreter("other") == ["other", "-P"]
