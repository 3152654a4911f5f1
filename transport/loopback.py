"""Both ends of rollout.transport.sockets in one process, with queues instead of sockets: for tests, and for a trainer that runs
the engine itself. The ends may be used in two threads. Frames pass by reference; the queues are bounded like a socket's
high-water mark."""

from __future__ import annotations

import threading
import time
from collections import deque

from rollout.transport.frames import Frame
from rollout.transport.sockets import BATCH, QUEUED_MESSAGES


class LoopbackService:
    """The service's end; `connect()` makes client ends.

    Example:
        end = LoopbackService()
        service = open_service(engine, transport=end)      # in a thread of its own: service.run()
        client = RolloutClient(transport=end.connect())
    """

    endpoint = "loopback"
    keys = None

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._inbox: deque[tuple[bytes, list[Frame]]] = deque()
        self._clients: dict[bytes, LoopbackClient] = {}
        self._peers = 0
        self._open = True
        self._woken = False

    def connect(self) -> LoopbackClient:
        with self._changed:
            if not self._open:
                raise ConnectionError("this loopback is closed")
            self._peers += 1
            peer = self._peers.to_bytes(5, "big")
            client = self._clients[peer] = LoopbackClient(self, peer)
        return client

    def receive(self, timeout: float, most: int = BATCH) -> list[tuple[bytes, list[Frame]]]:
        with self._changed:
            self._changed.wait_for(lambda: self._inbox or self._woken, timeout)
            self._woken = False
            was_full = len(self._inbox) >= QUEUED_MESSAGES
            received = [self._inbox.popleft() for _ in range(min(most, len(self._inbox)))]
            clients = list(self._clients.values()) if was_full else []
        for client in clients:
            client.wake()  # there is room again
        return received

    def send(self, peer: bytes, frames: list[Frame]) -> bool:
        client = self._clients.get(peer)
        return client is not None and client._put(frames)

    def reaches(self, peer: bytes, frames: list[Frame]) -> bool:
        """Return whether the connection is open, as in `rollout.transport.sockets`."""
        self.send(peer, frames)
        return peer in self._clients

    def expect(self, extra_bytes: int) -> None:
        """Do nothing: the queues count messages, not bytes."""

    def wake(self) -> None:
        with self._changed:
            self._woken = True
            self._changed.notify_all()

    def close(self, linger: float = 0.0) -> None:
        """Wait up to `linger` seconds until the clients have received all messages."""
        deadline = time.monotonic() + linger
        with self._changed:
            self._open = False
            clients, self._clients = list(self._clients.values()), {}
        for client in clients:
            client._disconnect(max(0.0, deadline - time.monotonic()))

    def _accept(self, peer: bytes, frames: list[Frame]) -> bool:
        with self._changed:
            if peer not in self._clients or len(self._inbox) >= QUEUED_MESSAGES:
                return False
            self._inbox.append((peer, frames))
            self._changed.notify_all()
            return True

    def _forget(self, peer: bytes) -> None:
        with self._changed:
            self._clients.pop(peer, None)


class LoopbackClient:
    """The client's end. `connected` from the start, until either end closes."""

    address = "loopback"
    refusal = ""

    def __init__(self, service: LoopbackService, peer: bytes) -> None:
        self.connected = True
        self.connections = 1
        self._service = service
        self._peer = peer
        self._changed = threading.Condition()
        self._inbox: deque[list[Frame]] = deque()
        self._woken = True  # the new connection is an event

    def receive(self, timeout: float, sending: bool = False) -> list[list[Frame]]:
        with self._changed:
            self._changed.wait_for(lambda: self._inbox or self._woken, timeout)
            self._woken = False
            received = [self._inbox.popleft() for _ in range(min(BATCH, len(self._inbox)))]
            self._changed.notify_all()
        return received

    def send(self, frames: list[Frame]) -> bool:
        return self._service._accept(self._peer, frames)

    def wake(self) -> None:
        with self._changed:
            self._woken = True
            self._changed.notify_all()

    def close(self, linger: float = 0.0) -> None:
        self._service._forget(self._peer)
        self.connected = False

    def _put(self, frames: list[Frame]) -> bool:
        with self._changed:
            if len(self._inbox) >= QUEUED_MESSAGES:
                return False
            self._inbox.append(frames)
            self._changed.notify_all()
            return True

    def _disconnect(self, linger: float) -> None:
        with self._changed:
            self._changed.wait_for(lambda: not self._inbox, linger)
            self.connected = False
            self._woken = True
            self._changed.notify_all()
