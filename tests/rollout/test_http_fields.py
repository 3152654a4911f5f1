"""Nothing is dropped: every field of a request is read, refused, or named with the reason why no response depends on it. Every
field of a response is in the table of shared fields."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

pytest.importorskip("starlette", reason="pip install 'rl-rollout[http]'")
pytest.importorskip("uvicorn", reason="pip install 'rl-rollout[http]'")
pytest.importorskip("httptools", reason="pip install 'rl-rollout[http]'")

import rollout.http  # noqa: E402
from rollout.http import adapters, chat, control, conversation, responses, sglang, vllm  # noqa: E402
from rollout.http.sampling import CHANGES_NOTHING, INSTEAD  # noqa: E402
from tests.support.scripted import byte_level, scripted, tool  # noqa: E402

ROOT = Path(__file__).parents[2]
SOURCES = {path: path.read_text() for path in sorted(Path(rollout.http.__file__).parent.glob("*.py"))}
REQUESTS = [
    chat.ChatRequest, chat.TokenizeRequest, chat.DetokenizeRequest, vllm.CompletionRequest, vllm.TokensRequest, vllm.Params,
    sglang.GenerateRequest, sglang.SGLangSampling, responses.StreamOptions, conversation.TextPart, conversation.Message,
    conversation.Tool, conversation.Function, adapters.LoadAdapter, adapters.UnloadAdapter, control.UpdateWeights,
    control.AbortRequests, control.ResetPrefixCache, control.UpdateFromDisk, control.PauseRequest, control.AbortRequest,
    control.MemoryTags,
]  # fmt: skip
CHECKED_SHAPE = {
    "Function.arguments",
    "Tool.function",
    "Message.role",
    "Message.content",
    "Message.tool_calls",
    "TextPart.type",
}
"""of objects that the template gets as they are"""


def reads(sources: dict[Path, str]) -> set[str]:
    """Names of attributes that are read, and of fields that are looked up by their name."""
    found = set()
    for source in sources.values():
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                found.add(node.attr)
            elif isinstance(node, ast.For | ast.comprehension) and isinstance(node.iter, ast.Tuple):  # getattr(body, name)
                found |= {
                    one.value for one in ast.walk(node.iter) if isinstance(one, ast.Constant) and isinstance(one.value, str)
                }
    return found


def unread(kinds: list[type[msgspec.Struct]], sources: dict[Path, str]) -> set[str]:
    known = reads(sources) | INSTEAD.keys() | CHANGES_NOTHING.keys()
    names = {f"{kind.__name__}.{name}" for kind in kinds for name in kind.__struct_fields__ if name not in known}
    return names - CHECKED_SHAPE


def test_every_field_of_a_request_is_read_or_refused() -> None:
    assert unread(REQUESTS, SOURCES) == set()
    listed = {kind.__name__ for kind in REQUESTS}
    bodies = set(re.findall(r"endpoints?\.post\([^)]*, (\w+)\)|(?<!\.)post\([^)]*, ([A-Z]\w+)\)", "".join(SOURCES.values())))
    assert {name for pair in bodies for name in pair if name[:1].isupper()} <= listed, "a body that this test does not know"


def test_a_field_that_nobody_reads_is_seen() -> None:
    class Body(msgspec.Struct):
        model: str
        forgotten_field: str | None = None

    assert unread([Body], SOURCES) == {"Body.forgotten_field"}


def test_what_changes_nothing_is_accepted_and_not_unsupported_as_well() -> None:
    assert not INSTEAD.keys() & CHANGES_NOTHING.keys()
    fields = {name for kind in REQUESTS for name in kind.__struct_fields__}
    assert CHANGES_NOTHING.keys() <= fields and INSTEAD.keys() <= fields


def test_nested_objects_take_no_unknown_field() -> None:
    """Except those that are the template's: messages and tools."""
    for kind in REQUESTS:
        if kind not in (conversation.Message, conversation.Tool, conversation.Function):
            assert kind.__struct_config__.forbid_unknown_fields, kind


def names_of(value: Any) -> set[str]:
    """All names in a JSON value, except ids and tokens, which are names by value."""
    if isinstance(value, dict):
        return {name for name in value if not re.fullmatch(r"-?\d+|token_id:\d+|.?|bytes:.*|<\|.*", name)} | {
            name for one in value.values() for name in names_of(one)
        }
    return {name for one in value for name in names_of(one)} if isinstance(value, list) else set()


def test_every_field_of_a_response_is_in_the_table(tmp_path: Path) -> None:
    page = (ROOT / "docs/http-fields.md").read_text()
    first, second = page.split("## SGLang's /generate")
    tables = [set(re.findall(r"`(\w+)`", "".join(row.split("|")[1] for row in part.splitlines() if row.startswith("|"))))
              for part in (first, second)]  # fmt: skip
    with scripted(tmp_path / "model", byte_level(tmp_path)) as s:
        said = 'a <tool_call>{"name": "f", "arguments": {}}</tool_call>'
        options = {"return_token_ids": True, "logprobs": True, "top_logprobs": 1, "tools": [tool()]}
        seen = names_of(s.chat(said, **options)) | names_of(s.events("/v1/chat/completions", chat_body(options)))
        stranger = [{"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
        seen |= names_of(s.post("/v1/chat/completions", {"messages": stranger, "max_tokens": 1}))
        body = {"prompt": "Once", "max_tokens": 2, "logprobs": 1, "prompt_logprobs": 1, "return_token_ids": True}
        usage = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
        seen |= names_of(s.post("/v1/completions", body)) | names_of(s.events("/v1/completions", body | usage))
        body = {"token_ids": [5], "sampling_params": {"max_tokens": 2, "logprobs": 2, "prompt_logprobs": 1}}
        seen |= names_of(s.post("/inference/v1/generate", body | {"return_token_ids": True}))
        assert seen - {"status"} - tables[0] == set()
        assert tables[0] - seen - {"routed_experts"} == set(), "a field that no response has"
        params = {"max_new_tokens": 2}
        body = {"text": "Once", "return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 1}
        seen = set()
        for more in ({}, {"stop": ["\x00"]}, {"stop_token_ids": [0]}):
            s.put({4: [0, 0]})
            seen |= names_of(s.post("/generate", body | {"sampling_params": params | more}))
        assert seen - {"status"} - tables[1] == set()
        assert tables[1] - seen - {"routed_experts", "message"} == set(), "a field that no response has"


def chat_body(options: dict[str, Any]) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "go"}], "max_tokens": 3} | options


def test_the_table_s_test_sees_a_name() -> None:
    assert names_of({"a_name": [{"token_id:3": 1, "7": {"rank": 1}}]}) == {"a_name", "rank"}
