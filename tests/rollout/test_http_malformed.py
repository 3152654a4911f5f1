"""A request that nobody could mean is refused in words, on every route: it is never a failure of the gateway."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from rollout.client.api import RolloutClient
from rollout.engine.values import Limits
from rollout.transport.loopback import LoopbackService
from tests.support.fake_engine import FakeEngine
from tests.support.gateway import gateway
from tests.support.wire import serving

pytest.importorskip("starlette", reason="pip install 'rl-rollout[http]'")
pytest.importorskip("uvicorn", reason="pip install 'rl-rollout[http]'")
pytest.importorskip("httptools", reason="pip install 'rl-rollout[http]'")

LIMITS = Limits(max_n=4, max_tokens=8, max_samples_per_client=64)
CHAT: dict[str, Any] = {
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "a"}]},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}],
            "prompt_token_ids": [5],
            "generation_token_ids": [6],
        },
        {"role": "tool", "content": "b"},
    ],
    "tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}],
    "chat_template_kwargs": {"style": "x"},
}
DRAWS = {"n": 1, "temperature": 1.0, "top_k": 0, "stop": ["x"], "stop_token_ids": [3], "logit_bias": {"7": 1.0}, "seed": 1}
BODIES: list[tuple[str, dict[str, Any]]] = [
    (
        "/v1/completions",
        {"prompt": ["a", [5]], "max_tokens": 2, "logprobs": 0, "stream_options": {"include_usage": True}, **DRAWS},
    ),
    ("/v1/completions", {"prompt": "a", "max_tokens": 2, "stream": True, "echo": False, "allowed_token_ids": [1], **DRAWS}),
    (
        "/inference/v1/generate",
        {"token_ids": [5], "sampling_params": {"max_tokens": 2, "logprobs": 0, **DRAWS}, "request_id": "a"},
    ),
    ("/inference/v1/generate", {"token_ids": [5], "sampling_params": {"max_tokens": 2}, "cache_salt": "7", "priority": 1}),
    ("/v1/chat/completions", {"max_tokens": 2, "stream": True, "logprobs": True, **CHAT, **DRAWS}),
    ("/v1/chat/completions", {"max_completion_tokens": 2, "tool_choice": "auto", "response_format": None, **CHAT}),
    ("/tokenize", {"add_generation_prompt": True, "return_token_strs": True, **CHAT}),
    ("/tokenize", {"prompt": "a", "add_special_tokens": True}),
    ("/detokenize", {"tokens": [5]}),
    (
        "/generate",
        {"input_ids": [[5], [6]], "sampling_params": {"max_new_tokens": 2, "n": 1}, "rid": ["a", "b"], "stream": True},
    ),
    ("/generate", {"text": ["a"], "sampling_params": [{"max_new_tokens": 2}], "return_logprob": True, "model": "tiny"}),
    ("/update_weights", {"weight_dir": "/nowhere/step_3", "update_info": None}),
    (
        "/update_weights_from_disk",
        {"model_path": "/nowhere", "weight_version": "3", "load_format": "auto", "flush_cache": True},
    ),
    ("/load_lora_adapter", {"lora_name": "a", "lora_path": "/nowhere"}),
    ("/unload_lora_adapter", {"lora_name": "a"}),
    ("/abort_requests", {"request_ids": ["a"]}),
    ("/abort_request", {"rid": "a", "abort_all": False}),
    ("/pause_generation", {"mode": "abort"}),
    ("/continue_generation", {}),
    ("/release_memory_occupation", {"tags": None}),
    ("/resume_memory_occupation", {"tags": ["weights"]}),
    ("/reset_prefix_cache", {"reset_running_requests": False}),
]
"""a good body of each route; what is tried differs from one of these in a place or two"""
QUERIES = [
    ("POST", "/pause", "mode"),
    ("POST", "/pause", "clear_cache"),
    ("POST", "/sleep", "level"),
    ("POST", "/wake_up", "tags"),
]
QUERIES += [("GET", "/v1/loads", "include"), ("GET", "/health", "x"), ("POST", "/resume", "x"), ("GET", "/server_info", "y")]
DEEP, DEEPER = "@deep@", "@deeper@"
NESTED = {DEEP: b"[" * 900 + b"]" * 900, DEEPER: b'{"a":' * 100_000 + b"1" + b"}" * 100_000}
HOSTILE: list[Any] = [
    *(None, True, False, 0, -1, 1, 5, 2**31, 2**63, 2**64, -(2**63), 2**70, 0.5, -0.0, 1e308, 10**400),
    *(
        "",
        "a",
        "x" * 100_000,
        "/" + "x" * 100_000,
        "\0",
        "/tmp/\0",
        ".",
        "/",
        "/proc/self/mem",
        "[" * 100_000,
        "\U0001f389" * 300,
    ),
    *("{}", "null", "1", "</s>", "self", "abort", "true"),
    *([], [[]], [None], [0], [-1], [2**40], [[1], 1], ["a", 1], ["a"] * 5000, [5] * 20_000),
    *({}, {"self": 1}, {"a": None}, {"messages": 1}, {"chat_template": "x"}, {"name": 5}, {"role": "user"}),
    *(DEEP, DEEPER),
]
NAMES = ["self", "messages", "add_generation_prompt", "chat_template", "tokenize", "tools", "n", "unknown", "__class__", ""]


@pytest.fixture(scope="module")
def http(tiny_model: Path) -> Iterator[httpx.Client]:
    """A gateway whose service changes nothing when it is asked to pause, sleep and so on: what comes after is served."""
    end = LoopbackService()
    with (
        serving(FakeEngine(LIMITS), end),
        RolloutClient(transport=end.connect()) as client,
        pytest.MonkeyPatch.context() as patch,
    ):
        for name in ("pause", "drain", "resume", "abort_all", "wake"):
            patch.setattr(client, name, lambda *_, **__: None)
        patch.setattr(client, "sleep", lambda *_: 0)
        with gateway(client, tiny_model, names=("tiny",)) as running, httpx.Client(base_url=running.url, timeout=60) as made:
            yield made


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place in a body."""
    yield path
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, one in inner:
        yield from places(one, (*path, name))


def replaced(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    """The same body, with something else in one place."""
    if not path:
        return new
    if isinstance(value, list):
        return [replaced(one, path[1:], new) if i == path[0] else one for i, one in enumerate(value)]
    return {**value, path[0]: replaced(value[path[0]] if path[1:] else None, path[1:], new)}


def written(body: Any) -> bytes:
    data = json.dumps(body).encode()
    for mark, nested in NESTED.items():
        data = data.replace(json.dumps(mark).encode(), nested)
    return data


def refused_or_served(response: httpx.Response) -> None:
    """No failure, which clients would repeat: 503 says that it is busy. Each error says why."""
    assert response.status_code < 500 or response.status_code == 503, response.text[:500]
    if response.status_code >= 400:
        assert len(response.json()["error"]["message"]) > 10
        assert len(response.content) < 10_000


@st.composite
def malformed(draw: st.DrawFn) -> tuple[str, Any]:
    """A body with something else in one place or two, or under a name that its dialect does not have there."""
    path, body = draw(st.sampled_from(BODIES))
    for _ in range(draw(st.integers(1, 2))):
        where = draw(st.sampled_from(list(places(body))))
        if where and isinstance(where[-1], str) and draw(st.integers(0, 4)) == 0:
            where = (*where[:-1], draw(st.sampled_from(NAMES)))
        body = replaced(body, where, draw(st.sampled_from(HOSTILE)))
    return path, body


@settings(
    max_examples=100,
    deadline=None,
    derandomize=True,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)
@given(case=malformed())
def test_a_malformed_body_is_no_failure_of_the_gateway(http: httpx.Client, case: tuple[str, Any]) -> None:
    path, body = case
    refused_or_served(http.post(path, content=written(body)))


@pytest.mark.some(4)
@pytest.mark.parametrize(("method", "path", "name"), QUERIES)
def test_a_malformed_query_is_no_failure_of_the_gateway(http: httpx.Client, method: str, path: str, name: str) -> None:
    for value in ("", "x", "\0", "1" * 10_000, "true", "-1", "\U0001f389", "weights"):
        refused_or_served(http.request(method, path, params={name: value}))
        refused_or_served(http.request(method, path, params={name: value, "self": "1"}))


@pytest.mark.some(5)
@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"1", b"\xff\xfe", b'"\\ud800"', *NESTED.values(), b"{}" * 3, b"null"])
def test_what_is_no_json_is_no_failure_of_the_gateway(http: httpx.Client, content: bytes) -> None:
    for path in sorted({path for path, _ in BODIES}):
        refused_or_served(http.post(path, content=content))


def test_the_seven_that_were_failures(http: httpx.Client) -> None:
    """Each is a 400 that names the field."""
    user, tools = {"role": "user", "content": "a"}, CHAT["messages"][1]
    call = {"function": {"name": "f", "arguments": "[" * 100_000}}
    cases: list[tuple[str, dict[str, Any], str | None]] = [
        ("/v1/chat/completions", {"messages": [{**tools, "tool_calls": 5}]}, "messages"),
        ("/v1/chat/completions", {"messages": [{**tools, "tool_calls": [call]}]}, "messages"),
        ("/v1/chat/completions", {"messages": [user], "chat_template_kwargs": {"self": 1}}, "chat_template_kwargs"),
        *(("/tokenize", {"messages": [user], "chat_template_kwargs": {name: 1}}, "chat_template_kwargs") for name in NAMES[:3]),
        ("/update_weights", {"weight_dir": "x" * 100_000}, "weight_dir"),
        ("/update_weights_from_disk", {"model_path": "x" * 100_000}, "model_path"),
        ("/load_lora_adapter", {"lora_name": "a", "lora_path": "x" * 100_000}, None),
    ]
    for path, body, param in cases:
        response = http.post(path, json=body)
        assert (response.status_code, response.json()["error"]["param"]) == (400, param), response.text[:500]


@pytest.mark.parametrize("path", ["/tokenize", "/v1/chat/completions"])
def test_no_request_brings_or_chooses_a_template(http: httpx.Client, path: str) -> None:
    body = {"messages": [{"role": "user", "content": "a"}]}
    assert http.post(path, json={**body, "chat_template": "{{ 7*7 }}"}).status_code == 400
    for name in (
        "chat_template",
        "tokenize",
        "tools",
        "continue_final_message",
        "tokenizer_kwargs",
        "padding",
        "conversations",
    ):
        response = http.post(path, json={**body, "chat_template_kwargs": {name: "{{ 7*7 }}"}})
        assert response.status_code == 400 and f"chat_template_kwargs.{name}" in response.text
    kept = {**body, "chat_template_kwargs": {"style": "x", "documents": []}, **({"max_tokens": 2} if path[1] == "v" else {})}
    assert http.post(path, json=kept).status_code == 200, "the control: the template's own arguments"
