"""A client's connection to the service behind the cache, in a thread that sends and receives messages."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

from rollout.client.connection import LinkTiming
from rollout.engine.types import Limits
from rollout.transport.frames import Frame
from rollout.transport.keys.files import ClientKeys
from rollout.transport.sockets import ClientEnd

Arrived = list[Frame] | str
"""frames of a message of the service; a text: the service is lost"""
POLL_S = 0.25
LINGER_S = 0.5
"""for which the last messages may still be sent"""


class UpstreamLike(Protocol):
    """Answers the messages of one client: a service, or `rollout.cache.offline.OfflineService`."""

    patient: bool
    """whether the service restarts with its groups, so that a connection may be down for long"""

    def send(self, frames: list[Frame]) -> None: ...
    def close(self) -> None: ...


class ServiceBehind:
    """Sends and receives messages of one client in a thread of its own.

    Args:
        arrived: called in that thread with each message of the service, and with a text if the service is lost.

    Raises as `ClientEnd`."""

    def __init__(self, address: str | ClientKeys, limits: Limits, arrived: Callable[[Arrived], None]) -> None:
        self.patient = False
        self._end = ClientEnd(address, limits)
        self._arrived = arrived
        self._out: deque[list[Frame]] = deque()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="rollout-cache-upstream", daemon=True)
        self._thread.start()

    def send(self, frames: list[Frame]) -> None:
        """Queue a message."""
        self._out.append(frames)
        self._end.wake()

    def close(self) -> None:
        """Send what is queued, and end. Returns at once."""
        self._closing = True
        self._end.wake()

    def _run(self) -> None:
        timing = LinkTiming()
        down_since: float | None = time.monotonic()
        until = None
        try:
            while until is None or (self._out and time.monotonic() < until):
                for frames in self._end.receive(POLL_S, sending=bool(self._out)):
                    self._arrived(frames)
                while self._out and self._end.send(self._out[0]):
                    self._out.popleft()
                if self._end.connected:
                    down_since = None
                elif down_since is None:
                    down_since = time.monotonic()
                elif self._end.refusal or time.monotonic() - down_since > (timing.restart_s if self.patient else timing.link_s):
                    self._arrived(self._end.refusal or f"no service at {self._end.address}")
                    return
                if self._closing and until is None:
                    until = time.monotonic() + LINGER_S
        finally:
            self._end.close(LINGER_S)
