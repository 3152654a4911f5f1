"""Which functions delete, replace, empty or make files, and why none of them can be the user's: a new one needs a line here."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.syntax import dotted

ROOT = Path(__file__).parents[1]
ROOMS = ("engine", "transport", "rollout", "recipes")
OF_OS = {"unlink", "remove", "rmdir", "removedirs", "rename", "renames", "replace", "truncate", "ftruncate", "link", "symlink"}
METHODS = {"unlink", "rmdir", "rename", "write_text", "write_bytes", "touch", "symlink_to", "hardlink_to", "extractall"}
MAKING = {"O_CREAT", "O_TRUNC"}

OWN = "its name and content were compared with ours (`own_files`)"
MADE = "made by this process under a name that was free"
ASKED = "the user names this file as the program's output"
NO_FILE = "no file"
REASONS = {
    "transport/own_files.py:remove_if_same": "the caller has it open",
    "transport/own_files.py:open_new": MADE,
    "transport/keys/cookie.py:_write": OWN,
    "transport/keys/files.py:_write": "read as a key file before; a new one takes no name that is there",
    "rollout/process.py:service_process": MADE,
    "rollout/process.py:write_atomically": "`check_ready_file`, or the note of a router that `_noted` has compared",
    "rollout/process.py:__init__": MADE,
    "rollout/process.py:close": MADE,
    "rollout/process.py:_remove_if_dead": OWN,
    "rollout/fleet/launcher.py:close": OWN,
    "rollout/fleet/ray_actor.py:serve": MADE,
    "rollout/commands/supervise.py:command": MADE,
    "rollout/commands/serve_fleet.py:local_launcher": "in the router's own folder, under this process's name",
    "rollout/commands/sample_file.py:open_out": ASKED,
    "rollout/commands/sample_file.py:keep_groups": "each of its lines was read as a sample",
    "rollout/commands/generate.py:run": ASKED,
    "rollout/commands/replay.py:run": ASKED,
    "rollout/metrics/sinks.py:__init__": ASKED + "; it is only added to",
    "rollout/models.py:_smollm2": OWN,
    "rollout/models.py:_locked": "an empty file under our name, never emptied",
    "rollout/models.py:_download_gguf": MADE,
    "engine/forward/shapes.py:write_configuration": "in a folder with our mark",
    "engine/cpu/build.py:compile_library": "its name has the hash of its content's sources",
    "engine/parallel/followers.py:end": MADE,
    "engine/parallel/placement.py:close": MADE,
    "recipes/fleet.py:joined_fleet": MADE,
    "rollout/client/memo_folder.py:_marked": MADE,
    "rollout/client/memo_folder.py:_write": MADE,
    "rollout/client/memo_folder.py:_remove_file": "opened without following a link, of this user, and it begins with our mark",
    "rollout/client/replaying.py:_groups": NO_FILE,
    "rollout/commands/main.py:main": NO_FILE,
    "engine/parallel/followers.py:memory": NO_FILE,
    "engine/parallel/weights.py:close": NO_FILE,
    "engine/parallel/weights.py:open": NO_FILE,
    "recipes/grpo.py:steps": ASKED,
}
ELSEWHERE = ("rollout/bench/", "rollout/ledger/", "rollout/service/journal.py", "rollout/private_files.py")
"""benchmarks, which are not in the wheel; files that the user names and the program continues: their own tests"""


def writes(source: str) -> Iterator[tuple[str, str]]:
    """Yield the function and the call of each place that deletes, replaces, empties or makes a file."""

    def walk(node: ast.AST, function: str) -> Iterator[tuple[str, str]]:
        for child in ast.iter_child_nodes(node):
            inner = child.name if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef) else function
            if isinstance(child, ast.Call) and does_write(child):
                yield function, ast.unparse(child.func)
            yield from walk(child, inner)

    yield from walk(ast.parse(source), "")


def does_write(call: ast.Call) -> bool:
    name = dotted(call.func)
    module, _, last = name.rpartition(".")
    attribute = call.func.attr if isinstance(call.func, ast.Attribute) else ""
    if module == "os":
        return last in OF_OS or (last == "open" and any(getattr(n, "attr", "") in MAKING for n in ast.walk(call)))
    if module == "shutil":
        return last not in {"which", "get_terminal_size", "disk_usage"}
    if attribute in METHODS:
        return True
    if attribute == "truncate" and len(call.args) == 1 and getattr(call.args[0], "value", None) == 0:
        return True
    if attribute == "replace" and len(call.args) == 1 and not call.keywords:  # Path.replace; a string's has two
        return True
    modes = [*call.args, *(k.value for k in call.keywords if k.arg == "mode")] if "open" in (last, attribute) else []
    return any(
        isinstance(mode := getattr(arg, "value", None), str) and set(mode) & set("wax+") and len(mode) < 4 for arg in modes
    )


def places() -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for room in ROOMS:
        for path in (ROOT / room).rglob("*.py"):
            where = str(path.relative_to(ROOT))
            if not where.startswith(ELSEWHERE):
                for function, call in writes(path.read_text()):
                    found.setdefault(f"{where}:{function}", set()).add(call)
    return found


def test_each_place_that_writes_files_says_why_it_may() -> None:
    found = places()
    assert {place: calls for place, calls in found.items() if place not in REASONS} == {}
    assert {place for place in REASONS if place not in found} == set()


@pytest.mark.parametrize(
    "source",
    [
        "def f(p): p.unlink()",
        "def f(p): os.replace(p, q)",
        "def f(p): shutil.rmtree(p)",
        "def f(p): p.open('w')",
        "def f(p): open(p, 'r+b')",
        "def f(p): open(p, mode='ab')",
        "def f(p): os.open(p, os.O_RDWR | os.O_CREAT)",
        "def f(p): p.replace(q)",
        "def f(p): file.truncate(0)",
        "def f(p): [each.write_text('') for each in p]",
    ],
)
def test_each_way_to_write_is_seen(source: str) -> None:
    assert [function for function, _ in writes(source)] == ["f"]


@pytest.mark.parametrize(
    "source", ["a.replace('x', 'y')", "open(p)", "open(p, 'rb')", "os.open(p, os.O_RDONLY)", "shutil.which('x')"]
)
def test_what_only_reads_is_not(source: str) -> None:
    assert not list(writes(source))
