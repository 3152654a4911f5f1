"""What has come and was not acked.

Acks of samples wait for each other for up to ACK_S, or until a group is sent, whose id may be that of one which ends with them.
Progress is acked at once: the service sends no more until it is.
"""

from __future__ import annotations

from collections.abc import Iterator

from engine.types import Limits
from rollout.client.send_queue import portions
from transport.messages import Ack

ACK_S = 0.05


class AckQueue:
    """Gathers what is to be acked, for the client's I/O thread. True while something waits."""

    def __init__(self) -> None:
        self.samples: list[tuple[str, int]] = []
        """(group id, index)"""
        self.progress = 0
        """number of the last Progress that came; 0: none"""
        self._taken_at = 0.0

    def __bool__(self) -> bool:
        return bool(self.samples or self.progress)

    def due(self, now: float) -> bool:
        """Whether something has waited for long enough. now: time.monotonic"""
        return bool(self.progress) or bool(self.samples) and now - self._taken_at >= ACK_S

    def reconnected(self) -> None:
        """Go on with a new connection, which has numbers of Progress of its own. Samples that came on the old one are here, and
        need not be sent again."""
        self.progress = 0

    def take(self, limits: Limits, now: float) -> Iterator[Ack]:
        """Yield the acks that wait, and forget what they are about. now: time.monotonic"""
        samples, progress = self.samples, self.progress
        self.samples, self.progress = [], 0
        self._taken_at = now if samples else self._taken_at
        for some in portions(samples, limits):
            yield Ack(some)
        if progress:
            yield Ack([], progress)
