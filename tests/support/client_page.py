"""The tables of docs/client.md that come from docstrings. `python -m tests.support.client_page` rewrites them."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from pathlib import Path
from typing import Any

from rollout import ClientConfig, Handle, RolloutClient, Sample, SampleStream, Sampling
from rollout.client.refresh import RefreshHandle
from rollout.engine.values import Refreshed, TokenColumns

PAGE = Path(__file__).parents[2] / "docs/client.md"
TABLE = re.compile(r"(<!-- table: (\w+) -->\n)(.*?)(<!-- end of the table -->)", re.DOTALL)
OF_THE_IO_THREAD = {
    "abort_unsent", "add_chunk", "add_sample", "add_samples", "check", "fail", "late", "may_pin_kv", "restart", "arrived",
}  # fmt: skip
"""of `Handle`: what the client itself calls"""


def arguments() -> str:
    """Describe the arguments of the client's constructor: the address, and the fields of its configuration."""
    entries, parameters = entries_of(RolloutClient, "Args"), inspect.signature(RolloutClient).parameters
    assert set(entries) == set(parameters)
    rows = [(f"`{name}`", f"`{parameters[name].default!r}`", entries[name]) for name in ("address", "config")]
    rows += [(f"`{name}`", default, text) for name, _, default, text in described(ClientConfig) if name != "clock"]
    return table(("argument", "default", "meaning"), rows)


def entries_of(owner: type, section: str) -> dict[str, str]:
    """Return the entries of a section of a docstring, such as Args, by name."""
    _, _, after = (inspect.getdoc(owner) or "").partition(f"{section}:\n")
    found = re.findall(r"^    (\w+): (.*?)(?=^    \w|^\S|\Z)", after, re.MULTILINE | re.DOTALL)
    return {name: text.strip().removesuffix(".") for name, text in found}


def methods(owner: type) -> str:
    """Describe the public methods and properties of a class: how they are called, and the first sentence."""
    rows = []
    members = {name: member for kind in reversed(owner.__mro__[:-1]) for name, member in vars(kind).items()}
    for name, member in members.items():
        if not name.startswith("_") and name not in OF_THE_IO_THREAD:
            function, arguments = (member.fget, "") if isinstance(member, property) else (member, f"({called(member)})")
            rows.append((f"`{name}{arguments}`", first_sentence(inspect.getdoc(function) or "")))
    return table(("call", "effect"), rows)


def called(function: Any) -> str:
    """Return the parameters of a method as in a call: optional ones have their default."""
    names, keyword_only = [], False
    for name, each in list(inspect.signature(function).parameters.items()):
        if name == "self":
            continue
        if each.kind is each.KEYWORD_ONLY and not keyword_only:
            keyword_only = True
            names.append("*")
        prefix = "**" if each.kind is each.VAR_KEYWORD else ""
        names.append(f"{prefix}{name}" if each.default is each.empty else f"{name}={each.default!r}")
    return ", ".join(names)


def fields(*classes: type) -> str:
    """Describe the fields of structs with their defaults."""
    rows = [(f"`{name}`", f"`{kind}`", default, text) for name, kind, default, text in described(*classes)]
    if not any(default for _, _, default, _ in rows):
        return table(("field", "type", "meaning"), [(name, kind, text) for name, kind, _, text in rows])
    return table(("field", "type", "default", "meaning"), rows)


def described(*classes: type) -> list[tuple[str, str, str, str]]:
    """Return name, type, default in backticks and meaning of each field of structs."""
    rows = []
    entries = {name: text for owner in classes for name, text in entries_of(owner, "Attributes").items()}
    for owner in classes:
        (body,) = ast.parse(textwrap.dedent(inspect.getsource(owner))).body
        assert isinstance(body, ast.ClassDef)
        for node, after in zip(body.body, [*body.body[1:], None], strict=True):
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                text = after.value.value if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant) else ""
                default = "" if node.value is None else f"`{ast.unparse(node.value)}`"
                name = node.target.id
                rows.append((name, ast.unparse(node.annotation), default, entries.get(name, str(text))))
    return rows


def first_sentence(text: str) -> str:
    """Return a docstring up to its first full stop or blank line."""
    paragraph = " ".join(text.split("\n\n")[0].split())
    return re.split(r"(?<=\.)\s+(?=[A-Z\"`])", paragraph)[0]


def table(head: tuple[str, ...], rows: list[Any]) -> str:
    """Write a Markdown table."""
    lines = [head, ("---",) * len(head), *rows]
    return "".join("| " + " | ".join(cell(text) for text in line) + " |\n" for line in lines)


def cell(text: str) -> str:
    """Return a text for one cell, with links to the pages that it names."""
    linked = re.sub(r"docs/((?:[\w-]+/)?([\w-]+)\.md)", r"[\2](\1)", " ".join(text.split()))
    return linked.replace("|", "\\|")


TABLES = {
    "arguments": arguments(),
    "methods": methods(RolloutClient),
    "handle": methods(Handle),
    "refresh_handle": methods(RefreshHandle),
    "sample_stream": methods(SampleStream),
    "sampling": fields(Sampling),
    "sample": fields(Sample, TokenColumns),
    "refreshed": fields(Refreshed),
}


def written(page: str) -> str:
    """Return the page with its tables as the docstrings have them."""
    return TABLE.sub(lambda found: found[1] + TABLES[found[2]] + found[4], page)


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text()))
