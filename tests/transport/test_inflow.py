"""What waits at the service to be received is bounded, whatever libzmq would take in."""

from __future__ import annotations

import gc
import os
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import zmq

from rollout.engine.values import Limits
from rollout.transport import receive_limit, sockets
from rollout.transport.keys.cookie import ClientCookie
from rollout.transport.sockets import ClientEnd, ServiceEnd, SocketOptions
from tests.support.by_hand import connected
from tests.support.waiting import until

LIMITS = Limits(max_frame_bytes=100_000, max_header_bytes=1000)
BOUND = 1 << 20
MOST = 64 << 20
"""that a peer sends before it is found that nothing ends it"""


@pytest.fixture
def service(request: pytest.FixtureRequest) -> Iterator[ServiceEnd]:
    """With the bound of all connections that the test is parametrized by."""
    total = getattr(request, "param", receive_limit.TOTAL_BYTES)
    end = ServiceEnd("tcp://127.0.0.1:*", LIMITS, options=SocketOptions(waiting_bytes=BOUND, total_bytes=total))
    yield end
    end.close()


def connect(service: ServiceEnd) -> ClientEnd:
    client = ClientEnd(service.endpoint, Limits())
    until(lambda: client.receive(0.01) == [] and client.connected)
    return client


def sent_until_the_end(connection: socket.socket, frames: bytes, most: int = MOST) -> int:
    """Bytes that went out before the other end closed the connection; `most` if it did not."""
    sent = 0
    try:
        while sent < most:
            connection.sendall(frames)
            sent += len(frames)
    except OSError:
        pass
    return sent


@pytest.mark.parametrize(
    "frame", [b"\x03" + struct.pack(">Q", 50_000) + bytes(50_000), b"\x01\x01x" * 10_000], ids=["long", "short"]
)
def test_a_message_without_an_end_ends_its_connection(service: ServiceEnd, frame: bytes) -> None:
    other = connect(service)
    with connected(service.endpoint) as connection:
        assert sent_until_the_end(connection, frame) < MOST
    assert other.send([b"x"]) and len(service.receive(60)) == 1 and other.connections == 1
    other.close()


def test_without_the_watch_it_would_be_taken_in(service: ServiceEnd, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(receive_limit.Inflow, "_enforce", lambda self: None)
    with connected(service.endpoint) as connection:
        assert sent_until_the_end(connection, b"\x03" + struct.pack(">Q", 50_000) + bytes(50_000)) >= MOST


def test_whole_messages_that_nobody_takes_end_their_connection(service: ServiceEnd) -> None:
    flood = connect(service)
    deadline = time.monotonic() + 60
    while flood.connections == 1 and time.monotonic() < deadline:
        flood.send([bytes(900), bytes(90_000)])
        flood.receive(0)
    assert flood.connections == 2
    flood.close()


def test_what_is_taken_does_not_count(service: ServiceEnd) -> None:
    """Many times the bound, by a peer that is never far ahead."""
    client = connect(service)
    for _ in range(20):
        for _ in range(5):
            until(lambda: client.send([bytes(900), bytes(90_000)]))
        came = 0
        while came < 5:
            came += len(service.receive(60, 5 - came))
    assert client.receive(0.1) == [] and client.connections == 1
    client.close()


def test_more_is_expected_by_agreement(service: ServiceEnd) -> None:
    service.expect(MOST)
    with connected(service.endpoint) as connection:
        assert sent_until_the_end(connection, (b"\x03" + struct.pack(">Q", 50_000) + bytes(50_000)) * 100) >= 3 * BOUND


@pytest.mark.parametrize("service", [BOUND], indirect=True)
def test_many_connections_share_a_bound(service: ServiceEnd) -> None:
    """Each is within its own."""
    ended, quiet = 0, connect(service)
    connections = [connected(service.endpoint) for _ in range(4)]
    for connection in connections:
        connection.sendall((b"\x03" + struct.pack(">Q", 50_000) + bytes(50_000)) * 10)
    for connection in connections:
        connection.settimeout(2.0)
        try:
            while connection.recv(1 << 16):
                pass
            ended += 1
        except TimeoutError:
            pass
        except OSError:
            ended += 1
        connection.close()
    assert ended and quiet.send([b"x"]) and len(service.receive(60)) == 1 and quiet.connections == 1
    quiet.close()


def test_the_threads_end_with_their_service() -> None:
    before = threading.active_count()
    end = ServiceEnd("tcp://127.0.0.1:*", LIMITS)
    assert threading.active_count() == before + 2  # and the door's
    end.close()
    end.close()
    assert threading.active_count() == before


def test_a_peer_that_was_gone_when_it_was_accepted() -> None:
    """libzmq does not know its address then, and tells no descriptor of its messages."""
    with zmq.Context() as context:
        there, here = (context.socket(zmq.PAIR) for _ in range(2))
        there.bind("inproc://x")
        here.connect("inproc://x")
        here.send(b"x")
        assert sockets._descriptor(there.recv(copy=False)) == -1
        there.close()
        here.close()


def test_nobody_watches_ipc(tmp_path: object) -> None:
    """As docs/limits.md says: the kernel does not count there."""
    end = ServiceEnd(f"ipc://{tmp_path}/s", LIMITS)
    end.expect(5)
    end.close()


def test_a_peer_may_name_itself(service: ServiceEnd) -> None:
    """Two connections of one name: the second one is not heard, and may not fill the memory."""
    with zmq.Context() as context:
        first, second = (context.socket(zmq.DEALER) for _ in range(2))
        for dealer in (first, second):
            dealer.linger = 0
            dealer.routing_id = b"same"
            dealer.sndhwm = 10
            ClientCookie(service.endpoint).show(dealer)
        first.connect(service.endpoint)
        first.send(b"x")
        assert len(service.receive(60)) == 1
        second.connect(service.endpoint)
        monitor = second.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        deadline = time.monotonic() + 60
        while not monitor.poll(0) and time.monotonic() < deadline:
            try:
                second.send(bytes(90_000), zmq.NOBLOCK)
            except zmq.Again:
                time.sleep(0.001)
        assert monitor.poll(0)
        second.disable_monitor()
        monitor.close()
        first.close()
        second.close()


@pytest.mark.parametrize("what", ["a file", "a socket that is no TCP", "nothing"])
def test_a_number_that_is_of_something_else_by_now_leaves_no_descriptor(what: str, tmp_path: Path) -> None:
    """A connection that has ended before the watch heard of it: its number is another file's, or nobody's."""
    watch = object.__new__(receive_limit.Inflow)
    watch._lock, watch._connections, watch._early, watch._ended_queues = threading.Lock(), {}, {}, {}
    with open(tmp_path / "file", "w") as file, socket.socket(socket.AF_UNIX) as other:
        number = {"a file": file.fileno(), "a socket that is no TCP": other.fileno(), "nothing": 1 << 19}[what]
        gc.collect()  # of what other tests have left open
        before = set(os.listdir("/proc/self/fd"))
        for _ in range(20):
            watch._accepted(number)
        gc.collect()
        assert set(os.listdir("/proc/self/fd")) == before and not watch._connections


MESSAGE = b"\x01\x01x" + b"\x02" + struct.pack(">Q", 50_000) + bytes(50_000)
"""two frames, complete"""


def flood_again_and_again(service: ServiceEnd, rounds: int) -> int:
    """Send whole messages until the connection is ended, 8 bounds at most, and connect anew when the watch has heard of its
    end, however late, while the service takes a message a round. Returns the bytes that then wait in libzmq."""
    inflow = service._inflow
    assert inflow is not None
    for _ in range(rounds):
        with suppress(OSError), connected(service.endpoint, timeout=0.5) as connection:
            until(lambda: inflow._connections)
            sent_until_the_end(connection, MESSAGE * 20, 8 * BOUND)
        until(lambda: not inflow._connections)
        service.receive(0, 1)
    waiting = 0
    while received := service.receive(0.5):
        waiting += sum(len(frame) for _, frames in received for frame in frames)
    return waiting


@pytest.mark.parametrize("service", [4 * BOUND], indirect=True)
def test_what_ended_connections_have_left_is_bounded(service: ServiceEnd) -> None:
    """A peer that is cut and connects anew, again and again, under the same descriptor's number."""
    assert flood_again_and_again(service, 24) < 14 * BOUND
    client = connect(service)
    assert client.send([b"x"]) and len(service.receive(60)) == 1 and client.connections == 1
    client.close()


@pytest.mark.parametrize("service", [4 * BOUND], indirect=True)
def test_if_all_were_let_in_it_would_grow(service: ServiceEnd, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(receive_limit.Inflow, "is_full", False)
    assert flood_again_and_again(service, 60) > 24 * BOUND


def queue(waits: int) -> receive_limit.ReceiveQueue:
    """A connection on which so many bytes wait."""
    made = object.__new__(receive_limit.ReceiveQueue)
    made.peer, made.taken, made.left, made.cut, made.over = None, 0, 0, False, False
    made.socket = socket.socket()
    made.waits = lambda: waits - made.taken  # type: ignore[method-assign]
    return made


def test_bytes_are_counted_for_the_connection_that_sent_them() -> None:
    """Also where the next connection has the number of one that ended and left bytes behind."""
    inflow = object.__new__(receive_limit.Inflow)
    inflow._lock, inflow._early = threading.Lock(), {}
    inflow._connections, inflow._ended_queues = {7: queue(1000)}, {}
    inflow.taken(7, b"old", 100)
    inflow._ended(7)
    assert inflow._left() == 900
    inflow._connections[7] = new = queue(500)
    inflow.taken(7, b"old", 300)
    inflow.taken(7, b"new", 50)
    assert (inflow._left(), new.waits()) == (600, 450)
    inflow.taken(7, b"old", 600)
    inflow.taken(7, b"new", 50)
    assert (inflow._left(), new.waits()) == (0, 400)
    new.socket.close()
