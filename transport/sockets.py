"""Both ends over ZeroMQ: ROUTER (service) and DEALER (client). `rollout.transport.loopback` has the same ends in one process.

    ServiceEnd.receive(timeout, most) -> [(peer, frames)]    ClientEnd.receive(timeout, sending) -> [frames]
    ServiceEnd.send(peer, frames) -> bool                    ClientEnd.send(frames) -> bool
    ServiceEnd.reaches(peer, frames) -> bool
    ServiceEnd.endpoint, expect(bytes), wake(), close(linger)
                                                             ClientEnd.connected, connections, wake(), close(linger)
    ServiceEnd.keys: KeyRing | None                          ClientEnd.refusal

`send` returns False if the message cannot be taken now (queue full, peer gone); it never blocks or drops. A peer is the routing
id that ROUTER chose for one connection: it identifies a connection, not a client (sessions do that). With keys
(`rollout.transport.keys`) a peer is the client's key and a routing id that the client chose for one connection.

There is no receive high-water mark. libzmq 4.3.5 stops reading a connection at the mark, stops polling it when the peer resets
it, and then aborts the process (`Assertion failed: !_io_error`) at the next ping, its own (HEARTBEAT_IVL) or one in the buffer.
Without a mark it never stops reading. Only the client has ZMTP heartbeats. `rollout.transport.receive_limit` bounds the bytes
that wait at the service; the service bounds those that wait at the client, since it counts unacknowledged samples.

Bounds: one frame by MAXMSGSIZE (libzmq checks it before it allocates, and closes the connection), unsent messages by the send
high-water mark, waiting bytes by `rollout.transport.receive_limit`, frames of a complete message by Limits.max_frames.

When a connection ends, the client loses messages that it has not received yet, even if they have arrived. An end that must know
whether the other end has a message waits for its answer before it closes.
"""

from __future__ import annotations

import ipaddress
import os
import socket
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

import zmq
from zmq.utils.monitor import recv_monitor_message

from rollout.engine.values import Limits
from rollout.transport.frames import Frame
from rollout.transport.keys.authenticator import KeyAuthenticator
from rollout.transport.keys.cookie import ClientCookie, Cookie, require
from rollout.transport.keys.curve import FRAME_BYTES, check_libzmq, guard, introduce, renew_routing_id
from rollout.transport.keys.files import DEFAULT_FILE, ClientKeys, read_client
from rollout.transport.keys.ring import NO_KEY, KeyRing, identified, routing_id
from rollout.transport.receive_limit import FRAME_OVERHEAD, TOTAL_BYTES, WAITING_BYTES, Inflow

QUEUED_MESSAGES = 256
"""high-water mark of one connection, each way"""
BATCH = 512
"""maximum of messages per `receive`, so that a flood cannot stop the loop"""
EVENTS = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_DISCONNECTED
"""events that the client watches; after FAILED_AUTH libzmq does not try again"""
END_FDS = 32
"""free descriptors that an end requires at its start; it uses some twelve, and one more per connection"""
KEEPALIVE_S = 10
"""interval of TCP's probes: a connection to a lost machine ends after some 40 s"""


class SocketOptions(NamedTuple):
    """Times and bounds of both ends. The service's libzmq I/O thread answers the client's ZMTP pings, so only a stopped or dead
    process is silent, not one in a long engine step."""

    handshake_ms: int = 3000
    """until an incomplete handshake ends the connection"""
    heartbeat_ms: int = 1000
    """between two pings of the client"""
    silence_ms: int = 3000
    """without an answer, until the client gives the connection up"""
    waiting_bytes: int = WAITING_BYTES
    """received bytes of one connection that may wait at the service, see `rollout.transport.receive_limit`"""
    total_bytes: int = TOTAL_BYTES
    """the same of all connections"""


DEFAULTS = SocketOptions()


class ServiceTransport(Protocol):
    """The service's end of the transport."""

    endpoint: str
    keys: KeyRing | None

    def receive(self, timeout: float, most: int = BATCH) -> list[tuple[bytes, list[Frame]]]: ...
    def send(self, peer: bytes, frames: list[Frame]) -> bool: ...
    def reaches(self, peer: bytes, frames: list[Frame]) -> bool: ...
    def expect(self, extra_bytes: int) -> None: ...
    def wake(self) -> None: ...
    def close(self, linger: float = 0.0) -> None: ...


class ClientTransport(Protocol):
    """The client's end of the transport."""

    address: str
    connected: bool
    connections: int
    refusal: str

    def receive(self, timeout: float, sending: bool = False) -> list[list[Frame]]: ...
    def send(self, frames: list[Frame]) -> bool: ...
    def wake(self) -> None: ...
    def close(self, linger: float = 0.0) -> None: ...


def check_bind(endpoint: str, keyed: bool = False) -> str:
    """Return the endpoint as libzmq takes it. Raises ValueError if other hosts could reach it and there are no keys
    (`keyed`)."""
    if endpoint.startswith("ipc://") and len(endpoint) > len("ipc://"):
        return endpoint
    scheme, _, rest = endpoint.partition("://")
    host, colon, port = rest.rpartition(":")
    if scheme != "tcp" or not colon:
        raise ValueError(f"endpoint {endpoint!r}: must be tcp://127.0.0.1:PORT, tcp://[::1]:PORT or ipc://PATH")
    if port != "*" and not (port.isascii() and port.isdigit() and int(port) <= 65535):
        raise ValueError(f"endpoint {endpoint!r}: the port must be 0 to 65535, or * for any free one")
    host = "127.0.0.1" if host == "localhost" else host
    if not keyed and not is_loopback(host):
        raise ValueError(
            f"endpoint {endpoint!r} can be reached from other hosts, and there are no keys to tell clients apart: "
            f"`rollout keys init --address tcp://HOST:{port}` makes them, --service.keys {DEFAULT_FILE} takes them; "
            "or bind to loopback (tcp://127.0.0.1:PORT) or ipc://PATH"
        )
    return f"tcp://{host}:{port}"


def check_socket_file(endpoint: str) -> None:
    """Check the file of ipc://PATH, which libzmq deletes before it binds. Raises ValueError unless there is none, or it is the
    socket of a process of this user that has ended."""
    path = endpoint.removeprefix("ipc://")
    if path == endpoint or path.startswith("@") or path == "*":
        return
    try:
        about = os.lstat(path)
    except OSError:  # none is there; a path that cannot be bound is libzmq's to refuse
        return
    if not stat.S_ISSOCK(about.st_mode) or about.st_uid != os.geteuid():
        raise ValueError(f"{path} is there, and is no socket of this user: it stays; name another path, or move it")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as asking:
        asking.setblocking(False)
        try:
            asking.connect(path)
        except (ConnectionRefusedError, FileNotFoundError):
            return
        except BlockingIOError:  # a process listens, and its queue is full
            pass
        except OSError as error:  # a datagram socket, or one that this user may not write to
            raise ValueError(f"{path} is there, and is not free ({error.strerror}): name another path, or move it") from None
    raise ValueError(f"a process listens at {path}: stop it, or name another path")


def is_loopback(host: str) -> bool:
    """Return whether an address is a loopback address of this host."""
    try:
        return host == "localhost" or ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def check_address(address: str, role: str = "rollout") -> None:
    """Raises ValueError for an invalid address, and for one of another host: that needs a connection file. role: of the key,
    for the message."""
    if not address.startswith(("tcp://", "ipc://")):
        raise ValueError(
            f"address {address!r}: must be tcp://HOST:PORT or ipc://PATH, as `rollout serve` prints it, or a connection file"
        )
    if address.startswith("tcp://") and not is_loopback(address.removeprefix("tcp://").rpartition(":")[0]):
        raise ValueError(
            f"address {address!r} is not on this host, and without keys nothing is encrypted or authenticated: give a "
            f"connection file in its place; on the service's host `rollout keys add NAME --role {role}` makes one"
        )


def check_descriptors(count: int) -> None:
    """Raises OSError (EMFILE, ENFILE) if this process cannot open `count` more descriptors."""
    opened: list[int] = []
    try:
        while len(opened) < count:
            opened.append(os.open(os.devnull, os.O_RDONLY))
    finally:
        for descriptor in opened:
            os.close(descriptor)


def _context(
    endpoint: str, limits: Limits, kind: int, options: SocketOptions, added: int = 0
) -> tuple[zmq.Context[zmq.Socket[bytes]], zmq.Socket[bytes]]:
    check_descriptors(END_FDS)  # without descriptors for a context's threads libzmq aborts
    zmq.Frame(b"\0", copy=False)  # creates pyzmq's context for zero-copy sends now, not at the first large frame
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        sock = context.socket(kind)
    except zmq.ZMQError as error:  # others were opened since the check
        context.destroy(linger=0)
        raise OSError(error.errno, error.strerror) from None
    sock.setsockopt(zmq.MAXMSGSIZE, max(limits.max_frame_bytes, limits.max_header_bytes) + added)
    sock.setsockopt(zmq.SNDHWM, QUEUED_MESSAGES)
    sock.setsockopt(zmq.RCVHWM, 0)  # see the docstring: anything else lets a peer abort this process
    sock.setsockopt(zmq.HANDSHAKE_IVL, options.handshake_ms)
    sock.setsockopt(zmq.IPV6, int("[" in endpoint))
    sock.setsockopt(zmq.TCP_KEEPALIVE, 1)
    sock.setsockopt(zmq.TCP_KEEPALIVE_IDLE, KEEPALIVE_S)
    sock.setsockopt(zmq.TCP_KEEPALIVE_INTVL, KEEPALIVE_S)
    sock.setsockopt(zmq.TCP_KEEPALIVE_CNT, 3)
    sock.setsockopt(zmq.LINGER, 0)
    return context, sock


def _receive(sock: zmq.Socket[bytes], max_frames: int, added: int = 0) -> tuple[list[Frame], zmq.Frame, int] | None:
    """Receive one waiting message, or None. Returns its frames, the last one as libzmq's object, and the bytes on the wire
    without the first frame. added: bytes that encryption adds to a frame. Of too many frames, one more than allowed is kept:
    the decoder refuses them."""
    try:
        frame = sock.recv(zmq.NOBLOCK, copy=False)
    except zmq.Again:
        return None
    frames: list[Frame] = [frame.buffer]
    size = 0
    while frame.more:
        frame = sock.recv(copy=False)
        length = len(frame) + added
        size += length + FRAME_OVERHEAD[length > 255]
        if len(frames) <= max_frames:
            frames.append(frame.buffer)
    return frames, frame, size


def _descriptor(frame: zmq.Frame) -> int:
    """Return the descriptor number of the message's connection; -1 if the peer disconnected before libzmq asked for its
    address."""
    try:
        return int(frame.get(zmq.SRCFD))
    except zmq.ZMQError:
        return -1


class Waker:
    """A descriptor to poll together with a socket, so that another thread can end the wait."""

    def __init__(self) -> None:
        self.end, self._write = socket.socketpair()
        """`end` is readable after `wake`"""
        self.end.setblocking(False)
        self._write.setblocking(False)

    def wake(self) -> None:
        try:
            self._write.send(b"\0")
        except (BlockingIOError, OSError):
            pass  # the buffer is full of wakes, or the end is closed: no further one is needed

    def clear_if(self, ready: Sequence[tuple[object, int]] | None) -> None:
        """Clear the wakes so far, if the descriptor is among those that a poll returned."""
        if ready is None or not any(one == self.end.fileno() for one, _ in ready):
            return
        try:
            while len(self.end.recv(4096)) == 4096:
                pass
        except BlockingIOError:
            pass

    def close(self) -> None:
        self.end.close()
        self._write.close()


def _user_id(frame: zmq.Frame) -> str:
    """Return the public key of the connection, as libzmq attaches it to each message."""
    try:
        return str(frame.get("User-Id"))
    except zmq.ZMQError:  # no authentication took place
        return NO_KEY


class ServiceEnd:
    """The ROUTER, for the thread of the service's loop. keys: the service's key file; without it, the endpoint accepts clients
    that can read its secret, which are this user's (`rollout.transport.keys.cookie`).

    Raises ValueError for an endpoint that other hosts can reach without keys, for one that cannot be bound, for invalid keys,
    and if the secret cannot be written."""

    def __init__(self, endpoint: str, limits: Limits, keys: str | None = None, options: SocketOptions = DEFAULTS) -> None:
        endpoint = check_bind(endpoint, keys is not None)
        self.keys = None if keys is None else KeyRing(keys)
        self._added = 0 if keys is None else FRAME_BYTES
        self._context, self._sock = _context(endpoint, limits, zmq.ROUTER, options, self._added)
        self._max_frames = limits.max_frames
        self._sock.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._cookie = Cookie() if keys is None else None
        self.authenticator: KeyAuthenticator | None = None
        self._inflow: Inflow | None = None
        self._wakes = Waker()
        self._poller = zmq.Poller()
        self._poller.register(self._sock, zmq.POLLIN)
        self._poller.register(self._wakes.end, zmq.POLLIN)
        self._connections: dict[bytes, ClientConnection] = {}
        """connections of clients with keys"""
        try:
            if self.keys is not None:
                guard(self._sock, self.keys.own)
                self.authenticator = KeyAuthenticator(self._context, self.keys)
            elif self._cookie is not None:
                require(self._sock)
                self.authenticator = KeyAuthenticator(self._context, self._cookie)
            check_socket_file(endpoint)
            self._sock.bind(endpoint)
            self.endpoint = self._sock.getsockopt_string(zmq.LAST_ENDPOINT)
            """with the real port, if any free one was requested"""
            if self._cookie is not None:
                self._cookie.publish(self.endpoint)
        except (zmq.ZMQError, OSError, ValueError) as error:
            self.close()
            in_use = isinstance(error, zmq.ZMQError) and error.errno == zmq.EADDRINUSE
            why = "the port is in use, perhaps by another service; choose another one, 0 = a free one" if in_use else error
            raise ValueError(f"cannot listen at {endpoint}: {why}") from None
        message_bytes = limits.max_header_bytes + limits.max_frame_bytes
        if endpoint.startswith("tcp://"):
            self._inflow = inflow = Inflow(self._sock, message_bytes, options.waiting_bytes, options.total_bytes)
            if self.authenticator is not None:
                self.authenticator.is_full = lambda: inflow.is_full

    def receive(self, timeout: float, most: int = BATCH) -> list[tuple[bytes, list[Frame]]]:
        """Receive up to `most` waiting messages as (peer, frames), round-robin over connections; wait up to `timeout` seconds
        for the first one, or for `wake`."""
        if self.authenticator is not None:
            self.authenticator.restart_if_dead()
        received: list[tuple[bytes, list[Frame]]] = []
        ready = None if timeout == 0 else self._poller.poll(int(timeout * 1000))
        if ready is None or ready:
            self._wakes.clear_if(ready)
            while len(received) < most:
                message = _receive(self._sock, self._max_frames + 1, self._added)
                if message is None:
                    break
                frames, last, size = message
                received.append((self._peer(bytes(frames[0]), last, size), frames[1:]))
        if len(received) < most and self._inflow is not None:
            self._inflow.drained()
        return received

    def _peer(self, routing_id: bytes, last: zmq.Frame, size: int) -> bytes:
        """Identify the connection of a message, and count its bytes. last: the last frame."""
        descriptor = _descriptor(last)
        if self._inflow is not None:
            self._inflow.taken(descriptor, routing_id, size)
        if self.keys is None:
            return routing_id
        peer = identified(_user_id(last), routing_id)
        if self._inflow is not None and peer not in self._connections:
            self._connections = {peer: one for peer, one in self._connections.items() if not one.over}
            self._connections[peer] = ClientConnection(self._inflow, descriptor)
        return peer

    def expect(self, extra_bytes: int) -> None:
        """Allow connections to send so many bytes ahead, besides the usual bound."""
        if self._inflow is not None:
            self._inflow.expected = extra_bytes

    def send(self, peer: bytes, frames: list[Frame]) -> bool:
        """Send a message. True if libzmq took it for that connection: ROUTER refuses the whole message or takes all of it."""
        return self._send(peer, frames) == 0

    def reaches(self, peer: bytes, frames: list[Frame]) -> bool:
        """Whether that connection has not ended. `frames`: a message that is sent to find out; it is lost where there is no
        room for it."""
        return self._send(peer, frames) != zmq.EHOSTUNREACH

    def _send(self, peer: bytes, frames: list[Frame]) -> int:
        """Send a message. Returns 0, or why not: EAGAIN, there is no room; EHOSTUNREACH, the connection has ended."""
        if self.keys is not None:
            line = self._connections.get(peer)
            if self._inflow is not None and (line is None or not line.up):
                return int(zmq.EHOSTUNREACH)
            peer = routing_id(peer)
        try:
            self._sock.send_multipart([peer, *frames], zmq.NOBLOCK, copy=False)
        except zmq.ZMQError as error:
            if error.errno in (zmq.EAGAIN, zmq.EHOSTUNREACH):
                return int(error.errno)
            raise
        return 0

    def wake(self) -> None:
        """Make a `receive` that waits return. Safe from any thread."""
        self._wakes.wake()

    def close(self, linger: float = 0.0) -> None:
        """Close within `linger` seconds, used to push out what was taken. May be repeated."""
        if self._inflow is not None:
            self._inflow.close()
        if self.authenticator is not None:
            self.authenticator.close()
        if self._cookie is not None:
            self._cookie.close()  # before another process can bind the address
        self._context.destroy(linger=int(linger * 1000))
        self._wakes.close()


class ClientConnection:
    """Connection of a client with a key. After it has ended, its routing id may belong to another client, so nothing is sent to
    it any more."""

    def __init__(self, inflow: Inflow, descriptor: int) -> None:
        self._inflow = inflow
        self._descriptor = descriptor
        self._connection = inflow.connection(descriptor)

    @property
    def up(self) -> bool:
        """Return whether it is known and has not ended."""
        if self._connection is None:
            self._connection = self._inflow.connection(self._descriptor)
        return self._connection is not None and not self._connection.over

    @property
    def over(self) -> bool:
        return self._connection is not None and self._connection.over


class ClientEnd:
    """The DEALER, for the client's I/O thread; any thread may call `wake`.

    It has no routing id and queues no messages without a connection (IMMEDIATE), so a new connection starts empty: the session
    decides what is sent again. It reconnects by itself, for ever. With keys, each connection has a random routing id.

    Args:
        address: tcp://HOST:PORT of this host, ipc://PATH, the path of a connection file, or its content.

    Raises ValueError for an invalid address, one of another host, or an invalid file; OSError if the process has too few
    descriptors left."""

    def __init__(self, address: str | ClientKeys, limits: Limits, options: SocketOptions = DEFAULTS) -> None:
        if isinstance(address, str) and "://" not in address and Path(address).is_file():
            address = read_client(address)
        keys = address if isinstance(address, ClientKeys) else None
        if isinstance(address, ClientKeys):
            check_libzmq()
            address = address.address
        else:
            check_address(address)
        self.address = address
        self.connected = False
        self.refusal = ""
        """why the service refuses this client, for good or until the address has another secret; "" = it does not"""
        self._cookie = ClientCookie(address) if keys is None else None
        self.connections = 0
        """number of handshakes: a change means a new connection, even if no loss was reported"""
        self._context, self._sock = _context(address, limits, zmq.DEALER, options, FRAME_BYTES)
        if keys is not None:
            introduce(self._sock, keys)
        elif self._cookie is not None:
            self._cookie.show(self._sock)
        self._max_frames = limits.max_frames
        self._sock.setsockopt(zmq.IMMEDIATE, 1)
        self._sock.setsockopt(zmq.HEARTBEAT_IVL, options.heartbeat_ms)
        self._sock.setsockopt(zmq.HEARTBEAT_TIMEOUT, options.silence_ms)
        self._sock.setsockopt(zmq.RECONNECT_IVL, 100)
        self._sock.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
        self._monitor = self._sock.get_monitor_socket(EVENTS)
        self._wakes = Waker()
        self._poller = zmq.Poller()
        self._poller.register(self._monitor, zmq.POLLIN)
        self._poller.register(self._wakes.end, zmq.POLLIN)
        try:
            self._sock.connect(address)
        except zmq.ZMQError as error:
            self.close()
            raise ValueError(f"address {address!r}: {error}") from None

    def receive(self, timeout: float, sending: bool = False) -> list[list[Frame]]:
        """Receive up to BATCH waiting messages. Returns early on `wake`, when the connection changes and, if `sending`, when
        the socket can send."""
        self._poller.register(self._sock, zmq.POLLIN | (zmq.POLLOUT if sending else 0))
        ready = self._poller.poll(int(timeout * 1000))
        self._wakes.clear_if(ready)
        if any(one is self._monitor for one, _ in ready):
            self._drain_events()
        if not self.connected and self._cookie is not None and self._cookie.is_old:
            self.refusal = ""
            self._connect_anew()
        received: list[list[Frame]] = []
        while len(received) < BATCH:
            message = _receive(self._sock, self._max_frames)
            if message is None:
                break
            received.append(message[0])
        return received

    def _drain_events(self) -> None:
        while self._monitor.poll(0):
            event = recv_monitor_message(self._monitor)["event"]
            if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
                self._refused()
            elif self._cookie is None and self.connected and event == zmq.EVENT_DISCONNECTED:
                self._connect_anew()
            self.connected = event == zmq.EVENT_HANDSHAKE_SUCCEEDED
            self.connections += self.connected
            if self.connected and self._cookie is not None:
                self._cookie.accepted()

    def _refused(self) -> None:
        """Note why, or connect again if the address may have a new secret. libzmq does not try again by itself."""
        if self._cookie is None:
            self.refusal = f"{self.address} does not know this key: it was revoked, or is another service's"
        elif self._cookie.refused():
            self.refusal = self._cookie.refusal
        else:
            self._connect_anew()

    def _connect_anew(self) -> None:
        """Connect again, with a new routing id or the new secret."""
        self._sock.disconnect(self.address)
        if self._cookie is None:
            renew_routing_id(self._sock)
        else:
            self._cookie.show(self._sock)
        self._sock.connect(self.address)

    def send(self, frames: list[Frame]) -> bool:
        if not int(self._sock.getsockopt(zmq.EVENTS)) & zmq.POLLOUT:
            return False
        try:
            self._sock.send_multipart(frames, zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return False
        return True

    def wake(self) -> None:
        self._wakes.wake()

    def close(self, linger: float = 0.0) -> None:
        """Close as ServiceEnd does. May be repeated."""
        if self._context.closed:
            return
        self._sock.disable_monitor()
        self._context.destroy(linger=int(linger * 1000))
        self._wakes.close()
