"""Tool calls are neither lost nor invented, and the turns of a conversation keep their ids or say that they do not."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rollout.http.tool_calls import MAX_NODES, find_calls, types_of
from tests.support.scripted import PLAIN, SPECIALS, Scripted, byte_level, functions, scripted, tool

pytest.importorskip("starlette", reason="pip install 'rl-rollout[http]'")
pytest.importorskip("uvicorn", reason="pip install 'rl-rollout[http]'")
pytest.importorskip("httptools", reason="pip install 'rl-rollout[http]'")

TOOLS_TEMPLATE = "{% if tools %}<|turn|>tools{% for t in tools %}{{ t.function.name }}{% endfor %}<|end|>\n{% endif %}" + PLAIN
TOOLS = [tool(x="string", k="integer", b="boolean", o="object", u={"anyOf": [{"type": "number"}, {"type": "null"}]})]


def call(body: str) -> str:
    return f"<tool_call>\n{body}\n</tool_call>"


def xml(**parameters: str) -> str:
    inside = "".join(f"<parameter={name}>\n{value}\n</parameter>\n" for name, value in parameters.items())
    return call(f"<function=f>\n{inside}</function>")


CALLS: dict[str, tuple[str, list[Any], str | None]] = {
    "json": (call('{"name": "f", "arguments": {"x": "a"}}'), [{"x": "a"}], None),
    "end tag in a string": (call('{"name": "f", "arguments": {"x": "a}</tool_call>b"}}'), [{"x": "a}</tool_call>b"}], None),
    "end of thinking in a string": (call('{"name": "f", "arguments": {"x": "</think>"}}'), [{"x": "</think>"}], None),
    "line break in a string": (call('{"name": "f", "arguments": {"x": "a\nb"}}'), [{"x": "a\nb"}], None),
    "parameters": (call('{"name": "f", "parameters": {"x": "a"}}'), [{"x": "a"}], None),
    "arguments as text": (call('{"name": "f", "arguments": "{\\"x\\": \\"a\\"}"}'), [{"x": "a"}], None),
    "no arguments": (call('{"name": "f"}') + "\n" + call('{"name": "f", "arguments": null}'), [{}, {}], None),
    "xml": (xml(x="hello", k="3"), [{"x": "hello", "k": 3}], None),
    "xml types": (
        xml(x="3", k="three", b="True", o='{"a": [1]}', u="None", y="7"),
        [{"x": "3", "k": "three", "b": True, "o": {"a": [1]}, "u": None, "y": "7"}],
        None,
    ),
    "xml of code": (xml(x="if a:\n\n    b </parameter> c\n"), [{"x": "if a:\n\n    b </parameter> c\n"}], None),
    "xml without parameters": (call("<function=f>\n</function>"), [{}], None),
    "around": ("A " + call('{"name": "f"}') + " B " + call('{"name": "f"}') + "\nC", [{}, {}], "A  B \nC"),
    "draft": (f"<think>I could {xml(x='draft')}.\n</think>\n\nNo.", [], None),
    "draft without its beginning": (f"I could {xml(x='draft')}.\n</think>\n\nNo.", [], None),
    "draft, then a call": (
        f"<think>{xml(x='draft')}</think>Yes " + xml(x="real"), [{"x": "real"}], f"<think>{xml(x='draft')}</think>Yes "
    ),
    "never thought out": (f"<think>{xml(x='draft')}", [], None),
}  # fmt: skip
TEXT = {
    "no json": call("{no json}"),
    "no name": call('{"nam": 1}'),
    "name is no text": call('{"name": 1}'),
    "arguments are a list": call('{"name": "f", "arguments": [1]}'),
    "arguments are a number": call('{"name": "f", "arguments": 0}'),
    "arguments are no json": call('{"name": "f", "arguments": "x"}'),
    "not finished": '<tool_call>\n{"name": "f", "arguments": {}}',
    "text behind": call('{"name": "f"} and more'),
    "half of a pair": call('{"name": "f", "arguments": {"x": "\\ud800"}}'),
    "no number": call('{"name": "f", "arguments": {"x": NaN}}'),
    "xml not closed": call("<function=f>\n<parameter=x>\na\n</function>"),
    "deep": "<tool_call>" + '{"a":' * 50_000,
    "many": "<tool_call>{" * 5000 + "</tool_call>",
}


@pytest.mark.parametrize("case", CALLS)
def test_calls(case: str) -> None:
    text, arguments, _ = CALLS[case]
    found = find_calls(text, TOOLS)
    assert functions([{"function": {"name": one.name, "arguments": one.arguments}} for one in found]) == [
        ("f", each) for each in arguments
    ]


@pytest.mark.parametrize("case", TEXT)
def test_what_is_no_call_stays_text(case: str) -> None:
    assert find_calls(TEXT[case], TOOLS) == []


class Counted(dict[str, Any]):
    """A schema that counts how often it is looked at."""

    looks = 0

    def get(self, *args: Any) -> Any:
        Counted.looks += args[0] == "type"
        return super().get(*args)


@pytest.mark.parametrize("case", ["itself", "each other", "wide", "values"])
def test_schemas_that_refer_to_each_other_cost_no_more_than_their_bound(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["a", "b", "c", "d", "e", "f", "g", "h"]
    to = lambda name: Counted({"$ref": f"#/$defs/{name}"})  # noqa: E731
    whole: dict[str, Any] = {
        "itself": {"$defs": {"a": Counted(anyOf=[to("a")] * 20)}},
        "each other": {"$defs": {name: Counted(anyOf=[to(other) for other in names]) for name in names}},
        "wide": {"$defs": {"a": Counted(anyOf=[Counted(type="integer")] * 100_000)}},
        "values": {"$defs": {"a": Counted(enum=[1] * 100_000)}},
    }[case]
    monkeypatch.setattr(Counted, "looks", 0)
    types_of(to("a"), whole)
    assert 1 < Counted.looks <= 2 * MAX_NODES  # once for a name, once for a list of names


def test_types_behind_references_and_choices_are_found() -> None:
    whole = {
        "$defs": {
            "a": {"anyOf": [{"$ref": "#/$defs/b"}, {"$ref": "#/$defs/a"}]},
            "b": {"oneOf": [{"const": 1}, {"enum": ["x"]}]},
        }
    }
    assert types_of({"allOf": [{"$ref": "#/$defs/a"}]}, whole) == {"integer", "string"}


@pytest.mark.parametrize("name", ["type", "enum", "anyOf", "oneOf", "allOf", "$ref", "const"])
@pytest.mark.parametrize("value", [5, None, "x", {"a": 1}, [5], [None], [[]], True])
def test_a_schema_that_is_none_says_nothing_and_its_parameter_is_text_or_a_value(name: str, value: Any) -> None:
    text = "<tool_call><function=f><parameter=x>7</parameter></function></tool_call>"
    parameters = {"type": "object", "properties": {"x": {name: value}}}
    (call,) = find_calls(text, [{"type": "function", "function": {"name": "f", "parameters": parameters}}])
    assert call.arguments in ('{"x":"7"}', '{"x":7}')


def test_thinking_that_the_prompt_began() -> None:
    text = xml(x="draft")
    assert find_calls(text, TOOLS) and not find_calls(text, TOOLS, thinking=True)
    assert len(find_calls(f"{text}</think>{text}", TOOLS, thinking=True)) == 1


@pytest.fixture(scope="module", params=[1, 7])
def s(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scripted]:
    """Text of tags; with stream_every = 7, a tokenizer whose tags are special tokens."""
    folder = tmp_path_factory.mktemp("scripted") / "model"
    specials = SPECIALS if request.param == 1 else (*SPECIALS, "<tool_call>", "</tool_call>", "<think>", "</think>")
    with scripted(folder, byte_level(folder, specials), TOOLS_TEMPLATE, stream_every=request.param) as made:
        yield made


@pytest.mark.parametrize("case", CALLS)
def test_calls_in_responses(s: Scripted, case: str) -> None:
    """Plain and streamed, which `Scripted.chat` compares."""
    text, arguments, content = CALLS[case]
    (choice,) = s.chat(text, tools=TOOLS, skip_special_tokens=False)["choices"]
    assert functions(choice["message"].get("tool_calls", ())) == [("f", each) for each in arguments]
    assert choice["finish_reason"] == ("tool_calls" if arguments else "stop")
    assert choice["message"]["content"] == (content if arguments else text)
    if case != "end tag in a string":  # where the tag is a special token, it is no text there either
        found = s.chat(text, tools=TOOLS)["choices"][0]["message"].get("tool_calls", ())
        assert functions(found) == [("f", each) for each in arguments]


def test_calls_are_text_without_tools_and_all_but_one_without_parallel_ones(s: Scripted) -> None:
    one = call('{"name": "f", "arguments": {"x": "%s"}}')
    both = one % "a" + one % "b"
    for body in ({}, {"tools": TOOLS, "tool_choice": "none"}):
        message = s.chat(both, skip_special_tokens=False, **body)["choices"][0]["message"]
        assert message["content"] == both and "tool_calls" not in message
    message = s.chat(both, tools=TOOLS, parallel_tool_calls=False, skip_special_tokens=False)["choices"][0]["message"]
    assert functions(message["tool_calls"]) == [("f", {"x": "a"})] and message["content"] == one % "b"
    assert len(s.chat(both, tools=TOOLS, parallel_tool_calls=True)["choices"][0]["message"]["tool_calls"]) == 2


def test_a_call_that_its_end_tag_stops(s: Scripted) -> None:
    text = call('{"name": "f"}')
    assert functions(s.chat(text, tools=TOOLS, stop=["</tool_call>"])["choices"][0]["message"]["tool_calls"]) == [("f", {})]


def test_content_that_is_null_is_no_text(s: Scripted) -> None:
    asked = [{"role": "user", "content": "a"}, {"role": "assistant", "content": None}, {"role": "user", "content": "b"}]
    empty = [asked[0], {"role": "assistant", "content": ""}, asked[2]]
    missing = [asked[0], {"role": "assistant"}, asked[2]]
    tokens = [s.post("/tokenize", {"messages": each})["tokens"] for each in (asked, empty, missing)]
    assert tokens[0] == tokens[1] == tokens[2]


@pytest.mark.parametrize(
    "part",
    [
        {"type": "text", "text": "a", "image_url": {"url": "x"}},
        {"type": "image_url", "text": "a"},
        {"type": "text", "text": "a", "cache_control": {}},
        {"type": "text"},
        "a",
        {"type": "refusal", "refusal": "a"},
    ],
)
def test_a_part_that_is_more_than_text_is_refused(s: Scripted, part: Any) -> None:
    answer = s.post("/v1/chat/completions", {"messages": [{"role": "user", "content": [part]}]})
    assert answer["status"] == 400 and answer["error"]["param"] == "messages"


# turns

TRIMMED = (
    "{% for m in messages %}<|turn|>{{ 'model' if m.role == 'assistant' else m.role }}\n{{ m.content | trim }}<|end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|turn|>model\n{% endif %}"
)
"""as Gemma's"""
OPEN = (
    "{% for m in messages %}{{ '<|stop|>' if m.role == 'user' else '<|turn|>' }}\n{{ m.content | trim }}{% endfor %}"
    "{% if add_generation_prompt %}<|turn|>\n{% endif %}"
)
"""as GLM's: a turn ends where the next one begins, with the token that ended the sample"""
FORGETFUL = (
    "{% for m in messages %}{% set c = m.content.split('</think>')[-1].lstrip('\\n') if not loop.last else m.content %}"
    "<|turn|>{{ m.role }}\n{{ c }}<|end|>\n{% endfor %}{% if add_generation_prompt %}<|turn|>assistant\n{% endif %}"
)
"""as Qwen 3's: earlier reasoning is left out"""
TEMPLATES = {
    "plain": (PLAIN, "<|end|>", "<|end|>"),
    "gemma": (TRIMMED, "<|stop|>", "<|end|>"),
    "glm": (OPEN, "<|end|>", "<|stop|>"),
}


def turns(s: Scripted, said: list[int], **body: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Two turns of a session, the first with these tokens."""
    one, session = [{"role": "user", "content": "hi"}], {"X-Session-ID": str(said)}
    first = s.chat(said, one, headers=session, return_token_ids=True, **body)
    message = {key: first["choices"][0]["message"][key] for key in ("role", "content")}
    messages = [*one, message, {"role": "user", "content": "more"}]
    return first, s.chat("ok", messages, headers=session, return_token_ids=True)


@pytest.mark.parametrize("kind", TEMPLATES)
def test_turns_keep_their_ids(kind: str, tmp_path: Path) -> None:
    template, eos, end = TEMPLATES[kind]
    tokenizer = byte_level(tmp_path, merges=[("H", "e"), ("l", "l")])
    with scripted(tmp_path / "model", tokenizer, template, eos, ends=(end, eos)) as s:
        letters = [id for letter in "Hello" for id in s.ids(letter)]  # not the ids that the tokenizer has for Hello
        blank = s.ids("\n")
        for said, body in (
            ([*letters, s.ends[0]], {}),
            ([*letters, *blank, s.ends[0]], {}),
            ([*letters, s.ends[1]], {}),
            (letters, {"max_tokens": len(letters)}),
            ([*s.ids("end"), s.ends[0]], {}),
        ):
            first, second = turns(s, said, **body)
            exact = first["prompt_token_ids"] + first["choices"][0]["token_ids"]
            assert second["prompt_token_ids"][: len(exact)] == exact and exact[-1] == said[-1]
            assert first["exact_prompt_tokens"] == 0 and second["exact_prompt_tokens"] == len(exact)
            assert "encoded_again" not in second
            rest = s.tokenizer.decode(second["prompt_token_ids"][len(exact) :], skip_special_tokens=False)
            assert rest.count("more") == 1 and "Hello" not in rest
            assert rest.count(end) == (kind != "glm") + (said[-1] != s.ends[0])


def test_turns_that_are_encoded_again_say_so(tmp_path: Path) -> None:
    with scripted(tmp_path / "model", byte_level(tmp_path), FORGETFUL) as s:
        counted = lambda: {  # noqa: E731
            line.split('ids="')[1].split('"')[0]: float(line.split(" ")[-1])
            for line in s.http.get("/metrics").text.splitlines()
            if line.startswith("rollout:http_turns_total")
        }
        _, kept = turns(s, [*s.ids("Hello"), s.ends[0]])
        assert kept["exact_prompt_tokens"] > 0 and counted() == {"exact": 1, "template": 0, "unknown": 0}
        _, again = turns(s, [*s.ids("<think>\nhm\n</think>\n\nHello"), s.ends[0]])
        assert again["exact_prompt_tokens"] == 0 and again["encoded_again"] == "template"
        assert counted() == {"exact": 1, "template": 1, "unknown": 0}
        stranger = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
        body = {"messages": stranger, "max_tokens": 1}
        assert s.post("/v1/chat/completions", body)["encoded_again"] == "unknown"
        assert s.events("/v1/chat/completions", body)[0]["encoded_again"] == "unknown"
        assert counted() == {"exact": 1, "template": 1, "unknown": 2}


def test_a_template_that_ignores_tools_says_so(tmp_path: Path) -> None:
    with scripted(tmp_path / "model", byte_level(tmp_path)) as s:
        assert s.chat("a", tools=TOOLS)["tools_unseen"] is True and "tools_unseen" not in s.chat("a")
