"""The service's clock, by which silence of clients is judged."""

from __future__ import annotations


class LoopClock:
    """Counts the seconds that the loop has been turning. `grace_s`: how long a client may be silent.

    It moves at most half the grace time a turn: a process that was itself suspended gives its clients time to come back.
    Heartbeats that queued up during a long step count: nobody is judged before everything received was taken, or twice the
    grace time has passed, in which each connection had its turn many times."""

    def __init__(self, monotonic: float, grace_s: float) -> None:
        self.now = 0.0
        self._grace_s = grace_s
        self._turned = monotonic
        self._caught_up = 0.0

    def turn(self, monotonic: float) -> None:
        """Advance to time.monotonic, given by the caller."""
        self.now += min(monotonic - self._turned, self._grace_s / 2)
        self._turned = monotonic

    def catch_up(self) -> None:
        """Note that everything received was taken."""
        self._caught_up = self.now

    @property
    def patience_s(self) -> float:
        """Seconds of silence after which a client is forgotten, judged in this turn."""
        behind = self.now - self._caught_up  # since before this turn if nothing was left over
        return self._grace_s if behind <= self._grace_s / 2 else 2 * self._grace_s
