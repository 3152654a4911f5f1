"""An address without keys: who gets in, who does not, and the file with its secret."""

from __future__ import annotations

import errno
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from rollout.engine.values import Limits
from rollout.transport import messages as m
from rollout.transport.frames import pack
from rollout.transport.keys import cookie, files
from rollout.transport.keys.cookie import ClientCookie, cookie_file
from rollout.transport.sockets import ClientEnd, ServiceEnd, SocketOptions
from tests.support import by_hand
from tests.support.waiting import until

LIMITS = Limits()
WAIT = 60.0
ROOT = Path(__file__).parents[2]
ASKED = [bytes(pack(each)[0]) for each in (m.Hello(m.PROTOCOL, "e" * 32, 1, "page"), m.Control(1, "abort_all"))]


@pytest.fixture(autouse=True)
def where(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(cookie.FOLDER_VARIABLE, str(tmp_path / "cookies"))
    return tmp_path / "cookies"


@pytest.fixture
def service() -> Iterator[ServiceEnd]:
    end = ServiceEnd("tcp://127.0.0.1:*", LIMITS)
    yield end
    end.close()


def arrives(service: ServiceEnd, client: ClientEnd) -> bool:
    """Whether what a client sends comes to the service, or the client is told that it will not."""
    sent = False

    def told() -> bool:
        nonlocal sent
        client.receive(0.01, sending=not sent)
        sent = sent or (client.connected and client.send([b"hello"]))
        return bool(client.refusal) or bool(service.receive(0.01))

    until(told)
    return not client.refusal


def until_closed(connection: socket.socket) -> bytes:
    """What a peer is sent before its connection is ended, which must be."""
    connection.settimeout(WAIT)
    got = b""
    try:
        while data := connection.recv(65536):
            got += data
    except ConnectionResetError:
        pass
    return got


# peers that are none

STRANGERS = {
    "a web page": by_hand.post(*ASKED),
    "ZMTP 1.0": by_hand.version_1(b"", *ASKED),
    "ZMTP 1.0 with a name": by_hand.version_1(b"me", *ASKED),
    "ZMTP 2.0": b"\xff" + bytes(7) + b"\x01\x7f\x01\x05\x00\x00" + b"".join(bytes([0, len(f)]) + f for f in ASKED),
    "ZMTP 3 without a mechanism": by_hand.NULL + by_hand.command(b"READY", by_hand.PROPERTIES) + b"\x00\x05hello",
    "without the secret": by_hand.GREETING + by_hand.command(b"HELLO", by_hand.text(cookie.USER) + by_hand.text(b"-")),
}


@pytest.mark.some(6)
@pytest.mark.parametrize("keyed", [False, True], ids=["loopback", "keys"])
@pytest.mark.parametrize("who", STRANGERS)
def test_no_message_of_a_stranger_is_read(who: str, keyed: bool, tmp_path: Path) -> None:
    if keyed:
        files.create(tmp_path / "service.json", "tcp://127.0.0.1:1")
    keys = str(tmp_path / "service.json") if keyed else None
    service = ServiceEnd("tcp://127.0.0.1:*", LIMITS, keys, SocketOptions(handshake_ms=500))
    with socket.create_connection(("127.0.0.1", int(service.endpoint.rpartition(":")[2]))) as stranger:
        stranger.sendall(STRANGERS[who])
        got = until_closed(stranger)
    assert b"READY" not in got and b"welcome" not in got
    assert service.receive(0.1) == []
    service.close()


def test_a_page_s_bytes_are_a_message_where_nobody_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """That the bytes above are what they are meant to be."""
    monkeypatch.setattr("rollout.transport.sockets.require", lambda sock: None)
    service = ServiceEnd("tcp://127.0.0.1:*", LIMITS)
    heard: list[bytes] = []
    with socket.create_connection(("127.0.0.1", int(service.endpoint.rpartition(":")[2]))) as page:
        page.sendall(STRANGERS["a web page"])
        until(lambda: heard.extend(bytes(frames[0]) for _, frames in service.receive(0.1) if frames) or ASKED[1] in heard)
    assert ASKED[0] in heard
    service.close()


def test_this_user_by_hand_gets_in(service: ServiceEnd) -> None:
    with by_hand.connected(service.endpoint) as connection:
        connection.sendall(b"\x00\x05hello")
        (received,) = service.receive(WAIT)
    assert bytes(received[1][0]) == b"hello"


# clients


@pytest.mark.parametrize(
    "endpoint", ["tcp://127.0.0.1:*", "tcp://localhost:0", "tcp://[::1]:*", "ipc://{}/s", "ipc://@rollout-{}"]
)
def test_a_client_of_this_user_gets_in_without_being_asked(endpoint: str, tmp_path: Path) -> None:
    endpoint = endpoint.format(tmp_path if "@" not in endpoint else os.getpid())
    service = ServiceEnd(endpoint, LIMITS)
    file = cookie_file(service.endpoint)
    assert file.stat().st_mode & 0o777 == 0o600 and (file.parent == tmp_path or file.parent.stat().st_mode & 0o777 == 0o700)
    for address in (service.endpoint, service.endpoint.replace("127.0.0.1", "localhost")):
        client = ClientEnd(address, LIMITS)
        assert arrives(service, client)
        client.close()
    service.close()
    assert not file.exists()


def test_a_client_without_the_secret_is_told_what_it_lacks(service: ServiceEnd, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has another home, or is in a container."""
    for setup, why in (
        (lambda path: None, "there is no such file"),
        (lambda path: path.write_bytes(b"a" * 64), "not this user's alone"),
        (lambda path: (path.write_bytes(b"a" * 64), path.chmod(0o600)), "is not its secret"),
        (lambda path: (path.write_bytes(b"rubbish"), path.chmod(0o600)), "holds no secret"),
        (lambda path: (path.unlink(), path.symlink_to("/etc/hostname")), "cannot be read"),
    ):
        with monkeypatch.context() as patch:
            patch.setenv(cookie.FOLDER_VARIABLE, str(Path(os.environ[cookie.FOLDER_VARIABLE]).parent / "other"))
            cookie_file(service.endpoint).parent.mkdir(exist_ok=True)
            setup(cookie_file(service.endpoint))
            client = ClientEnd(service.endpoint, LIMITS)
            assert not arrives(service, client)
            assert why in client.refusal and str(cookie_file(service.endpoint)) in client.refusal
            assert "ROLLOUT_COOKIES" in client.refusal and "keys" in client.refusal
            client.close()


def test_a_client_that_was_refused_comes_in_once_the_file_is_right(service: ServiceEnd) -> None:
    file = cookie_file(service.endpoint)
    right = file.read_text()
    file.write_text("0" * 64)
    client = ClientEnd(service.endpoint, LIMITS)
    assert not arrives(service, client)
    file.write_text(right)
    until(lambda: client.receive(0.01) == [] and client.connected)
    assert arrives(service, client)
    client.close()


def test_clients_find_the_next_service_of_an_address() -> None:
    """It has another secret; the one before was killed, and its file is there."""
    first = ServiceEnd("tcp://127.0.0.1:*", LIMITS)
    file = cookie_file(first.endpoint)
    client = ClientEnd(first.endpoint, LIMITS)
    assert arrives(first, client)
    old = file.read_text()
    first.close()
    file.write_text(old)  # as a SIGKILL leaves it
    file.chmod(0o600)
    until(lambda: client.receive(0.01) == [] and not client.connected)
    second = ServiceEnd(first.endpoint, LIMITS)
    assert file.read_text() != old
    assert arrives(second, client)
    client.close()
    second.close()


def test_a_refusal_that_is_reported_late_ends_nothing(service: ServiceEnd) -> None:
    """What libzmq reports of the connection before comes when the new secret is shown already; twice would be a refusal."""
    client = ClientEnd(service.endpoint, LIMITS)
    try:
        assert arrives(service, client)
        client.connected = False
        client._refused()
        assert not client.refusal and arrives(service, client)
        client._refused()
        client._refused()
        assert "is not its secret" in client.refusal
    finally:
        client.close()


def test_a_client_may_be_there_first() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    client = ClientEnd(f"tcp://127.0.0.1:{port}", LIMITS)
    client.receive(0.0)
    service = ServiceEnd(f"tcp://127.0.0.1:{port}", LIMITS)
    assert arrives(service, client)
    client.close()
    service.close()


# the file


def test_each_service_has_its_own_secret(service: ServiceEnd) -> None:
    other = ServiceEnd("tcp://127.0.0.1:*", LIMITS)
    assert cookie_file(service.endpoint).read_text() != cookie_file(other.endpoint).read_text()
    for end in (service, other):
        client = ClientEnd(end.endpoint, LIMITS)
        assert arrives(end, client)
        client.close()
    other.close()


def test_who_cannot_have_the_port_leaves_the_other_s_secret(service: ServiceEnd) -> None:
    before = cookie_file(service.endpoint).read_text()
    with pytest.raises(ValueError, match="in use"):
        ServiceEnd(service.endpoint, LIMITS)
    assert cookie_file(service.endpoint).read_text() == before


def test_a_file_that_was_removed_is_written_again(service: ServiceEnd, where: Path) -> None:
    file = cookie_file(service.endpoint)
    shutil.rmtree(where)
    until(file.exists)
    client = ClientEnd(service.endpoint, LIMITS)
    assert arrives(service, client)
    client.close()


@pytest.mark.parametrize("kind", ["dangling", "link", "file", "secret"])
def test_whatever_has_the_name_of_a_secret_is_told_once(
    service: ServiceEnd, where: Path, kind: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It stays, and new clients are refused; once it was moved away, the file is written again."""
    file = cookie_file(service.endpoint)
    other = where / "other"
    if kind in ("dangling", "link"):
        other.symlink_to(where / ("nowhere" if kind == "dangling" else "mine"))
        (where / "mine").touch()
    else:
        other.write_bytes(b"0" * 64 if kind == "secret" else b"mine")
    other.replace(file)
    until(lambda: "move that away, and the file is written again" in caplog.text)
    looks: list[int] = []
    reload = cookie.Cookie.reload
    monkeypatch.setattr(cookie.Cookie, "reload", lambda self: (reload(self), looks.append(1)))
    until(lambda: len(looks) >= 3)
    assert caplog.text.count("move that away") == 1 and (kind != "secret" or file.read_bytes() == b"0" * 64)
    file.unlink()
    until(lambda: file.exists() and "written again path" in caplog.text)


KILLED = """
import os, signal
from rollout.engine.values import Limits
from rollout.transport.sockets import ServiceEnd
end = ServiceEnd("tcp://127.0.0.1:*", Limits())
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_files_of_killed_services_are_removed_and_no_others(service: ServiceEnd, where: Path) -> None:
    subprocess.run([sys.executable, "-c", KILLED], cwd=ROOT, timeout=WAIT)
    assert len(list(where.iterdir())) == 2
    other = ServiceEnd("tcp://127.0.0.1:*", LIMITS)
    assert {*where.iterdir()} == {cookie_file(service.endpoint), cookie_file(other.endpoint)}
    other.close()


def test_a_folder_that_others_can_use_is_refused(where: Path) -> None:
    where.mkdir()
    where.chmod(0o755)
    with pytest.raises(ValueError, match="chmod 700"):
        ServiceEnd("tcp://127.0.0.1:*", LIMITS)


def test_a_secret_that_cannot_be_written_names_its_file(monkeypatch: pytest.MonkeyPatch, where: Path) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(ValueError, match=f"(?s){where}.*No space left.*ROLLOUT_COOKIES.*keys"):
        ServiceEnd("tcp://127.0.0.1:*", LIMITS)
    monkeypatch.undo()
    assert not list(where.iterdir())


def test_a_user_without_a_home_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def nowhere() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv(cookie.FOLDER_VARIABLE)
    monkeypatch.setattr(Path, "home", nowhere)
    for end in (ServiceEnd, ClientEnd):
        with pytest.raises(ValueError, match="ROLLOUT_COOKIES"):
            end("tcp://127.0.0.1:1", LIMITS) if end is ClientEnd else end("tcp://127.0.0.1:*", LIMITS)


def test_loopbacks_that_share_a_home_have_files_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    here = cookie_file("tcp://127.0.0.1:5655")
    monkeypatch.setattr(cookie, "_loopback", lambda: "other")
    assert cookie_file("tcp://127.0.0.1:5655") != here


def test_the_first_refused_is_in_the_log_and_the_last_as_well(service: ServiceEnd, caplog: pytest.LogCaptureFixture) -> None:
    with zmq.Context() as context:
        for _ in range(5):
            stranger = context.socket(zmq.DEALER)
            stranger.plain_username, stranger.plain_password = b"x", b"wrong"
            monitor = stranger.get_monitor_socket(zmq.EVENT_HANDSHAKE_FAILED_AUTH)
            stranger.connect(service.endpoint)
            assert monitor.poll(1000 * WAIT)
            stranger.disable_monitor()
            monitor.close(linger=0)
            stranger.close(linger=0)
    service.close()
    lines = [record.getMessage() for record in caplog.records if "connections refused" in record.getMessage()]
    assert len(lines) == 2 and "refused=1" in lines[0] and "new=4 refused=5" in lines[1] and "127.0.0.1" in lines[1]


def test_a_client_shows_nothing_where_there_is_nothing() -> None:
    """libzmq takes no empty password."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        ClientCookie("tcp://127.0.0.1:9").show(dealer)
        assert dealer.plain_password == cookie.NOTHING.encode()
