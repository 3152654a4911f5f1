"""Tool calls in the text of a message, in the two forms that most chat templates ask for.

    <tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>                            JSON (Hermes, Qwen 2.5 and 3)
    <tool_call><function=f><parameter=x>1</parameter></function></tool_call>               XML (Qwen 3.5, Nemotron 3)

All other text stays text, and so does a call that the model only thinks about.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple, NoReturn

BEGIN, END = "<tool_call>", "</tool_call>"
THINKING = ("<think>", "</think>")
FUNCTION = re.compile(r"\s*<function=([^<>\n]+)>")
PARAMETER = re.compile(r"\s*<parameter=([^<>\n]+)>")
VALUE_END = "</parameter>"
VALUE_FOLLOWED = re.compile(r"\s*(?:<parameter=|</function>)")
FUNCTION_END = re.compile(r"\s*</function>\s*</tool_call>")
JSON_END = re.compile(r"\s*</tool_call>")
BRACE = re.compile(r"\s*(?=\{)")
MARK = re.compile(f"{re.escape(BEGIN)}|{re.escape(THINKING[1])}")
MAX_BROKEN = 100
"""beginnings of calls that are none, after which no more is searched: each is read to its end"""
MAX_NODES = 1000
"""schemas and values that are looked at for the types of one parameter: a client chooses how they refer to each other"""
PYTHON = {"True": True, "False": False, "None": None}
"""as templates write these arguments of earlier calls, which models imitate"""

Schema = Mapping[str, Any]


class Call(NamedTuple):
    """A call, and its place in the text."""

    start: int
    end: int
    name: str
    arguments: str
    """a JSON object"""


def find_calls(text: str, tools: Sequence[Schema], thinking: bool = False) -> list[Call]:
    """Find the calls of a message.

    Args:
        tools: as in a request; the types of their parameters decide what the text of an XML parameter is.
        thinking: the prompt has begun to think for the model: the message has no beginning of it."""
    calls: list[Call] = []
    at = broken = 0
    if thinking or text.lstrip().startswith(THINKING[0]):
        end = text.find(THINKING[1])
        if end < 0:
            return []
        at = end + len(THINKING[1])
    while broken < MAX_BROKEN and (mark := MARK.search(text, at)) is not None:
        at = mark.end()
        if mark[0] == THINKING[1]:
            calls = []  # drafts: the model was still thinking
        elif (call := _json_call(text, mark) or _xml_call(text, mark, tools)) is not None:
            calls.append(call)
            at = call.end
        else:
            broken += 1
    return calls


def _json_call(text: str, mark: re.Match[str]) -> Call | None:
    brace = BRACE.match(text, mark.end())
    if brace is None:
        return None
    try:
        call, at = JSON.raw_decode(text, brace.end())
        end = JSON_END.match(text, at)
        if end is None or not isinstance(call, dict) or not isinstance(call.get("name"), str) or not call["name"]:
            return None
        given = call.get("arguments", call.get("parameters"))
        arguments = JSON.decode(given) if isinstance(given, str) and given.strip() else given
    except (ValueError, RecursionError):
        return None
    return made(mark.start(), end.end(), call["name"], {} if arguments in (None, "") else arguments)


def _xml_call(text: str, mark: re.Match[str], tools: Sequence[Schema]) -> Call | None:
    function = FUNCTION.match(text, mark.end())
    if function is None:
        return None
    name, at = function[1].strip(), function.end()
    parameters, arguments = parameters_of(name, tools), dict[str, Any]()
    while (parameter := PARAMETER.match(text, at)) is not None:
        end = value_end(text, parameter.end())
        if end < 0:
            return None
        key, value = parameter[1].strip(), text[parameter.end() : end].removeprefix("\n").removesuffix("\n")
        arguments[key] = typed(value, types_of(parameters.get("properties", {}).get(key), parameters))
        at = end + len(VALUE_END)
    last = FUNCTION_END.match(text, at)
    return made(mark.start(), last.end(), name, arguments) if last is not None and name else None


def value_end(text: str, at: int) -> int:
    """Return where the value of an XML parameter ends: at an end tag behind which the call goes on. -1: nowhere."""
    while (end := text.find(VALUE_END, at)) >= 0:
        at = end + len(VALUE_END)
        if VALUE_FOLLOWED.match(text, at):
            return end
    return -1


def made(start: int, end: int, name: str, arguments: Any) -> Call | None:
    """Make a call; None if its arguments are no object, or hold what JSON and UTF-8 cannot."""
    if not isinstance(arguments, dict):
        return None
    try:
        written = json.dumps(arguments, ensure_ascii=False, separators=(",", ":"))
        (written + name).encode()  # half of a surrogate pair is text for JSON, and not for UTF-8
    except (ValueError, RecursionError):
        return None
    return Call(start, end, name, written)


def parameters_of(name: str, tools: Sequence[Schema]) -> dict[str, Any]:
    """Return the schema of a function's parameters, {} if it has none that is an object."""
    for tool in tools:
        function = tool.get("function")
        if isinstance(function, dict) and function.get("name") == name:
            parameters = function.get("parameters")
            properties = parameters.get("properties") if isinstance(parameters, dict) else None
            return dict(parameters) if isinstance(parameters, dict) and isinstance(properties, dict) else {}
    return {}


def types_of(schema: Any, whole: Schema) -> set[str]:
    """Return the JSON types that a schema allows; empty: it does not say. What has no form of a schema says nothing.

    Args:
        whole: the schema with its definitions. Each of them is looked at once, and MAX_NODES schemas and values in all."""
    found: set[str] = set()
    references: set[str] = set()
    waiting, left = [schema], MAX_NODES
    while waiting and left > 0:
        one = waiting.pop()
        left -= 1
        if not isinstance(one, dict):
            continue
        values = [*islice(listed(one, "enum"), left), *([one["const"]] if "const" in one else [])]
        left -= len(values)
        kinds = one.get("type")
        named = {kind for kind in ([kinds] if isinstance(kinds, str) else listed(one, "type")) if isinstance(kind, str)}
        found |= named or {type_of(value) for value in values}
        for name in ("anyOf", "oneOf", "allOf"):
            waiting += islice(listed(one, name), left)
        if isinstance(reference := one.get("$ref"), str) and reference not in references:
            references.add(reference)
            waiting.append(referred(reference, whole))
    return found


def listed(schema: Schema, name: str) -> list[Any]:
    """Return a field of a schema that is a list; [] for anything else."""
    value = schema.get(name)
    return value if isinstance(value, list) else []


def referred(reference: str, whole: Schema) -> Any:
    """Return the definition that a $ref names; None if there is none."""
    place: Any = whole
    for step in reference.removeprefix("#/").split("/"):
        place = place.get(step) if isinstance(place, dict) else None
    return place


def type_of(value: Any) -> str:
    """Return the JSON type of a value."""
    kinds: dict[type, str] = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object"}
    return kinds.get(type(value), "null")


def typed(text: str, types: set[str]) -> Any:
    """Return the value of an XML parameter: its text, unless the schema allows another type and the text is one."""
    if not types - {"string"}:
        return text
    try:
        value: Any = PYTHON[text.strip()] if text.strip() in PYTHON else JSON.decode(text)
    except (ValueError, RecursionError):
        return text
    kind = type_of(value)
    if kind == "number" and "number" not in types and value == int(value):
        kind, value = "integer", int(value)
    fits = kind in types or (kind == "integer" and "number" in types)
    return value if fits else text


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON")


def _number(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is no number")
    return value


JSON = json.JSONDecoder(parse_constant=_refuse, parse_float=_number, strict=False)
"""models write line breaks into strings as they are"""
