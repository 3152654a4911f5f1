"""Text and conversations become token ids in bounded time and memory, and never in the event loop."""

from __future__ import annotations

import asyncio
import re
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from tests.support.http_stack import Stack, limits, stack_of

pytest.importorskip("starlette", reason="pip install 'rl-rollout[http]'")
pytest.importorskip("uvicorn", reason="pip install 'rl-rollout[http]'")
pytest.importorskip("httptools", reason="pip install 'rl-rollout[http]'")

WAIT_S = 60.0
"""a bound for hangs only"""

HOSTILE_TEMPLATE = (
    "{% if messages[0].content == 'time' %}{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    "{% elif messages[0].content == 'memory' %}{% set x = 'a' * 1500000000 %}{{ x|length }}"
    "{% elif messages[0].content == 'text' %}{{ 'a' * 600000 }}"
    "{% elif messages[0].content == 'raise' %}{{ raise_exception('no such role') }}"
    "{% else %}{{ messages[0].content }}{% endif %}"
)
"""a model's own, which some messages drive out of bounds"""


@pytest.fixture(scope="module")
def stack(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    folder = tmp_path_factory.mktemp("hostile") / "model"
    shutil.copytree(tiny_model, folder)
    (folder / "chat_template.jinja").write_text(HOSTILE_TEMPLATE)
    with stack_of(folder, limits=limits(prompt_timeout_s=2.0, prompt_memory_bytes=64 << 20, max_samples=10)) as made:
        yield made


def tokenize(stack: Stack, content: str) -> httpx.Response:
    return httpx.post(f"{stack.url}/tokenize", json={"messages": [{"role": "user", "content": content}]}, timeout=60)


@pytest.mark.some(2)
@pytest.mark.parametrize(
    ("content", "why"),
    [
        ("time", "longer than 2.0 s .*prompt_timeout_s"),
        ("memory", "more memory"),
        ("text", "writes 600000 characters: at most"),
        ("raise", "chat template refused the messages: no such role"),
    ],
)
def test_a_template_is_bounded_and_the_next_request_is_served(stack: Stack, content: str, why: str) -> None:
    """Meanwhile others are answered: the event loop does none of it."""
    answers: list[httpx.Response] = []
    asking = threading.Thread(target=lambda: answers.append(tokenize(stack, content)))
    asking.start()
    assert httpx.get(f"{stack.url}/liveness", timeout=60).status_code == 200
    asking.join(WAIT_S)
    (answer,) = answers
    assert answer.status_code == 400
    assert re.search(why, answer.json()["error"]["message"]), answer.text[:500]
    assert tokenize(stack, "abc").json()["count"] == 3


def test_a_text_that_no_context_holds_is_refused_before_it_is_tokenized(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    """The longest token of the tiny vocabulary, <unk>, has 5 characters, and the context 100,000 tokens."""
    from rollout.http.prompt_pool import PromptPool

    def never(self: Any, job: bytes) -> Any:
        raise AssertionError("it was tokenized")

    monkeypatch.setattr(PromptPool, "_ask", never)
    text = "a" * 500_001
    user = [{"role": "user", "content": text}]
    for path, body in (
        ("/v1/completions", {"prompt": text}),
        ("/v1/completions", {"prompt": ["a", text]}),
        ("/generate", {"text": text}),
        ("/tokenize", {"prompt": text}),
        ("/tokenize", {"messages": user}),
        ("/v1/chat/completions", {"messages": user}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}] * 20_000}),
        ("/tokenize", {"messages": [{"role": "user"}], "chat_template_kwargs": {"x": text}}),
    ):
        response = httpx.post(stack.url + path, json=body, timeout=60)
        assert response.status_code == 400 and "at most 500000 (100000 tokens of at most 5 characters)" in response.text


def test_the_longest_text_passes(stack: Stack) -> None:
    """The control, with characters of several bytes: what is counted are characters. 3 bytes each are 3 tokens here."""
    response = httpx.post(f"{stack.url}/tokenize", json={"prompt": "界" * 30_000}, timeout=60)
    assert response.status_code == 200 and response.json()["count"] == 90_000


def test_a_detokenized_prompt_has_the_context_s_length(stack: Stack) -> None:
    response = httpx.post(f"{stack.url}/detokenize", json={"tokens": [5] * 100_001}, timeout=60)
    assert response.status_code == 400 and "at most 100000" in response.text


def test_one_request_has_so_many_samples(stack: Stack) -> None:
    for path, body, count in (
        ("/v1/completions", {"prompt": [[5]] * 6, "n": 2, "max_tokens": 1}, 12),
        ("/v1/completions", {"prompt": [[5]] * 6, "n": 2, "max_tokens": 1, "stream": True}, 12),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "n": 11, "max_tokens": 1}, 11),
        ("/inference/v1/generate", {"token_ids": [5], "sampling_params": {"n": 11, "max_tokens": 1}}, 11),
        ("/generate", {"input_ids": [[5]] * 6, "sampling_params": {"n": 2, "max_new_tokens": 1}}, 12),
    ):
        response = httpx.post(stack.url + path, json=body, timeout=60)
        assert response.status_code == 400
        assert response.json()["message"] == f"{count} samples, n of each prompt: at most 10 in one request (max_samples)"
    assert not stack.engine.clients, "the service saw it"
    body = {"prompt": [[5]] * 5, "n": 2, "max_tokens": 1}
    assert len(httpx.post(f"{stack.url}/v1/completions", json=body, timeout=60).json()["choices"]) == 10


def test_the_longest_token_is_counted_in_characters() -> None:
    from rollout.http.prompts import longest_token

    byte_level = SimpleNamespace(get_vocab=lambda: {"Ġ" * 7: 0, "çķĮ": 1})  # 7 spaces; one character of 3 bytes
    assert longest_token(byte_level) == 7


def test_texts_are_joined_to_jobs_of_one_context() -> None:
    from rollout.http.prompt_pool import batches

    assert batches(["aa", "b", "cccc", "", "d"], 3) == [["aa", "b"], ["cccc"], ["", "d"]] and batches([], 3) == []


# weights


def test_a_pause_changes_no_update_that_is_under_way() -> None:
    """Between the awaits of an update that keeps KV comes a pause that has the next weights compute it again."""
    from rollout.http.control import ServiceControl, SGLangControl, UpdateFromDisk, VllmControl
    from rollout.http.upstream import Upstream
    from rollout.transport.errors import Busy

    asked: list[Any] = []

    async def both() -> None:
        looked, go_on = asyncio.Event(), asyncio.Event()
        client = SimpleNamespace(
            info=SimpleNamespace(version=0, incarnation="a"),
            pause=lambda: None,
            refresh=lambda folder, **how: (asked.append(how["kv"]), SimpleNamespace(version=1))[1],
        )
        upstream = Upstream(client, 0.25)  # type: ignore[arg-type]

        async def status() -> dict[str, Any]:
            looked.set()
            await go_on.wait()
            return {"version": 0}

        upstream.status = status  # type: ignore[method-assign]
        generation: Any = SimpleNamespace(upstream=upstream, abort=None)
        control = ServiceControl(generation)
        sglang, vllm = SGLangControl(control), VllmControl(control)
        body = UpdateFromDisk(model_path="/a", flush_cache=False)
        update = asyncio.create_task(sglang.update_from_disk(None, body))  # type: ignore[arg-type]
        async with asyncio.timeout(WAIT_S):
            await looked.wait()
            await vllm.pause(SimpleNamespace(query_params={"mode": "keep"}))  # type: ignore[arg-type]
            assert control.kv_policy == "recompute", "for later weights"
            with pytest.raises(Busy):
                await sglang.update_from_disk(None, body)  # type: ignore[arg-type]
            go_on.set()
            await update
        upstream.close()

    asyncio.run(both())
    assert asked == ["keep"]
