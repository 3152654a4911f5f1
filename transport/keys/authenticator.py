"""Authenticates connections for libzmq (ZAP, https://rfc.zeromq.org/spec/27/), in a thread of its own.

libzmq asks during each handshake. Without an answer the connection is refused: the socket has ZAP_ENFORCE_DOMAIN, without which
libzmq would accept it. After status 300 the client tries again, after 400 it gives up.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Protocol

import zmq

ADDRESS = "inproc://zeromq.zap.01"
DOMAIN = b"rollout"
RELOAD_MS = 100
"""maximum time between two checks of the key file"""
LOG_S = 60.0
"""minimum time between two log lines about refused connections"""
MOST_ADDRESSES = 16
"""in such a line"""
BIND_S = 2.0
"""how long a new thread waits until the old one has released the address"""

log = logging.getLogger(__name__)


class CredentialCheck(Protocol):
    """Decides which credentials are accepted: keys (`rollout.transport.keys.ring`) or a secret
    (`rollout.transport.keys.cookie`). For the authenticator's thread."""

    refusal_reason: str
    """for the log"""

    def reload(self) -> None:
        """Read the file again if it has changed."""
        ...

    def check(self, mechanism: bytes, credentials: list[bytes]) -> tuple[bytes, bytes, bytes]:
        """Return status, text and user of ZAP's answer."""
        ...


class KeyAuthenticator:
    """Accepts the connections whose credentials pass a check. `restart_if_dead` and `close` are for the thread that owns the
    sockets.

    Args:
        context: of the sockets.
        credentials: the check."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], credentials: CredentialCheck) -> None:
        self.restarts = 0
        self.refused = 0
        """number of refused connections; written by the authenticator's thread"""
        self._context = context
        self._credentials = credentials
        self.is_full: Callable[[], bool] = lambda: False
        """whether no connection is accepted for now; such a client tries again"""
        self._closed = threading.Event()
        self._logged, self._logged_at = 0, float("-inf")
        """number of refused connections in the log, and time of the last line"""
        self._unlogged = set[str]()
        """addresses of the others"""
        self._start()

    def restart_if_dead(self) -> None:
        """Start the thread again if it has died."""
        if not self._thread.is_alive() and not self._closed.is_set():
            self.restarts += 1
            log.error("the authenticator thread died and refused all connections; restarted restarts=%d", self.restarts)
            self._start()

    def close(self) -> None:
        """End the thread. May be repeated."""
        self._closed.set()
        self._thread.join()
        if self.refused > self._logged:
            self._log_refused()

    def _start(self) -> None:
        self._listens = threading.Event()
        self._thread = threading.Thread(target=self._run, name="rollout-authenticator", daemon=True)
        self._thread.start()
        while not self._listens.wait(0.01) and self._thread.is_alive():
            pass  # the first connection needs it

    def _run(self) -> None:
        sock = self._context.socket(zmq.REP)
        sock.setsockopt(zmq.LINGER, 0)
        try:
            _bind(sock)
            self._listens.set()
            while not self._closed.is_set():
                if sock.poll(RELOAD_MS):
                    request = sock.recv_multipart()
                    self._credentials.reload()
                    sock.send_multipart(self.answer(request))
                else:
                    self._credentials.reload()
        except Exception:
            log.exception("the authenticator thread failed")
        finally:
            sock.close()

    def answer(self, request: list[bytes]) -> list[bytes]:
        """Answer one request of libzmq: [version, request, domain, address, routing id, mechanism, credentials]."""
        version, number, domain, address, _, mechanism, *credentials = request
        if version != b"1.0" or domain != DOMAIN:
            return [b"1.0", number, b"400", b"not for this authenticator", b"", b""]
        status, text, user = self._credentials.check(mechanism, credentials)
        if status == b"400":
            self._refuse(address)
        elif self.is_full():
            return [b"1.0", number, b"300", b"too much waits to be received", b"", b""]
        return [b"1.0", number, status, text, user, b""]

    def _refuse(self, address: bytes) -> None:
        self.refused += 1
        if len(self._unlogged) < MOST_ADDRESSES:
            self._unlogged.add(address.decode("ascii", "replace"))
        now = time.monotonic()
        if now - self._logged_at >= LOG_S:  # a client that tries again and again must not fill the disk
            self._logged_at = now
            self._log_refused()

    def _log_refused(self) -> None:
        new, self._logged = self.refused - self._logged, self.refused
        where, self._unlogged = ",".join(sorted(self._unlogged)), set()
        log.warning(
            "connections refused why=%r from=%s new=%d refused=%d", self._credentials.refusal_reason, where, new, self.refused
        )


def _bind(sock: zmq.Socket[bytes]) -> None:
    """Bind when libzmq has released the address. Raises ZMQError after BIND_S."""
    until = time.monotonic() + BIND_S
    while True:
        try:
            sock.bind(ADDRESS)
            return
        except zmq.ZMQError as error:
            if error.errno != zmq.EADDRINUSE or time.monotonic() > until:
                raise
        time.sleep(0.01)
