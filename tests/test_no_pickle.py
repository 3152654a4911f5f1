"""Nothing here runs what it is sent: no pickle in any of its forms, no eval, no exec, no torch.load."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.support.syntax import dotted

ROOT = Path(__file__).parents[1]
ROOMS = ("engine", "transport", "rollout", "recipes", ".ci")
MODULES = {"pickle", "_pickle", "pickletools", "cPickle", "cloudpickle", "dill", "joblib", "marshal", "shelve", "jsonpickle"}
NAMES = {"eval", "exec", "compile", "__import__"}
ATTRIBUTES = {"recv_pyobj", "send_pyobj", "recv_multipart_pyobj", "read_pickle", "to_pickle", "load_pickle", "save_pickle"}
CALLS = {
    "torch.load",
    "torch.save",
    "torch.jit.load",
    "torch.package",
    "yaml.load",
    "yaml.unsafe_load",
    "os.system",
    "builtins.eval",
}
KEYWORDS = {"allow_pickle": True, "weights_only": False, "shell": True, "trust_remote_code": True}
FROM = {tuple(call.rsplit(".", 1)) for call in CALLS}


def dangers(source: str) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Import():
                found |= {alias.name for alias in node.names if alias.name.split(".")[0] in MODULES}
            case ast.ImportFrom():
                if (node.module or "").split(".")[0] in MODULES:
                    found.add(node.module or "")
                found |= {f"{node.module}.{alias.name}" for alias in node.names if (node.module, alias.name) in FROM}
            case ast.Name() if node.id in NAMES | MODULES:
                found.add(node.id)
            case ast.Attribute() if node.attr in ATTRIBUTES:
                found.add(node.attr)
            case ast.Attribute() if dotted(node) in CALLS:
                found.add(dotted(node))
            case ast.Call():
                for keyword in node.keywords:
                    if keyword.arg in KEYWORDS and getattr(keyword.value, "value", None) is KEYWORDS[keyword.arg]:
                        found.add(f"{keyword.arg}={KEYWORDS[keyword.arg]}")
                if dotted(node.func) in ("np.load", "numpy.load") and not any(k.arg == "allow_pickle" for k in node.keywords):
                    found.add("numpy.load without allow_pickle=False")
                if dotted(node.func) == "getattr" and any(
                    getattr(a, "value", None) in NAMES | ATTRIBUTES for a in node.args[1:2]
                ):
                    found.add("getattr")
    return found


def test_nothing_runs_what_it_is_sent() -> None:
    paths = [path for room in ROOMS for path in (ROOT / room).rglob("*.py")]
    assert len(paths) > 40
    assert not {str(path.relative_to(ROOT)): found for path in paths if (found := dangers(path.read_text()))}


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "import os, pickle as p",
        "from pickle import loads",
        "def f():\n    from cloudpickle.compat import x",
        "eval('1')",
        "f = eval",
        "exec(text)",
        "compile(text, '', 'exec')",
        "torch.load(path)",
        "load = torch.load",
        "from torch import load",
        "torch.load(path, weights_only=True)",
        "load(path, weights_only=False)",
        "np.load(path, allow_pickle=True)",
        "np.load(path)",
        "socket.recv_pyobj()",
        "subprocess.run(text, shell=True)",
        "__import__('pickle')",
        "getattr(socket, 'recv_pyobj')()",
        "AutoModel.from_pretrained(path, trust_remote_code=True)",
    ],
)
def test_each_danger_is_seen(source: str) -> None:
    assert dangers(source)


@pytest.mark.parametrize(
    "source",
    [
        "model.eval()",
        "np.load(path, allow_pickle=False)",
        "json.loads(text)",
        "re.compile(x)",
        "torch.compile(f)",
        "'import pickle'",
    ],
)
def test_harmless_things_pass(source: str) -> None:
    assert not dangers(source)
