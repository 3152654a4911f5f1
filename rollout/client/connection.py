"""Protocol state of the client's connection: handshake, heartbeats, outages, acks and flow control.

    new connection, or state to repair ──→ greet_again ──→ Hello(number) due ──→ … repeated ──→ Welcome(number) ──→ ready
    ready ──→ heartbeat due, each second

No I/O and no clock: `now` is the caller's time.monotonic, in seconds. For the client's I/O thread.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import NamedTuple, TypeVar

from rollout.engine.values import Limits
from rollout.transport.errors import NotBelieved, RequestTimeout
from rollout.transport.frames import Frame, frame_bytes
from rollout.transport.messages import UNTAKEN_BYTES, Ack, Welcome

ACK_ENTRY_BYTES = 16
"""bytes of an entry of Ack besides the group's id"""
FACTS = (
    "model", "vocab_size", "context", "eos_token_ids", "configuration", "tokenizer", "arithmetic", "block_size", "kv_dtype",
)  # fmt: skip
"""fields of Welcome that do not change while a service runs"""

T = TypeVar("T")


class LinkTiming(NamedTuple):
    """Timeouts and intervals of one client, in seconds."""

    link_s: float = 4.0
    """without a connection, until open groups and requests fail"""
    stall_s: float = 300.0
    """connected, but without a message of the service, until open groups and requests fail"""
    restart_s: float = 300.0
    """in place of link_s, if longer, for a service that restarts with its groups or gets them again"""
    heartbeat_s: float = 1.0
    """between two heartbeats"""
    hello_retry_s: float = 2.0
    """between two Hellos without Welcome"""
    ack_s: float = 0.05
    """for which an ack waits for others"""
    poll_s: float = 0.25
    """for which the I/O thread waits for messages at a time"""
    goodbye_s: float = 0.5
    """for which `close` waits until the goodbye is sent"""

    def outage_s(self, welcome: Welcome | None, resubmit: bool) -> float:
        """Return how long to wait for a connection: longer if a restarted service will have the open groups."""
        if welcome is None or not (resubmit or welcome.starts):
            return self.link_s
        return max(self.link_s, self.restart_s)


class ConnectionState:
    """Decides when to greet the service, when to send a heartbeat, and how long it has been unreachable."""

    def __init__(self, now: float, timing: LinkTiming | None = None) -> None:
        self._timing = LinkTiming() if timing is None else timing
        self.ready = False
        """Welcome to the last Hello has arrived on this connection"""
        self.hello_number = 0
        """incremented when the service has to repair the state of this session"""
        self.last_received_at = now
        self._known = 0
        """number of the connection that was last greeted, as `transport.connections` counts"""
        self._hello_at = now
        self._heartbeat_at = now
        self._outage_since = now
        """reset while connected, and while no caller waits"""

    def connected(self, connections: int, now: float) -> None:
        """Note that connection number `connections` exists. A new one is greeted at once."""
        self._outage_since = now
        if connections != self._known:
            self._known, self.last_received_at = connections, now
            self.greet_again(now)

    def disconnected(self, now: float) -> float:
        """Note that there is no connection. Returns the seconds for which callers have waited for one."""
        self.ready = False
        return now - self._outage_since

    def idle(self, now: float) -> None:
        """Note that no caller waits: the next one gets the full timeout."""
        self._outage_since = now

    def greet_again(self, now: float) -> None:
        """Make a Hello due now; answers to older ones become outdated."""
        self.hello_number += 1
        self.ready, self._hello_at = False, now

    def resync(self, now: float) -> None:
        """Greet again, so that the service drops groups that no caller waits for: their ids may be used again."""
        if self.ready:
            self.greet_again(now)
        else:
            self.hello_number += 1  # the Hello in flight lists these groups; the next one keeps its time

    def expect_close(self, now: float) -> None:
        """Give a service that announced its shutdown time to end before it is greeted again."""
        self.ready, self._hello_at = False, now + self._timing.hello_retry_s

    def welcomed(self, now: float) -> None:
        """Note that Welcome has arrived."""
        self.ready, self._heartbeat_at = True, now + self._timing.heartbeat_s

    def hello_due(self, now: float) -> bool:
        """Return whether to send Hello now; the next one is due after `hello_retry_s`."""
        if self.ready or now < self._hello_at:
            return False
        self._hello_at = now + self._timing.hello_retry_s
        return True

    def heartbeat_due(self, now: float) -> bool:
        """Return whether to send Heartbeat now; the next one is due after `heartbeat_s`."""
        if not self.ready or now < self._heartbeat_at:
            return False
        self._heartbeat_at = now + self._timing.heartbeat_s
        return True


class SendQueue:
    """Queues messages and limits how far the client sends ahead of the service. True while messages wait.

    The service reports the bytes it has taken (`Alive.taken_bytes`). The client stays within UNTAKEN_BYTES of that, not
    counting chunks of weights, which have a window of their own. So a service in a long step does not mistake a trainer for a
    flood."""

    def __init__(self) -> None:
        self._waiting: deque[list[Frame]] = deque()
        self._chunks: dict[int, int] = {}
        """bytes of unanswered chunks, by request id"""
        self._paced = False
        self._sent_bytes = self._taken_bytes = 0
        """since Welcome: given to the socket, and taken by the service"""

    def __bool__(self) -> bool:
        return bool(self._waiting)

    @property
    def blocked(self) -> bool:
        """Whether the next message must wait until the service has taken more. A message longer than UNTAKEN_BYTES goes
        alone."""
        ahead = self._sent_bytes - self._taken_bytes
        most = UNTAKEN_BYTES + sum(self._chunks.values())
        return self._paced and bool(self._waiting) and ahead > 0 and ahead + frame_bytes(self._waiting[0]) > most

    def add(self, *messages: list[Frame]) -> None:
        """Queue messages."""
        self._waiting.extend(messages)

    def add_chunk(self, request_id: int, frames: list[Frame]) -> None:
        """Extend the window by a chunk of weights until it is answered."""
        self._chunks[request_id] = frame_bytes(frames)

    def answered(self, request_id: int) -> None:
        """Note that a request was answered."""
        self._chunks.pop(request_id, None)

    def restart(self, paced: bool) -> None:
        """Drop what waits and count bytes from 0, as the service does on a new connection. paced: the service counts."""
        self._waiting.clear()
        self._paced = paced
        self._sent_bytes = self._taken_bytes = 0

    def taken(self, taken_bytes: int) -> None:
        """Note the bytes that the service has taken since Welcome."""
        self._taken_bytes = taken_bytes

    def send(self, send: Callable[[list[Frame]], bool]) -> None:
        """Give the socket the messages that it accepts and the window allows."""
        while self._waiting and not self.blocked and send(self._waiting[0]):
            self._sent_bytes += frame_bytes(self._waiting.popleft())


class AckQueue:
    """Collects acks. True while some wait. Acks of samples wait for each other; the service sends the next Progress only after
    the ack of the last one, so that goes at once."""

    def __init__(self, wait_s: float = LinkTiming().ack_s) -> None:
        self.samples: list[tuple[str, int]] = []
        """(group id, index)"""
        self.progress = 0
        """number of the last Progress received on this connection; 0: none"""
        self._wait_s = wait_s
        self._taken_at = 0.0

    def __bool__(self) -> bool:
        return bool(self.samples or self.progress)

    def due(self, now: float) -> bool:
        """Return whether to send acks now."""
        return bool(self.progress) or bool(self.samples) and now - self._taken_at >= self._wait_s

    def reconnected(self) -> None:
        """Start on a new connection, which numbers Progress from 1. Samples of the old one still need their ack."""
        self.progress = 0

    def take(self, limits: Limits, now: float) -> Iterator[Ack]:
        """Yield the waiting acks and forget them."""
        samples, progress = self.samples, self.progress
        self.samples, self.progress = [], 0
        self._taken_at = now if samples else self._taken_at
        for some in split_ids(samples, limits):
            yield Ack(some)
        if progress:
            yield Ack([], progress)


def split_ids(ids: list[T], limits: Limits) -> Iterator[list[T]]:
    """Split a list of ids, or of (id, index), into parts that fit into a header."""
    most = max(1, limits.max_header_bytes // (limits.max_id_bytes + ACK_ENTRY_BYTES) - 1)
    for start in range(0, len(ids), most):
        yield ids[start : start + most]


def restarted(old: Welcome, new: Welcome) -> bool:
    """Return whether the service was restarted between two Welcomes."""
    return (old.incarnation, old.starts) != (new.incarnation, new.starts)


def check_same_service(old: Welcome | None, new: Welcome) -> None:
    """Raises NotBelieved if a service that was not restarted reports another model than before."""
    if old is None or restarted(old, new):
        return
    for name in FACTS:
        if getattr(old, name) != getattr(new, name):
            raise NotBelieved(f"{name} of the service changed from {getattr(old, name)!r:.80} to {getattr(new, name)!r:.80}")


def answer(future: Future[T], timeout: float | None, what: str) -> T:
    """Wait for the answer to a request. Raises RequestTimeout after `timeout` seconds; the request is not repeated then."""
    try:
        return future.result(timeout)
    except RequestTimeout:
        raise
    except TimeoutError:
        future.cancel()
        raise RequestTimeout(f"no {what} within {timeout:.3g} s") from None
