"""The sources of vLLM's and SGLang's response types, out of their wheels, without what they depend on.

    python -m tests.support.their_sources FOLDER       # downloads 380 MB, keeps 1 MB

vLLM's modules import an inference engine, so the classes of its responses are copied as they stand into a module of their own.
SGLang's are a module that imports nothing of its package.
"""

from __future__ import annotations

import ast
import importlib.util
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

WHEELS = ("vllm==0.33.0", "sglang==0.5.23")
VLLM = (
    "vllm/outputs.py", "vllm/logprobs.py", "vllm/entrypoints/serve/engine/protocol.py",
    "vllm/entrypoints/generate/base/protocol.py", "vllm/entrypoints/openai/chat_completion/protocol.py",
    "vllm/entrypoints/openai/completion/protocol.py", "vllm/entrypoints/serve/tokenize/protocol.py",
    "vllm/entrypoints/scale_out/token_in_token_out/protocol.py",
)  # fmt: skip
SGLANG = "sglang/api/v1/api_types.py"
FOLDER = "their"
"""in the environment's folder"""
RESPONSES = (
    "CompletionResponse", "CompletionStreamResponse", "ChatCompletionResponse", "ChatCompletionStreamResponse",
    "GenerateTokensResponse", "GenerateTokensStreamResponse", "TokenizeResponse", "DetokenizeResponse", "ModelList",
    "ErrorResponse", "WeightVersionSpan",
)  # fmt: skip
HEAD = """
import json
import time
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

from openai.types.chat.chat_completion_audio import ChatCompletionAudio as OpenAIChatCompletionAudio
from openai.types.chat.chat_completion_message import Annotation as OpenAIAnnotation
from pydantic import (
    BaseModel, BeforeValidator, ConfigDict, Field, JsonValue, NonNegativeInt, PrivateAttr, SerializeAsAny, field_validator,
    model_serializer, model_validator,
)

random_uuid = make_tool_call_id = lambda *_, **__: "id"
"""


def fetch(folder: Path) -> None:
    """Download the wheels, and keep the files of response types."""
    with tempfile.TemporaryDirectory() as wheels:
        download = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:", "-d", wheels]
        subprocess.run([*download, *WHEELS], check=True)
        for wheel in Path(wheels).glob("*.whl"):
            with zipfile.ZipFile(wheel) as archive:
                for name in {*VLLM, SGLANG} & set(archive.namelist()):
                    archive.extract(name, folder)


def definitions(folder: Path) -> dict[str, tuple[ast.stmt, str]]:
    """Return the classes and the names that are assigned in vLLM's modules, and their source."""
    found: dict[str, tuple[ast.stmt, str]] = {}
    for name in VLLM:
        source = (folder / name).read_text()
        for node in ast.parse(source).body:
            names = [node.name] if isinstance(node, ast.ClassDef) else []
            if isinstance(node, ast.AnnAssign | ast.Assign):
                targets = [node.target] if isinstance(node, ast.AnnAssign) else node.targets
                names = [target.id for target in targets if isinstance(target, ast.Name)]
            for each in names:
                decorators = [node.lineno, *(one.lineno for one in getattr(node, "decorator_list", ()))]
                lines = source.splitlines()[min(decorators) - 1 : node.end_lineno]
                found.setdefault(each, (node, "\n".join(lines)))
    return found


def needed(name: str, known: dict[str, tuple[ast.stmt, str]], done: dict[str, None]) -> Iterator[str]:
    """Yield a class and, before it, what its definition names."""
    if name in done or name not in known:
        return
    done[name] = None
    for node in ast.walk(known[name][0]):
        if isinstance(node, ast.Name) and node.id != name:
            yield from needed(node.id, known, done)
    yield name


def vllm_types(folder: Path, made: Path) -> ModuleType:
    """Import vLLM's response types from a module that is written to `made`."""
    known, done = definitions(folder), dict[str, None]()
    known.pop("logger", None)
    order = [name for response in RESPONSES for name in needed(response, known, done)]
    quiet = "class logger:\n    debug = warning_once = staticmethod(lambda *_, **__: None)\n"
    made.write_text("\n\n".join([HEAD, quiet, *(known[name][1] for name in order)]) + "\n")
    return loaded(made)


def sglang_types(folder: Path) -> ModuleType:
    """Import SGLang's response types."""
    return loaded(folder / SGLANG)


def loaded(path: Path) -> ModuleType:
    """Import a file as a module."""
    spec = importlib.util.spec_from_file_location(f"their_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    fetch(Path(sys.argv[1]))
