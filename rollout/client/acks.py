"""What has come on this connection and was not acked."""

from __future__ import annotations

from collections.abc import Iterator

from engine.types import Limits
from rollout.client.outgoing import portions
from transport.messages import Ack


class Acks:
    """For the client's I/O thread."""

    def __init__(self) -> None:
        self.samples: list[tuple[str, int]] = []
        """(group id, index)"""
        self.progress = 0
        """number of the last Progress that came; 0: none"""

    def clear(self) -> None:
        """Forget what came on a connection that has ended: Hello makes it good."""
        self.samples, self.progress = [], 0

    def take(self, limits: Limits) -> Iterator[Ack]:
        """Yield the acks that are due, and forget what they are about."""
        samples, progress = self.samples, self.progress
        self.clear()
        for some in portions(samples, limits):
            yield Ack(some)
        if progress:
            yield Ack([], progress)
