"""Owners of replicas: whom the router trusts, and whom it has banned.

    key (with keys) or name of a replica ─→ Owner ─→ trusted? ─→ its samples are verified, or verify others
                                                  ─→ banned?  ─→ refused when it joins

A key may have many replicas, and a ban is of the key. Without keys all processes belong to one user, and an owner is a name.
"""

from __future__ import annotations

import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from rollout.logs import logger

LOCAL = "local"
"""in `fleet.trust`: all replicas that the router starts itself"""
MOST_GROUPS = 1024
"""groups of one owner that are remembered after their samples were delivered unverified"""
SHOWN_GROUPS = 20
"""of them that the log names"""

log = logger(__name__)


class Ban(NamedTuple):
    """An owner whose replicas are refused."""

    owner: str
    """`Owner.id`"""
    name: str
    """`Owner.name`"""
    why: str
    at: float
    """seconds since 1970"""


@dataclass(slots=True, eq=False)
class Owner:
    """Who runs a replica."""

    id: str
    """public key, or the name of the replica if it joined without one"""
    name: str
    """of the key or replica, for people"""
    trusted: bool = False
    own: bool = False
    """the router starts its replicas"""
    ban: Ban | None = None
    counts: Counter[str] = field(default_factory=Counter)
    """verified, lies, unverifiable, skipped: children with its tokens"""
    delivered: OrderedDict[tuple[str, str], set[int]] = field(default_factory=OrderedDict)
    """(client, its id of the group) → children with tokens of this owner that were delivered unverified"""
    forgotten: int = 0
    """older groups that `delivered` had no room for"""

    def add_delivered(self, client: str, group: str, index: int) -> None:
        """Remember a child that was delivered unverified."""
        self.delivered.setdefault((client, group), set()).add(index)
        if len(self.delivered) > MOST_GROUPS:
            self.delivered.popitem(last=False)
            self.forgotten += 1


class Owners:
    """Written by the thread of the router's service.

    Args:
        trusted: names of keys, or of replicas that join without a key; LOCAL: those that the router starts.
        bans: of a router before this one.
        store: writes a new ban to the journal, if there is one."""

    def __init__(
        self, trusted: Collection[str] = (), bans: Iterable[Ban] = (), store: Callable[[Ban], None] = lambda ban: None
    ) -> None:
        self.open_to_all = not trusted
        """whether others than trusted owners may join: once trusted ones have said which model and weights are live"""
        self._trusted = frozenset(trusted)
        self._store = store
        self._by_id: dict[str, Owner] = {ban.owner: Owner(ban.owner, ban.name, ban=ban) for ban in bans}

    def of(self, replica: str, key: str, key_name: str, own: bool) -> Owner:
        """Return the owner of a replica. key: public, "" if it joined without one; own: the router has started it."""
        id, name = (key, f"key {key_name}") if key else (f"name {replica}", f"replica {replica}")
        owner = self._by_id.get(id)
        if owner is None:
            trusted = (key_name if key else replica) in self._trusted or (own and LOCAL in self._trusted)
            owner = self._by_id[id] = Owner(id, name, trusted, own)
        return owner

    @property
    def banned(self) -> list[Owner]:
        """List the banned owners."""
        return [owner for owner in self._by_id.values() if owner.ban is not None]

    def ban(self, owner: Owner, why: str) -> None:
        """Ban an owner: its replicas are refused, also by the next router with the same journal. A replica that the router
        starts itself may be started again by the next one: it is this user's, on this host."""
        owner.ban = Ban(owner.id, owner.name, why, time.time())
        if not owner.own:
            self._store(owner.ban)
        groups = [f"{client}/{group}" for client, group in owner.delivered]
        shown = " ".join(groups[:SHOWN_GROUPS]) + " …, all in fleet.bans of the status" * (len(groups) > SHOWN_GROUPS)
        unverified = sum(map(len, owner.delivered.values())), len(groups) + owner.forgotten
        log.error("replicas banned owner=%r why=%r", owner.name, why)
        log.error("delivered unverified before: samples=%d groups=%d client/group: %s", *unverified, shown or "none")

    def described(self) -> list[dict[str, Any]]:
        """Describe the bans for the status, with the groups that a trainer may want to drop."""
        return [
            {
                "owner": owner.name,
                "why": owner.ban.why,
                "at": owner.ban.at,
                "groups": [
                    {"client": client, "group": group, "samples": sorted(indices)}
                    for (client, group), indices in owner.delivered.items()
                ],
                "forgotten_groups": owner.forgotten,
            }
            for owner in self.banned
            if owner.ban is not None
        ]
