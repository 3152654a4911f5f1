"""Peers that speak something older than ZMTP 3, and web pages whose requests look like one of them.

libzmq reads a first byte other than 0xff as the length of a ZMTP 1.0 frame, so a page's POST is a message to it: its head reads
as frames of arbitrary lengths, its body as the frames that the page chose (github.com/zeromq/libzmq, `stream_engine`).
"""

from __future__ import annotations

import random
import socket
import time

import msgspec
import psutil

from rollout.transport import messages as m
from rollout.transport.frames import pack
from tests.support.by_hand import post, version_1

ANSWER_S = 0.3
"""for an answer to come; there is none where all is well"""
MOST_BYTES = 65536
"""of an answer that are looked at"""
HARMFUL: tuple[msgspec.Struct, ...] = (
    m.Control(1, "abort_all"),
    m.Control(1, "pause"),
    m.Sleep(1, level=2),
    m.Replicas(1, "scale", count=1),
)
HEAD = (
    "POST /{path} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nConnection: keep-alive\r\nContent-Length: {length}\r\n"
    "User-Agent: Mozilla/5.0 (X11; Linux x86_64)\r\nContent-Type: text/plain;charset=UTF-8\r\nAccept: */*\r\n"
    "Origin: https://elsewhere.example\r\nSec-Fetch-Site: cross-site\r\nSec-Fetch-Mode: no-cors\r\n\r\n"
)
ZMTP2 = b"\xff" + bytes(8) + b"\x7f\x01\x05\x00\x00"
"""a greeting of ZMTP 2.0 of a DEALER without a name"""


def orders(rng: random.Random) -> list[bytes]:
    """Make a Hello and a message that does harm."""
    hello = m.Hello(m.PROTOCOL, f"{rng.getrandbits(128):032x}", number=1, name="page")
    return [bytes(pack(each)[0]) for each in (hello, rng.choice(HARMFUL))]


def bare(rng: random.Random) -> bytes:
    """Make what a peer of ZMTP 1.0 or 2.0 sends: its name, then orders."""
    name = rng.choice((b"\x01\x00", version_1(rng.randbytes(5).replace(b"\0", b"x"))))
    return rng.choice((name, ZMTP2)) + version_1(*orders(rng))


def request(port: int, rng: random.Random) -> bytes:
    """Make the request of a page to a port."""
    frames = orders(rng)
    length = len(version_1(*frames)) + 258
    head = HEAD.format(path="abcdefgh"[rng.randrange(8)] * rng.randrange(100, 240), port=port, length=length).encode()
    return post(*frames, head=head, length=length)


def believed(port: int, data: bytes) -> bool:
    """Send this to a port of this host. Returns whether it was answered as a client is."""
    answer, until = b"", time.monotonic() + ANSWER_S
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=ANSWER_S) as peer:
            peer.sendall(data)
            while len(answer) < MOST_BYTES and time.monotonic() < until and (got := peer.recv(MOST_BYTES)):
                answer += got
    except OSError:
        pass  # closed, or silent: either way it is not served
    return b"welcome" in answer or b"request_id" in answer


def ports_below(pid: int) -> list[int]:
    """List the TCP ports of this host at which the descendants of a process listen."""
    found: set[int] = set()
    try:
        for process in psutil.Process(pid).children(recursive=True):
            try:
                connections = process.net_connections("tcp")
            except psutil.Error:
                continue
            found |= {each.laddr.port for each in connections if each.status == psutil.CONN_LISTEN}
    except psutil.Error:
        pass  # it has ended
    return sorted(found)
