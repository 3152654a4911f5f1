"""The session of one client: its groups, and the samples that it has not acknowledged.

    Submit → AcceptedGroup (in the engine) → finished sample → unacked + queue → sent → Ack → forgotten

A session outlives its connection: after a reconnect everything unacknowledged is queued again, so a broken connection loses
nothing. Sessions use no sockets; `rollout.service.loop` sends and receives the messages.
"""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple

import msgspec
import numpy as np

from rollout.engine.values import Sample, no_tokens
from rollout.logs import logger
from rollout.service.engine_api import EngineLike
from rollout.service.group_names import GroupNames
from rollout.service.persistence import Persistence, SessionIdentity
from rollout.service.streaming import MOST_TOKENS, Streaming
from rollout.transport.columns import pack_samples
from rollout.transport.errors import Busy
from rollout.transport.frames import Frame, frame_bytes, pack
from rollout.transport.messages import DIGESTS, GATHERS, Alive, StatusReply

log = logger(__name__)

MAX_REPLY_BYTES = 1 << 24
"""bytes of replies (refusals, status, heartbeats) that may wait for a client that does not read"""
SAMPLE_OVERHEAD = 160
"""bytes that a sample counts in addition to its arrays"""


@dataclass(frozen=True, slots=True)
class SendLimits:
    """How much a client is sent at once."""

    batch_samples: int = 256
    """samples in one message"""
    batch_bytes: int = 1 << 18
    """bytes of samples in one message"""
    first_bytes: int = 2048
    """the same, until the client has acknowledged more on this connection"""
    messages: int = 32
    """messages to one client in an iteration of the loop"""
    progress_tokens: int = MOST_TOKENS
    """streamed tokens in one message"""
    gather_s: float = 0.02
    """seconds that samples for a router may wait, so that one message has several"""


class GroupStatus(Enum):
    """What the engine still has to do for an accepted group."""

    RUNNING = "in the engine, or parked until its weights are live"
    ABORTING = "aborted; the client gets the samples"
    DROPPED = "aborted; the samples are dropped"


@dataclass(slots=True)
class AcceptedGroup:
    """A group from its acceptance until the client has acknowledged all samples."""

    group_id: str
    """the client's name for it"""
    engine_id: str
    """the engine's name for it, unique over all sessions"""
    digest: bytes
    """of the Submit message"""
    wanted: Sequence[int]
    """indices of its children"""
    ended: int = 0
    """children that have finished"""
    acked: int = 0
    """samples that the client has acknowledged"""
    unacked: dict[int, UnackedSample] = field(default_factory=dict)
    """finished children by index, until they are acknowledged"""
    status: GroupStatus = GroupStatus.RUNNING
    """written by `rollout.service.engine_groups`"""

    @property
    def n(self) -> int:
        """Number of its samples."""
        return len(self.wanted)

    @property
    def running(self) -> bool:
        """Whether children are unfinished."""
        return self.ended < self.n


class UnackedSample(NamedTuple):
    """A finished child that the client has not acknowledged."""

    accepted: AcceptedGroup
    sample: Sample
    size: int
    """bytes that it counts"""


class Session:
    """Messages, groups and samples of one client.

    Args:
        persistence: stores groups and samples; by default nothing.
        limits: how much the client is sent at once.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        identity: SessionIdentity,
        persistence: Persistence | None = None,
        limits: SendLimits | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.key, self.id, self.name, self.number = identity
        self.persistence = Persistence() if persistence is None else persistence
        self._limits = limits or SendLimits()
        self._clock = clock
        self.peer: bytes | None = None
        """its connection; None while it has none"""
        self.last_hello: tuple[bytes, int] | None = None
        """connection and number of the last Hello"""
        self.last_received_at = 0.0
        self.last_sent_at = 0.0
        """when the last heartbeat was sent; both on the service's clock"""
        self.digests = False
        """whether the client understands digests of weights in heartbeats"""
        self.taken_bytes = 0
        """bytes of messages processed from this connection since Welcome"""
        self._reported_bytes = 0
        """how many of these the client knows of"""
        self.streaming = Streaming(self._limits.progress_tokens)
        self.names = GroupNames(self.number)
        self.groups: dict[str, AcceptedGroup] = {}
        self.samples = 0
        """sum of n over `groups`"""
        self.unacked_bytes = 0
        self.gathers = False
        """whether samples may wait for others"""
        self._queue: deque[UnackedSample | list[Frame]] = deque()
        """samples, and frames of replies"""
        self._packed: list[Frame] = []
        """the next message of samples, until the connection accepts it"""
        self._reply_bytes = 0
        self._carried = 0
        """bytes of samples that were acknowledged on this connection. No message is larger, because on a connection that breaks
        again and again a large one might never arrive"""
        self._samples_at = 0.0
        """when samples were last sent, by `clock`"""

    @property
    def running(self) -> int:
        """Number of unfinished children."""
        return sum(accepted.n - accepted.ended for accepted in self.groups.values())

    @property
    def pending(self) -> bool:
        """Whether messages wait and the client is connected."""
        return bool(self._queue or self._packed) and self.peer is not None

    @property
    def flooded(self) -> bool:
        """Whether too many replies wait: the client sends requests without reading the replies."""
        return self._reply_bytes > MAX_REPLY_BYTES

    @property
    def unreported_bytes(self) -> int:
        """Processed bytes that the client does not know of."""
        return self.taken_bytes - self._reported_bytes

    def greeted(self, capabilities: Collection[str], now: float) -> None:
        """Record the client's capabilities, and that it sent a message."""
        self.last_received_at = self.last_sent_at = now
        self.digests, self.gathers = DIGESTS in capabilities, GATHERS in capabilities

    def report(self, alive: Alive, now: float) -> None:
        """Queue a heartbeat."""
        self.last_sent_at = now
        self.reply(self.beat(alive))

    def beat(self, alive: Alive) -> list[Frame]:
        """Make a heartbeat. The bytes processed and the digest of the weights are included if the client understands them."""
        self._reported_bytes = self.taken_bytes
        digest = alive.digest if self.digests else ""
        return pack(msgspec.structs.replace(alive, taken_bytes=self.taken_bytes, digest=digest))

    def reached(self, reaches: Callable[[bytes, list[Frame]], bool], alive: Alive) -> bool:
        """Send a heartbeat; returns whether the connection still exists. reaches: of the transport."""
        return self.peer is not None and reaches(self.peer, self.beat(alive))

    def status(self, clock: float) -> dict[str, object]:
        """Describe the client in the service's status. clock: the service's time."""
        return {
            "name": self.name,
            "number": self.number,
            "connected": self.peer is not None,
            "groups": len(self.groups),
            "running_samples": self.running,
            "unacked_bytes": self.unacked_bytes,
            "silent_s": round(clock - self.last_received_at, 3),
        }

    def hold(self, accepted: AcceptedGroup) -> None:
        """Add an accepted group."""
        self.groups[accepted.group_id] = accepted
        self.samples += accepted.n

    def drop(self, group_id: str) -> None:
        """Forget a group and its samples."""
        accepted = self.groups.pop(group_id)
        self.persistence.dropped(accepted.engine_id)
        self.streaming.drop(group_id)
        self.samples -= accepted.n
        self.unacked_bytes -= sum(unacked.size for unacked in accepted.unacked.values())
        accepted.unacked.clear()

    def reply(self, frames: list[Frame]) -> None:
        """Queue a message that is not sent again after a reconnect: the client repeats its request."""
        self._queue.append(frames)
        self._reply_bytes += frame_bytes(frames)

    def reply_status(self, request_id: int, status: dict[str, Any]) -> None:
        """Queue a status as JSON. Raises TypeError for values that JSON cannot express."""
        self.reply(pack(StatusReply(request_id, to_json(status))))

    def deliver(self, accepted: AcceptedGroup, sample: Sample) -> None:
        """Record that a child has finished, and queue its sample until it is acknowledged."""
        accepted.ended += 1
        if not accepted.running:
            self.streaming.drop(accepted.group_id)
        if self.persistence.lasting:
            frames = pack(pack_samples([accepted.group_id], [sample]))
            self.persistence.ended(accepted.engine_id, sample.index, sample.finish_reason, frames)
        self.queue_sample(accepted, sample)

    def queue_sample(self, accepted: AcceptedGroup, sample: Sample) -> None:
        """Queue a sample until it is acknowledged."""
        unacked = accepted.unacked[sample.index] = UnackedSample(accepted, sample, counted_bytes(sample))
        self._queue.append(unacked)
        self.unacked_bytes += unacked.size

    def stream(self, engine: EngineLike) -> None:
        """Queue new tokens of running children, if the client wants them and reads."""
        if self.peer is not None and (progress := self.streaming.next(engine)) is not None:
            self.reply(pack(progress))

    def ack(self, samples: Iterable[tuple[str, int]]) -> None:
        """Forget acknowledged samples, and a group with its last sample. Other acknowledgements are old and are ignored."""
        for group_id, index in samples:
            accepted = self.groups.get(group_id)
            unacked = accepted.unacked.pop(index, None) if accepted else None
            if accepted is None or unacked is None:
                continue
            self.unacked_bytes -= unacked.size
            self._carried += unacked.size
            accepted.acked += 1
            self.persistence.acked(accepted.engine_id, index)
            if accepted.acked == accepted.n:
                self.drop(group_id)

    def attach(self, peer: bytes, welcome: list[Frame]) -> None:
        """Use a new connection: queue the Welcome, then all unacknowledged samples again."""
        self.peer = peer
        self.taken_bytes = self._reported_bytes = 0
        self.streaming.restart()
        self._queue.clear()
        self._queue.append(welcome)
        self._packed, self._carried = [], 0
        self._reply_bytes = frame_bytes(welcome)
        for accepted in self.groups.values():
            self._queue.extend(accepted.unacked.values())

    def flush(self, send: Callable[[bytes, list[Frame]], bool], more_come: bool = False) -> bool:
        """Send messages until the connection accepts no more. Returns whether it stopped at `SendLimits.messages` instead.
        more_come: samples of the next step follow soon, so those for a router wait up to `gather_s`."""
        may_wait = more_come and self.gathers and not self._reply_bytes
        if self.peer is None or (may_wait and self._clock() - self._samples_at < self._limits.gather_s):
            return False
        for _ in range(self._limits.messages):
            if not (self._queue or self._packed):
                return False
            first = self._queue[0] if self._queue else None
            if not self._packed and isinstance(first, list):
                if not send(self.peer, first):
                    return False
                self._queue.popleft()
                self._reply_bytes -= frame_bytes(first)
                continue
            self._packed = self._packed or self._pack()
            if self._packed and not send(self.peer, self._packed):
                return False
            self._packed, self._samples_at = [], self._clock()
        return bool(self._queue)

    def _pack(self) -> list[Frame]:
        """Make one message of the next samples. Samples that were acknowledged or dropped meanwhile are left out."""
        samples, names, size, limits = list[Sample](), list[str](), 0, self._limits
        most_bytes = min(limits.batch_bytes, max(limits.first_bytes, self._carried))
        while self._queue and len(samples) < limits.batch_samples:
            entry = self._queue[0]
            if isinstance(entry, list):
                break
            accepted, sample, more = entry
            if sample.index in accepted.unacked:
                size = size + more
                if samples and (size > most_bytes or sample.layout != samples[0].layout):
                    break
                samples.append(sample)
                names.append(accepted.group_id)
            self._queue.popleft()
        return pack(pack_samples(names, samples)) if samples else []


def counted_bytes(sample: Sample) -> int:
    """Return the bytes that an unacknowledged sample counts."""
    return sample.nbytes + SAMPLE_OVERHEAD


def to_json(status: dict[str, Any]) -> bytes:
    """Encode a status; numpy scalars and arrays become numbers and lists. Raises TypeError for values that JSON cannot
    express."""
    return json.dumps(status, default=_plain).encode()


def _plain(value: Any) -> Any:
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    raise TypeError(f"a status holds a {type(value).__name__}, which is not JSON")


class Sessions:
    """The sessions of all clients, by key and id, and by connection.

    Args:
        most: sessions at once.
        persistence, send_limits, clock: of each `Session`.
    """

    def __init__(
        self,
        most: int,
        persistence: Persistence,
        send_limits: SendLimits,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._most = most
        self.persistence = persistence
        self.send_limits = send_limits
        self._clock = clock
        self._by_id: dict[tuple[str, str], Session] = {}
        self._by_peer: dict[bytes, Session] = {}
        self._made = 0

    def __iter__(self) -> Iterator[Session]:
        return iter(self._by_id.values())

    def __len__(self) -> int:
        return len(self._by_id)

    def others(self, session: Session) -> list[Session]:
        """List the other routers with the same key. Clients are never in the list, whatever their Hello says."""
        return [other for other in self if other is not session and other.key == session.key and other.gathers]

    def at(self, peer: bytes) -> Session | None:
        """Return the session of a connection."""
        return self._by_peer.get(peer)

    def open(self, id: str, name: str, key: str = "") -> Session:
        """Return the session with this key and id, or open it. The key is part of the lookup: knowing the id of another
        client's session is not enough. Raises Busy."""
        if (key, id) not in self._by_id:
            if len(self._by_id) >= self._most:
                raise Busy(f"{len(self._by_id)} clients are connected (Limits.max_clients): close one, or raise this limit")
            self._made += 1
            self._make(identity := SessionIdentity(key, id, name, self._made))
            self.persistence.opened(identity)
            log.info("client connected client=%d name=%r", self._made, name)
        return self._by_id[key, id]

    def restore(self, identity: SessionIdentity) -> None:
        """Open a session of the journal."""
        self._made = max(self._made, identity.number)
        self._make(identity)

    def _make(self, identity: SessionIdentity) -> None:
        session = Session(identity, self.persistence, self.send_limits, self._clock)
        self._by_id[identity.key, identity.id] = session

    def of(self, key: str, id: str) -> Session:
        """Return the session with this key and id. Raises KeyError."""
        return self._by_id[key, id]

    def connect(self, session: Session, peer: bytes, hello: int, welcome: list[Frame]) -> None:
        """Make `peer` the connection of this session and of no other. hello: number of the Hello. If a slow answer made the
        client repeat its Hello, the answer is sent again and nothing else: the samples that were sent on this connection
        arrive, and a duplicate might be taken for a sample of a new group with the same id."""
        if session.peer == peer and session.last_hello == (peer, hello):
            session.reply(welcome)
            return
        session.last_hello = peer, hello
        previous = self._by_peer.get(peer)
        if previous is not None:
            previous.peer = None
        if session.peer is not None:
            del self._by_peer[session.peer]
        self._by_peer[peer] = session
        session.attach(peer, welcome)

    def close(self, session: Session) -> None:
        """Forget a session."""
        del self._by_id[session.key, session.id]
        self.persistence.closed(session.key, session.id)
        if session.peer is not None:
            del self._by_peer[session.peer]


def without_tokens(sample: Sample, reason: str) -> Sample:
    """Return the "error" sample that is delivered when there is no room to keep `sample`."""
    empty = {"prompt_routed_experts": None, **no_tokens().columns()}
    return msgspec.structs.replace(sample, finish_reason="error", error=reason, **empty)
