"""The two ends over ZeroMQ: ROUTER (service) and DEALER (client). `transport.loopback` has the same two in one process.

    ServiceEnd.receive(timeout, most) -> [(peer, frames)]    ClientEnd.receive(timeout, sending) -> [frames]
    ServiceEnd.send(peer, frames) -> bool                    ClientEnd.send(frames) -> bool
    ServiceEnd.endpoint, expect(bytes), close(linger)        ClientEnd.connected, connections, wake(), close(linger)

`send` returns False where the message cannot be taken now (queue full, peer gone); it never blocks and never drops. A peer is
the routing id that ROUTER made up for one connection: it names a connection, never a client. Sessions do that.

No receive high-water mark: libzmq 4.3.5 stops reading a connection at the mark, ends its polling when the peer resets it, and
then aborts the whole process (`Assertion failed: !_io_error`) at the next ping, its own (HEARTBEAT_IVL) or one that the peer
left in the buffer. Without a mark it never stops reading. The client alone has ZMTP heartbeats; what waits at the service is
bounded by `transport.inflow`, what waits at the client by the service, which keeps count of what was not acked.

Bounds: one frame by MAXMSGSIZE (checked by libzmq before it allocates; a longer one costs the sender its connection), messages
not sent yet by the send high-water mark, bytes that wait to be received by `transport.inflow`, frames of a message by
Limits.max_frames once it is whole.

When a connection ends, what the client has not yet received from it is lost, even if it has arrived: whoever must know that the
other end has something waits for an answer before it closes.
"""

from __future__ import annotations

import ipaddress
import socket
from typing import Protocol

import zmq
from zmq.utils.monitor import recv_monitor_message

from engine.types import Limits
from transport.frames import Frame
from transport.inflow import FRAME_OVERHEAD, Inflow

QUEUED_MESSAGES = 256
"""high-water mark of one connection, each way"""
BATCH = 512
"""messages taken by one `receive`, so that a flood cannot keep the loop from stepping"""
HANDSHAKE_MS = 3000
CLIENT_HEARTBEAT_MS, CLIENT_SILENCE_MS = 1000, 3000
"""the client's ZMTP pings are answered by the service's libzmq I/O thread, so a long engine step is not silence; a stopped or
dead process is"""
KEEPALIVE_S = 10
"""TCP's own probes: a connection whose machine is gone ends after some 40 s"""


class ServiceTransport(Protocol):
    """What the service needs of its end."""

    endpoint: str

    def receive(self, timeout: float, most: int = BATCH) -> list[tuple[bytes, list[Frame]]]: ...
    def send(self, peer: bytes, frames: list[Frame]) -> bool: ...
    def expect(self, extra_bytes: int) -> None: ...
    def close(self, linger: float = 0.0) -> None: ...


class ClientTransport(Protocol):
    """What the client needs of its end."""

    address: str
    connected: bool
    connections: int

    def receive(self, timeout: float, sending: bool = False) -> list[list[Frame]]: ...
    def send(self, frames: list[Frame]) -> bool: ...
    def wake(self) -> None: ...
    def close(self, linger: float = 0.0) -> None: ...


def check_bind(endpoint: str) -> str:
    """Return the endpoint as libzmq takes it. Raises ValueError with the reason if others than this host could reach it."""
    if endpoint.startswith("ipc://") and len(endpoint) > len("ipc://"):
        return endpoint
    scheme, _, rest = endpoint.partition("://")
    host, colon, port = rest.rpartition(":")
    if scheme != "tcp" or not colon:
        raise ValueError(f"endpoint {endpoint!r}: must be tcp://127.0.0.1:PORT, tcp://[::1]:PORT or ipc://PATH")
    if port != "*" and not (port.isascii() and port.isdigit() and int(port) <= 65535):
        raise ValueError(f"endpoint {endpoint!r}: the port must be 0 to 65535, or * for any free one")
    host = "127.0.0.1" if host == "localhost" else host
    try:
        loopback = ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        loopback = False
    if not loopback:
        raise ValueError(
            f"endpoint {endpoint!r} can be reached from other hosts, and this version has no keys to tell clients apart; "
            "bind to loopback (tcp://127.0.0.1:PORT) or ipc://PATH and reach it from elsewhere through an SSH tunnel"
        )
    return f"tcp://{host}:{port}"


def _context(endpoint: str, limits: Limits, kind: int) -> tuple[zmq.Context[zmq.Socket[bytes]], zmq.Socket[bytes]]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    sock = context.socket(kind)
    sock.setsockopt(zmq.MAXMSGSIZE, max(limits.max_frame_bytes, limits.max_header_bytes))
    sock.setsockopt(zmq.SNDHWM, QUEUED_MESSAGES)
    sock.setsockopt(zmq.RCVHWM, 0)  # see the docstring: anything else lets a peer abort this process
    sock.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
    sock.setsockopt(zmq.IPV6, int("[" in endpoint))
    sock.setsockopt(zmq.TCP_KEEPALIVE, 1)
    sock.setsockopt(zmq.TCP_KEEPALIVE_IDLE, KEEPALIVE_S)
    sock.setsockopt(zmq.TCP_KEEPALIVE_INTVL, KEEPALIVE_S)
    sock.setsockopt(zmq.TCP_KEEPALIVE_CNT, 3)
    sock.setsockopt(zmq.LINGER, 0)
    return context, sock


def _receive(sock: zmq.Socket[bytes], max_frames: int, inflow: Inflow | None = None) -> list[Frame] | None:
    """Receive one waiting message, or None. Of a message with too many frames, one more than allowed is kept: the decoder
    refuses it."""
    try:
        frame = sock.recv(zmq.NOBLOCK, copy=False)
    except zmq.Again:
        return None
    frames: list[Frame] = [frame.buffer]
    size = 0
    while frame.more:
        frame = sock.recv(copy=False)
        length = len(frame)
        size += length + FRAME_OVERHEAD[length > 255]
        if len(frames) <= max_frames:
            frames.append(frame.buffer)
    if inflow is not None:
        inflow.taken(_descriptor(frame), size)
    return frames


def _descriptor(frame: zmq.Frame) -> int:
    """Return the number of the connection's descriptor that the message came by; -1 if the peer was gone before libzmq asked
    for its address."""
    try:
        return int(frame.get(zmq.SRCFD))
    except zmq.ZMQError:
        return -1


class ServiceEnd:
    """The ROUTER. For the thread that runs the service's loop.

    Raises ValueError for an endpoint that others can reach, or that cannot be bound (a port in use)."""

    def __init__(self, endpoint: str, limits: Limits) -> None:
        endpoint = check_bind(endpoint)
        self._context, self._sock = _context(endpoint, limits, zmq.ROUTER)
        self._max_frames = limits.max_frames
        self._sock.setsockopt(zmq.ROUTER_MANDATORY, 1)
        try:
            self._sock.bind(endpoint)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise ValueError(f"cannot listen at {endpoint}: {error}") from None
        self.endpoint = self._sock.getsockopt_string(zmq.LAST_ENDPOINT)
        """the real one, if the port was left open"""
        message_bytes = limits.max_header_bytes + limits.max_frame_bytes
        self._inflow = Inflow(self._sock, message_bytes) if endpoint.startswith("tcp://") else None

    def receive(self, timeout: float, most: int = BATCH) -> list[tuple[bytes, list[Frame]]]:
        """Receive up to `most` waiting messages as (peer, frames), in turn from all connections; wait up to `timeout` seconds
        for a first one."""
        received: list[tuple[bytes, list[Frame]]] = []
        if timeout == 0 or self._sock.poll(int(timeout * 1000), zmq.POLLIN):
            while len(received) < most:
                frames = _receive(self._sock, self._max_frames + 1, self._inflow)
                if frames is None:
                    break
                received.append((bytes(frames[0]), frames[1:]))
        if len(received) < most and self._inflow is not None:
            self._inflow.emptied()
        return received

    def expect(self, extra_bytes: int) -> None:
        """Let a connection send so much ahead, besides what any may."""
        if self._inflow is not None:
            self._inflow.expected = extra_bytes

    def send(self, peer: bytes, frames: list[Frame]) -> bool:
        """Send a message. True if libzmq took it for that connection: ROUTER refuses the whole message or takes all of it."""
        try:
            self._sock.send_multipart([peer, *frames], zmq.NOBLOCK, copy=False)
        except zmq.ZMQError as error:
            if error.errno in (zmq.EAGAIN, zmq.EHOSTUNREACH):
                return False
            raise
        return True

    def close(self, linger: float = 0.0) -> None:
        """Close within `linger` seconds, used to push out what was taken. May be repeated."""
        if self._inflow is not None:
            self._inflow.close()
        self._context.destroy(linger=int(linger * 1000))


class ClientEnd:
    """The DEALER. For the client's I/O thread, except `wake`, which any thread may call.

    The routing id is left unset and messages are not queued for connections that do not exist (IMMEDIATE), so a new connection
    starts empty: the session decides what is sent again. Reconnects by itself, for ever."""

    def __init__(self, address: str, limits: Limits) -> None:
        if not address.startswith(("tcp://", "ipc://")):
            raise ValueError(f"address {address!r}: must be tcp://HOST:PORT or ipc://PATH, as `rollout serve` prints it")
        self.address = address
        self.connected = False
        self.connections = 0
        """handshakes so far: a change means another connection, even if no loss was seen"""
        self._context, self._sock = _context(address, limits, zmq.DEALER)
        self._max_frames = limits.max_frames
        self._sock.setsockopt(zmq.IMMEDIATE, 1)
        self._sock.setsockopt(zmq.HEARTBEAT_IVL, CLIENT_HEARTBEAT_MS)
        self._sock.setsockopt(zmq.HEARTBEAT_TIMEOUT, CLIENT_SILENCE_MS)
        self._sock.setsockopt(zmq.RECONNECT_IVL, 100)
        self._sock.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
        self._monitor = self._sock.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
        self._wake_read, self._wake_write = socket.socketpair()
        self._wake_read.setblocking(False)
        self._wake_write.setblocking(False)
        self._poller = zmq.Poller()
        self._poller.register(self._monitor, zmq.POLLIN)
        self._poller.register(self._wake_read, zmq.POLLIN)
        try:
            self._sock.connect(address)
        except zmq.ZMQError as error:
            self.close()
            raise ValueError(f"address {address!r}: {error}") from None

    def receive(self, timeout: float, sending: bool = False) -> list[list[Frame]]:
        """Receive up to BATCH waiting messages. Returns early on `wake`, on a change of the connection and, if `sending`, when
        there is room to send."""
        self._poller.register(self._sock, zmq.POLLIN | (zmq.POLLOUT if sending else 0))
        self._poller.poll(int(timeout * 1000))
        self._drain_events()
        received: list[list[Frame]] = []
        while len(received) < BATCH:
            frames = _receive(self._sock, self._max_frames)
            if frames is None:
                break
            received.append(frames)
        return received

    def _drain_events(self) -> None:
        try:
            while self._wake_read.recv(4096):
                pass
        except BlockingIOError:
            pass
        while self._monitor.poll(0):
            event = recv_monitor_message(self._monitor)["event"]
            self.connected = event == zmq.EVENT_HANDSHAKE_SUCCEEDED
            self.connections += self.connected

    def send(self, frames: list[Frame]) -> bool:
        if not int(self._sock.getsockopt(zmq.EVENTS)) & zmq.POLLOUT:
            return False
        try:
            self._sock.send_multipart(frames, zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return False
        return True

    def wake(self) -> None:
        try:
            self._wake_write.send(b"\0")
        except (BlockingIOError, OSError):
            pass  # the buffer is full of wakes, or the end is closed: either way nobody needs another one

    def close(self, linger: float = 0.0) -> None:
        """Close as ServiceEnd does. May be repeated."""
        if self._context.closed:
            return
        self._sock.disable_monitor()
        self._context.destroy(linger=int(linger * 1000))
        self._wake_read.close()
        self._wake_write.close()
