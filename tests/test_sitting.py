"""The first hour with a GPU: the commands are short enough, name files, parts and options that exist, and run every test for a
GPU; what comes back is collected."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import tyro

from tests.bench.gpu import PARTS, Args, check
from tests.support import sitting

ROOT = Path(__file__).resolve().parent.parent


def named() -> list[str]:
    """Files of tests that the commands name, each as often as it is named."""
    texts = " ".join(command.text for command in sitting.COMMANDS)
    for braces in re.findall(r"\S+\{\S+\}\S*", texts):
        head, names, tail = re.split(r"[{}]", braces)
        texts = texts.replace(braces, " ".join(f"{head}{name}{tail}" for name in names.split(",")))
    return re.findall(r"tests/[\w/]+\.py", texts)


def test_a_command_is_short_enough() -> None:
    for command in sitting.COMMANDS:
        assert command.seconds <= sitting.MOST_SECONDS and len(command.text) <= sitting.MOST_CHARACTERS, command.name
        assert len(re.findall(r"\$OUT/\S+\.\w+", command.text)) <= 8, "as many files come back"
        assert subprocess.run(["bash", "-n", "-c", command.text], timeout=60).returncode == 0


def test_tests_for_a_gpu_are_run_once() -> None:
    files = named()
    assert all((ROOT / name).is_file() for name in files)
    for path in (ROOT / "tests/gpu").glob("test_*.py"):
        times = files.count(f"tests/gpu/{path.name}")
        assert times == 1 or (times == 3 and "oracle" in path.name), path.name
    told = subprocess.run(
        ["make", "-n", "test-gpu", "GPU_PYTHON=python3"], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    lines = [set(re.findall(r"tests/[\w/]+\.py", line)) for line in told.stdout.replace("\\\n", " ").splitlines()]
    assert set(sitting.ALONE) in lines and {*sitting.TOGETHER, "tests/engine/test_streaming.py"} in lines
    assert set(files) == set().union(*lines), "make test-gpu runs others"


def test_the_benchmark_takes_the_options() -> None:
    run = set()
    for step in (step for command in sitting.COMMANDS for step in command.steps if sitting.BENCH in step.command):
        words = shlex.split(step.command)
        args = tyro.cli(Args, args=words[words.index("tests.bench.gpu") + 1 :])
        run |= set(check(Args(model=args.model, parts=args.parts, device="cpu"), PARTS))
        assert args.minutes * 60 <= step.seconds or step.name == "products-without-splits"
    assert run == set(PARTS)


def test_what_came_back_is_collected(tmp_path: Path) -> None:
    (tmp_path / "oracle.log").write_text("...F\nFAILED tests/gpu/test_x.py::test_y - assert\n1 failed, 3 passed in 2.1s\n\n")
    (tmp_path / "small.jsonl").write_text('{"part": "decode", "ms": 15.9}\n{"part": "dec')
    command = [sys.executable, "-m", "tests.support.sitting", "--collect", str(tmp_path)]
    rows = [json.loads(line) for line in subprocess.check_output(command, cwd=ROOT, text=True, timeout=60).splitlines()]
    log, figures, cut_off = rows
    assert (log["failed"], log["passed"]) == (1, 3) and log["red"] == ["FAILED tests/gpu/test_x.py::test_y - assert"]
    assert figures == {"figures": "small", "part": "decode", "ms": 15.9} and "cut_off" in cut_off


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_the_commands_are_printed(options: list[str]) -> None:
    """By a Python without any package."""
    command = [
        sys.executable,
        "-I",
        "-S",
        "-c",
        "import sys; sys.path.insert(0, '.'); from tests.support.sitting import main; main()",
    ]
    printed = subprocess.check_output([*command, *options], cwd=ROOT, text=True, timeout=60)
    if options:
        assert [json.loads(line)["command"] for line in printed.splitlines()] == [each.text for each in sitting.COMMANDS]
    else:
        assert all(each.text in printed for each in sitting.COMMANDS)
