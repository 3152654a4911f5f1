"""Where children ran that have ended: a turn that continues one finds its KV there, and nowhere else."""

from __future__ import annotations

import time
from collections import OrderedDict
from typing import NamedTuple

from rollout.client.handle import Handle
from rollout.client.link import Link
from rollout.fleet.replica import Replica

MOST_HOMES = 4096
"""groups that are remembered"""


class SampleLocation(NamedTuple):
    """Where one child ran."""

    replica: Replica
    link: Link
    """of the process that it ran in"""
    handle: Handle
    """of its part"""
    until: float
    """time.monotonic: nothing is kept of it afterwards"""

    @property
    def there(self) -> bool:
        """Whether that process still lives."""
        return self.link is self.replica.link


class SampleLocations:
    """Of the newest groups. Written by `Groups`."""

    def __init__(self) -> None:
        self._homes: OrderedDict[str, dict[int, SampleLocation]] = OrderedDict()

    def add(self, group_id: str, index: int, replica: Replica, handle: Handle) -> None:
        """Note where a child has ended of which something is kept."""
        if replica.link is not None:
            until = time.monotonic() + handle.group.sampling.kv_ttl_s
            self._homes.setdefault(group_id, {})[index] = SampleLocation(replica, replica.link, handle, until)

    def tend(self) -> None:
        """Forget the oldest, if they are too many or nothing is kept of them any more."""
        while len(self._homes) > MOST_HOMES or self._first_is_over():
            self._homes.popitem(last=False)

    def _first_is_over(self) -> bool:
        oldest = next(iter(self._homes.values()), {})
        return bool(oldest) and all(home.until < time.monotonic() for home in oldest.values())

    def find(self, after: tuple[str, int] | None) -> SampleLocation | None:
        """Return where the child ran that a turn continues; None where nothing is kept of it."""
        home = self._homes.get(after[0], {}).get(after[1]) if after is not None else None
        return home if home is not None and home.there else None

    def hint(self, after: tuple[str, int] | None, replica: Replica) -> tuple[str, int] | None:
        """Return what a replica calls the child that a turn continues, if it ran there."""
        home = self.find(after)
        return None if home is None or after is None or home.replica is not replica else (home.handle.group_id, after[1])

    def give_up(self, group_id: str, index: int | None) -> None:
        """Have replicas give up what they keep of children that have ended; of all of a group if index is None."""
        homes = self._homes.get(group_id, {})
        for each in list(homes) if index is None else [index]:
            home = homes.pop(each, None)
            if home is not None and home.there:
                home.handle.cancel([each])
        if not homes:
            self._homes.pop(group_id, None)
