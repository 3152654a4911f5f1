"""What the service keeps of one client: its groups, and what it has not taken yet.

    Submit -> HeldGroup (in the engine) -> sample ends -> unacked + queue -> sent -> Ack -> forgotten

A session outlives its connection: after a reconnect everything unacked is queued again, so a broken link loses nothing. No
sockets in here; `rollout.service.loop` moves the messages.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from engine.types import Sample, no_tokens
from rollout.logs import logger
from rollout.service.engine_api import EngineLike
from rollout.service.group_names import GroupNames
from rollout.service.persistence import Persistence
from rollout.service.streaming import Streaming
from transport.columns import pack_samples
from transport.errors import Busy
from transport.frames import Frame, frame_bytes, pack
from transport.messages import DIGESTS, GATHERS, Alive

log = logger(__name__)

MAX_REPLY_BYTES = 1 << 24
"""of replies (refusals, status, heartbeats) that may wait for a client that does not read"""
BATCH_SAMPLES, BATCH_BYTES = 256, 1 << 18
"""most of one message"""
MOST_AT_ONCE = 32
"""messages that a client is sent before others have their turn"""
FIRST_BYTES = 2048
"""most of one message on a connection that has not shown that it carries more"""
SAMPLE_OVERHEAD = 160
"""bytes that a sample is counted for besides its arrays"""
GATHER_S = 0.02
"""for which the samples of a front may wait for each other"""


@dataclass(slots=True)
class HeldGroup:
    """A group that the service has taken and the client has not wholly acked."""

    group_id: str
    engine_id: str
    """the engine's name for it, unique over all sessions"""
    digest: bytes
    wanted: Sequence[int]
    """indices of its children"""
    ended: int = 0
    acked: int = 0
    unacked: dict[int, UnackedSample] = field(default_factory=dict)
    """the ended children, by index, until the client has them"""

    @property
    def n(self) -> int:
        """Samples that come of it."""
        return len(self.wanted)

    @property
    def running(self) -> bool:
        return self.ended < self.n


class UnackedSample(NamedTuple):
    """A child that has ended, and that the client may not have."""

    held: HeldGroup
    sample: Sample
    size: int
    """bytes that it is counted for"""


class Session:
    """One client. `peer` is its connection at the moment, None while it has none. `key`: of its client, "" without keys."""

    def __init__(self, id: str, name: str, number: int, key: str = "", record: Persistence | None = None) -> None:
        self.id = id
        self.key = key
        self.record = Persistence() if record is None else record
        self.name = name
        self.number = number
        self.peer: bytes | None = None
        self.last_hello: tuple[bytes, int] | None = None
        """connection and number of the last Hello"""
        self.last_received_at = 0.0
        self.last_sent_at = 0.0
        """of heartbeats; both on the service's clock"""
        self.digests = False
        """it takes the digest of the weights with their version"""
        self.taken_bytes = 0
        """of messages taken from this connection since Welcome"""
        self._reported_bytes = 0
        """how much of that the client was told"""
        self.streaming = Streaming()
        self.names = GroupNames(number)
        self.groups: dict[str, HeldGroup] = {}
        self.samples = 0
        """sum of n over `groups`"""
        self.unacked_bytes = 0
        self.gathers = False
        """its samples may wait for each other"""
        self._queue: deque[UnackedSample | list[Frame]] = deque()
        """samples, and frames of replies"""
        self._packed: list[Frame] = []
        """the samples that are sent next, once the connection takes them"""
        self._reply_bytes = 0
        self._carried = 0
        """bytes of samples that were acked on this connection: no message has more, or on a link that breaks again and again
        none might come through"""
        self._samples_at = 0.0
        """time.monotonic when samples were last sent"""

    @property
    def running(self) -> int:
        """Children that have not ended."""
        return sum(held.n - held.ended for held in self.groups.values())

    @property
    def pending(self) -> bool:
        """Whether something waits to be sent and there is a connection to send it on."""
        return bool(self._queue or self._packed) and self.peer is not None

    @property
    def flooded(self) -> bool:
        """Whether it asks without reading the answers."""
        return self._reply_bytes > MAX_REPLY_BYTES

    @property
    def unreported_bytes(self) -> int:
        """Bytes taken that the client was not told of."""
        return self.taken_bytes - self._reported_bytes

    def greeted(self, capabilities: Collection[str], now: float) -> None:
        """Note what its client can do, and that it was heard."""
        self.last_received_at = self.last_sent_at = now
        self.digests, self.gathers = DIGESTS in capabilities, GATHERS in capabilities

    def report(self, alive: Alive, now: float) -> None:
        """Queue a heartbeat."""
        self.last_sent_at = now
        self.reply(self.beat(alive))

    def beat(self, alive: Alive) -> list[Frame]:
        """Make a heartbeat with what this client understands: what was taken from it, the digest of the weights."""
        self._reported_bytes = self.taken_bytes
        digest = alive.digest if self.digests else ""
        return pack(msgspec.structs.replace(alive, taken_bytes=self.taken_bytes, digest=digest))

    def reached(self, reaches: Callable[[bytes, list[Frame]], bool], alive: Alive) -> bool:
        """Whether its connection has not ended: a heartbeat finds out. reaches: of the transport."""
        return self.peer is not None and reaches(self.peer, self.beat(alive))

    def status(self, clock: float) -> dict[str, object]:
        """Describe the client for people and dashboards. `clock`: the service's."""
        return {
            "name": self.name,
            "number": self.number,
            "connected": self.peer is not None,
            "groups": len(self.groups),
            "running_samples": self.running,
            "unacked_bytes": self.unacked_bytes,
            "silent_s": round(clock - self.last_received_at, 3),
        }

    def hold(self, held: HeldGroup) -> None:
        self.groups[held.group_id] = held
        self.samples += held.n

    def drop(self, group_id: str) -> None:
        """Forget a group and its samples."""
        held = self.groups.pop(group_id)
        self.record.dropped(held.engine_id)
        self.streaming.drop(group_id)
        self.samples -= held.n
        self.unacked_bytes -= sum(kept.size for kept in held.unacked.values())
        held.unacked.clear()

    def reply(self, frames: list[Frame]) -> None:
        """Queue a message that is not repeated after a reconnect: the client asks again."""
        self._queue.append(frames)
        self._reply_bytes += frame_bytes(frames)

    def deliver(self, held: HeldGroup, sample: Sample) -> None:
        """Queue a sample of `held`; it is kept until acked."""
        held.ended += 1
        if not held.running:
            self.streaming.drop(held.group_id)
        if self.record.lasting:
            frames = pack(pack_samples([held.group_id], [sample]))
            self.record.ended(held.engine_id, sample.index, sample.finish_reason, frames)
        self.keep(held, sample)

    def keep(self, held: HeldGroup, sample: Sample) -> None:
        """Queue a child that has ended."""
        kept = held.unacked[sample.index] = UnackedSample(held, sample, kept_bytes(sample))
        self._queue.append(kept)
        self.unacked_bytes += kept.size

    def stream(self, engine: EngineLike) -> None:
        """Queue new tokens of children that run, if the client asks for them and reads."""
        if self.peer is not None and (progress := self.streaming.next(engine)) is not None:
            self.reply(pack(progress))

    def ack(self, samples: Iterable[tuple[str, int]]) -> None:
        """Forget samples that have arrived, and a group with its last one. Acks of anything else are old: nothing to do."""
        for group_id, index in samples:
            held = self.groups.get(group_id)
            kept = held.unacked.pop(index, None) if held else None
            if held is None or kept is None:
                continue
            self.unacked_bytes -= kept.size
            self._carried += kept.size
            held.acked += 1
            self.record.acked(held.engine_id, index)
            if held.acked == held.n:
                self.drop(group_id)

    def attach(self, peer: bytes, welcome: list[Frame]) -> None:
        """Take a (new) connection: the Welcome goes first, then whatever it has not acked is sent again."""
        self.peer = peer
        self.taken_bytes = self._reported_bytes = 0
        self.streaming.restart()
        self._queue, self._packed, self._carried = deque([welcome]), [], 0
        self._reply_bytes = frame_bytes(welcome)
        for held in self.groups.values():
            self._queue.extend(held.unacked.values())

    def flush(self, send: Callable[[bytes, list[Frame]], bool], more_come: bool = False) -> bool:
        """Send what the connection takes now, at most MOST_AT_ONCE messages. Returns whether that was the reason to stop.
        more_come: samples that may wait need not go by themselves."""
        waits = more_come and self.gathers and not self._reply_bytes and time.monotonic() - self._samples_at < GATHER_S
        if self.peer is None or waits:
            return False
        for _ in range(MOST_AT_ONCE):
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
            self._packed, self._samples_at = [], time.monotonic()
        return bool(self._queue)

    def _pack(self) -> list[Frame]:
        """Make one message of the samples that are next; none of those that were acked or dropped meanwhile."""
        samples, names, size = list[Sample](), list[str](), 0
        most_bytes = min(BATCH_BYTES, max(FIRST_BYTES, self._carried))
        while self._queue and len(samples) < BATCH_SAMPLES:
            entry = self._queue[0]
            if isinstance(entry, list):
                break
            held, sample, more = entry
            if sample.index in held.unacked:
                size = size + more
                if samples and (size > most_bytes or sample.layout != samples[0].layout):
                    break
                samples.append(sample)
                names.append(held.group_id)
            self._queue.popleft()
        return pack(pack_samples(names, samples)) if samples else []


def kept_bytes(sample: Sample) -> int:
    """Count what a sample takes that is kept for its client."""
    return sample.nbytes + SAMPLE_OVERHEAD


class Sessions:
    """All clients, by key and session id, and by connection."""

    def __init__(self, most: int, record: Persistence | None = None) -> None:
        self._most = most
        self._record = Persistence() if record is None else record
        self._by_id: dict[tuple[str, str], Session] = {}
        self._by_peer: dict[bytes, Session] = {}
        self._made = 0

    def __iter__(self) -> Iterator[Session]:
        return iter(self._by_id.values())

    def __len__(self) -> int:
        return len(self._by_id)

    def others(self, session: Session) -> list[Session]:
        """List the other fronts of its key. Clients are none, whatever a Hello asks for."""
        return [other for other in self if other is not session and other.key == session.key and other.gathers]

    def at(self, peer: bytes) -> Session | None:
        return self._by_peer.get(peer)

    def open(self, id: str, name: str, key: str = "") -> Session:
        """Return the key's session of this id, a new one if there is none: who finds out the id of another's session has
        nothing of it. Raises Busy."""
        if (key, id) not in self._by_id:
            if len(self._by_id) >= self._most:
                raise Busy(f"{len(self._by_id)} clients are connected, the most allowed (Limits.max_clients)")
            self._made += 1
            self._by_id[key, id] = Session(id, name, self._made, key, self._record)
            self._record.opened(key, id, name, self._made)
            log.info("client connected client=%d name=%r", self._made, name)
        return self._by_id[key, id]

    def bring_back(self, key: str, id: str, name: str, number: int) -> Session:
        """Make a session again that was open before a restart, under the number that it had."""
        self._made = max(self._made, number)
        session = self._by_id[key, id] = Session(id, name, number, key, self._record)
        return session

    def of(self, key: str, id: str) -> Session:
        """Return the session of this id that the key has. KeyError if there is none."""
        return self._by_id[key, id]

    def connect(self, session: Session, peer: bytes, hello: int, welcome: list[Frame]) -> None:
        """Make `peer` the session's connection, and nobody else's. `hello`: number of the Hello that says so. One
        that is repeated, because its answer was slow, changes nothing: what was sent on this connection arrives, and a sample
        that came twice might be taken for one of a new group of the same id."""
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
        del self._by_id[session.key, session.id]
        self._record.closed(session.key, session.id)
        if session.peer is not None:
            del self._by_peer[session.peer]


def without_tokens(sample: Sample, reason: str) -> Sample:
    """Make what is delivered in place of a sample that there is no room to keep."""
    return msgspec.structs.replace(sample, finish_reason="error", error=reason, **no_tokens().columns())
