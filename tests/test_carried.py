"""What a machine with a GPU and no network runs: `make test-gpu` and `make bench-gpu` load nothing but torch, transformers and
pytest, what these bring, and the wheels that `make wheels` says are to be carried."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
from functools import cache
from importlib.metadata import PackageNotFoundError, packages_distributions, requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.tags import compatible_tags, cpython_tags
from packaging.utils import parse_wheel_filename

ROOT = Path(__file__).resolve().parent.parent
OURS = {"rollout", "tests"}
THERE = ("torch", "transformers", "pytest")
"""on that machine"""
BESIDE = {"triton": "torch"}
"""what the torch for CUDA brings, other ones do not"""


def plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def shown(target: str) -> str:
    command = ["make", "--dry-run", target, "GPU_PYTHON=python3"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True).stdout


def with_what_they_bring(names: tuple[str, ...]) -> set[str]:
    """Distributions, and those that they require here, without extras."""
    found: set[str] = set()
    todo = [plain(name) for name in names]
    while todo:
        name = todo.pop()
        if name in found:
            continue
        found.add(name)
        try:
            wanted = [Requirement(line) for line in requires(name) or []]
        except PackageNotFoundError:
            continue
        todo += [plain(each.name) for each in wanted if each.marker is None or each.marker.evaluate({"extra": ""})]
    return found


@cache
def imported(file: Path) -> frozenset[str]:
    """Dotted names that a file imports as soon as it is loaded; those of `from a import b` twice, as a and a.b."""
    names: set[str] = set()
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.Import):
            names |= {each.name for each in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{each.name}" for each in node.names)}
    return frozenset(names)


def files_of(name: str) -> list[Path]:
    """Of our module, and of the packages above it; none for what is no module."""
    parts = re.sub(r"^rollout\.(?=(?:engine|transport|recipes)\b)", "", name).split(".")
    places = [ROOT.joinpath(*parts[:end]) for end in range(1, len(parts) + 1)]
    return [file for place in places for file in (place / "__init__.py", place.with_suffix(".py")) if file.is_file()]


def loaded(files: list[Path]) -> set[str]:
    """Packages of others that files of ours load, by way of all that they import of ours."""
    seen: set[Path] = set()
    others: set[str] = set()
    todo = list(files)
    while todo:
        file = todo.pop()
        if file in seen:
            continue
        seen.add(file)
        for name in imported(file):
            if name.split(".")[0] in OURS:
                todo += files_of(name)
            else:
                others.add(name.split(".")[0])
    return others - set(sys.stdlib_module_names)


def lacking(files: list[Path], carried: set[str]) -> set[str]:
    """Packages that files of ours load and that are neither there nor carried."""
    there = with_what_they_bring(THERE) | carried
    made_of = packages_distributions()
    return {
        package
        for package in loaded(files)
        if BESIDE.get(package) not in THERE and not {plain(name) for name in made_of.get(package, [package])} & there
    }


def gpu_tests() -> list[Path]:
    """Files that `make test-gpu` runs."""
    found: list[Path] = []
    for name in re.findall(r"(?<!-)\btests(?:/[\w/]+(?:\.py)?)?", re.sub(r"--ignore \S+", "", shown("test-gpu"))):
        at = ROOT / name
        found += [at] if at.is_file() else sorted(at.rglob("test_*.py"))
    return [ROOT / "tests/conftest.py", *found]


def carried() -> set[str]:
    return {plain(name) for name in shown("wheels").split("--no-deps")[1].split() if name != "\\"}


def test_nothing_is_missing_on_a_machine_without_a_network() -> None:
    assert {"msgspec", "pyzmq", "tyro"} <= carried()
    assert not lacking(gpu_tests(), carried())
    assert not lacking([ROOT / "tests/bench/gpu.py"], carried())


def test_what_is_missing_is_seen() -> None:
    """The negative controls: a wheel less, and a file of tests that takes more."""
    assert lacking(gpu_tests(), carried() - {"msgspec"}) == {"msgspec"}
    assert "hypothesis" in lacking([ROOT / "tests/engine/test_stop_strings.py"], carried())


@pytest.mark.long
@pytest.mark.parametrize("version", ["3.12", "3.11"])
def test_wheels_are_for_the_python_that_was_named(version: str, tmp_path: Path) -> None:
    """Each wheel can be installed there, by its tags; another version's cannot."""
    command = ["make", "wheels", f"PYTHON={sys.executable}", f"WHEELS={tmp_path}", f"GPU_VERSION={version}"]
    subprocess.run(command, cwd=ROOT, timeout=300, check=True)
    wheels = {plain(parts[0]): parts[3] for parts in (parse_wheel_filename(each.name) for each in tmp_path.iterdir())}
    assert set(wheels) == carried()
    major, minor = map(int, version.split("."))
    platforms = [f"manylinux_2_{glibc}_x86_64" for glibc in range(28, 4, -1)] + ["manylinux2014_x86_64"]

    def installable(minor: int) -> set[str]:
        there = {*cpython_tags((major, minor), platforms=platforms), *compatible_tags((major, minor), platforms=platforms)}
        return {name for name, tags in wheels.items() if tags & there}

    assert installable(minor) == carried()
    assert "msgspec" not in installable(minor + 1)


def interpreter(version: str) -> Path | None:
    """Return a Python of this minor version; None: there is none here."""
    found = shutil.which(f"python{version}")
    others = [Path(found)] if found else []
    others += sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/python"))
    works = [each for each in others if subprocess.run([each, "-c", "import venv, ensurepip"], timeout=60).returncode == 0]
    return works[-1] if works else None


@pytest.mark.long
@pytest.mark.parametrize("version", ["3.12"])
def test_a_clean_environment_installs_them_without_a_network(version: str, tmp_path: Path) -> None:
    """And collects the tests for a GPU, beside torch, Triton, transformers and pytest of the environment OLDEST names
    (`tests.support.version_ends`), if that is of the same Python."""
    python = interpreter(version)
    if python is None:
        pytest.skip(f"no Python {version} here")
    command = ["make", "wheels", f"PYTHON={sys.executable}", f"WHEELS={tmp_path / 'wheels'}", f"GPU_VERSION={version}"]
    subprocess.run(command, cwd=ROOT, timeout=300, check=True)
    subprocess.run([python, "-m", "venv", tmp_path / "env"], timeout=300, check=True)
    own = tmp_path / "env/bin/python"
    offline = {**os.environ, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": "", "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    install = [own, "-m", "pip", "install", "--quiet", "--no-deps", *(tmp_path / "wheels").iterdir()]
    subprocess.run(install, env=offline, timeout=300, check=True)
    loads = "import msgspec, psutil, zmq, tomli_w, xxhash"  # tyro takes typing_extensions, which torch brings
    subprocess.run([own, "-c", loads], env=offline, timeout=60, check=True)
    there = os.environ.get("OLDEST")
    if there is None or site_of(there).parts[-2] != f"python{version}":
        pytest.skip("installed; without an environment OLDEST nothing is collected")
    (site_of(own) / "there.pth").write_text(str(site_of(there)))
    collect = [own, "-m", "pytest", "-q", "--collect-only", "-m", "gpu", "-W", "default", "tests/gpu"]
    told = subprocess.run(collect, cwd=ROOT, env=offline, capture_output=True, text=True, timeout=300)
    assert told.returncode == 0 and told.stdout.count("::") > 100, told.stdout[-2000:] + told.stderr[-2000:]


def site_of(python: str | Path) -> Path:
    """Return where an interpreter has its packages."""
    told = subprocess.check_output([python, "-c", "import site; print(site.getsitepackages()[0])"], text=True, timeout=60)
    return Path(told.strip())


def test_every_test_for_a_gpu_is_run() -> None:
    marked = {
        file for file in (ROOT / "tests").rglob("test_*.py") if "pytest.mark.gpu" in file.read_text() and file != Path(__file__)
    }
    assert marked <= set(gpu_tests())
