"""What a newcomer meets: the list of routes, the log of requests, the model's name, errors that are not worth a retry."""

from __future__ import annotations

import asyncio
import logging
import re
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from rollout.client.api import RolloutClient
from rollout.commands.connecting import connected
from rollout.transport.errors import ServiceLost
from rollout.transport.loopback import LoopbackService
from tests.support.fake_engine import FakeEngine
from tests.support.gateway import gateway
from tests.support.http_stack import BODY, TOKEN, Stack, stack_of
from tests.support.waiting import until
from tests.support.wire import serving, serving_at

pytest.importorskip("starlette", reason="pip install 'rl-rollout[http]'")
pytest.importorskip("uvicorn", reason="pip install 'rl-rollout[http]'")
pytest.importorskip("httptools", reason="pip install 'rl-rollout[http]'")

LOG = "rollout.http.request_log"
CHAT = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 3}


@pytest.fixture(scope="module")
def stack(tiny_model: Path) -> Iterator[Stack]:
    with stack_of(tiny_model) as made:
        yield made


# routes


def test_the_root_lists_the_routes(stack: Stack) -> None:
    listed = httpx.get(stack.url).json()
    assert listed["models"] == ["fake"] and listed["service"].startswith("rollout ")
    routes = {(each["method"], each["path"]): each["summary"] for each in listed["routes"]}
    assert len(routes) > 35 and all(len(summary) > 8 for summary in routes.values()), "each is described"
    assert {("POST", "/v1/chat/completions"), ("GET", "/v1/models"), ("POST", "/generate"), ("POST", "/pause")} <= routes.keys()
    for method, path in routes:
        if method == "GET":
            assert httpx.get(stack.url + path, timeout=60).status_code == 200, path
    assert httpx.get(f"{stack.url}/docs").json()["error"]["message"].endswith("GET / lists the routes")


def test_a_browser_gets_a_page(tiny_model: Path) -> None:
    with stack_of(tiny_model, names=("<script>",)) as stack:
        page = httpx.get(stack.url, headers={"accept": "text/html,application/xhtml+xml,*/*;q=0.8"})
        assert page.headers["content-type"].startswith("text/html")
        assert (
            "<code>/v1/chat/completions</code>" in page.text and "&lt;script&gt;" in page.text and "<script>" not in page.text
        )


def test_each_port_lists_its_own_routes(tiny_model: Path) -> None:
    with stack_of(tiny_model, admin_port=0, token=TOKEN) as stack:
        assert httpx.get(stack.url).status_code == 401, "the list is for those who may use it"
        key = {"authorization": f"Bearer {TOKEN}"}
        main, admin = (
            {each["path"] for each in httpx.get(url, headers=key).json()["routes"]}
            for url in (stack.url, stack.gateway.admin_url)
        )
        assert "/v1/completions" in main - admin and "/pause" in admin - main and "/health" in main & admin


# the log


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Any:
    caplog.set_level(logging.INFO, LOG)
    return lambda: [record.getMessage() for record in caplog.records if record.name == LOG]


def test_each_request_is_a_line_with_its_tokens(stack: Stack, lines: Any) -> None:
    assert stack.generate().status_code == 200
    streamed = {**BODY, "sampling_params": {"max_tokens": 5, "seed": 1}, "stream": True}
    httpx.post(f"{stack.url}/inference/v1/generate", json=streamed, timeout=60)
    httpx.get(f"{stack.url}/a%0ab?secret=1")
    until(lambda: len(lines()) >= 3)
    first, second, third = lines()
    tokens = r"1 prompt and {} sampled tokens$"
    assert re.match(r"127\.0\.0\.1 POST /inference/v1/generate 200 [\d.]+ ms " + tokens.format(3), first)
    assert re.match(r"127\.0\.0\.1 POST /inference/v1/generate 200 [\d.]+ ms " + tokens.format(5), second)
    assert re.match(r"127\.0\.0\.1 GET /a\\nb 404 [\d.]+ ms$", third), "one line, without the query"


def test_the_log_can_be_off(tiny_model: Path, lines: Any) -> None:
    with stack_of(tiny_model, request_log=False) as stack:
        assert stack.generate().status_code == 200
    assert lines() == []


# the model's name


def test_no_response_has_the_model_s_folder(tiny_model: Path) -> None:
    engine, end = FakeEngine(), LoopbackService()
    engine.model.name = "/home/someone/models/policy"
    with (
        serving(engine, end),
        RolloutClient(transport=end.connect()) as client,
        gateway(client, tiny_model) as running,
    ):
        assert client.info.model == engine.model.name, "the client needs it for the tokenizer"
        stack = Stack(engine, client, running)
        paths = ("/", "/v1/models", "/server_info", "/model_info", "/metrics")
        texts = [httpx.get(stack.url + path, timeout=60).text for path in paths] + [stack.generate().text]
        assert all("policy" in text for text in texts) and not any("someone" in text for text in texts)


def test_the_name_is_the_one_given_to_serve() -> None:
    from rollout.http.upstream import model_name

    with serving(FakeEngine(), served_model_name="HuggingFaceTB/SmolLM2-135M-Instruct") as service:
        with RolloutClient(service.endpoint) as client:
            assert model_name(client.info) == "HuggingFaceTB/SmolLM2-135M-Instruct"
    info: Any = SimpleNamespace(served_model_name="", model="/cache/smollm2")
    assert model_name(info) == "smollm2", "of a service that does not report it"


# errors


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/v1/embeddings", {"input": "a"}, 404),
        ("/v1/responses", {"input": "a"}, 404),
        ("/v1/images/generations", {"prompt": "a"}, 404),
        ("/v1/chat/completions", {**CHAT, "response_format": {"type": "json_object"}}, 400),
        ("/v1/chat/completions", {**CHAT, "reasoning_effort": "low"}, 400),
        ("/v1/chat/completions", {**CHAT, "service_tier": "flex"}, 400),
        ("/v1/chat/completions", {**CHAT, "no_such_field": 1}, 400),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, 400),
    ],
)
def test_what_a_client_asks_wrongly_is_not_worth_a_retry(stack: Stack, path: str, body: Any, status: int) -> None:
    response = httpx.post(stack.url + path, json=body, timeout=60)
    assert response.status_code == status and not repeated(response), response.text
    assert len(response.json()["error"]["message"]) > 20


def test_the_field_that_was_meant_is_named(stack: Stack) -> None:
    for field, meant in (("message", "messages"), ("max_new_tokens", "max_tokens")):
        response = httpx.post(f"{stack.url}/v1/chat/completions", json={**CHAT, field: 1}, timeout=60)
        assert response.json()["error"]["message"] == f"Object contains unknown field `{field}`; did you mean {meant}?"


def test_fields_that_change_no_sample_are_accepted(stack: Stack) -> None:
    neutral = {
        "service_tier": "auto",
        "modalities": ["text"],
        "prompt_cache_key": "a",
        "metadata": {},
        "reasoning_effort": None,
    }
    response = httpx.post(f"{stack.url}/v1/chat/completions", json={**CHAT, **neutral}, timeout=60)
    assert response.status_code == 200, response.text


def repeated(response: httpx.Response) -> bool:
    """Whether OpenAI's client would send the request again."""
    asked = response.headers.get("x-should-retry")
    if asked is not None:
        return asked == "true"
    return response.status_code in (408, 409, 429) or response.status_code >= 500


def test_only_what_may_pass_is_repeated() -> None:
    from rollout.http.errors import HttpError, response_of
    from rollout.http.generation import ABORTED
    from rollout.transport.errors import Busy, GroupFailed, InvalidRequest

    errors: dict[Exception, bool] = {
        Busy("full"): True,
        HttpError(503, "full"): True,
        GroupFailed("the engine failed"): False,
        KeyError("a bug"): False,
        InvalidRequest("n=0"): False,
        HttpError(ABORTED, "aborted"): False,
    }
    for error, again in errors.items():
        response = response_of(error)
        assert repeated(httpx.Response(response.status_code, headers=dict(response.headers))) == again, error


def test_an_aborted_score_is_not_asked_for_again() -> None:
    from rollout.http.errors import HttpError, response_of
    from rollout.http.generation import Arrival, GenerationService

    arrival = Arrival({"mine"})
    arrival.abort(frozenset({"mine"}))
    group, generation = SimpleNamespace(prompt=[5, 6]), SimpleNamespace(_checked=lambda *given: None)
    with pytest.raises(HttpError, match="was aborted before its prompt was scored") as raised:
        asyncio.run(GenerationService.score(generation, None, arrival, [group], 1))  # type: ignore[arg-type, list-item]
    response = response_of(raised.value)
    assert response.status_code == 499 and "retry-after" not in response.headers
    assert not repeated(httpx.Response(response.status_code, headers=dict(response.headers)))


# a service that is starting


def test_a_gateway_waits_for_a_service_that_starts(capfd: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
    with pytest.raises(ServiceLost):
        connected(address, "rollout http", 0.1)
    told = ""
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(connected, address, "rollout http", 0.1, 60.0)

        def waits() -> bool:
            nonlocal told
            told += capfd.readouterr().err
            return "waiting for it, 60 s at most" in told

        until(waits)
        assert not waiting.done()
        with serving_at(FakeEngine(), address), waiting.result(60) as client:
            assert client.info.model == "fake"


# metrics


def test_prometheus_reads_the_metrics(tiny_model: Path) -> None:
    parser = pytest.importorskip("prometheus_client.parser", reason="not installed: pip install 'rl-rollout[metrics]'")
    with stack_of(tiny_model, names=('a "name"',)) as stack:
        assert stack.generate().status_code == 200
        httpx.post(f"{stack.url}/inference/v1/generate", json={**BODY, "stream": True}, timeout=60)
        text = httpx.get(f"{stack.url}/metrics", timeout=60).text
    found = {family.name: family for family in parser.text_string_to_metric_families(text)}
    assert all(family.documentation and family.type in ("gauge", "counter", "histogram") for family in found.values())
    assert {one.labels["model_name"] for family in found.values() for one in family.samples} == {'a "name"'}
    counts = {name: family.samples[-1].value for name, family in found.items() if family.type == "histogram"}
    assert counts == {
        "vllm:time_to_first_token_seconds": 1,  # of the stream alone
        "vllm:e2e_request_latency_seconds": 2,
        "vllm:request_prompt_tokens": 2,
        "vllm:request_generation_tokens": 2,
    }
    assert found["vllm:request_generation_tokens"].samples[-2].value == 6, "the sum"
