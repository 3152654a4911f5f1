"""Checks which messages the key of a client permits. Without keys every client may send every message.

message → key of the connection → one of its roles is in ROLES_OF → the loop
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import msgspec

from rollout.service.session import Session
from rollout.transport import messages as m
from rollout.transport.errors import Forbidden, KeyRefused
from rollout.transport.keys.files import ROLES, Role
from rollout.transport.keys.ring import KeyRing, client_of

ANY: tuple[Role, ...] = ROLES

ROLES_OF: dict[type[msgspec.Struct], tuple[Role, ...]] = {
    m.Hello: ANY,
    m.Heartbeat: ANY,
    m.Goodbye: ANY,
    m.Submit: ("rollout",),
    m.Abort: ("rollout",),
    m.Ack: ("rollout",),
    m.StatusRequest: ("read",),
    m.Begin: ("weights",),
    m.Chunk: ("weights",),
    m.Prepare: ("weights",),
    m.Commit: ("weights",),
    m.Abandon: ("weights",),
    m.WeightsRequest: ("weights", "read"),
    m.Share: ("weights",),
    m.Control: ("admin",),
    m.Replicas: ("admin",),
    m.Sleep: ("admin",),
    m.Wake: ("admin",),
}
"""roles that permit a message; one is enough. Messages that are not listed need the role admin"""


class Access:
    """Checks messages by key. ring: the clients' keys; None: the service has no keys."""

    def __init__(self, ring: KeyRing | None) -> None:
        self._ring = ring

    def check(self, peer: bytes, message: m.ClientMessage) -> None:
        """Check that the key of a connection permits a message. Raises KeyRefused, Forbidden."""
        if self._ring is None:
            return
        client, roles = client_of(self._ring, peer), ROLES_OF.get(type(message), ("admin",))
        if not any(role in client.roles for role in roles):
            what = " or ".join(map(repr, roles))
            have = ", ".join(client.roles)
            reason = f"{type(message).__name__} is for keys with the role {what}; {client.name!r} has {have}"
            raise Forbidden(reason, getattr(message, "group_id", None))

    def key(self, peer: bytes) -> str:
        """Return the public key of a connection; "" without keys."""
        return "" if self._ring is None else client_of(self._ring, peer).public

    def revoked(self, sessions: Iterable[Session]) -> Iterator[Session]:
        """Yield the sessions whose key was removed from the key file."""
        if self._ring is not None:
            yield from [session for session in sessions if self._ring.client(session.key) is None]

    def describe(self) -> dict[str, object] | None:
        """Describe the keys in the service's status; None without keys."""
        return None if self._ring is None else {"file": str(self._ring.path), "clients": len(self._ring)}


REVOKED = KeyRefused("this key was revoked, and its groups were aborted: ask for a new key")
