"""What the client's I/O thread knows of its connection: is it greeted, what is due, since when is it silent or gone.

    new connection, or state to put right ──→ renew ──→ Hello(number) due ──→ … repeated ──→ Welcome(number) ──→ ready
    ready ──→ heartbeat due, each second

No I/O and no clock: `now` is the caller's time.monotonic, in seconds.
"""

from __future__ import annotations

HEARTBEAT_S = 1.0
HELLO_RETRY_S = 2.0


class ConnectionState:
    """Keeps the state of one connection, and says what is due. For one thread."""

    def __init__(self, now: float) -> None:
        self.ready = False
        """Welcome to the last Hello has come, on this connection"""
        self.hello_number = 0
        """raised whenever what the service knows of this session has to be put right"""
        self.last_received_at = now
        self._known = 0
        """of `transport.connections`, the one that Hello went to"""
        self._hello_at = now
        self._heartbeat_at = now
        self._outage_since = now
        """reset while connected, and while nobody waits for anything"""

    def connected(self, connections: int, now: float) -> None:
        """Note that there is a connection, the `connections`-th. A new one is greeted at once."""
        self._outage_since = now
        if connections != self._known:
            self._known, self.last_received_at = connections, now
            self.renew(now)

    def disconnected(self, now: float) -> float:
        """Note that there is none. Returns for how many seconds somebody has waited for one."""
        self.ready = False
        return now - self._outage_since

    def nobody_waits(self, now: float) -> None:
        """Let whoever comes next wait for all of the time-out."""
        self._outage_since = now

    def renew(self, now: float) -> None:
        """Greet again: the next Hello is due at once, and answers to older ones are out of date."""
        self.hello_number += 1
        self.ready, self._hello_at = False, now

    def outdate_hello(self) -> None:
        """Ignore answers to the Hello that is on its way or due; the next one keeps its time."""
        self.hello_number += 1

    def put_right(self, now: float) -> None:
        """Greet again, so that the service drops what nobody waits for: a new group may use the same id."""
        if self.ready:
            self.renew(now)
        else:  # Hello is on its way, or is what went wrong: what answers it is of before this
            self.outdate_hello()

    def expect_close(self, now: float) -> None:
        """Leave the service the time to go before it is greeted again."""
        self.ready, self._hello_at = False, now + HELLO_RETRY_S

    def welcomed(self, now: float) -> None:
        """Note that Welcome has come."""
        self.ready, self._heartbeat_at = True, now + HEARTBEAT_S

    def hello_due(self, now: float) -> bool:
        """Whether to send Hello; if so, the next one is due after HELLO_RETRY_S."""
        if self.ready or now < self._hello_at:
            return False
        self._hello_at = now + HELLO_RETRY_S
        return True

    def heartbeat_due(self, now: float) -> bool:
        """Whether to send Heartbeat; if so, the next one is due after HEARTBEAT_S."""
        if not self.ready or now < self._heartbeat_at:
            return False
        self._heartbeat_at = now + HEARTBEAT_S
        return True
