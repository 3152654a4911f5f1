"""Maps a client's group ids to engine ids, also for finished groups, which the next turn of a conversation may continue.

A lookup sees the groups of this client only, so another client's group is an unknown one.
"""

from __future__ import annotations

import numpy as np
import xxhash

FIRST_SLOTS = 64
"""size of a new ring"""


def engine_name(session: int, number: int) -> str:
    """Return the engine id of a group. session: number of the session; number: counts the groups of the service."""
    return f"{session}.{number}"


def number_of(engine_id: str) -> int:
    """Return the number of a group, from its engine id. Raises ValueError."""
    return int(engine_id.rpartition(".")[2])


class GroupNames:
    """Engine ids of the newest groups of one client, in a ring with 16 bytes for each: there are hundreds per second, and few
    are looked up. A client's id is stored as a 64-bit digest. If two ids collide, the engine notices that the tokens of the
    turn differ (`rollout.engine.scheduling.conversation`).

    session: number of the client's session."""

    def __init__(self, session: int) -> None:
        self._session = session
        self._digests = np.zeros(FIRST_SLOTS, np.uint64)
        """digests of ids"""
        self._numbers = np.zeros(FIRST_SLOTS, np.int64)
        """numbers of the groups"""
        self._added = 0
        self._keeping: dict[int, int] = {}
        """digest → number of groups whose KV the engine may keep (`Sampling.kv_ttl_s`)"""

    def add(self, group_id: str, engine_id: str, keeps: bool, most: int) -> list[str]:
        """Add a group. Returns the engine ids of groups that can no longer be looked up and whose KV may be kept: the previous
        group of this id, and the oldest group.

        keeps: whether the engine may keep KV of it. most: groups in the ring, the same in all calls."""
        digest, number, slot = _digest(group_id), number_of(engine_id), self._added % most
        gone = [self._keeping.pop(digest, None)]
        if slot == len(self._digests):
            self._digests = np.resize(self._digests, min(most, 2 * slot))
            self._numbers = np.resize(self._numbers, min(most, 2 * slot))
        elif self._added >= most and self._keeping.get(oldest := int(self._digests[slot])) == self._numbers[slot]:
            gone.append(self._keeping.pop(oldest))
        self._digests[slot], self._numbers[slot] = digest, number
        self._added += 1
        if keeps:
            self._keeping[digest] = number
        return [engine_name(self._session, each) for each in gone if each is not None]

    def turn(self, after: tuple[str, int] | None) -> tuple[str, int] | None:
        """Return engine id and index of a child, given the client's group id and index; None if the group is unknown. Scans the
        ring, in some 20 µs."""
        if after is None:
            return None
        known = self._digests[: self._added] == np.uint64(_digest(after[0]))
        numbers = self._numbers[: self._added][known]
        return (engine_name(self._session, int(numbers.max())), after[1]) if len(numbers) else None

    def keeping(self, group_id: str | None = None) -> list[str]:
        """List the engine ids of groups whose KV the engine may keep: of one id, or of all."""
        if group_id is None:
            return [engine_name(self._session, number) for number in self._keeping.values()]
        number = self._keeping.get(_digest(group_id))
        return [] if number is None else [engine_name(self._session, number)]


def _digest(group_id: str) -> int:
    return xxhash.xxh3_64_intdigest(group_id.encode())
