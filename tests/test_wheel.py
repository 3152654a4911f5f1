"""What a wheel installs: every public name can be imported, the README's example runs, natively where there is no compiler."""

from __future__ import annotations

import ast
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest
import torch

from rollout.config import Config
from rollout.engine.cpu.isa import ISAS
from rollout.process import service_process
from tests.support.readme import readme_program

ROOT = Path(__file__).parents[1]
BUILD = "import sys; from setuptools import build_meta; print(build_meta.build_wheel(sys.argv[1]))"
PROGRAM = """
import json, numpy as np, torch
from transformers import AutoConfig, AutoModelForCausalLM
import rollout
from rollout.engine import Engine, EngineConfig, Group, Sampling, cpu
from rollout.engine.cpu.kernels import Kernels, choose
from rollout.engine.cpu.isa import here
from rollout.engine.forward.model import Model

sizes = dict(hidden_size=96, intermediate_size=224, num_attention_heads=6, num_key_value_heads=2, head_dim=32, vocab_size=208)
config = AutoConfig.for_model("llama", num_hidden_layers=2, max_position_embeddings=512, **sizes)
module = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
engine = Engine(EngineConfig(kv_tokens=1024, cpu_offload_gib=0, max_num_seqs=8, threads=1), Model(module, "tiny"))
engine.submit(Group("g", np.arange(3, 20, dtype=np.int32), Sampling(n=2, max_tokens=6, ignore_eos=True, seed=1)))
samples = []
while engine.has_work:
    samples += engine.step()
status = engine.status()
paths = {}
for isa in here():
    try:
        paths[isa] = str(Kernels(isa).path)
    except Exception as error:
        paths[isa] = str(error)
print(json.dumps({"package": cpu.__file__, "samples": len(samples), "paths": paths, "why": choose().why,
                  **{name: status[name] for name in ("isa", "attention", "arithmetic")}}))
"""


ALONE = """
import sys

class NotInstalled:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("engine", "transport", "recipes"):
            raise ImportError(f"{name} is not there where the wheel is installed")

sys.meta_path.insert(0, NotInstalled())
"""
"""what keeps the sources away that an editable installation has beside the tree under test"""
NAMES = (
    ALONE
    + """
import importlib, json
modules = {name: importlib.import_module(name) for name in sys.argv[1:]}
print(json.dumps({name: [str(getattr(module, each))[:80] for each in module.__all__] for name, module in modules.items()}))
"""
)
MODULES = (
    ALONE
    + """
import importlib, pkgutil, rollout
for module in pkgutil.walk_packages(rollout.__path__, "rollout."):
    if not module.name.endswith(".__main__"):
        try:
            importlib.import_module(module.name)
        except ModuleNotFoundError as error:
            assert error.name in ("ray", "verl", "omegaconf", "wandb", "trl", "matplotlib", "reasoning_gym"), error
"""
)


OLD_COMPILER = """#!/bin/sh
case "$*" in *-mamx-tile*) echo "unrecognized command-line option -mamx-tile" >&2; exit 1;; esac
while [ "$1" != -o ]; do shift; done
: > "$2"
"""
KERNELS = "from rollout.engine.cpu.build import installed_kernels; print(*installed_kernels())"
X86 = platform.machine() in ("x86_64", "AMD64")
USUAL = [isa for isa in ISAS if isa != "plain"] if X86 else ["plain"]


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of this tree: a build writes beside its sources."""
    tree = tmp_path_factory.mktemp("sources")
    for name in ("engine", "transport", "recipes", "rollout"):
        shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    return tree


def built(sources: Path, folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Lay the packages out in `folder` as a wheel has them. Without CC among `environment` nothing is compiled."""
    ours = {name: value for name, value in os.environ.items() if name not in ("CC", "ROLLOUT_KERNELS")}
    environment = ours | {"PATH": ""} | environment
    command = [sys.executable, "setup.py", "-q", "build_py", "--build-lib", str(folder)]
    return subprocess.run(command, cwd=sources, env=environment, capture_output=True, text=True, timeout=100)


@pytest.fixture(scope="module")
def tree(sources: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("built")
    done = built(sources, folder)
    assert done.returncode == 0, done.stderr[-3000:]
    return folder


@pytest.fixture(scope="module")
def old_compiler(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A compiler that writes empty libraries, and does not know the tile instructions of AMX."""
    path = tmp_path_factory.mktemp("compiler") / "cc"
    path.write_text(OLD_COMPILER)
    path.chmod(0o755)
    return str(path)


def kernels_of(tree: Path, cwd: Path) -> list[str]:
    """Ask an installed tree for its kernels."""
    done = python_in(tree, KERNELS, cwd=cwd)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.split()


@pytest.mark.skipif(not X86, reason="plain C only on this architecture")
def test_a_wheel_lacks_no_kernels_unless_that_is_asked_for(sources: Path, old_compiler: str, tmp_path: Path) -> None:
    done = built(sources, tmp_path / "all", CC=old_compiler)
    others = [name for name in USUAL if name != "amx"]
    assert done.returncode == 1 and "unrecognized command-line option" in done.stderr, done.stderr[-3000:]
    advice = f"no kernels for amx: ROLLOUT_KERNELS={','.join(others)} builds a wheel without them\n"
    assert done.stderr.endswith(advice), done.stderr[-300:]

    done = built(sources, tmp_path / "named", CC=old_compiler, ROLLOUT_KERNELS=",".join(others))
    assert done.returncode == 0, done.stderr[-3000:]
    assert f"rollout: compiling the kernels for {', '.join(others)} with {old_compiler}\n" in done.stdout
    assert all(f"rollout: {name} compiled in " in done.stdout for name in others)
    assert kernels_of(tmp_path / "named", tmp_path) == others


def test_a_wheel_without_kernels_says_so(sources: Path, tree: Path, old_compiler: str, tmp_path: Path) -> None:
    done = built(sources, tmp_path / "none", CC=old_compiler, ROLLOUT_KERNELS="none")
    assert done.returncode == 0 and "rollout: no kernels in this wheel" in done.stdout
    assert kernels_of(tmp_path / "none", tmp_path) == kernels_of(tree, tmp_path) == []
    done = built(sources, tmp_path / "without", ROLLOUT_KERNELS="plain")
    assert done.returncode == 1 and done.stderr.endswith(
        "ROLLOUT_KERNELS=plain: no C compiler (cc, gcc, clang or $CC) is there\n"
    )
    for wrong in ("", "avx1024", "none,plain"):
        done = built(sources, tmp_path / "wrong", CC=old_compiler, ROLLOUT_KERNELS=wrong)
        assert done.returncode == 1 and f"ROLLOUT_KERNELS={wrong!r}: must be none, or some of" in done.stderr


def public(tree: Path) -> list[str]:
    """The modules of a built tree that say what is public in them."""
    found = [path for path in (tree / "rollout").rglob("*.py") if re.search("^__all__ =", path.read_text(), re.MULTILINE)]
    names = [".".join(path.relative_to(tree).with_suffix("").parts).removesuffix(".__init__") for path in found]
    return sorted(names)


def python_in(
    tree: Path, program: str, *words: str, cwd: Path, python: str | Path = sys.executable
) -> subprocess.CompletedProcess[str]:
    command = [python, "-c", program, *words]
    environment = os.environ | {"PYTHONPATH": str(tree)}
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=200)


@pytest.mark.long  # `make test-arithmetic` runs it
def test_every_public_name_of_an_installed_tree_can_be_imported(tree: Path, tmp_path: Path) -> None:
    modules = public(tree)
    assert {"rollout", "rollout.engine", "rollout.client", "rollout.exact"} <= set(modules) and len(modules) >= 7
    done = python_in(tree, NAMES, *modules, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    names = json.loads(done.stdout)
    assert "<class 'rollout.engine.values.sampling.Sampling'>" in names["rollout"] and len(names["rollout"]) >= 7
    (tmp_path / "rollout").mkdir()
    (tmp_path / "rollout" / "__init__.py").write_text("from engine.values import Sampling\n__all__ = ['Sampling']\n")
    done = python_in(tmp_path, NAMES, "rollout", cwd=tmp_path)
    assert done.returncode and "engine is not there" in done.stderr, "the negative control: the sources are kept away"


def lacking(tree: Path) -> set[str]:
    """Modules of the sources that a built tree lacks; the benchmarks are not installed."""
    files = {path for folder in ("engine", "transport", "recipes", "rollout") for path in (ROOT / folder).rglob("*.py")}
    names = {path.relative_to(ROOT).as_posix().removeprefix("rollout/") for path in files}
    return {name for name in names if not name.startswith("bench/") and not (tree / "rollout" / name).is_file()}


def test_a_built_tree_has_every_module(tree: Path, tmp_path: Path) -> None:
    """The recipes too, which nothing imports."""
    assert lacking(tree) == set()
    (tmp_path / "rollout").mkdir()
    (tmp_path / "rollout" / "recipes").symlink_to(tree / "rollout" / "recipes")
    missing = lacking(tmp_path)
    assert {"client/api.py", "engine/engine.py"} < missing and "recipes/grpo.py" not in missing, "the control"


LINKED = ("engine", "transport", "recipes")


def files_of(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file() and path.suffix != ".pyc"}


def test_the_build_imports_the_standard_library_alone() -> None:
    """pip builds in an environment with setuptools and nothing else, also for `make venv` in a fresh clone."""
    tree = ast.parse((ROOT / "setup.py").read_text())
    modules = [
        node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and str(node.module).startswith("rollout")
    ]
    assert modules
    program = f"import sys; sys.path.insert(0, {str(ROOT)!r}); import {', '.join(map(str, modules))}"
    bare = [sys.executable, "-I", "-S", "-c"]
    done = subprocess.run([*bare, program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    lacking = subprocess.run([*bare, f"{program}, rollout.engine.values"], capture_output=True, text=True, timeout=60)
    assert "No module named" in lacking.stderr, "the control: these are not there"


def test_the_sources_have_links_where_a_wheel_has_folders() -> None:
    assert {name: (ROOT / "rollout" / name).readlink().as_posix() for name in LINKED} == {name: f"../{name}" for name in LINKED}


def test_a_copy_without_links_has_the_same_modules(sources: Path, tree: Path, tmp_path: Path) -> None:
    """Archives leave links out, and Git on Windows writes small files in their place."""
    copied = tmp_path / "copied"
    shutil.copytree(sources, copied, ignore=shutil.ignore_patterns("build", "*.egg-info"))
    for name in LINKED:
        shutil.rmtree(copied / "rollout" / name)
    (copied / "rollout" / "engine").write_text("../engine")
    places = "import rollout.engine.values as one, rollout.transport.frames as two; print(one.__file__, two.__file__)"
    done = python_in(copied, ALONE + places, cwd=tmp_path)
    assert done.stdout.split() == [str(copied / "engine/values/__init__.py"), str(copied / "transport/frames.py")], done.stderr
    done = built(copied, tmp_path / "wheel")
    assert done.returncode == 0, done.stderr[-3000:]
    assert files_of(tmp_path / "wheel") == files_of(tree) and len(files_of(tree)) > 300
    shutil.rmtree(copied / "recipes")
    done = built(copied, tmp_path / "less")
    assert done.returncode or files_of(tmp_path / "less") < files_of(tree), "the control"


def test_type_checkers_read_the_types_of_an_installed_tree(tree: Path) -> None:
    assert all((tree / "rollout" / folder / "py.typed").is_file() for folder in (".", "engine", "transport"))


def test_a_built_tree_imports_what_it_has(tree: Path) -> None:
    """By every import statement, those of modules that nothing here can load among them."""
    for path in (tree / "rollout").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            named = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            named += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            for name in named:
                assert name.split(".")[0] not in ("engine", "transport", "recipes"), f"{path}:{node.lineno}: {name}"
                at = tree.joinpath(*name.split("."))
                ours = name.split(".")[0] == "rollout" and not name.startswith("rollout.bench")
                assert not ours or at.is_dir() or at.with_suffix(".py").exists(), f"{path}:{node.lineno}: {name}"


@pytest.fixture(scope="module")
def wheel(sources: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """of a copy of this tree"""
    folder, tree = tmp_path_factory.mktemp("wheel"), sources
    done = subprocess.run([sys.executable, "-c", BUILD, str(folder)], cwd=tree, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    return folder / done.stdout.split()[-1]


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with the wheel, and with what it depends on from where this test has it."""
    folder = tmp_path_factory.mktemp("installed") / "venv"
    venv.create(folder, with_pip=False)
    (packages,) = folder.glob("lib/python*/site-packages")
    zipfile.ZipFile(wheel).extractall(packages)
    (packages / "dependencies.pth").write_text(str(Path(torch.__file__).parents[1]))
    return folder


def run(installed: Path, cache: Path) -> dict[str, object]:
    environment = {"PATH": str(installed), "HOME": str(cache), "ROLLOUT_CACHE": str(cache), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [installed / "bin" / "python", "-c", PROGRAM], cwd=cache, env=environment, capture_output=True, text=True, timeout=250
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.skipif(shutil.which("cc") is None, reason="no compiler to build the wheel with")
def test_without_a_compiler_an_installed_wheel_runs_natively(wheel: Path, installed: Path, tmp_path: Path) -> None:
    names = {name.split("/")[0] for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert names == {"rollout"}, "packages that others may have under the same name"
    assert not any("/bench/" in name for name in zipfile.ZipFile(wheel).namelist())
    assert wheel.name.split("-")[2:4] == ["py3", "none"] and os.uname().machine in wheel.name
    told = run(installed, tmp_path)
    assert str(installed) in str(told["package"]) and told["samples"] == 2 and told["attention"] == "native"
    assert told["isa"] in USUAL and not (tmp_path / "native").exists(), "nothing was compiled"
    paths = told["paths"]
    assert isinstance(paths, dict)
    for isa, path in paths.items():
        assert ("/engine/cpu/lib/kernels-" in path) == (isa in USUAL), path

    done = python_in(Path(), MODULES, cwd=tmp_path, python=installed / "bin" / "python")
    assert done.returncode == 0, done.stderr[-3000:]

    # the negative control, and the guard against libraries of other sources: another byte in a C file
    (source,) = installed.glob("lib/python*/site-packages/rollout/engine/cpu/c/sampling.c")
    source.write_text(source.read_text() + "\n")
    told = run(installed, tmp_path)
    assert told["isa"] == "torch" and told["attention"] == "reference" and "no C compiler" in str(told["why"])
    assert str(told["arithmetic"]).startswith("torch/")


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.skipif(shutil.which("cc") is None, reason="no compiler to build the wheel with")
def test_the_readme_example_runs_from_an_installed_wheel(
    installed: Path, tiny_config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Service and trainer, as a user has them who has no sources."""
    monkeypatch.delenv("PYTHONPATH", raising=False)
    monkeypatch.chdir(tmp_path)  # Python looks there first
    python = str(installed / "bin" / "python")
    (tmp_path / "example.py").write_text(readme_program("example.py"))
    with service_process(tiny_config, python=python) as service:
        done = subprocess.run([python, "example.py", service.endpoint], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr[-3000:]
    assert len(re.findall(r"^#(\d+) (\d) (?:stop|length) -\d+\.\d\d  ", done.stdout, re.MULTILINE)) == 8, done.stdout


@pytest.fixture(scope="module")
def client_level(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with the wheel and what pip finds for it, without extras."""
    folder = tmp_path_factory.mktemp("client") / "venv"
    venv.create(folder, with_pip=True)
    done = pip(folder, "install", str(wheel))
    assert done.returncode == 0, done.stderr[-3000:]
    return folder


def pip(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [folder / "bin" / "python", "-m", "pip", *words, "--disable-pip-version-check"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=600)


def in_client(folder: Path, cwd: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run a program of this environment, without the sources beside it."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [folder / "bin" / words[0], *words[1:]]
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=100)


def client_example() -> str:
    (found,) = re.findall(r"<!-- client -->\n```python\n(.*?)```", (ROOT / "docs/install.md").read_text(), re.DOTALL)
    return str(found)


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.skipif(shutil.which("cc") is None, reason="no compiler to build the wheel with")
def test_the_client_is_small_and_has_no_torch(client_level: Path, tmp_path: Path) -> None:
    (packages,) = client_level.glob("lib/python*/site-packages")
    bytes_of = {path: path.stat().st_size for path in packages.rglob("*") if path.is_file()}
    tools = ("pip", "setuptools", "pkg_resources", "_distutils_hack")
    ours = {path: size for path, size in bytes_of.items() if path.relative_to(packages).parts[0].split("-")[0] not in tools}
    assert 20e6 < sum(ours.values()) <= 100.5e6, "100 MB, as the documents say"
    assert not (packages / "torch").exists() and (packages / "numpy").exists()

    done = in_client(client_level, tmp_path, "python", "-c", NAMES, "rollout", "rollout.client")
    assert done.returncode == 0, done.stderr[-3000:]
    names = json.loads(done.stdout)
    assert len(names["rollout"]) >= 7 and len(names["rollout.client"]) >= 2
    done = in_client(client_level, tmp_path, "python", "-c", NAMES, "rollout.exact")
    assert done.returncode and "No module named 'torch'" in done.stderr, "the negative control: it is not there"


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.skipif(shutil.which("cc") is None, reason="no compiler to build the wheel with")
def test_client_and_commands_run_without_extras(client_level: Path, tiny_service: str, tmp_path: Path) -> None:
    (tmp_path / "example.py").write_text(client_example())
    done = in_client(client_level, tmp_path, "python", "example.py", tiny_service)
    assert done.returncode == 0, done.stderr[-3000:]
    assert len(re.findall(r"^#\d+ \d (?:stop|length) \[\d", done.stdout, re.MULTILINE)) == 8, done.stdout

    done = in_client(client_level, tmp_path, "rollout", "status", "--json", "--address", tiny_service)
    assert done.returncode == 0 and "running" in json.loads(done.stdout), done.stderr
    done = in_client(client_level, tmp_path, "rollout", "top", "--address", tiny_service, "--once", "--interval", "0.1")
    assert done.returncode == 0 and "device KV" in done.stdout, done.stderr
    done = in_client(client_level, tmp_path, "rollout", "keys", "init", "--address", "tcp://127.0.0.1:9")
    assert done.returncode == 0, done.stderr
    done = in_client(client_level, tmp_path, "rollout", "serve", "--model", "smollm2")
    assert done.stderr.endswith("rollout serve: torch is not installed: pip install 'rl-rollout[serve]'\n"), done.stderr


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.skipif(shutil.which("cc") is None, reason="no compiler to build the wheel with")
def test_pip_keeps_what_is_installed_when_it_adds_an_extra(client_level: Path) -> None:
    """As error messages say it. The index has no package of this name, or a newer one."""
    done = pip(client_level, "install", "--dry-run", "rl-rollout[text]")
    assert done.returncode == 0, done.stderr[-3000:]
    would = [word for line in done.stdout.splitlines() if line.startswith("Would install") for word in line.split()[2:]]
    assert any(word.startswith("transformers-") for word in would) and not any("rollout" in word for word in would), would


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.skipif(shutil.which("cc") is None, reason="no compiler to build the wheel with")
def test_a_program_of_the_client_passes_mypy_strict(client_level: Path, tmp_path: Path) -> None:
    def checked(program: str) -> subprocess.CompletedProcess[str]:
        (tmp_path / "example.py").write_text(program)
        command = [sys.executable, "-m", "mypy", "--strict", "--python-executable", str(client_level / "bin" / "python")]
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        command.append("example.py")
        return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)

    done = checked(client_example())
    assert done.returncode == 0, done.stdout + done.stderr
    done = checked(client_example().replace("n=4", 'n="4"'))
    assert done.returncode == 1 and 'Argument "n" to "Sampling"' in done.stdout, "the negative control: it knows the types"
