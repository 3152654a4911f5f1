"""ZMTP 3 without libzmq: a connection after its handshake, for frames by hand."""

from __future__ import annotations

import socket
import struct

from rollout.transport.keys.cookie import USER, cookie_file, read

NULL = b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(48)
GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00PLAIN" + bytes(47)
PROPERTIES = b"\x0bSocket-Type" + struct.pack(">I", 6) + b"DEALER\x08Identity" + bytes(4)


def command(name: bytes, body: bytes) -> bytes:
    """A command of less than 256 bytes."""
    body = bytes([len(name)]) + name + body
    return b"\x04" + bytes([len(body)]) + body


def text(data: bytes) -> bytes:
    return bytes([len(data)]) + data


def version_1(*frames: bytes) -> bytes:
    """Messages of one frame each as a peer of ZMTP 1.0 sends them, which has no handshake."""
    return b"".join(bytes([len(frame) + 1, 0]) + frame for frame in frames)


PAGE = b"POST /" + b"a" * 200 + b" HTTP/1.1\r\nHost: 127.0.0.1\r\nOrigin: https://evil.example\r\n\r\n"


def post(*frames: bytes, head: bytes = PAGE, length: int = 2000) -> bytes:
    """A request of a web page that libzmq may take for a peer of ZMTP 1.0: its head reads as frames of the lengths of its
    letters, and these frames begin in its body, of `length` bytes, where those have ended."""
    at = 0
    while at < len(head):
        at += 1 + head[at]
    return head + (b"x" * (at - len(head)) + b"\x01\x00" + version_1(*frames)).ljust(length, b"\x01")


def connected(endpoint: str, timeout: float | None = None) -> socket.socket:
    """Connect as a DEALER of this user, with the secret of the endpoint. timeout: seconds without an answer. Raises OSError if
    the other end closes the connection before it is made, or lets it wait."""
    secret, why = read(cookie_file(endpoint))
    assert secret, why
    connection = socket.create_connection(("127.0.0.1", int(endpoint.rpartition(":")[2])), timeout)
    try:
        connection.sendall(GREETING + command(b"HELLO", text(USER) + text(secret.encode())))
        _await(connection, b"WELCOME")
        connection.sendall(command(b"INITIATE", PROPERTIES))
        _await(connection, b"READY")
    except BaseException:
        connection.close()
        raise
    connection.settimeout(None)
    return connection


def _await(connection: socket.socket, name: bytes) -> None:
    answered = b""
    while name not in answered:
        data = connection.recv(4096)
        if not data:
            raise ConnectionResetError(f"closed after {answered!r}")
        answered += data
