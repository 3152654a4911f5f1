"""The shape of the repository: who imports whom, what is slim, what is exported, and that the README is true."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ROOMS = ("engine", "transport", "rollout", "recipes")
MAY_IMPORT = {
    "engine": (),
    "transport": ("engine.types",),
    "rollout": ("engine", "transport"),
    "recipes": ("engine", "transport", "rollout"),
}
VALUE_TYPES = ("engine/types.py", "engine/config.py")
"""no torch in these: the wire and the command line need them"""


def imported(source: str, module: str) -> set[str]:
    """Dotted names that a module imports, wherever in the file; `from a import b` counts as a and as a.b."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = module.split(".")[: -node.level] if node.level else []
            parent = ".".join([*base, *([node.module] if node.module else [])])
            names |= {parent} | {f"{parent}.{alias.name}" for alias in node.names}
    return names


def forbidden(source: str, module: str) -> set[str]:
    """Names of our own rooms that this module may not import."""
    room = module.split(".")[0]
    allowed = (room, *MAY_IMPORT[room])

    def fine(name: str) -> bool:
        # `from engine import types` gives "engine" as well: the longer name decides
        inside = any(name == prefix or name.startswith(prefix + ".") for prefix in allowed)
        return inside or any(prefix.startswith(name + ".") for prefix in allowed)

    return {name for name in imported(source, module) if name.split(".")[0] in ROOMS and not fine(name)}


def modules() -> list[Path]:
    return [path for room in ROOMS for path in sorted((ROOT / room).rglob("*.py"))]


def test_imports_point_down() -> None:
    wrong = {}
    for path in modules():
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        names = forbidden(path.read_text(), module)
        if names:
            wrong[module] = names
    assert not wrong


def arrows(package: str) -> set[tuple[str, str]]:
    """(importer, imported) among the rooms of a package: its folders, and the files beside them."""
    found = set()
    for path in (ROOT / package).rglob("*.py"):
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        for name in imported(path.read_text(), module):
            if name.startswith(f"{package}."):
                found.add((f"{module}.".split(".")[1] or package, name.split(".")[1]))
    rooms = {path.stem for path in (ROOT / package).iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    return {(one, other) for one, other in found if one != other and other in rooms}


def test_rooms_of_the_service_and_client_form_no_circle() -> None:
    """What a trainer holds and what serves it never meet; nothing imports what imports it."""
    for package in ("rollout", "transport"):
        found = arrows(package)
        print(f"{package}: {len({room for arrow in found for room in arrow})} rooms, {len(found)} arrows")
        while leaves := {one for one, _ in found} | {other for _, other in found}:
            free = {room for room in leaves if not any(one == room for one, _ in found)}
            assert free, f"a circle among {sorted(leaves)}"
            found = {(one, other) for one, other in found if other not in free}
    assert not {("client", "service"), ("service", "client")} & arrows("rollout")


def test_no_module_reaches_another_room_by_its_path() -> None:
    for path in modules():
        assert "parents[" not in path.read_text(), f"{path}: resources lie beside the module that reads them"


@pytest.mark.parametrize(
    ("source", "module", "seen"),
    [
        ("import rollout.client", "engine.engine", {"rollout.client"}),
        ("def f():\n    from transport import frames", "engine.kv.pages", {"transport", "transport.frames"}),
        ("from engine.engine import Engine", "transport.frames", {"engine.engine", "engine.engine.Engine"}),
        ("from engine.types import Group", "transport.frames", set()),
        ("from engine import types", "transport.frames", set()),
        ("from engine import kv", "transport.frames", {"engine.kv"}),
        ("from ..engine import kv", "transport.frames", {"engine.kv"}),
        ("from engine.engine import Engine", "rollout.service.loop", set()),
    ],
)
def test_a_wrong_import_is_seen(source: str, module: str, seen: set[str]) -> None:
    assert forbidden(source, module) == seen


def test_value_types_import_no_torch() -> None:
    for path in VALUE_TYPES:
        assert not {"torch", "transformers"} & {name.split(".")[0] for name in imported((ROOT / path).read_text(), "engine.x")}


def run_python(program: str) -> str:
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_client_is_slim() -> None:
    loaded = run_python("import rollout.client, sys; print(*sorted(sys.modules))").split()
    heavy = {"torch", "transformers", "tyro", "rich", "wandb", "engine.engine", "engine.scheduling", "engine.kv"}
    assert not heavy & set(loaded)


def test_torch_would_be_noticed() -> None:
    assert "torch" in run_python("import engine.kv.pages, sys; print(*sorted(sys.modules))").split()


def test_exported_names() -> None:
    import rollout

    assert sorted(rollout.__all__) == [
        "Arrivals",
        "Handle",
        "RolloutClient",
        "RolloutError",
        "Sample",
        "Sampling",
        "__version__",
    ]
    for name in rollout.__all__:
        assert getattr(rollout, name) is not None


def test_the_version_is_the_distribution_s() -> None:
    import rollout

    assert rollout.__version__ == tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]


def test_log_probs_are_scored_in_one_place() -> None:
    """What trains, audits and measures calls `rollout.exact`."""
    places = {str(path.relative_to(ROOT)) for path in modules() if "log_softmax" in path.read_text()}
    elsewhere = ("engine/", "rollout/bench/peers/")  # the sampler; scripts of other environments, which have none of our code
    assert {path for path in places if not path.startswith(elsewhere)} == {"rollout/exact/module.py"}


def test_files_that_the_documents_name_exist() -> None:
    for document in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]:
        text = document.read_text()
        for target in re.findall(r"\]\((?!https?:|#)([^)#]+)", text):
            assert (document.parent / target).exists(), f"{document.name} links to {target}"
        for path in re.findall(r"\b(?:engine|transport|rollout|recipes|tests|docs)/[\w/]+\.(?:py|c|md)\b", text):
            assert (ROOT / path).exists(), f"{document.name} names {path}"


def test_every_folder_and_file_of_the_engine_is_in_the_map() -> None:
    named = set(re.findall(r"`([\w/]+(?:\.py|/))`", (ROOT / "docs/architecture.md").read_text()))
    here = {path.name + ("/" if path.is_dir() else "") for path in (ROOT / "engine").iterdir() if path.name[0] not in "_."}
    assert here <= named


def test_tests_share_only_what_is_in_support() -> None:
    for path in sorted((ROOT / "tests").rglob("*.py")):
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        others = {name for name in imported(path.read_text(), module) if re.match(r"tests\.(?!support)", name)}
        assert not others, f"{path.name} imports {others}: what tests share lies in tests/support"


def test_functions_stay_readable() -> None:
    long = set()
    for path in modules():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and (node.end_lineno or 0) - node.lineno >= 70:
                long.add(f"{path.relative_to(ROOT)}:{node.name}")
    assert not long


def quick() -> set[str]:
    """Test files of `make quick`."""
    shown = subprocess.run(["make", "--dry-run", "quick"], cwd=ROOT, capture_output=True, text=True, timeout=60)
    return set(re.findall(r"tests/[\w/]+\.py", shown.stdout))


WHOLE = {
    "tests/engine/test_equivalence.py": "whole models",
    "tests/engine/test_long_tail.py": "schedules of thousands of steps",
    "tests/engine/test_pressure.py": "a pool that is too small for seconds on end",
    "tests/engine/test_schedules.py": "a thousand schedules",
}
"""no torch in them, and yet not quick"""


def test_quick_has_every_small_test_of_the_engine() -> None:
    """Those that import no torch: scheduling, blocks, tables, plans."""
    small = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "tests/engine").glob("test_*.py")
        if "torch" not in {name.split(".")[0] for name in imported(path.read_text(), "tests.engine.x")}
    }
    assert small - WHOLE.keys() <= quick(), "name it in QUICK of the Makefile, or in WHOLE with a reason"
    assert all((ROOT / path).exists() for path in quick() | WHOLE.keys())
