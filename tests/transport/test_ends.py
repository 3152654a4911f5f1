"""The two ends: what holds for sockets and for loopback alike, and what only sockets have."""

from __future__ import annotations

import errno
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from rollout.engine.values import Limits
from rollout.transport import sockets
from rollout.transport.keys.cookie import ClientCookie
from rollout.transport.loopback import LoopbackClient, LoopbackService
from rollout.transport.sockets import QUEUED_MESSAGES, ClientEnd, ServiceEnd, check_bind
from tests.support.waiting import until

ROOT = Path(__file__).parents[2]
LIMITS = Limits(max_frames=4, max_frame_bytes=100_000, max_header_bytes=1000)


class Pair:
    """A service end and its clients, closed at the end of the test."""

    def __init__(self, sockets: bool) -> None:
        self.service = ServiceEnd("tcp://127.0.0.1:*", LIMITS) if sockets else LoopbackService()
        self.sockets = sockets
        self.clients: list[ClientEnd | LoopbackClient] = []

    def connect(self) -> ClientEnd | LoopbackClient:
        service = self.service
        client = service.connect() if isinstance(service, LoopbackService) else ClientEnd(service.endpoint, LIMITS)
        self.clients.append(client)
        until(lambda: client.receive(0.01) == [] and client.connected)
        return client

    def introduced(self) -> tuple[bytes, ClientEnd | LoopbackClient]:
        """A client and the name that the service has for its connection."""
        client = self.connect()
        assert client.send([b"hello"])
        ((peer, frames),) = self.service.receive(60)
        assert [bytes(frame) for frame in frames] == [b"hello"]
        return peer, client


@pytest.fixture(params=[True, False], ids=["sockets", "loopback"])
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    pair = Pair(request.param)
    yield pair
    for client in pair.clients:
        client.close()
    pair.service.close()


def test_a_service_that_waits_is_woken(pair: Pair) -> None:
    for _ in range(3):
        threading.Timer(0.05, pair.service.wake).start()
        began = time.monotonic()
        assert pair.service.receive(60.0) == [] and time.monotonic() - began < 50, "it waited for a message"
    pair.service.wake()
    assert pair.service.receive(60.0) == pair.service.receive(0.0) == []


def test_there_and_back(pair: Pair) -> None:
    (a, first), (b, second) = pair.introduced(), pair.introduced()
    assert a != b
    assert pair.service.send(b, [b"to second", b"", bytes(3)])
    assert [[bytes(f) for f in frames] for frames in second.receive(60)] == [[b"to second", b"", bytes(3)]]
    assert first.receive(0) == []


def test_a_connection_that_has_ended_is_not_reached(pair: Pair) -> None:
    (peer, client), (other, _) = pair.introduced(), pair.introduced()
    assert pair.service.reaches(peer, [b"there?"])
    assert [[bytes(f) for f in frames] for frames in client.receive(60)] == [[b"there?"]]
    while pair.service.send(peer, [b"one that does not read"]):
        pass
    assert pair.service.reaches(peer, [b"there?"]), "it has no room, and has not ended"
    client.close()
    until(lambda: pair.service.receive(0.01) == [] and not pair.service.reaches(peer, [b"there?"]))
    assert pair.service.reaches(other, [b"there?"]) and not pair.service.send(peer, [b"x"])


def test_nobody_to_receive_from(pair: Pair) -> None:
    started = time.monotonic()
    assert pair.service.receive(0.05) == []
    assert time.monotonic() - started > 0.04
    assert not pair.service.send(b"nobody", [b"x"])


def test_order_is_kept_and_nothing_is_dropped_when_nobody_reads(pair: Pair) -> None:
    """Each way is filled until `send` says no; then everything that it took comes out, in order."""
    peer, client = pair.introduced()
    frame = bytes(50_000)
    for send, receive in (
        (lambda head: pair.service.send(peer, [head, frame]), lambda: client.receive(0.2)),
        (lambda head: client.send([head, frame]), lambda: [frames for _, frames in pair.service.receive(0.2)]),
    ):
        taken = 0
        while send(b"%d" % taken):
            taken += 1
            assert taken < 5000, "it takes any number"
        assert taken >= QUEUED_MESSAGES // 2
        came: list[int] = []
        until(lambda: came.extend(int(bytes(f[0])) for f in receive()) or len(came) >= taken)  # noqa: B023
        assert came == list(range(taken))
        until(lambda: send(b"0"))  # noqa: B023  there is room again


def test_wake_ends_a_wait(pair: Pair) -> None:
    client = pair.connect()
    threading.Timer(0.05, client.wake).start()
    assert client.receive(1000) == [], "longer than a test may take"
    client.close()
    client.wake()  # harmless


def test_a_client_that_left_is_not_sent_to(pair: Pair) -> None:
    peer, client = pair.introduced()
    client.close()
    until(lambda: not pair.service.send(peer, [b"x"]))


def test_the_service_leaves(pair: Pair) -> None:
    peer, client = pair.introduced()
    assert pair.service.send(peer, [b"last words"])
    assert [bytes(frames[0]) for frames in client.receive(60)] == [b"last words"]
    pair.service.close(linger=60)
    until(lambda: client.receive(0.1) == [] and not client.connected)
    until(lambda: not client.send([b"x"]))


def test_no_connection_to_a_closed_loopback() -> None:
    service = LoopbackService()
    service.close()
    with pytest.raises(ConnectionError):
        service.connect()


# sockets only


@pytest.mark.parametrize(
    ("endpoint", "bound"),
    [
        ("tcp://127.0.0.1:5655", "tcp://127.0.0.1:5655"),
        ("tcp://127.0.0.1:*", "tcp://127.0.0.1:*"),
        ("tcp://127.8.9.1:0", "tcp://127.8.9.1:0"),
        ("tcp://localhost:*", "tcp://127.0.0.1:*"),
        ("tcp://[::1]:*", "tcp://[::1]:*"),
        ("ipc:///tmp/x", "ipc:///tmp/x"),
    ],
)
def test_endpoints_that_only_this_host_reaches(endpoint: str, bound: str) -> None:
    assert check_bind(endpoint) == bound


@pytest.mark.parametrize(
    "endpoint",
    [
        "tcp://0.0.0.0:5655", "tcp://*:5655", "tcp://[::]:5655", "tcp://10.0.0.1:5655", "tcp://example.com:5655", "tcp://eth0:1",
        "tcp://127.0.0.1.example.com:1", "tcp://[::ffff:10.0.0.1]:1", "tcp://127.0.0.1;10.0.0.1:1", "tcp://:1",
    ],
)  # fmt: skip
def test_endpoints_that_others_reach_are_refused_with_the_reason(endpoint: str) -> None:
    with pytest.raises(ValueError, match="can be reached from other hosts, and there are no keys"):
        ServiceEnd(endpoint, LIMITS)


@pytest.mark.parametrize("endpoint", ["", "127.0.0.1:1", "udp://127.0.0.1:1", "inproc://x", "ipc://", "tcp://127.0.0.1"])
def test_endpoints_that_are_none(endpoint: str) -> None:
    with pytest.raises(ValueError, match="must be tcp://"):
        ServiceEnd(endpoint, LIMITS)


@pytest.mark.parametrize("port", ["65536", "-1", "x", "١", ""])
def test_ports_that_are_none(port: str) -> None:
    with pytest.raises(ValueError, match="the port must be 0 to 65535"):
        ServiceEnd(f"tcp://127.0.0.1:{port}", LIMITS)


def test_a_port_in_use() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        with pytest.raises(ValueError, match=r"cannot listen at tcp://127.0.0.1:\d+: the port is in use, .* choose another"):
            ServiceEnd(f"tcp://127.0.0.1:{taken.getsockname()[1]}", LIMITS)


@pytest.mark.parametrize("address", ["", "127.0.0.1:5", "inproc://x", "tcp://127.0.0.1", "tcp://127.0.0.1:x", "http://a:1"])
def test_addresses_that_are_none(address: str) -> None:
    with pytest.raises(ValueError, match="address"):
        ClientEnd(address, LIMITS)


def test_ipc(tmp_path: Path) -> None:
    service = ServiceEnd(f"ipc://{tmp_path}/s", LIMITS)
    client = ClientEnd(service.endpoint, LIMITS)
    until(lambda: client.receive(0.05) == [] and client.connected)
    assert client.send([b"x"])
    ((peer, _),) = service.receive(60)
    assert service.reaches(peer, [b"there?"])
    client.close()
    until(lambda: service.receive(0.01) == [] and not service.reaches(peer, [b"there?"]))
    service.close()


def test_nothing_is_queued_for_a_connection_that_does_not_exist() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    client = ClientEnd(f"tcp://127.0.0.1:{port}", LIMITS)
    assert client.receive(0.01, sending=True) == [] and not client.connected
    assert not client.send([b"x"])
    service = ServiceEnd(f"tcp://127.0.0.1:{port}", LIMITS)
    until(lambda: client.receive(0.05) == [] and client.connected)
    assert client.connections == 1 and client.send([b"y"])
    ((_, frames),) = service.receive(60)
    assert bytes(frames[0]) == b"y"
    client.close()
    service.close()


SERVICE_THAT_READS_LATE = """
import socket, struct, time
from rollout.engine.values import Limits
from tests.support.by_hand import connected
from rollout.transport.sockets import ServiceEnd

end = ServiceEnd("tcp://127.0.0.1:*", Limits())
ping = b"\\x04\\x09\\x04PING\\x00\\x00\\x07\\x07"
raw = connected(end.endpoint)
raw.sendall((b"\\x00\\xc8" + b"x" * 200 + ping) * 3000)
raw.settimeout(1.0)
try:
    while raw.recv(1 << 16):
        pass
except TimeoutError:
    pass  # it has read what it reads
raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
raw.close()  # resets the connection
time.sleep(0.5)
while end.receive(0.2):
    pass
print("alive")
"""
CLIENT_THAT_READS_LATE = """
import socket, struct, time, zmq
from rollout.engine.values import Limits
from rollout.transport import sockets
from rollout.transport.keys.cookie import Cookie, require
from rollout.transport.keys.authenticator import KeyAuthenticator

context = zmq.Context()
service = context.socket(zmq.ROUTER)
require(service)
cookie = Cookie()
door = KeyAuthenticator(context, cookie)
service.setsockopt(zmq.SNDHWM, 0)
service.setsockopt(zmq.LINGER, 300)
service.bind("tcp://127.0.0.1:*")
cookie.publish(service.getsockopt_string(zmq.LAST_ENDPOINT))
client = sockets.ClientEnd(service.getsockopt_string(zmq.LAST_ENDPOINT), Limits(), sockets.SocketOptions(heartbeat_ms=100))
while not client.connected:
    client.receive(0.05)
assert client.send([b"hello"]) and service.poll(20_000)
peer, _ = service.recv_multipart()
for _ in range(2000):
    service.send_multipart([peer, b"x" * 200])
time.sleep(0.5)
door.close()
cookie.close()
service.close()
context.term()
time.sleep(1.0)
deadline = time.monotonic() + 20
while client.connected and time.monotonic() < deadline:
    client.receive(0.2)
print("alive")
"""


FEW_DESCRIPTORS = """
import os, resource, sys, zmq
from rollout.engine.values import Limits
from rollout.transport import sockets

def ends(spare):
    limit = len(os.listdir("/proc/self/fd")) - 1 + spare
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    held = []
    try:
        while True:
            held.append(sockets.ClientEnd("tcp://127.0.0.1:9", Limits()))
    except OSError:
        os._exit(len(held))

if sys.argv[1] == "later":
    held = sockets.ClientEnd("tcp://127.0.0.1:9", Limits())
    limit = len(os.listdir("/proc/self/fd")) - 1
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    large = zmq.Frame(bytes(1 << 20), copy=False)
    raise SystemExit(print(len(large)))
if sys.argv[1] == "unchecked":
    sockets.check_descriptors = lambda count: None
for spare in range(40):
    if not (pid := os.fork()):
        ends(spare)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""


def few_descriptors(how: str) -> list[int]:
    """Return how many ends a process opens with 0, 1, 2 … descriptors to spare; negative: the signal that ended it."""
    words = [sys.executable, "-c", FEW_DESCRIPTORS, how]
    ended = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=120)
    return [int(line) for line in ended.stdout.split()]


def test_descriptors_that_others_take_meanwhile_are_the_same_error(monkeypatch: pytest.MonkeyPatch) -> None:
    make = zmq.Context.socket

    def none_left(context: zmq.Context[zmq.Socket[bytes]], kind: int) -> zmq.Socket[bytes]:
        if kind == zmq.DEALER:
            raise zmq.ZMQError(errno.EMFILE)
        return make(context, kind)

    monkeypatch.setattr(zmq.Context, "socket", none_left)
    with pytest.raises(OSError, match="Too many open files") as raised:
        ClientEnd("tcp://127.0.0.1:1", LIMITS)
    assert raised.value.errno == errno.EMFILE


def test_an_end_without_descriptors_is_an_error() -> None:
    """Never the end of the process, and never an end that is half made."""
    assert few_descriptors("checked") == [int(spare >= sockets.END_FDS) for spare in range(40)]
    assert -signal.SIGABRT in few_descriptors("unchecked"), "libzmq bears it: the check may go"


def test_an_end_needs_no_descriptor_for_its_first_large_frame() -> None:
    """pyzmq makes a context of its own for what is sent without a copy."""
    assert few_descriptors("later") == [1 << 20]


@pytest.mark.parametrize("script", [SERVICE_THAT_READS_LATE, CLIENT_THAT_READS_LATE], ids=["service", "client"])
def test_a_peer_that_sends_much_and_goes_does_not_end_the_process(script: str) -> None:
    """A process of its own, since what it guards against is an abort inside libzmq: messages wait, pings among them, nobody
    reads, the peer resets the connection."""
    ended = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert ended.returncode != -signal.SIGABRT, ended.stderr
    assert (ended.returncode, ended.stdout) == (0, "alive\n"), ended.stderr


def test_an_oversized_frame_costs_its_sender_the_connection_and_nobody_else() -> None:
    service, pair = ServiceEnd("tcp://127.0.0.1:*", LIMITS), Pair.__new__(Pair)
    pair.service, pair.sockets, pair.clients = service, True, []
    peer, victim = pair.introduced()
    big = ClientEnd(service.endpoint, Limits(max_frame_bytes=10**9))
    until(lambda: big.receive(0.05) == [] and big.connected)
    assert big.send([bytes(LIMITS.max_frame_bytes)])  # the longest that is allowed
    assert len(service.receive(60)) == 1
    assert big.send([bytes(LIMITS.max_frame_bytes + 1)])
    until(lambda: big.receive(0.05) == [] and big.connections == 2)  # thrown out, and back
    assert service.receive(0.05) == []
    assert victim.connections == 1 and service.send(peer, [b"x"])
    for end in (big, victim, service):
        end.close()


def test_too_many_frames_reach_the_decoder_as_one_too_many() -> None:
    service = ServiceEnd("tcp://127.0.0.1:*", LIMITS)
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        ClientCookie(service.endpoint).show(dealer)
        dealer.connect(service.endpoint)
        dealer.send_multipart([b"x"] * 5000)
        dealer.send_multipart([b"after"])
        received: list[list[bytes]] = []
        until(lambda: received.extend([bytes(f) for f in frames] for _, frames in service.receive(0.1)) or len(received) == 2)
        dealer.close(linger=0)
    assert [len(frames) for frames in received] == [LIMITS.max_frames + 1, 1]
    service.close()
