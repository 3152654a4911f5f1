"""What the engine calls the groups of a client, also those that have ended: a turn names the child that it continues.

Nobody but the client itself is looked up here, so another client's group is one that does not exist. A client that runs for
days names millions: of each there are two numbers, some 130 bytes.
"""

from __future__ import annotations

import xxhash


def engine_name(session: int, number: int) -> str:
    """Name a group in the engine. session: number of its client's; number: of the group, in the order of their making."""
    return f"{session}.{number}"


def number_of(engine_id: str) -> int:
    """Return which group of this service, in the order of their making, has this name in the engine."""
    return int(engine_id.rpartition(".")[2])


class Names:
    """Of the newest groups of one client: as many as `add` is told at least, and twice as many at most.

    Two generations: when the newer one is full, the older one is forgotten as a whole. Ids are known by 64 bits of a digest; a
    turn that two of them led to the wrong child would find its tokens to be others (`engine.scheduling.turns`)."""

    def __init__(self, session: int) -> None:
        self._session = session
        self._newer: dict[int, int] = {}
        """digest of a group's id -> twice its number, plus 1 if KV of its children may be kept (`Sampling.keep_s`)"""
        self._older: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._newer) + len(self._older)

    def add(self, group_id: str, engine_id: str, keeps: bool, least: int) -> list[str]:
        """Note a group; the newest `least` can be named. Returns the engine's names of those that cannot be named any more, if
        something may be kept of them: of the id's last owner, and of the oldest groups."""
        gone, digest = self.keeping(group_id), _digest(group_id)
        self._newer.pop(digest, None)
        self._older.pop(digest, None)
        if len(self._newer) >= least:
            gone += self._keeping(self._older)
            self._older, self._newer = self._newer, {}
        self._newer[digest] = 2 * number_of(engine_id) + keeps
        return gone

    def turn(self, after: tuple[str, int] | None) -> tuple[str, int] | None:
        """Return the engine's name of a child of this client; None if it is not known."""
        noted = self._noted(after[0]) if after is not None else None
        return None if noted is None or after is None else (self._engine_id(noted), after[1])

    def keeping(self, group_id: str | None = None) -> list[str]:
        """List the engine's names of the groups that may have something kept; of one group, or of all."""
        if group_id is None:
            return self._keeping(self._older) + self._keeping(self._newer)
        noted = self._noted(group_id)
        return [self._engine_id(noted)] if noted is not None and noted % 2 else []

    def _noted(self, group_id: str) -> int | None:
        digest = _digest(group_id)
        return self._newer.get(digest, self._older.get(digest))

    def _keeping(self, some: dict[int, int]) -> list[str]:
        return [self._engine_id(noted) for noted in some.values() if noted % 2]

    def _engine_id(self, noted: int) -> str:
        return engine_name(self._session, noted // 2)


def _digest(group_id: str) -> int:
    return xxhash.xxh3_64_intdigest(group_id.encode())
