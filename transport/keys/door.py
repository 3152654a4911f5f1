"""Answers libzmq who may connect (ZAP, https://rfc.zeromq.org/spec/27/), from a thread of its own.

libzmq asks during each handshake. Where nobody answers, nobody gets in: the socket has ZAP_ENFORCE_DOMAIN, without which
libzmq would let everybody in instead. An answer of 300 has the client try again, one of 400 has it give up.
"""

from __future__ import annotations

import logging
import threading
import time

import zmq
from zmq.utils import z85

from transport.keys.ring import KeyRing

ADDRESS = "inproc://zeromq.zap.01"
DOMAIN = b"rollout"
LOOK_MS = 100
"""between two looks at the key file, at most"""
BIND_S = 2.0
"""longest that a new thread waits for the address of the one before it"""

log = logging.getLogger("rollout.service.loop")


class Door:
    """Lets the keys of a ring in, and nobody else. `context`: of the sockets that it guards.

    `tend` and `close` are for the thread that owns those sockets."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], ring: KeyRing) -> None:
        self.restarts = 0
        self.refused = 0
        """connections; the door's thread counts them"""
        self._context = context
        self._ring = ring
        self._closed = threading.Event()
        self._told_at = float("-inf")
        self._start()

    def tend(self) -> None:
        """Start the thread again if it has died."""
        if not self._thread.is_alive() and not self._closed.is_set():
            self.restarts += 1
            log.error("the thread that checks keys has died, nobody could connect; started again restarts=%d", self.restarts)
            self._start()

    def close(self) -> None:
        """End the thread. May be repeated."""
        self._closed.set()
        self._thread.join()

    def _start(self) -> None:
        self._listens = threading.Event()
        self._thread = threading.Thread(target=self._run, name="rollout-door", daemon=True)
        self._thread.start()
        while not self._listens.wait(0.01) and self._thread.is_alive():
            pass  # the first connection must find it

    def _run(self) -> None:
        sock = self._context.socket(zmq.REP)
        sock.setsockopt(zmq.LINGER, 0)
        try:
            _bind(sock)
            self._listens.set()
            while not self._closed.is_set():
                if sock.poll(LOOK_MS):
                    request = sock.recv_multipart()
                    self._ring.look()
                    sock.send_multipart(self.answer(request))
                else:
                    self._ring.look()
        except Exception:
            log.exception("the thread that checks keys failed")
        finally:
            sock.close()

    def answer(self, request: list[bytes]) -> list[bytes]:
        """Answer one request of libzmq's: [version, request, domain, address, routing id, mechanism, key]."""
        version, number, domain, address, _, mechanism, *credentials = request
        if version != b"1.0" or domain != DOMAIN or mechanism != b"CURVE" or len(credentials) != 1:
            return [b"1.0", number, b"400", b"no key", b"", b""]
        key = z85.encode(credentials[0])
        if not self._ring.readable:
            return [b"1.0", number, b"300", b"the key file cannot be used", b"", b""]
        if self._ring.client(key.decode()) is None:
            self._refuse(address)
            return [b"1.0", number, b"400", b"unknown key", b"", b""]
        return [b"1.0", number, b"200", b"OK", key, b""]

    def _refuse(self, address: bytes) -> None:
        self.refused += 1
        now = time.monotonic()
        if now - self._told_at >= 1.0:  # one who tries on fills no disk
            self._told_at = now
            log.warning(
                "connection with an unknown key refused from=%s refused=%d", address.decode("ascii", "replace"), self.refused
            )


def _bind(sock: zmq.Socket[bytes]) -> None:
    """Bind, once libzmq has let go of the address. Raises ZMQError after BIND_S."""
    until = time.monotonic() + BIND_S
    while True:
        try:
            sock.bind(ADDRESS)
            return
        except zmq.ZMQError as error:
            if error.errno != zmq.EADDRINUSE or time.monotonic() > until:
                raise
        time.sleep(0.01)
