"""What a client has seen of its service's weights: which version named which digest."""

from __future__ import annotations

from collections import OrderedDict

from engine.types import Served

REMEMBERED = 64
"""versions whose digest is remembered"""


class Seen:
    """Written by the client's I/O thread; any thread may read."""

    def __init__(self) -> None:
        self.live = Served()
        """as the service last said"""
        self._digests: OrderedDict[int, str] = OrderedDict()
        self._awaited = 0
        """version that groups wait for, on a service that counts from 0 again; 0: there is none"""

    def note(self, weights: Served) -> None:
        """Remember weights that are live, or were."""
        self.live = max(self.live, weights)
        if weights.digest:
            self._digests[weights.version] = weights.digest
            self._digests.move_to_end(weights.version)
        while len(self._digests) > REMEMBERED:
            self._digests.popitem(last=False)

    def told(self, live: Served) -> None:
        """Note what is live."""
        self.live = live
        self._awaited = self._awaited if live.version < self._awaited else 0
        self.note(live)

    def restarted(self, counts_on: bool, awaited: bool) -> None:
        """Note that the service was started again. counts_on: its versions go on from where they were. awaited: groups wait for
        weights as new as the last ones."""
        if not counts_on:
            self._awaited = max(self._awaited, self.live.version) if awaited else 0

    def digest(self, version: int) -> str:
        """Return the digest of the weights of a version; "": not known."""
        return self._digests.get(version, "")

    def next_version(self) -> int | None:
        """Return the version to ask for where nobody names one: above what groups wait for, on a service that counts from 0
        again. None: the service's next."""
        return self._awaited + 1 if self._awaited else None
