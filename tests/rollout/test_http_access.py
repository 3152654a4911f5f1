"""Who may ask the gateway, and by which name; what listens where; and who is still there."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from rollout.commands.http import token_of
from rollout.config import InputError
from tests.support.http_stack import POST, TOKEN, Stack, raw, stack_of
from tests.support.waiting import until

pytest.importorskip("starlette", reason="pip install 'rl-rollout[http]'")
pytest.importorskip("uvicorn", reason="pip install 'rl-rollout[http]'")
pytest.importorskip("httptools", reason="pip install 'rl-rollout[http]'")

BODY = b'{"token_ids": [5], "sampling_params": {"max_tokens": 3, "seed": 1}}'


@pytest.fixture(scope="module")
def stack(tiny_model: Path) -> Iterator[Stack]:
    with stack_of(tiny_model) as made:
        yield made


def status_for(url: str, host: str, path: str = "/v1/models", **headers: str) -> int:
    return httpx.get(url + path, headers={"host": host, **headers}).status_code


# Host


@pytest.mark.parametrize("path", ["/v1/models", "/server_info", "/metrics", "/health", "/liveness", "/nothing"])
def test_a_name_that_is_not_its_own_reads_nothing(stack: Stack, path: str) -> None:
    """A page whose name was pointed to 127.0.0.1 (DNS rebinding)."""
    response = httpx.get(stack.url + path, headers={"host": "evil.example:8000"})
    assert response.status_code == 421 and "--allowed-hosts" in response.json()["error"]["message"]
    response = httpx.post(f"{stack.url}/pause", headers={"host": "evil.example"})
    assert response.status_code == 421


@pytest.mark.parametrize(
    "host", ["localhost", "LOCALHOST.:1", "127.0.0.1", "127.0.0.1:99", "[::1]:8000", "10.1.2.3", "[fd00::1]"]
)
def test_loopback_and_addresses_are_its_own(stack: Stack, host: str) -> None:
    assert status_for(stack.url, host) == 200


@pytest.mark.parametrize(
    "host", ["localhost.evil.example", "127.0.0.1.evil.example", "a@localhost", "local host", "[::1", "", "1"]
)
def test_what_only_looks_like_them_is_not(stack: Stack, host: str) -> None:
    assert status_for(stack.url, host) == 421


def test_a_request_has_one_host(stack: Stack) -> None:
    for hosts in (b"", b"host: localhost\r\nhost: evil.example\r\n"):
        with raw(stack.port) as connection:
            connection.sendall(b"GET /v1/models HTTP/1.1\r\n" + hosts + b"connection: close\r\n\r\n")
            assert connection.recv(100).startswith(b"HTTP/1.1 400 ")
    with raw(stack.port) as connection:
        connection.sendall(b"GET /v1/models HTTP/1.0\r\n\r\n")
        assert b" 200 " in connection.recv(100), "no browser speaks HTTP/1.0"


def test_hosts_that_the_user_lists(tiny_model: Path) -> None:
    with stack_of(tiny_model, allowed_hosts=("Models.example",)) as stack:
        assert [status_for(stack.url, host) for host in ("models.EXAMPLE:80", "localhost", "evil.example")] == [200, 200, 421]


def test_at_other_addresses_the_token_decides(tiny_model: Path) -> None:
    """Probes call a pod by its address, proxies by names that nobody told us; no page has the token."""
    given = {"authorization": f"Bearer {TOKEN}"}
    with stack_of(tiny_model, host="0.0.0.0", token=TOKEN) as stack:
        url = f"http://127.0.0.1:{stack.port}"
        assert [status_for(url, "pod-3.svc", path) for path in ("/health", "/v1/models")] == [200, 401]
        assert status_for(url, "pod-3.svc", **given) == 200
    with stack_of(tiny_model, host="0.0.0.0", token=TOKEN, allowed_hosts=("models.example",)) as stack:
        url = f"http://127.0.0.1:{stack.port}"
        assert [status_for(url, host, **given) for host in ("models.example", "10.1.2.3", "pod-3.svc")] == [200, 200, 421]
    with stack_of(tiny_model, token=TOKEN) as stack:
        assert status_for(stack.url, "evil.example", "/health") == 421, "at loopback it is looked at with a token too"


# settings


def test_what_cannot_be_listened_at_is_told() -> None:
    from rollout.http.settings import Settings

    for settings in ({"port": 70_000}, {"port": -1}, {"admin_port": 65_536}):
        with pytest.raises(ValueError, match=r"port -?\d+: must be 1 to 65535"):
            Settings(**settings)
    for name in ("http://a", "a:80", "a/b", "", "a b", "*@"):
        with pytest.raises(ValueError, match="--allowed-hosts"):
            Settings(allowed_hosts=(name,))
    Settings(port=65_535, allowed_hosts=("a.example", "10.0.0.1"))


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o604, 0o620])
def test_a_token_that_others_can_read_is_refused(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "token"
    path.write_text(TOKEN + "\n")
    path.chmod(mode)
    with pytest.raises(InputError, match="--token-file .* chmod 600"):
        token_of(str(path))
    path.chmod(0o600)
    assert token_of(str(path)) == TOKEN
    path.write_bytes(b"\xff")
    for broken in (path, tmp_path / "none", tmp_path, "a\0b"):
        with pytest.raises(InputError, match="--token-file"):
            token_of(str(broken))


@pytest.mark.parametrize("scheme", ["Bearer", "bearer", "BEARER"])
def test_the_scheme_is_read_in_any_case(tiny_model: Path, scheme: str) -> None:
    with stack_of(tiny_model, token=TOKEN) as stack:
        assert stack.generate(headers={"Authorization": f"{scheme} {TOKEN}"}).status_code == 200
        for wrong in (f"{scheme}{TOKEN}", f"Basic {TOKEN}", scheme, f"{scheme} {TOKEN.upper()}"):
            assert stack.generate(headers={"Authorization": wrong}).status_code == 401


# who is still there


def test_a_client_that_only_stops_sending_gets_its_answer(stack: Stack) -> None:
    """What `nc -N` does. The service answers once the other end was looked for."""
    stack.engine.frozen = True
    with raw(stack.port) as connection:
        connection.sendall(POST + b"content-length: %d\r\n\r\n" % len(BODY) + BODY)
        connection.shutdown(socket.SHUT_WR)
        assert connection.recv(65_536) == b"HTTP/1.1 102 Processing\r\n\r\n"
        stack.engine.frozen = False
        data = b""
        while part := connection.recv(65_536):
            data += part
    assert data.startswith(b"HTTP/1.1 200 ") and b"choices" in data
    with raw(stack.port) as connection:
        connection.sendall(b"GET /liveness HTTP/1.1\r\nhost: localhost\r\n\r\n")
        connection.shutdown(socket.SHUT_WR)
        assert connection.recv(65_536).startswith(b"HTTP/1.1 200 "), "a quick answer comes alone"


def test_one_that_has_gone_is_found(tiny_model: Path) -> None:
    """The control: its end looks the same at first."""
    with stack_of(tiny_model) as stack:
        stack.engine.frozen = True
        with raw(stack.port) as connection:
            connection.sendall(POST + b"content-length: %d\r\n\r\n" % len(BODY) + BODY)
            until(lambda: len(stack.engine.groups) == 1)
        until(lambda: len(stack.engine.aborted) == 1)
