"""Membership of the fleet: replicas report each second where they listen, and the router connects to them.

    replica ── Join(name, incarnation, address, key of its service) ──→ JoinListener ── ReplicaEvent ──→ ReplicaSet ── link
            ←── Joined(leave) or Refused ─────────────────────────────── poll

A shell, SLURM, Kubernetes, Ray or `rollout.fleet.launcher` starts them. With keys the replica shows one with the role
`replica`, and the router shows the replica its own: each end knows the other by a key that the connection file, or the
encrypted Join, contains. No secret is sent.
"""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, NoReturn

import msgspec

from rollout.engine.values import Limits
from rollout.fleet.launcher import PREFIX, ProcessExit, Use, alike, least_used
from rollout.fleet.owners import Ban, Owner, Owners
from rollout.fleet.timing import TIMING, Timing
from rollout.logs import logger
from rollout.transport import messages as m
from rollout.transport.errors import Busy, Forbidden, InvalidRequest, LimitExceeded, RolloutError, VersionMismatch
from rollout.transport.frames import Decoder, pack
from rollout.transport.keys.files import FILE_VERSION, ClientKeys
from rollout.transport.keys.ring import client_of
from rollout.transport.places import reaches
from rollout.transport.sockets import ServiceTransport, check_address

log = logger(__name__)


class ReplicaEvent(NamedTuple):
    """A replica has joined, or its process has ended."""

    name: str
    address: str | ClientKeys | None
    """where it listens; None: it has ended"""
    why: str
    removed: bool = False
    """no other process is expected under this name"""
    owner: Owner | None = None
    """of one that has joined"""


class JoinEndpoint(NamedTuple):
    """An address at which replicas join."""

    end: ServiceTransport
    admits: Callable[[str, int], bool] | None = None
    """for processes that the router starts itself: whether the process with this id is the replica of this name"""


@dataclass(slots=True)
class JoinedReplica:
    """A replica that has joined."""

    join: m.Join
    key: str
    """public, of the replica; "" without keys"""
    owner: Owner
    reported_at: float
    pause_s: float
    """before the router connects again"""
    again_at: float = 0.0
    """when the router connects (again)"""
    up: bool = False
    """the event that it has joined was returned"""
    answer: m.Joined = m.Joined()
    removed: bool = False


class JoinListener:
    """Used by the thread of the router's service. `endpoints`: where replicas join; closed by `close`. `owners`: whom the
    router trusts, and whom it has banned."""

    def __init__(
        self,
        *endpoints: JoinEndpoint,
        owners: Owners | None = None,
        clock: Callable[[], float] = time.monotonic,
        timing: Timing = TIMING,
    ) -> None:
        self.owners = owners or Owners()
        self._endpoints = endpoints
        self._clock = clock
        self._timing = timing
        self._decoder: Decoder[m.ReplicaMessage] = Decoder(m.ReplicaMessage, Limits())
        self._known: dict[str, JoinedReplica] = {}
        self._events: list[ReplicaEvent] = []
        self.own_addresses: set[str] = set()
        """where the router's clients connect, written by who makes its service"""
        self._refused: set[str] = set()
        """names of banned replicas that have asked to join"""
        for one in endpoints:
            log.info("replicas may join address=%s", one.end.endpoint)

    @property
    def names(self) -> list[str]:
        """Names of the replicas that have joined and are not being removed, including those that are expected back."""
        return [name for name, known in self._known.items() if not known.removed]

    def __contains__(self, name: str) -> bool:
        return name in self._known

    def poll(self, exits: Sequence[ProcessExit] = ()) -> list[ReplicaEvent]:
        """Answer the replicas that report. Returns what has changed since the last call. `exits`: processes that have ended, as
        their launcher knows; others may join under their names at once."""
        for endpoint in self._endpoints:
            for peer, frames in endpoint.end.receive(0.0):
                try:
                    answer: msgspec.Struct = self._handle(endpoint, peer, self._decoder.unpack(frames))
                except RolloutError as error:
                    answer = m.Refused(error.kind, error.message)
                endpoint.end.send(peer, pack(answer))
        for one in exits:
            self._ended(one)
        for name, known in list(self._known.items()):
            if self._is_revoked(known):
                self._forget(name, "its key was revoked")
            elif not known.up and self._clock() - known.reported_at > self._timing.forget_s:
                self._forget(name, f"{known.answer.why or 'it was lost'}, and it has not come back")
        events, self._events = self._events, []
        return events

    def lost(self, name: str, sick: bool = False) -> None:
        """Let a lost replica join again after a pause. `sick`: its process must be restarted first."""
        if (known := self._known.get(name)) is not None:
            known.up = False
            known.again_at = self._clock() + known.pause_s
            known.pause_s = min(self._timing.max_pause_s, 2 * known.pause_s)
            if sick and not known.answer.leave:
                known.answer = m.Joined("restart", "the replica is unhealthy")

    def restart(self, name: str) -> None:
        """Ask a replica's process to stop in order; its exit status asks its launcher for another one."""
        if (known := self._known.get(name)) is not None:
            known.answer = m.Joined("restart", "the fleet is being restarted")

    def remove(self, name: str) -> None:
        """Ask a replica's process to stop in order, for good."""
        if (known := self._known.get(name)) is not None and not known.removed:
            known.removed, known.answer = True, m.Joined("stop", "the replica was removed from the fleet")

    def scale(self, count: int, use: Use = alike) -> list[str]:
        """Return the names of the replicas to remove. Raises ValueError if fewer than `count` have joined."""
        staying = self.names
        here = sum(self._known[name].up for name in staying)
        if count > here:
            raise ValueError(f"{here} replicas have joined: start more with `rollout serve --join …` to have {count}")
        return least_used(staying, count, use)

    def pid(self, name: str) -> int | None:
        known = self._known.get(name)
        return known.join.pid or None if known is not None else None

    def close(self) -> None:
        """Close the addresses. Replicas keep running, and join the next router that listens there."""
        for one in self._endpoints:
            one.end.close()

    # messages

    def _handle(self, endpoint: JoinEndpoint, peer: bytes, message: m.ReplicaMessage) -> m.Joined:
        key, key_name = _key(endpoint.end, peer)
        known = self._known.get(message.name)
        owner = self.owners.of(message.name, key, key_name, endpoint.admits is not None)
        if owner.ban is not None:
            self._refuse_banned(message.name, owner.ban)
        if isinstance(message, m.Leave):
            if known is not None and (known.key, known.join.incarnation) == (key, message.incarnation):
                self._left(known, "it has stopped")
            return m.Joined()
        if message.protocol != m.PROTOCOL:
            raise VersionMismatch(f"the replica speaks protocol {message.protocol}, the router {m.PROTOCOL}")
        address = _address(endpoint.end, message)
        self._check_address(message.address)
        if endpoint.admits is None and message.name.startswith(PREFIX):
            raise InvalidRequest(
                f"names that begin with {PREFIX!r} belong to the router's own processes: choose another --fleet.name"
            )
        if endpoint.admits is not None and not endpoint.admits(message.name, message.pid):
            return m.Joined("stop", "another process is the replica of this name")
        if not (owner.trusted or self.owners.open_to_all):
            raise Busy("a trusted replica (fleet.trust) must join first: its model and weights are the fleet's")
        if known is None or (known.key, known.join.incarnation) != (key, message.incarnation):
            if known is not None and endpoint.admits is None:
                self._check_free(known)
            known = self._new(message, key, owner, known)
        known.reported_at = now = self._clock()
        if not known.up and not known.answer.leave and now >= known.again_at:
            known.up = True
            self._events.append(ReplicaEvent(message.name, address, "it has joined", owner=known.owner))
        return known.answer

    def _check_address(self, address: str) -> None:
        """Raises InvalidRequest for an address of the router itself, and for ipc:// without a socket of this user."""
        own = (*self.own_addresses, *(one.end.endpoint for one in self._endpoints))
        if any(reaches(address, each) for each in own):
            raise InvalidRequest(f"{address} is the router's own address: a replica gives its --service.endpoint")
        if address.startswith("ipc://") and not is_own_socket(address.removeprefix("ipc://")):
            raise InvalidRequest(f"{address}: there is no socket of the router's user; the replica must listen before it joins")

    def _refuse_banned(self, name: str, ban: Ban) -> NoReturn:
        """Raises Forbidden with the reason of a ban, which is logged once for each name."""
        why = f"{ban.name} is banned: {ban.why}"
        if len(self._refused) < m.MOST_REPLICAS and name not in self._refused:
            self._refused.add(name)
            log.warning("replica refused name=%s reason=%r", name, why)
        raise Forbidden(why)

    def _is_revoked(self, known: JoinedReplica) -> bool:
        rings = [one.end.keys for one in self._endpoints if one.end.keys is not None]
        return bool(known.key) and all(ring.client(known.key) is None for ring in rings)

    def _check_free(self, known: JoinedReplica) -> None:
        """Raises Busy while another process has the name."""
        if self._clock() - known.reported_at < self._timing.silent_s:
            raise Busy(f"another process is the replica {known.join.name!r}: choose another --fleet.name")

    def _new(self, join: m.Join, key: str, owner: Owner, before: JoinedReplica | None) -> JoinedReplica:
        """Add a process. Raises LimitExceeded."""
        now, first = self._clock(), self._timing.first_pause_s
        if before is not None and before.up:
            self._events.append(ReplicaEvent(join.name, None, "another process has its name"))
        if before is None and len(self._known) >= m.MOST_REPLICAS:
            raise LimitExceeded(f"{m.MOST_REPLICAS} replicas have joined")
        again_at, pause_s = (now, first) if before is None else (before.again_at, before.pause_s)
        known = self._known[join.name] = JoinedReplica(join, key, owner, now, pause_s, again_at)
        if before is not None and before.removed:
            known.removed, known.answer = True, before.answer
        log.info("replica joins name=%s address=%s pid=%d", join.name, join.address, join.pid)
        return known

    def _ended(self, one: ProcessExit) -> None:
        known = self._known.get(one.name)
        if known is None:
            self._events.append(ReplicaEvent(one.name, None, one.why, one.removed))
        else:
            known.removed |= one.removed
            self._left(known, one.why)

    def _left(self, known: JoinedReplica, why: str) -> None:
        known.up, known.reported_at = False, self._clock() - self._timing.silent_s  # its name is free
        known.again_at, known.pause_s = 0.0, self._timing.first_pause_s
        self._events.append(ReplicaEvent(known.join.name, None, why, known.removed))
        if known.removed:
            del self._known[known.join.name]

    def _forget(self, name: str, why: str) -> None:
        del self._known[name]
        self._events.append(ReplicaEvent(name, None, why, True))


def _key(end: ServiceTransport, peer: bytes) -> tuple[str, str]:
    """Return the key that a message came with, and its name; "" without keys. Raises KeyRefused, Forbidden."""
    if end.keys is None:
        return "", ""
    client = client_of(end.keys, peer)
    if "replica" not in client.roles:
        raise Forbidden(f"Join is for keys with the role 'replica'; {client.name!r} has {', '.join(client.roles)}")
    return client.public, client.name


def is_own_socket(path: str) -> bool:
    """Return whether a path is a socket of this user; an abstract one (@NAME) has no file and is another's to refuse."""
    try:
        about = os.lstat(path)
    except (OSError, ValueError):  # ValueError: a NUL in it
        return path.startswith("@")
    return stat.S_ISSOCK(about.st_mode) and about.st_uid == os.geteuid()


def _address(end: ServiceTransport, join: m.Join) -> str | ClientKeys:
    """Return what the router connects to. Raises InvalidRequest for a replica without keys, or with an invalid address."""
    if end.keys is None:
        if join.server:
            raise InvalidRequest("the replica has keys and this router has none: --service.keys, see docs/fleet.md")
        try:
            check_address(join.address)
        except ValueError as error:
            raise InvalidRequest(str(error)) from None
        return join.address
    own = end.keys.own
    fields = dict(version=FILE_VERSION, address=join.address, server=join.server, name="router", public=own.public)
    try:
        return msgspec.convert({**fields, "secret": own.secret}, ClientKeys, strict=False)
    except msgspec.ValidationError:
        raise InvalidRequest("the replica has no keys: join by a connection file of a key with the role replica") from None
