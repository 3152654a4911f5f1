"""What the engine calls the groups of a client, also those that have ended: a turn names the child that it continues.

Nobody but the client itself is looked up here, so another client's group is one that does not exist.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple


class Name(NamedTuple):
    engine_id: str
    keeps: bool
    """KV of its children may be kept (`Sampling.keep_s`)"""


class Names:
    """Of the newest groups of one client."""

    def __init__(self) -> None:
        self._names: OrderedDict[str, Name] = OrderedDict()

    def add(self, group_id: str, name: Name, most: int) -> list[str]:
        """Note a group, the newest of at most so many. Returns the engine's names of those that cannot be named any more, if
        something may be kept of them: of the id's last owner, and of the oldest group."""
        gone = [self._names.pop(group_id)] if group_id in self._names else []
        self._names[group_id] = name
        if len(self._names) > most:
            gone.append(self._names.popitem(last=False)[1])
        return [name.engine_id for name in gone if name.keeps]

    def turn(self, after: tuple[str, int] | None) -> tuple[str, int] | None:
        """Return the engine's name of a child of this client; None if it is not known."""
        name = self._names.get(after[0]) if after is not None else None
        return None if name is None or after is None else (name.engine_id, after[1])

    def keeping(self, group_id: str | None = None) -> list[str]:
        """List the engine's names of the groups that may have something kept; of one group, or of all."""
        some = self._names.values() if group_id is None else [self._names[group_id]] if group_id in self._names else []
        return [name.engine_id for name in some if name.keeps]
