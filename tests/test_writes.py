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
LEDGER = "read as a ledger of this user from its first byte to its last, and locked"
REASONS: dict[str, tuple[str, str]] = {
    "engine/cpu/build.py:compile_library": (
        "Path(temporary).unlink os.replace",
        "its name has the hash of its content's sources",
    ),
    "engine/forward/shapes.py:write_configuration": ("Path(temporary.name).rename os.open", "in a folder with our mark"),
    "engine/parallel/followers.py:end": ("shutil.rmtree", MADE),
    "engine/parallel/followers.py:memory": ("os.ftruncate", NO_FILE),
    "engine/parallel/placement.py:MeetingPlace.close": ("shutil.rmtree", MADE),
    "engine/parallel/weights.py:StagedMemory.close": ("os.ftruncate", NO_FILE),
    "engine/parallel/weights.py:StagedMemory.open": ("os.ftruncate", NO_FILE),
    "recipes/fleet.py:joined_fleet": ("toml.write_text", MADE),
    "recipes/grpo.py:steps": ("(options.out / 'rewards.jsonl').open", ASKED),
    "rollout/client/memo_folder.py:MemoFolder._remove_file": (
        "os.unlink",
        "opened without following a link, of this user, and it begins with our mark or has no content",
    ),
    "rollout/client/memo_folder.py:MemoFolder._write": ("open os.rename os.unlink", MADE),
    "rollout/client/memo_folder.py:_marked": ("os.open", MADE),
    "rollout/client/replaying.py:Replay._groups": ("child.rename", NO_FILE),
    "rollout/commands/generate.py:run": ("sink.truncate", ASKED),
    "rollout/commands/main.py:main": ("open", NO_FILE),
    "rollout/commands/replay.py:run": ("sink.truncate", ASKED),
    "rollout/commands/sample_file.py:keep_groups": ("open os.replace", "each of its lines was read as a sample"),
    "rollout/commands/sample_file.py:open_out": ("Path(out).open", ASKED),
    "rollout/commands/serve_fleet.py:local_launcher": (
        "toml.write_text",
        "in the router's own folder, under this process's name",
    ),
    "rollout/commands/supervise.py:serving.command": ("toml.write_text", MADE),
    "rollout/fleet/launcher.py:RouterFolder.close": ("self._note.unlink", OWN),
    "rollout/fleet/ray_actor.py:ReplicaHolder.serve": ("(folder / 'replica.toml').write_text", MADE),
    "rollout/ledger/writer.py:LedgerFile._whole": ("os.ftruncate", LEDGER),
    "rollout/ledger/writer.py:LedgerFile.append": ("os.ftruncate", LEDGER),
    "rollout/ledger/writer.py:LedgerFile.replace": (
        "os.rename os.rename",
        LEDGER + "; FILE.new was free, FILE.1 is an ended one",
    ),
    "rollout/metrics/sinks.py:JsonlSink.__init__": ("Path(path).expanduser().open", ASKED + "; it is only added to"),
    "rollout/models.py:_download_gguf": ("(folder / GGUF_FILE).open requirement.write_text shutil.copyfileobj", MADE),
    "rollout/models.py:_locked": ("os.open", "an empty file under our name, never emptied"),
    "rollout/models.py:_smollm2": ("(Path(temporary) / UNFINISHED).write_bytes converted.rename shutil.rmtree", OWN),
    "rollout/service/journal.py:_connect": ("sqlite3.connect", "`open_private` has made or checked it and all files beside it"),
    "rollout/private_files.py:open_private": ("os.open", "not emptied; what is there must be this user's alone"),
    "rollout/process.py:Folder.__init__": ("new.rename", MADE),
    "rollout/process.py:Folder.close": ("shutil.rmtree", MADE),
    "rollout/process.py:_remove_if_dead": ("shutil.rmtree", OWN),
    "rollout/process.py:service_process": ("toml.write_text", MADE),
    "rollout/process.py:write_atomically": (
        "open temporary.rename",
        "`check_ready_file`, or the note of a router that `_noted` has compared",
    ),
    "transport/keys/cookie.py:Cookie._write": ("os.replace", OWN),
    "transport/keys/files.py:_write": (
        "open os.link os.replace",
        "read as a key file before; a new one takes no name that is there",
    ),
    "transport/own_files.py:open_new": ("os.open", MADE),
    "transport/own_files.py:remove_if_same": ("path.unlink", "the caller has it open"),
}
"""by function: its calls, one for each place; why they meet no file of the user"""
ELSEWHERE = ("rollout/bench/",)
"""benchmarks, which are not in the wheel"""


def writes(source: str) -> Iterator[tuple[str, str]]:
    """Yield the qualified name of the function, and the call, of each place that deletes, replaces, empties or makes a file."""

    def walk(node: ast.AST, function: str) -> Iterator[tuple[str, str]]:
        for child in ast.iter_child_nodes(node):
            named = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
            inner = f"{function}.{child.name}".strip(".") if named else function
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
    if name == "sqlite3.connect":
        return True
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


def places() -> dict[str, str]:
    """Return the calls of each function that has some, sorted, one for each place."""
    found: dict[str, list[str]] = {}
    for room in ROOMS:
        for path in (ROOT / room).rglob("*.py"):
            where = str(path.relative_to(ROOT))
            if not where.startswith(ELSEWHERE):
                for function, call in writes(path.read_text()):
                    found.setdefault(f"{where}:{function}", []).append(call)
    return {place: " ".join(sorted(calls)) for place, calls in found.items()}


def test_each_place_that_writes_files_says_why_it_may() -> None:
    assert places() == {place: calls for place, (calls, _) in REASONS.items()}


def test_a_call_more_in_a_listed_function_or_a_method_of_the_same_name_is_seen() -> None:
    once = "class A:\n    def close(self):\n        p.unlink()\n"
    assert list(writes(once)) == [("A.close", "p.unlink")]
    assert list(writes(once + "        q.unlink()\n")) == [("A.close", "p.unlink"), ("A.close", "q.unlink")]
    assert {place for place, _ in writes(once + once.replace("A", "B"))} == {"A.close", "B.close"}


@pytest.mark.parametrize(
    "source",
    [
        "def f(p): p.unlink()",
        "def f(p): sqlite3.connect(p)",
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
