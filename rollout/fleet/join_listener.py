"""Replicas that others start: a shell, SLURM, Kubernetes, Ray. They say each second where they listen; the front connects.

    replica ── Join(name, incarnation, address, key of its service) ──→ Joins ── Event(name, address) ──→ Members ── link
            ←── Joined(leave) or Refused ─────────────────────────────── tend

With keys the replica shows one with the role `replica`, and the front shows the replica its own: each end knows the other by a
key that the connection file, or the encrypted Join, has named. Nothing secret travels.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from engine.types import Limits
from rollout.fleet.launcher import FIRST_PAUSE_S, MOST_PAUSE_S, LauncherLike, ReplicaEvent, Use, alike, least_used
from rollout.logs import logger
from transport import messages as m
from transport.errors import Busy, Forbidden, InvalidRequest, LimitExceeded, RolloutError, VersionMismatch
from transport.frames import Decoder, pack
from transport.keys.files import FILE_VERSION, ClientKeys
from transport.keys.ring import client_of
from transport.sockets import ServiceTransport, check_address

SILENT_S = 4.0
"""a name is free for another process when its own has said nothing for so long"""
GONE_S = 60.0
"""a replica that is lost, and silent for so long, is forgotten"""

log = logger(__name__)


@dataclass(slots=True)
class JoinedReplica:
    """A replica that has joined, or had."""

    join: m.Join
    key: str
    """public, of who joined; "" without keys"""
    heard_at: float
    again_at: float = 0.0
    """when the front connects (again)"""
    pause_s: float = FIRST_PAUSE_S
    up: bool = False
    """the front was told that it listens"""
    answer: m.Joined = m.Joined()
    going: bool = False
    """for good"""


class JoinListener:
    """Used by the thread of the front's service. `end`: where replicas join; closed by `close`."""

    def __init__(self, end: ServiceTransport, clock: Callable[[], float] = time.monotonic) -> None:
        self._end = end
        self._clock = clock
        self._decoder: Decoder[m.ReplicaMessage] = Decoder(m.ReplicaMessage, Limits())
        self._known: dict[str, JoinedReplica] = {}
        self._events: list[ReplicaEvent] = []
        log.info("replicas may join address=%s", end.endpoint)

    @property
    def endpoint(self) -> str:
        return self._end.endpoint

    @property
    def wanted(self) -> int:
        """How many replicas have joined and are not to go, those included that are expected back."""
        return sum(not known.going for known in self._known.values())

    @property
    def outlived(self) -> frozenset[str]:
        return frozenset()  # they join again by themselves

    def __contains__(self, name: str) -> bool:
        return name in self._known

    def tend(self) -> list[ReplicaEvent]:
        """Answer those who join. Returns what has become of the replicas since the last call."""
        for peer, frames in self._end.receive(0.0):
            try:
                answer: msgspec.Struct = self._handle(peer, self._decoder.unpack(frames))
            except RolloutError as error:
                answer = m.Refused(error.kind, error.message)
            self._end.send(peer, pack(answer))
        now = self._clock()
        for name, known in list(self._known.items()):
            if self._end.keys is not None and self._end.keys.client(known.key) is None:
                self._forget(name, "its key was revoked")
            elif not known.up and now - known.heard_at > GONE_S:
                self._forget(name, f"{known.answer.why or 'it was lost'}, and it has not come back")
        events, self._events = self._events, []
        return events

    def replace(self, name: str, sick: bool = False) -> None:
        """Let a lost replica join again after a pause; `sick`: have its process end, for another one to take its place."""
        if (known := self._known.get(name)) is not None:
            known.up = False
            known.again_at = self._clock() + known.pause_s
            known.pause_s = min(MOST_PAUSE_S, 2 * known.pause_s)
            if sick and not known.answer.leave:
                known.answer = m.Joined("restart", "it is not of use as it is")

    def restart(self, name: str) -> None:
        """Ask a replica's process to stop in order, and its launcher, by the exit status, for another one."""
        self._known[name].answer = m.Joined("restart", "the fleet is restarted")

    def remove(self, name: str) -> None:
        """End a replica for good."""
        if (known := self._known.get(name)) is not None and not known.going:
            known.going, known.answer = True, m.Joined("stop", "the fleet does without it")

    def scale(self, count: int, use: Use = alike) -> list[str]:
        """Name those that are to go. Raises ValueError where there are not as many as wanted."""
        staying = [name for name, known in self._known.items() if not known.going]
        here = sum(self._known[name].up for name in staying)
        if count > here:
            raise ValueError(f"{here} replicas have joined: start more with `rollout serve --join …` to have {count}")
        return least_used(staying, count, use)

    def pid(self, name: str) -> int | None:
        known = self._known.get(name)
        return known.join.pid or None if known is not None else None

    def close(self) -> None:
        """Let go of the address. The replicas stay, and join whatever front comes to listen there."""
        self._end.close()

    # messages

    def _handle(self, peer: bytes, message: m.ReplicaMessage) -> m.Joined:
        key = self._key(peer)
        known = self._known.get(message.name)
        if isinstance(message, m.Leave):
            if known is not None and (known.key, known.join.incarnation) == (key, message.incarnation):
                self._left(known)
            return m.Joined()
        if message.protocol != m.PROTOCOL:
            raise VersionMismatch(f"the replica speaks protocol {message.protocol}, the front {m.PROTOCOL}")
        self._address(message)
        if known is None or (known.key, known.join.incarnation) != (key, message.incarnation):
            known = self._new(message, key, known)
        known.heard_at = now = self._clock()
        if not known.up and not known.answer.leave and now >= known.again_at:
            known.up = True
            self._events.append(ReplicaEvent(message.name, self._address(message), "it has joined"))
        return known.answer

    def _key(self, peer: bytes) -> str:
        """Return the key that a message came with. Raises KeyRefused, Forbidden."""
        if self._end.keys is None:
            return ""
        client = client_of(self._end.keys, peer)
        if "replica" not in client.roles:
            raise Forbidden(f"Join is for keys with the role 'replica'; {client.name!r} has {', '.join(client.roles)}")
        return client.public

    def _address(self, join: m.Join) -> str | ClientKeys:
        """Return what the front connects by. Raises InvalidRequest for a replica that would talk in clear, or to nobody."""
        if self._end.keys is None:
            if join.server:
                raise InvalidRequest("the replica has keys and this front has none: --service.keys, see docs/fleet.md")
            try:
                check_address(join.address)
            except ValueError as error:
                raise InvalidRequest(str(error)) from None
            return join.address
        own = self._end.keys.own
        fields = dict(version=FILE_VERSION, address=join.address, server=join.server, name="front", public=own.public)
        try:
            return msgspec.convert({**fields, "secret": own.secret}, ClientKeys, strict=False)
        except msgspec.ValidationError:
            raise InvalidRequest("the replica has no keys: join by a connection file of a key with the role replica") from None

    def _new(self, join: m.Join, key: str, before: JoinedReplica | None) -> JoinedReplica:
        """Take a process in. Raises Busy while another one has its name, LimitExceeded."""
        now = self._clock()
        if before is not None:
            if now - before.heard_at < SILENT_S:
                raise Busy(f"another process is the replica {join.name!r}: --fleet.name gives this one another name")
            if before.up:
                self._events.append(ReplicaEvent(join.name, None, "another process has its name"))
        elif len(self._known) >= m.MOST_REPLICAS:
            raise LimitExceeded(f"{m.MOST_REPLICAS} replicas have joined")
        again_at, pause_s = (now, FIRST_PAUSE_S) if before is None else (before.again_at, before.pause_s)
        known = self._known[join.name] = JoinedReplica(join, key, now, again_at, pause_s)
        if before is not None and before.going:
            known.going, known.answer = True, before.answer
        log.info("replica joins name=%s address=%s pid=%d", join.name, join.address, join.pid)
        return known

    def _left(self, known: JoinedReplica) -> None:
        known.up, known.heard_at = False, self._clock() - SILENT_S  # its name is free
        known.again_at, known.pause_s = 0.0, FIRST_PAUSE_S
        self._events.append(ReplicaEvent(known.join.name, None, "it has stopped", known.going))
        if known.going:
            del self._known[known.join.name]

    def _forget(self, name: str, why: str) -> None:
        del self._known[name]
        self._events.append(ReplicaEvent(name, None, why, True))


class MixedLauncher:
    """Replicas that a launcher of this host starts, and those that join."""

    def __init__(self, started: LauncherLike, joins: JoinListener) -> None:
        self._started, self._joins = started, joins

    @property
    def wanted(self) -> int:
        return self._started.wanted + self._joins.wanted

    @property
    def outlived(self) -> frozenset[str]:
        return self._started.outlived

    def tend(self) -> list[ReplicaEvent]:
        return [*self._started.tend(), *self._joins.tend()]

    def replace(self, name: str, sick: bool = False) -> None:
        self._of(name).replace(name, sick)

    def restart(self, name: str) -> None:
        self._of(name).restart(name)

    def remove(self, name: str) -> None:
        self._of(name).remove(name)

    def scale(self, count: int, use: Use = alike) -> list[str]:
        """Change how many are started here; others come and go by themselves."""
        return self._started.scale(count, use)

    def pid(self, name: str) -> int | None:
        return self._of(name).pid(name)

    def close(self) -> None:
        self._started.close()
        self._joins.close()

    def _of(self, name: str) -> LauncherLike:
        return self._joins if name in self._joins else self._started
