"""Answers libzmq who may connect (ZAP, https://rfc.zeromq.org/spec/27/), from a thread of its own.

libzmq asks during each handshake. Where nobody answers, nobody gets in: the socket has ZAP_ENFORCE_DOMAIN, without which
libzmq would let everybody in instead. An answer of 300 has the client try again, one of 400 has it give up.
"""

from __future__ import annotations

import logging
import threading
import time
from typing import Protocol

import zmq

ADDRESS = "inproc://zeromq.zap.01"
DOMAIN = b"rollout"
LOOK_MS = 100
"""between two looks at the key file, at most"""
TELL_S = 60.0
"""between two lines of the log that say who was refused, at least"""
MOST_ADDRESSES = 16
"""in such a line"""
BIND_S = 2.0
"""longest that a new thread waits for the address of the one before it"""

log = logging.getLogger("rollout.transport.keys")


class Judge(Protocol):
    """Who may connect. For the door's thread: keys (`transport.keys.ring`) or a secret (`transport.keys.cookie`)."""

    stranger: str
    """what those lack whom it refuses, for the log"""

    def look(self) -> None:
        """Look whether something has changed."""
        ...

    def judge(self, mechanism: bytes, credentials: list[bytes]) -> tuple[bytes, bytes, bytes]:
        """Return status, text and user of ZAP's answer."""
        ...


class KeyAuthenticator:
    """Lets those in whom a judge lets in, and nobody else. `context`: of the sockets that it guards.

    `tend` and `close` are for the thread that owns those sockets."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], judge: Judge) -> None:
        self.restarts = 0
        self.refused = 0
        """connections; the door's thread counts them"""
        self._context = context
        self._judge = judge
        self._closed = threading.Event()
        self._told, self._told_at = 0, float("-inf")
        """how many of the refused the log has, and since when"""
        self._from = set[str]()
        """addresses of those that it has not"""
        self._start()

    def tend(self) -> None:
        """Start the thread again if it has died."""
        if not self._thread.is_alive() and not self._closed.is_set():
            self.restarts += 1
            log.error("the thread that checks who connects has died, nobody could; started again restarts=%d", self.restarts)
            self._start()

    def close(self) -> None:
        """End the thread. May be repeated."""
        self._closed.set()
        self._thread.join()
        if self.refused > self._told:
            self._tell()

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
                    self._judge.look()
                    sock.send_multipart(self.answer(request))
                else:
                    self._judge.look()
        except Exception:
            log.exception("the thread that checks who connects failed")
        finally:
            sock.close()

    def answer(self, request: list[bytes]) -> list[bytes]:
        """Answer one request of libzmq's: [version, request, domain, address, routing id, mechanism, credentials]."""
        version, number, domain, address, _, mechanism, *credentials = request
        if version != b"1.0" or domain != DOMAIN:
            return [b"1.0", number, b"400", b"not for this door", b"", b""]
        status, text, user = self._judge.judge(mechanism, credentials)
        if status == b"400":
            self._refuse(address)
        return [b"1.0", number, status, text, user, b""]

    def _refuse(self, address: bytes) -> None:
        self.refused += 1
        if len(self._from) < MOST_ADDRESSES:
            self._from.add(address.decode("ascii", "replace"))
        now = time.monotonic()
        if now - self._told_at >= TELL_S:  # one who tries on fills no disk
            self._told_at = now
            self._tell()

    def _tell(self) -> None:
        new, self._told = self.refused - self._told, self.refused
        where, self._from = ",".join(sorted(self._from)), set()
        log.warning("connections refused why=%r from=%s new=%d refused=%d", self._judge.stranger, where, new, self.refused)


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
