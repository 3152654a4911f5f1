"""Keys of a running service, reloaded when the file changes."""

from __future__ import annotations

import logging
import os
from pathlib import Path

from zmq.utils import z85

from rollout.transport.errors import KeyRefused, ProtocolError
from rollout.transport.keys.files import BadKeys, ClientKey, read_service

KEY_CHARS = 40
NO_KEY = "~" * KEY_CHARS
"""placeholder of a connection without a key; keys do not contain this letter"""
LEAST_NONCE_BYTES = 16
"""minimum length of the routing id that a client with a key chooses for each connection"""

log = logging.getLogger(__name__)


class KeyRing:
    """The keys of a service. The authenticator's thread calls `reload` and `check`; any thread may read. Raises BadKeys for an
    invalid file."""

    refusal_reason = "an unknown key"

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.own = read_service(self.path)
        """the file at the start: the service's own key does not change"""
        self.readable = True
        """whether the file is valid; otherwise new connections are refused and open sessions continue"""
        self._clients = {client.public: client for client in self.own.clients}
        self._seen = self._signature()

    def __len__(self) -> int:
        return len(self._clients)

    def client(self, key: str) -> ClientKey | None:
        """Find the client of a public key."""
        return self._clients.get(key)

    def reload(self) -> None:
        """Read the file again if it has changed."""
        signature = self._signature()
        if signature == self._seen:
            return
        self._seen = signature
        try:
            clients = {client.public: client for client in read_service(self.path).clients}
        except BadKeys as error:
            self.readable = False
            log.error("key file is invalid, new connections are refused reason=%s", error)
            return
        gone, new = self._clients.keys() - clients.keys(), clients.keys() - self._clients.keys()
        log.info("key file read clients=%d added=%d revoked=%d", len(clients), len(new), len(gone))
        self._clients, self.readable = clients, True

    def check(self, mechanism: bytes, credentials: list[bytes]) -> tuple[bytes, bytes, bytes]:
        """Return status, text and user of the ZAP answer. The user is the key, which libzmq attaches to every message."""
        if mechanism != b"CURVE" or len(credentials) != 1:
            return b"400", b"no key", b""
        if not self.readable:
            return b"300", b"the key file cannot be used", b""
        key = z85.encode(credentials[0])
        return (b"400", b"unknown key", b"") if self.client(key.decode()) is None else (b"200", b"OK", key)

    def _signature(self) -> tuple[int, ...]:
        try:
            about = os.stat(self.path)
        except OSError:
            return ()
        return about.st_mtime_ns, about.st_ctime_ns, about.st_ino, about.st_size, about.st_mode


def identified(key: str, routing_id: bytes) -> bytes:
    """Identify a connection by its client's key and its routing id."""
    return key.encode() + routing_id


def routing_id(peer: bytes) -> bytes:
    return peer[KEY_CHARS:]


def client_of(ring: KeyRing, peer: bytes) -> ClientKey:
    """Return the client of a connection. Raises KeyRefused for a revoked key, ProtocolError for a short routing id: another
    client could guess it and receive the messages."""
    if len(peer) < KEY_CHARS + LEAST_NONCE_BYTES:
        raise ProtocolError(f"with keys a connection's routing id must be {LEAST_NONCE_BYTES} random bytes or more")
    client = ring.client(peer[:KEY_CHARS].decode())
    if client is None:
        raise KeyRefused("this key was revoked, or is not in the service's key file (any more)")
    return client
