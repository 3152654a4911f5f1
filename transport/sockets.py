"""The two ends over ZeroMQ: ROUTER (service) and DEALER (client). `transport.loopback` has the same two in one process.

    ServiceEnd.receive(timeout, most) -> [(peer, frames)]    ClientEnd.receive(timeout, sending) -> [frames]
    ServiceEnd.send(peer, frames) -> bool                    ClientEnd.send(frames) -> bool
    ServiceEnd.reaches(peer, frames) -> bool
    ServiceEnd.endpoint, expect(bytes), wake(), close(linger)
                                                             ClientEnd.connected, connections, wake(), close(linger)
    ServiceEnd.keys: KeyRing | None                          ClientEnd.refusal

`send` returns False where the message cannot be taken now (queue full, peer gone); it never blocks and never drops. A peer is
the routing id that ROUTER made up for one connection: it names a connection, never a client. Sessions do that. With keys
(`transport.keys`) a peer is the key of its client and a routing id that the client made up for one connection.

No receive high-water mark: libzmq 4.3.5 stops reading a connection at the mark, ends its polling when the peer resets it, and
then aborts the whole process (`Assertion failed: !_io_error`) at the next ping, its own (HEARTBEAT_IVL) or one that the peer
left in the buffer. Without a mark it never stops reading. The client alone has ZMTP heartbeats; what waits at the service is
bounded by `transport.receive_limit`, what waits at the client by the service, which keeps count of what was not acked.

Bounds: one frame by MAXMSGSIZE (checked by libzmq before it allocates; a longer one costs the sender its connection), messages
not sent yet by the send high-water mark, bytes that wait to be received by `transport.receive_limit`, frames of a message by
Limits.max_frames once it is whole.

When a connection ends, what the client has not yet received from it is lost, even if it has arrived: whoever must know that the
other end has something waits for an answer before it closes.
"""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import zmq
from zmq.utils.monitor import recv_monitor_message

from engine.types import Limits
from transport.frames import Frame
from transport.keys.authenticator import KeyAuthenticator
from transport.keys.cookie import ClientCookie, Cookie, require
from transport.keys.curve import FRAME_BYTES, check_libzmq, guard, introduce, renew_routing_id
from transport.keys.files import DEFAULT_FILE, ClientKeys, read_client
from transport.keys.ring import NO_KEY, KeyRing, identified, routing_id
from transport.receive_limit import FRAME_OVERHEAD, Inflow

QUEUED_MESSAGES = 256
"""high-water mark of one connection, each way"""
BATCH = 512
"""messages taken by one `receive`, so that a flood cannot keep the loop from stepping"""
HANDSHAKE_MS = 3000
CLIENT_HEARTBEAT_MS, CLIENT_SILENCE_MS = 1000, 3000
"""the client's ZMTP pings are answered by the service's libzmq I/O thread, so a long engine step is not silence; a stopped or
dead process is"""
EVENTS = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_DISCONNECTED
"""that the client looks for; after FAILED_AUTH libzmq does not try again"""
END_FDS = 32
"""descriptors that an end finds free before it begins; it takes some twelve, and one more for each connection"""
KEEPALIVE_S = 10
"""TCP's own probes: a connection whose machine is gone ends after some 40 s"""


class ServiceTransport(Protocol):
    """What the service needs of its end."""

    endpoint: str
    keys: KeyRing | None

    def receive(self, timeout: float, most: int = BATCH) -> list[tuple[bytes, list[Frame]]]: ...
    def send(self, peer: bytes, frames: list[Frame]) -> bool: ...
    def reaches(self, peer: bytes, frames: list[Frame]) -> bool: ...
    def expect(self, extra_bytes: int) -> None: ...
    def wake(self) -> None: ...
    def close(self, linger: float = 0.0) -> None: ...


class ClientTransport(Protocol):
    """What the client needs of its end."""

    address: str
    connected: bool
    connections: int
    refusal: str

    def receive(self, timeout: float, sending: bool = False) -> list[list[Frame]]: ...
    def send(self, frames: list[Frame]) -> bool: ...
    def wake(self) -> None: ...
    def close(self, linger: float = 0.0) -> None: ...


def check_bind(endpoint: str, keyed: bool = False) -> str:
    """Return the endpoint as libzmq takes it. Raises ValueError with the reason if others than this host could reach it and
    there are no keys (`keyed`)."""
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


def is_loopback(host: str) -> bool:
    """Whether this is an address that leads nowhere but to this host, and can be seen to."""
    try:
        return host == "localhost" or ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def check_address(address: str, role: str = "rollout") -> None:
    """Raises ValueError with the reason for what is no address, or for one of another host, which is for those with keys. role:
    what the key would be for."""
    if not address.startswith(("tcp://", "ipc://")):
        raise ValueError(
            f"address {address!r}: must be tcp://HOST:PORT or ipc://PATH, as `rollout serve` prints it, or a connection file"
        )
    if address.startswith("tcp://") and not is_loopback(address.removeprefix("tcp://").rpartition(":")[0]):
        raise ValueError(
            f"address {address!r} is not on this host, and what is sent there would be in clear and from anybody: give a "
            f"connection file in its place; on the service's host `rollout keys add NAME --role {role}` makes one"
        )


def check_descriptors(count: int) -> None:
    """Raise OSError (EMFILE, ENFILE) where this process cannot open so many descriptors more."""
    opened: list[int] = []
    try:
        while len(opened) < count:
            opened.append(os.open(os.devnull, os.O_RDONLY))
    finally:
        for descriptor in opened:
            os.close(descriptor)


def _context(
    endpoint: str, limits: Limits, kind: int, added: int = 0
) -> tuple[zmq.Context[zmq.Socket[bytes]], zmq.Socket[bytes]]:
    check_descriptors(END_FDS)  # libzmq ends the process where a context's threads get none
    zmq.Frame(b"\0", copy=False)  # pyzmq's own context, for what is sent without a copy: else made with the first large frame
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        sock = context.socket(kind)
    except zmq.ZMQError as error:  # since that look others have opened some
        context.destroy(linger=0)
        raise OSError(error.errno, error.strerror) from None
    sock.setsockopt(zmq.MAXMSGSIZE, max(limits.max_frame_bytes, limits.max_header_bytes) + added)
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


def _receive(sock: zmq.Socket[bytes], max_frames: int, added: int = 0) -> tuple[list[Frame], zmq.Frame, int] | None:
    """Receive one waiting message, or None: its frames, the last of them as libzmq has it, and the bytes of those behind the
    first on the wire; `added`: by encryption to each frame. Of a message with too many frames, one more than allowed is kept:
    the decoder refuses it."""
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
    """Return the number of the connection's descriptor that the message came by; -1 if the peer was gone before libzmq asked
    for its address."""
    try:
        return int(frame.get(zmq.SRCFD))
    except zmq.ZMQError:
        return -1


class Waker:
    """A descriptor to poll beside a socket, so that another thread can end the wait."""

    def __init__(self) -> None:
        self.end, self._write = socket.socketpair()
        """`end`: readable when somebody has woken"""
        self.end.setblocking(False)
        self._write.setblocking(False)

    def wake(self) -> None:
        try:
            self._write.send(b"\0")
        except (BlockingIOError, OSError):
            pass  # the buffer is full of wakes, or the end is closed: either way nobody needs another one

    def clear_if(self, ready: Sequence[tuple[object, int]] | None) -> None:
        """Forget the wakes so far, if the descriptor is among what a poll has found; what nobody polled for is left there."""
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
    """Return the public key that the door let in, as it stands with each of its messages."""
    try:
        return str(frame.get("User-Id"))
    except zmq.ZMQError:  # nobody was asked: the socket is not guarded, whatever it was told
        return NO_KEY


class ServiceEnd:
    """The ROUTER. For the thread that runs the service's loop. `keys`: the service's key file; without it whoever can read the
    endpoint's secret is served, which is this user (`transport.keys.cookie`).

    Raises ValueError for an endpoint that others can reach without keys, for one that cannot be bound (a port in use), for keys
    that cannot be used, and where the secret cannot be written."""

    def __init__(self, endpoint: str, limits: Limits, keys: str | None = None) -> None:
        endpoint = check_bind(endpoint, keys is not None)
        self.keys = None if keys is None else KeyRing(keys)
        self._added = 0 if keys is None else FRAME_BYTES
        self._context, self._sock = _context(endpoint, limits, zmq.ROUTER, self._added)
        self._max_frames = limits.max_frames
        self._sock.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._cookie = Cookie() if keys is None else None
        self.door: KeyAuthenticator | None = None
        self._inflow: Inflow | None = None
        self._wakes = Waker()
        self._poller = zmq.Poller()
        self._poller.register(self._sock, zmq.POLLIN)
        self._poller.register(self._wakes.end, zmq.POLLIN)
        self._lines: dict[bytes, ClientConnection] = {}
        """connections of clients with keys"""
        try:
            if self.keys is not None:
                guard(self._sock, self.keys.own)
                self.door = KeyAuthenticator(self._context, self.keys)
            elif self._cookie is not None:
                require(self._sock)
                self.door = KeyAuthenticator(self._context, self._cookie)
            self._sock.bind(endpoint)
            self.endpoint = self._sock.getsockopt_string(zmq.LAST_ENDPOINT)
            """the real one, if the port was left open"""
            if self._cookie is not None:
                self._cookie.publish(self.endpoint)
        except (zmq.ZMQError, ValueError) as error:
            self.close()
            raise ValueError(f"cannot listen at {endpoint}: {error}") from None
        message_bytes = limits.max_header_bytes + limits.max_frame_bytes
        if endpoint.startswith("tcp://"):
            self._inflow = Inflow(self._sock, message_bytes)

    def receive(self, timeout: float, most: int = BATCH) -> list[tuple[bytes, list[Frame]]]:
        """Receive up to `most` waiting messages as (peer, frames), in turn from all connections; wait up to `timeout` seconds
        for a first one, or for `wake`."""
        if self.door is not None:
            self.door.tend()
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
            self._inflow.emptied()
        return received

    def _peer(self, routing_id: bytes, last: zmq.Frame, size: int) -> bytes:
        """Name the connection that a message came by, and note what was taken from it. `last`: its last frame."""
        descriptor = _descriptor(last)
        if self._inflow is not None:
            self._inflow.taken(descriptor, size)
        if self.keys is None:
            return routing_id
        peer = identified(_user_id(last), routing_id)
        if self._inflow is not None and peer not in self._lines:
            self._lines = {peer: line for peer, line in self._lines.items() if not line.over}
            self._lines[peer] = ClientConnection(self._inflow, descriptor)
        return peer

    def expect(self, extra_bytes: int) -> None:
        """Let a connection send so much ahead, besides what any may."""
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
            line = self._lines.get(peer)
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
        if self.door is not None:
            self.door.close()
        if self._cookie is not None:
            self._cookie.close()  # while nobody else can have the address
        self._context.destroy(linger=int(linger * 1000))
        self._wakes.close()


class ClientConnection:
    """A connection of a client with a key. What is for it is not sent once it has ended: by then its routing id may be another
    client's."""

    def __init__(self, inflow: Inflow, descriptor: int) -> None:
        self._inflow = inflow
        self._descriptor = descriptor
        self._connection = inflow.connection(descriptor)

    @property
    def up(self) -> bool:
        """Whether it is known, and has not ended."""
        if self._connection is None:
            self._connection = self._inflow.connection(self._descriptor)
        return self._connection is not None and not self._connection.over

    @property
    def over(self) -> bool:
        return self._connection is not None and self._connection.over


class ClientEnd:
    """The DEALER. For the client's I/O thread, except `wake`, which any thread may call.

    The routing id is left unset and messages are not queued for connections that do not exist (IMMEDIATE), so a new connection
    starts empty: the session decides what is sent again. Reconnects by itself, for ever. With keys each connection has a
    routing id of its own, which nobody can guess.

    Args:
        address: tcp://HOST:PORT of this host, ipc://PATH, or the path of a connection file, or what is in one.

    Raises ValueError for an address that is none, or is another host's, and for a file that cannot be used; OSError where the
    process has hardly a descriptor left."""

    def __init__(self, address: str | ClientKeys, limits: Limits) -> None:
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
        """why the service does not let this client in, for good or until the address has another secret; "" = it does"""
        self._cookie = ClientCookie(address) if keys is None else None
        self.connections = 0
        """handshakes so far: a change means another connection, even if no loss was seen"""
        self._context, self._sock = _context(address, limits, zmq.DEALER, FRAME_BYTES)
        if keys is not None:
            introduce(self._sock, keys)
        elif self._cookie is not None:
            self._cookie.show(self._sock)
        self._max_frames = limits.max_frames
        self._sock.setsockopt(zmq.IMMEDIATE, 1)
        self._sock.setsockopt(zmq.HEARTBEAT_IVL, CLIENT_HEARTBEAT_MS)
        self._sock.setsockopt(zmq.HEARTBEAT_TIMEOUT, CLIENT_SILENCE_MS)
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
        """Receive up to BATCH waiting messages. Returns early on `wake`, on a change of the connection and, if `sending`, when
        there is room to send."""
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
                self._cookie.let_in()

    def _refused(self) -> None:
        """Note why, or connect again where the address may have another secret by now. libzmq does not try again by itself."""
        if self._cookie is None:
            self.refusal = f"{self.address} does not know this key: it was revoked, or is another service's"
        elif self._cookie.refused():
            self.refusal = self._cookie.refusal
        else:
            self._connect_anew()

    def _connect_anew(self) -> None:
        """Connect with what holds now: another routing id, which libzmq would keep, or another secret."""
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
