"""What the engine calls the groups of a client, also those that have ended: a turn names the child that it continues.

Nobody but the client itself is looked up here, so another client's group is one that does not exist.
"""

from __future__ import annotations

import numpy as np
import xxhash

FIRST_PLACES = 64


def engine_name(session: int, number: int) -> str:
    """Name a group in the engine. session: number of its client's; number: of the group, in the order of their making."""
    return f"{session}.{number}"


def number_of(engine_id: str) -> int:
    """Return which group of this service, in the order of their making, has this name in the engine."""
    return int(engine_id.rpartition(".")[2])


class GroupNames:
    """Of the newest groups of one client, in a ring: 16 bytes for each, since there are hundreds in a second and few are asked
    for. Ids are known by 64 bits of a digest; where two of them share these, the engine finds that a turn's tokens are others
    (`engine.scheduling.conversation`)."""

    def __init__(self, session: int) -> None:
        self._session = session
        self._digests = np.zeros(FIRST_PLACES, np.uint64)
        """of ids"""
        self._numbers = np.zeros(FIRST_PLACES, np.int64)
        """of the groups, in the order of their making"""
        self._added = 0
        self._keeping: dict[int, int] = {}
        """digest -> number of those that may have something kept (`Sampling.kv_ttl_s`)"""

    def add(self, group_id: str, engine_id: str, keeps: bool, most: int) -> list[str]:
        """Note a group, the newest of `most`, which is the same in all calls. Returns the engine's names of those that cannot
        be named any more, if something may be kept of them: of the id's last owner, and of the oldest group."""
        digest, number, place = _digest(group_id), number_of(engine_id), self._added % most
        gone = [self._keeping.pop(digest, None)]
        if place == len(self._digests):
            self._digests = np.resize(self._digests, min(most, 2 * place))
            self._numbers = np.resize(self._numbers, min(most, 2 * place))
        elif self._added >= most and self._keeping.get(oldest := int(self._digests[place])) == self._numbers[place]:
            gone.append(self._keeping.pop(oldest))
        self._digests[place], self._numbers[place] = digest, number
        self._added += 1
        if keeps:
            self._keeping[digest] = number
        return [engine_name(self._session, each) for each in gone if each is not None]

    def turn(self, after: tuple[str, int] | None) -> tuple[str, int] | None:
        """Return the engine's name of a child of this client; None if it is not known. Looks through all, for some 20 µs."""
        if after is None:
            return None
        known = self._digests[: self._added] == np.uint64(_digest(after[0]))
        numbers = self._numbers[: self._added][known]
        return (engine_name(self._session, int(numbers.max())), after[1]) if len(numbers) else None

    def keeping(self, group_id: str | None = None) -> list[str]:
        """List the engine's names of the groups that may have something kept; of one group, or of all."""
        if group_id is None:
            return [engine_name(self._session, number) for number in self._keeping.values()]
        number = self._keeping.get(_digest(group_id))
        return [] if number is None else [engine_name(self._session, number)]


def _digest(group_id: str) -> int:
    return xxhash.xxh3_64_intdigest(group_id.encode())
