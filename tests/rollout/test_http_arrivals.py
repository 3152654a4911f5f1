"""A request exists for the gateway from its arrival on: aborts by name and pauses reach it while its text is being encoded."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.http_stack import Stack, stack_of

pytest.importorskip("starlette", reason="pip install 'rl-rollout[http]'")
pytest.importorskip("uvicorn", reason="pip install 'rl-rollout[http]'")
pytest.importorskip("httptools", reason="pip install 'rl-rollout[http]'")

WAIT_S = 60.0
USER = [{"role": "user", "content": "a"}]
REQUESTS: dict[str, tuple[str, dict[str, Any], str]] = {
    "completion": ("/v1/completions", {"prompt": "a", "request_id": "mine"}, "cmpl-mine"),
    "completion stream": ("/v1/completions", {"prompt": "a", "request_id": "mine", "stream": True}, "mine"),
    "chat": ("/v1/chat/completions", {"messages": USER, "request_id": "mine"}, "mine"),
    "chat stream": ("/v1/chat/completions", {"messages": USER, "request_id": "mine", "stream": True}, "chatcmpl-mine"),
    "sglang": ("/generate", {"text": "a", "rid": "mine"}, "mine"),
    "sglang stream": ("/generate", {"text": "a", "rid": "mine", "stream": True}, "mine"),
}


class Encoding:
    """Holds the encoding of texts until `go`."""

    def __init__(self) -> None:
        self.begun, self.go = threading.Event(), threading.Event()


@pytest.fixture
def encoding(monkeypatch: pytest.MonkeyPatch) -> Encoding:
    from rollout.http.prompt_pool import PromptPool

    made, ask = Encoding(), PromptPool._ask

    def held(self: Any, job: bytes) -> Any:
        made.begun.set()
        assert made.go.wait(WAIT_S)
        return ask(self, job)

    monkeypatch.setattr(PromptPool, "_ask", held)
    return made


@pytest.fixture
def stack(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stack]:
    """A service that answers no request that it gets: it is paused as long as the test runs."""
    with stack_of(tiny_model) as made:
        made.engine.frozen = True
        for name in ("pause", "abort_all"):
            monkeypatch.setattr(made.client, name, lambda *_, **__: None)
        yield made


@pytest.fixture
def ask(stack: Stack) -> Iterator[Callable[[str], Future[httpx.Response]]]:
    with ThreadPoolExecutor() as threads:

        def begin(kind: str) -> Future[httpx.Response]:
            path, body, _ = REQUESTS[kind]
            return threads.submit(lambda: httpx.post(stack.url + path, json=body, timeout=WAIT_S))

        yield begin
        stack.engine.frozen = False


@pytest.mark.parametrize("kind", REQUESTS)
@pytest.mark.parametrize("how", ["name", "all", "pause"])
def test_what_is_encoded_is_aborted(stack: Stack, encoding: Encoding, ask: Any, kind: str, how: str) -> None:
    answer = ask(kind)
    assert encoding.begun.wait(WAIT_S)
    if how == "pause":
        path, body = ("/pause_generation", {}) if kind == "sglang" else ("/pause?mode=abort", {})
    else:
        path, body = "/abort_request", {"rid": REQUESTS[kind][2]} if how == "name" else {"abort_all": True}
    done = httpx.post(stack.url + path, json=body, timeout=WAIT_S)
    assert done.status_code == 200 and done.json().get("aborted", 1) == 1
    encoding.go.set()
    response = answer.result(WAIT_S)
    assert response.status_code == 200 and '"abort"' in response.text, response.text
    assert not stack.engine.groups, "the service got it"


def test_another_name_aborts_nothing(stack: Stack, encoding: Encoding, ask: Any) -> None:
    """The control: what was not aborted is sent."""
    answer = ask("sglang")
    assert encoding.begun.wait(WAIT_S)
    assert httpx.post(f"{stack.url}/abort_request", json={"rid": "other"}, timeout=WAIT_S).json()["aborted"] == 0
    encoding.go.set()
    stack.engine.frozen = False
    assert answer.result(WAIT_S).json()["meta_info"]["finish_reason"]["type"] != "abort"


def test_one_prompt_of_several_is_aborted_by_its_name(stack: Stack, encoding: Encoding) -> None:
    body = {"text": ["a", "b"], "rid": ["one", "two"], "sampling_params": {"max_new_tokens": 2}}
    with ThreadPoolExecutor() as threads:
        answer = threads.submit(lambda: httpx.post(f"{stack.url}/generate", json=body, timeout=WAIT_S))
        assert encoding.begun.wait(WAIT_S)
        assert httpx.post(f"{stack.url}/abort_request", json={"rid": "two"}, timeout=WAIT_S).json()["aborted"] == 1
        stack.engine.frozen = False
        encoding.go.set()
        kinds = [one["meta_info"]["finish_reason"]["type"] for one in answer.result(WAIT_S).json()]
    assert kinds[0] != "abort" and kinds[1] == "abort"
