"""Records on which replicas finished children ran: only these replicas have the KV for the next turn."""

from __future__ import annotations

import time
from collections import OrderedDict
from typing import NamedTuple

from rollout.client.handle import OpenHandle
from rollout.client.link import Link
from rollout.fleet.replica import Replica

MAX_GROUPS = 4096
"""groups whose locations are stored"""


class SampleLocation(NamedTuple):
    """The replica on which one child ran."""

    replica: Replica
    link: Link
    """of the process that it ran in"""
    handle: OpenHandle
    """of its part"""
    until: float
    """time.monotonic: its KV is released then"""

    @property
    def valid(self) -> bool:
        """Whether the replica still has the same process."""
        return self.link is self.replica.link


class SampleLocations:
    """Locations of the children of the newest groups. Written by `FleetGroups`."""

    def __init__(self) -> None:
        self._by_group: OrderedDict[str, dict[int, SampleLocation]] = OrderedDict()

    def add(self, group_id: str, index: int, replica: Replica, handle: OpenHandle) -> None:
        """Store the location of a child whose KV is kept."""
        if replica.link is not None:
            until = time.monotonic() + handle.group.sampling.kv_ttl_s
            self._by_group.setdefault(group_id, {})[index] = SampleLocation(replica, replica.link, handle, until)

    def expire(self) -> None:
        """Remove the oldest groups while there are too many, or their KV was released."""
        while len(self._by_group) > MAX_GROUPS or self._oldest_expired():
            self._by_group.popitem(last=False)

    def _oldest_expired(self) -> bool:
        oldest = next(iter(self._by_group.values()), {})
        return bool(oldest) and all(one.until < time.monotonic() for one in oldest.values())

    def find(self, after: tuple[str, int] | None) -> SampleLocation | None:
        """Return the location of the child that a turn continues; None if its KV is not kept."""
        found = self._by_group.get(after[0], {}).get(after[1]) if after is not None else None
        return found if found is not None and found.valid else None

    def name_on(self, after: tuple[str, int] | None, replica: Replica) -> tuple[str, int] | None:
        """Return the replica's name of the child that a turn continues, if it ran there."""
        found = self.find(after)
        return None if found is None or after is None or found.replica is not replica else (found.handle.group_id, after[1])

    def release(self, group_id: str, index: int | None) -> None:
        """Release the KV of a finished child; of all children of the group if index is None."""
        children = self._by_group.get(group_id, {})
        for each in list(children) if index is None else [index]:
            found = children.pop(each, None)
            if found is not None and found.valid:
                found.handle.cancel([each])
        if not children:
            self._by_group.pop(group_id, None)
