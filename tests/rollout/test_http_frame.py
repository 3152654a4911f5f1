"""The gateway's frame: who may ask, how much, over how many connections, and how it ends."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import msgspec
import psutil
import pytest

from rollout.client.api import RolloutClient
from rollout.transport.loopback import LoopbackService
from tests.support.fake_engine import FakeEngine, expected
from tests.support.gateway import gateway
from tests.support.http_stack import BODY, POST, TOKEN, Stack, limits, raw, stack_of
from tests.support.waiting import until
from tests.support.wire import serving

pytest.importorskip("starlette", reason="pip install 'rl-rollout[http]'")
pytest.importorskip("uvicorn", reason="pip install 'rl-rollout[http]'")
pytest.importorskip("httptools", reason="pip install 'rl-rollout[http]'")


@pytest.fixture(scope="module")
def stack(tiny_model: Path) -> Iterator[Stack]:
    with stack_of(tiny_model) as made:
        yield made


def read_all(connection: socket.socket) -> tuple[int, dict[str, Any]]:
    """Status and error of what is sent before the other end closes."""
    data = b""
    while part := connection.recv(65536):
        data += part
    head, _, body = data.partition(b"\r\n\r\n")
    return int(head.split(b" ")[1]), json.loads(body)["error"]


# who may ask


def test_a_token_opens_all_but_the_probes(tiny_model: Path) -> None:
    with stack_of(tiny_model, token=TOKEN) as stack:
        for headers in ({}, {"Authorization": TOKEN}, {"Authorization": "Bearer wrong"}, {"Authorization": f"Bearer {TOKEN}x"}):
            response = stack.generate(headers=headers)
            assert response.status_code == 401 and response.json()["error"]["type"] == "authentication_error"
            assert httpx.post(f"{stack.url}/pause?mode=keep", headers=headers).status_code == 401
        assert not stack.engine.clients, "the service saw it"
        assert stack.generate(headers={"Authorization": f"Bearer {TOKEN}"}).status_code == 200
        assert httpx.get(f"{stack.url}/health").status_code == httpx.get(f"{stack.url}/liveness").status_code == 200


def test_other_addresses_than_loopback_need_a_token() -> None:
    from rollout.http.settings import Settings

    for settings in ({"host": "0.0.0.0"}, {"host": "192.168.1.2"}, {"admin_host": "::", "admin_port": 1}):
        with pytest.raises(ValueError, match="open to other machines: give --token-file"):
            Settings(**settings)
        Settings(**settings, token=TOKEN)
    for token in ("short", "with\nline end and more", "ünbekannt und lang genug"):
        with pytest.raises(ValueError, match="16 printable ASCII"):
            Settings(token=token)


def test_web_pages_may_not_ask(stack: Stack) -> None:
    assert stack.generate(headers={"Origin": "http://evil.example"}).status_code == 403
    assert stack.generate().status_code == 200


def test_administrators_have_a_port_of_their_own(tiny_model: Path) -> None:
    with stack_of(tiny_model, admin_port=0) as stack:
        assert stack.gateway.admin_url != stack.url
        for path in (
            "/pause?mode=keep",
            "/resume",
            "/update_weights",
            "/sleep",
            "/update_weights_from_disk",
            "/pause_generation",
        ):
            response = httpx.post(stack.url + path, json={})
            assert response.status_code == 403 and "--admin-port" in response.json()["error"]["message"]
        assert stack.generate().status_code == 200
        assert httpx.post(stack.gateway.admin_url + "/inference/v1/generate", json=BODY).status_code == 404
        assert httpx.get(stack.gateway.admin_url + "/v1/models").json()["data"][0]["id"] == "fake"
        assert httpx.post(stack.gateway.admin_url + "/abort_requests", json={}).json()["aborted"] == 0


# how much


def test_a_body_has_a_size(tiny_model: Path) -> None:
    with stack_of(tiny_model, limits=limits(max_body_bytes=1000)) as stack:
        url = f"{stack.url}/inference/v1/generate"
        assert httpx.post(url, content=b"x" * 1001).status_code == 413
        assert httpx.post(url, content=iter([b"x" * 600] * 3)).status_code == 413  # chunked: no length is told
        assert stack.generate().status_code == 200


def test_all_bodies_together_have_a_size(tiny_model: Path) -> None:
    with (
        stack_of(tiny_model, limits=limits(max_body_bytes=60_000, max_buffered_bytes=100_000)) as stack,
        ExitStack() as open_now,
    ):
        head = POST + b"content-length: 50000\r\nconnection: close\r\n\r\n"
        slow = [open_now.enter_context(raw(stack.port)) for _ in range(4)]
        for connection in slow:
            connection.sendall(head + b"x" * 40_000)
        status, error = read_all_of_first(slow)
        assert status == 503 and "max_buffered_bytes" in error["message"]


def read_all_of_first(connections: list[socket.socket]) -> tuple[int, dict[str, Any]]:
    """What comes on whichever connection is answered first."""
    import select

    ready, _, _ = select.select(connections, [], [], 30)
    assert ready, "nobody was answered"
    return read_all(ready[0])


def test_half_open_connections_end(tiny_model: Path) -> None:
    with stack_of(tiny_model, limits=limits(head_timeout_s=0.2, body_timeout_s=0.2)) as stack:
        request = POST + b"connection: close\r\n"
        for sent in (b"", b"PO", request, request + b"content-length: 50\r\n\r\n{"):
            with raw(stack.port) as connection:
                connection.sendall(sent)
                status, error = read_all(connection)
                assert status == 408 and "did not come within 0.2 s" in error["message"]
        assert not stack.engine.clients
        assert stack.generate().status_code == 200


def test_a_slow_sample_is_not_a_half_open_connection(tiny_model: Path) -> None:
    """The control: time-outs are for what comes in."""
    with stack_of(tiny_model, limits=limits(head_timeout_s=0.1, body_timeout_s=0.1)) as stack:
        stack.engine.step_s = 0.2
        assert stack.generate().status_code == 200


def test_a_head_has_a_size(stack: Stack) -> None:
    with raw(stack.port) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\n")
        try:
            for i in range(3000):
                connection.sendall(b"x-%d: %s\r\n" % (i, b"y" * 1000))
        except (BrokenPipeError, ConnectionResetError):
            return  # it closed while we wrote
        assert read_all(connection)[0] == 431


@pytest.mark.parametrize("content", [b"\0" * 100, b"hello\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", b"\x16\x03\x01\x02\x00\x01"])
def test_what_is_no_http_is_refused(stack: Stack, content: bytes) -> None:
    with raw(stack.port) as connection:
        connection.sendall(content)
        status, error = read_all(connection)
    assert status == 400 and error["type"] == "invalid_request_error"


def test_a_thousand_connections(tiny_model: Path) -> None:
    """Half of them half open, half of them asking at once; memory stays where it was, and who comes after is served."""
    with stack_of(tiny_model) as stack, ExitStack() as open_now:
        assert stack.generate().status_code == 200
        process = psutil.Process()
        before = process.memory_info().rss
        body = json.dumps(BODY).encode()
        head = POST + b"connection: close\r\ncontent-length: %d\r\n\r\n" % len(body)
        connections = [open_now.enter_context(raw(stack.port)) for _ in range(1000)]
        for i, connection in enumerate(connections):
            connection.sendall(head + body if i % 2 else head[:40])
        for connection in connections[1::2]:
            data = b""
            while part := connection.recv(65536):
                data += part
            assert json.loads(data.partition(b"\r\n\r\n")[2])["choices"][0]["token_ids"] == expected([5], 0, 3)
        assert stack.generate().status_code == 200
        assert process.memory_info().rss - before < 200 << 20


def test_connections_over_the_limit_are_told_so(tiny_model: Path) -> None:
    with stack_of(tiny_model, limits=limits(max_connections=20)) as stack, ExitStack() as open_now:
        for _ in range(20):
            open_now.enter_context(raw(stack.port))
        with raw(stack.port) as one_more:
            status, error = read_all(one_more)
        assert status == 503 and "max_connections" in error["message"]
        open_now.close()
        until(lambda: served(stack))


def served(stack: Stack) -> bool:
    try:
        return stack.generate().status_code == 200
    except httpx.HTTPError:
        return False


# many at once, without a thread a request


def test_requests_take_no_threads(tiny_model: Path) -> None:
    with stack_of(tiny_model) as stack, ExitStack() as open_now:
        stack.engine.frozen = True
        body = json.dumps(BODY).encode()
        head = POST + b"connection: close\r\ncontent-length: %d\r\n\r\n" % len(body)
        before = threading.active_count()
        connections = [open_now.enter_context(raw(stack.port)) for _ in range(100)]
        for connection in connections:
            connection.sendall(head + body)
        until(lambda: sum(stack.engine.clients.values()) == 100)
        assert threading.active_count() <= before + 2
        assert httpx.get(f"{stack.url}/health").status_code == 200
        stack.engine.frozen = False
        for connection in connections:
            data = b""
            while part := connection.recv(65536):
                data += part
            assert b" 200 " in data.split(b"\r\n")[0]


def test_whoever_hangs_up_is_cancelled(tiny_model: Path) -> None:
    with stack_of(tiny_model) as stack:
        stack.engine.frozen = True
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{stack.url}/inference/v1/generate", json=BODY, timeout=httpx.Timeout(30, read=0.3))
        until(lambda: len(stack.engine.aborted) == 1)
        stack.engine.frozen = False
        assert stack.generate().status_code == 200


def test_a_disconnect_ends_a_request_that_has_another_one_pipelined_after_it(tiny_model: Path) -> None:
    """uvicorn reports the disconnect to the last request only."""
    with stack_of(tiny_model) as stack:
        stack.engine.step_s = 0.001
        body = json.dumps({"token_ids": [5], "sampling_params": {"max_tokens": 40_000}, "stream": True}).encode()
        request = POST + b"content-length: %d\r\n\r\n" % len(body) + body
        with raw(stack.port) as connection:
            connection.sendall(request + request)
            assert connection.recv(4096).startswith(b"HTTP/1.1 200")
        until(lambda: not stack.engine.groups)
        assert len(stack.engine.aborted) == 1, "the second request never started"


# streams


def long_stream(url: str, path: str = "/inference/v1/generate", **fields: Any) -> Any:
    """A request that would run for long; its events come as they are made."""
    params = {"max_tokens": 40_000, "logprobs": 0}
    body = {"token_ids": [5], "sampling_params": params, "stream": True, **fields}
    if path == "/v1/completions":
        body = {"prompt": [5], "max_tokens": 40_000, "stream": True, **fields}
    if path == "/generate":
        body = {"input_ids": [5], "sampling_params": {"max_new_tokens": 40_000}, "stream": True, **fields}
    if path == "/v1/chat/completions":
        body = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 40_000, "stream": True, **fields}
    return httpx.stream("POST", url + path, json=body, timeout=60)


def data_of(lines: Iterator[str]) -> Any:
    """The next event."""
    line = next(line for line in lines if line)
    return line if line == "data: [DONE]" else json.loads(line.removeprefix("data: "))


@pytest.mark.parametrize("path", ["/inference/v1/generate", "/v1/completions", "/generate", "/v1/chat/completions"])
def test_parts_come_while_a_sample_runs_and_hanging_up_ends_it(tiny_model: Path, path: str) -> None:
    with stack_of(tiny_model) as stack:
        stack.engine.step_s = 0.001
        with long_stream(stack.url, path) as response:
            lines = response.iter_lines()
            for _ in range(2):
                data_of(lines)
            (children,) = stack.engine.groups.values()
            assert len(children) == 1, "it runs"
        until(lambda: not stack.engine.groups)
        assert len(stack.engine.aborted) == 1


def test_a_request_is_ended_by_its_name_and_no_other(tiny_model: Path) -> None:
    with stack_of(tiny_model) as stack, ExitStack() as open_now:
        stack.engine.step_s = 0.001
        names = {"/inference/v1/generate": "request_id", "/v1/completions": "request_id", "/generate": "rid"}
        streams = {path: open_now.enter_context(long_stream(stack.url, path, **{field: path})) for path, field in names.items()}
        readers = {path: response.iter_lines() for path, response in streams.items()}
        first = {path: data_of(lines) for path, lines in readers.items()}
        aborts = [("/abort_requests", {"request_ids": ["unknown"]}, 0), ("/abort_request", {"rid": "unknown"}, 0)]
        aborts += [("/abort_requests", {"request_ids": []}, 0)]
        aborts += [("/abort_requests", {"request_ids": ["/inference/v1/generate", "x"]}, 1)]
        aborts += [("/abort_requests", {"request_ids": [first["/v1/completions"]["id"]]}, 1)]
        aborts += [("/abort_request", {"rid": "/generate"}, 1)]
        for left, (path, body, ended) in zip((3, 3, 3, 2, 1, 0), aborts, strict=True):
            assert httpx.post(stack.url + path, json=body).json()["aborted"] == ended
            until(lambda left=left: len(stack.engine.groups) == left)
        for path, lines in readers.items():
            *_, last, done = [line for line in lines if line]
            event = json.loads(last.removeprefix("data: "))
            end = event["meta_info"]["finish_reason"]["type"] if path == "/generate" else event["choices"][0]["finish_reason"]
            assert (end, done) == ("abort", "data: [DONE]")


def test_many_streams_that_hang_up_leave_nothing(tiny_model: Path) -> None:
    """Half of them before the head is whole, half in the middle of a stream that nobody reads."""
    with stack_of(tiny_model) as stack, ExitStack() as open_now:
        stack.engine.step_s = 0.001
        assert stack.generate().status_code == 200
        process = psutil.Process()
        before = process.memory_info().rss
        body = json.dumps({"token_ids": [5], "sampling_params": {"max_tokens": 40_000}, "stream": True}).encode()
        request = POST + b"content-length: %d\r\n\r\n" % len(body) + body
        connections = [open_now.enter_context(raw(stack.port)) for _ in range(200)]
        for i, connection in enumerate(connections):
            connection.sendall(request if i % 2 else request[:60])
        for connection in connections[1::2]:
            assert connection.recv(4096).startswith(b"HTTP/1.1 200")
        assert sum(map(len, stack.engine.groups.values())) == 100
        open_now.close()
        until(lambda: not stack.engine.groups)
        assert stack.generate().status_code == 200
        assert process.memory_info().rss - before < 200 << 20


def test_a_failure_in_a_stream_is_its_last_event(tiny_model: Path) -> None:
    with stack_of(tiny_model) as stack:
        stack.engine.step_s = 0.001
        with long_stream(stack.url) as response:
            lines = response.iter_lines()
            data_of(lines)
            stack.engine.crash_on = 5
            *_, last = [line for line in lines if line]
        assert json.loads(last.removeprefix("data: "))["error"]["code"] in (500, 503)


def test_a_failure_before_the_first_event_has_its_status(tiny_model: Path) -> None:
    with stack_of(tiny_model) as stack:
        params = {"max_tokens": 60_000}  # the engine's pool holds 50,000
        response = httpx.post(
            f"{stack.url}/inference/v1/generate", json={"token_ids": [5], "sampling_params": params, "stream": True}, timeout=60
        )
        assert response.status_code == 400 and response.json()["error"]["type"] == "invalid_request"


def test_a_slow_reader_is_sent_the_rest_with_the_sample(tiny_model: Path) -> None:
    """What it has not taken is bounded, and nothing is missing in the end."""
    import asyncio

    from starlette.requests import Request

    from rollout.engine.values import Sample, Sampling
    from rollout.http.generation import GenerationService
    from rollout.http.settings import Settings
    from rollout.http.text import Text
    from rollout.http.upstream import Upstream
    from rollout.models import load_tokenizer

    engine, end = FakeEngine(), LoopbackService()
    text = Text(load_tokenizer(tiny_model))

    async def slow(client: RolloutClient) -> list[Any]:
        upstream = Upstream(client, 0.25)
        generation = GenerationService(upstream, text, None, Settings(limits=limits(max_waiting_chunks=20)))  # type: ignore[arg-type]
        group = generation.group([5], Sampling(max_tokens=3000, stream_every=1), ())
        got = []
        with generation.arrival(()) as arrival:
            async for chunk in generation.stream(Request({"type": "http"}), arrival, [group]):
                if not got:
                    await asyncio.to_thread(until, lambda: not engine.groups)
                    await asyncio.sleep(0)
                got.append(chunk)
        upstream.close()
        return got

    with serving(engine, end), RolloutClient(transport=end.connect()) as client:
        got = asyncio.run(slow(client))
    assert len(got) <= 20 + 2 and isinstance(got[-1].sample, Sample)
    assert [id for chunk in got for id in chunk.ids] == expected([5], 0, 3000)


# ends


def test_at_its_end_requests_may_finish_and_the_rest_come_back_with_what_they_have(tiny_model: Path) -> None:
    with stack_of(tiny_model, limits=limits(grace_s=0.3)) as stack:
        stack.engine.step_s = 0.01
        answers: list[httpx.Response] = []
        long = {"token_ids": [5], "sampling_params": {"max_tokens": 40_000}}
        url = f"{stack.url}/inference/v1/generate"
        thread = threading.Thread(target=lambda: answers.append(httpx.post(url, json=long, timeout=60)))
        thread.start()
        until(lambda: stack.engine.groups)
        stack.gateway.end()
        thread.join(60)
        (choice,) = answers[0].json()["choices"]
        assert choice["finish_reason"] == "abort" and choice["token_ids"] == expected([5], 0, len(choice["token_ids"]))


def test_a_service_that_is_lost_is_told_as_503(tiny_model: Path) -> None:
    with ExitStack() as services:
        engine, end = FakeEngine(), LoopbackService()
        services.enter_context(serving(engine, end))
        with (
            RolloutClient(transport=end.connect(), link_timeout_s=0.3) as client,
            gateway(client, tiny_model) as running,
        ):
            services.close()
            response = httpx.post(f"{running.url}/inference/v1/generate", json=BODY, timeout=60)
            error = response.json()["error"]
            assert response.status_code == 503 and error["type"] == "service_lost" and response.headers["retry-after"] == "1"
            assert httpx.get(f"{running.url}/health", timeout=60).status_code == 503
            assert httpx.get(f"{running.url}/liveness").status_code == 200


def test_a_prompt_that_is_too_long_may_be_answered_with_nothing(tiny_model: Path) -> None:
    """TRL's worker repeats a 400 for minutes."""
    prompt = {"prompt": [5] * 100_000, "max_tokens": 10, "logprobs": 0, "return_token_ids": True}
    with stack_of(tiny_model) as stack:
        response = httpx.post(f"{stack.url}/v1/completions", json=prompt)
        assert response.status_code == 400 and "exceeds the context" in response.json()["error"]["message"]
    with stack_of(tiny_model, overlong="empty") as stack:
        (choice,) = httpx.post(f"{stack.url}/v1/completions", json=prompt).json()["choices"]
        assert (choice["token_ids"], choice["finish_reason"], choice["logprobs"]["token_logprobs"]) == ([], "length", [])
        assert httpx.post(f"{stack.url}/v1/completions", json={**prompt, "n": 10**9}).status_code == 400
        assert not stack.engine.clients


def test_a_log_prob_that_is_no_number_is_never_sent(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with stack_of(tiny_model) as stack:
        end_of = stack.engine._end
        wrong = lambda child, reason: msgspec.structs.replace(end_of(child, reason), logprobs=end_of_nan(child))  # noqa: E731
        monkeypatch.setattr(stack.engine, "_end", wrong)
        response = stack.generate()
        assert response.status_code == 500 and "must be finite" in response.json()["error"]["message"]


def end_of_nan(child: Any) -> Any:
    import numpy as np

    return np.full(len(child.tokens), np.nan, np.float32)


def test_the_command_says_what_is_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from rollout.commands.main import main

    assert main(["http", "--host", "0.0.0.0"]) == 1
    assert "rollout http: 0.0.0.0 is open to other machines: give --token-file" in capsys.readouterr().err
    assert main(["http", "--token-file", str(tmp_path / "none")]) == 1
    assert "--token-file" in capsys.readouterr().err


@pytest.mark.parametrize(("number", "status"), [pytest.param(signal.SIGTERM, 0, marks=pytest.mark.long), (signal.SIGINT, 130)])
def test_the_command_serves_and_ends(number: int, status: int, tiny_model: Path, tmp_path: Path) -> None:
    """As a process: the ready file holds the URL; a signal ends it with a line and, as `rollout serve`, with its status."""
    with serving(FakeEngine()) as service:
        ready = tmp_path / "ready"
        command = [sys.executable, "-m", "rollout", "http", "--address", service.endpoint, "--port", "0"]
        command += ["--tokenizer", str(tiny_model), "--served-model-name", "tiny", "--ready-file", str(ready)]
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
            try:
                until(lambda: ready.exists() or process.poll() is not None, "the gateway listens", 120)
                assert ready.exists(), process.stderr and process.stderr.read()
                url = ready.read_text().split()[0]
                assert httpx.get(f"{url}/v1/models").json()["data"][0]["id"] == "tiny"
                body = {**BODY, "model": "tiny"}
                answer = httpx.post(f"{url}/inference/v1/generate", json=body, timeout=60).json()
                assert answer["choices"][0]["token_ids"] == expected([5], 0, 3)
                process.send_signal(number)
                _, said = process.communicate(timeout=60)
                assert process.returncode == status and "Traceback" not in said, said
                assert said.endswith("rollout http: stopping; open requests have 10 s to finish\nrollout http: stopped\n"), said
            finally:
                process.kill()
