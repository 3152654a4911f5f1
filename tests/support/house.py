"""What one must read to follow one action: closures of imports, and what one action of an engine enters."""

from __future__ import annotations

import ast
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).parents[2]
FOLDERS = ("rollout", "engine", "transport", "recipes")


def modules_of(root: Path) -> dict[str, Path]:
    """Map the name that each module is imported by to its file. The links in `rollout/` are left out: what they lead to lies at
    the top."""
    found = {}
    for folder in FOLDERS:
        for path in sorted((root / folder).rglob("*.py")):
            parts = path.relative_to(root).with_suffix("").parts
            if any((root / Path(*parts[:depth])).is_symlink() for depth in range(1, len(parts))):
                continue
            parts = parts if folder == "rollout" else ("rollout", *parts)
            found[".".join(parts).removesuffix(".__init__")] = path
    return found


def run_at_import(nodes: list[ast.stmt]) -> list[ast.Import | ast.ImportFrom]:
    """List the imports that run when a module is imported: none inside functions or under TYPE_CHECKING."""
    found: list[ast.Import | ast.ImportFrom] = []
    for node in nodes:
        match node:
            case ast.Import() | ast.ImportFrom():
                found.append(node)
            case ast.If(test=test, body=body, orelse=other):
                found += run_at_import(([] if "TYPE_CHECKING" in ast.unparse(test) else body) + other)
            case ast.Try(body=body, handlers=handlers, orelse=other, finalbody=last):
                found += run_at_import([*body, *(each for handler in handlers for each in handler.body), *other, *last])
            case ast.With(body=body) | ast.ClassDef(body=body):
                found += run_at_import(body)
    return found


def imports(path: Path, module: str, known: dict[str, Path]) -> set[str]:
    """Return which of the known modules a file imports when it is imported."""
    names = set()
    package = module.split(".") if path.name == "__init__.py" else module.split(".")[:-1]
    for node in run_at_import(ast.parse(path.read_text()).body):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
            continue
        above = package[: len(package) - node.level + 1] if node.level else []
        base = ".".join([*above, *([node.module] if node.module else [])])
        names |= {base, *(f"{base}.{alias.name}" for alias in node.names)}
    return names & known.keys()


def closure(module: str, known: dict[str, Path]) -> set[str]:
    """Return the known modules that importing a module reads, packages' own files included. Raises KeyError."""
    seen: set[str] = set()
    todo = [module]
    while todo:
        name = todo.pop()
        if name in seen or (name not in known and name != module):
            continue
        seen.add(name)
        todo += imports(known[name], name, known)
        parts = name.split(".")
        todo += [".".join(parts[:depth]) for depth in range(1, len(parts))]
    return seen


def lines_of(module: str, known: dict[str, Path]) -> int:
    """Count the lines of a module's closure."""
    return sum(len(known[name].read_text().splitlines()) for name in closure(module, known))


def entered(action: Callable[[], Any]) -> dict[str, int]:
    """Run an action; return how many files and functions of the project this thread enters meanwhile."""
    seen: set[tuple[str, str]] = set()
    here, others = f"{ROOT}/", f"{ROOT}/."

    def profile(frame: FrameType, event: str, _: Any) -> None:
        if event == "call":
            file = os.path.realpath(frame.f_code.co_filename)
            if file.startswith(here) and not file.startswith((others, f"{ROOT}/tests/")):
                seen.add((file, frame.f_code.co_qualname))

    sys.setprofile(profile)
    try:
        action()
    finally:
        sys.setprofile(None)
    return {"files": len({file for file, _ in seen}), "functions": len(seen)}


def actions() -> dict[str, int]:
    """Count what one group, one decode step and one refresh enter, in an engine of a tiny Llama on the CPU, all options off."""
    import numpy as np
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from rollout.engine.engine import Engine, EngineConfig
    from rollout.engine.values import Group, Sampling

    torch.manual_seed(0)
    sizes = dict(hidden_size=64, intermediate_size=96, num_attention_heads=4, num_key_value_heads=2, head_dim=32)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=256, num_hidden_layers=2, **sizes))  # type: ignore[arg-type]
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        engine = Engine(EngineConfig(model=folder, dtype="float32", kv_tokens=4096))

    def submit(name: str) -> None:
        engine.submit(Group(name, np.arange(1, 40, dtype=np.int32), Sampling(n=4, max_tokens=8, seed=1, ignore_eos=True)))

    def finish() -> None:
        while engine.has_work:
            engine.step()

    def group(name: str) -> None:
        submit(name)
        finish()

    group("first")  # what is chosen or compiled once
    found = {"group": entered(lambda: group("measured"))}
    submit("stepped")
    for _ in range(4):
        engine.step()
    found["step"] = entered(engine.step)
    finish()
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    engine.refresh(state)
    found["refresh"] = entered(lambda: engine.refresh(state))
    engine.close()
    return {f"{action}: {what}": count for action, counts in found.items() for what, count in counts.items()}
