"""What sessions store so that they survive the process: a service has a `Persistence`, or its heir `Journal`."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import NamedTuple

from rollout.engine.values import FinishReason, Served
from rollout.transport.frames import Frame


class SessionIdentity(NamedTuple):
    """Names of a session. They stay the same when the service restarts."""

    key: str
    """public key of the client; "" without keys"""
    id: str
    """chosen by the client"""
    name: str
    """of the client, for logs and the status"""
    number: int
    """counts the sessions of the service"""


class Persistence:
    """What sessions store so that they survive the process. This base class stores nothing; `rollout.service.journal.Journal`
    writes to SQLite."""

    lasting = False
    """whether sessions exist again after a restart"""

    def __init__(self) -> None:
        self.incarnation = secrets.token_hex(8)
        """names the sessions and versions of this service: with a journal it stays the same over restarts"""
        self.starts = 0
        """how often a service has started with this incarnation; 0 without a journal"""

    def opened(self, session: SessionIdentity) -> None:
        """Store a session."""

    def closed(self, key: str, session: str) -> None:
        """Delete a session and its groups."""

    def accepted(self, key: str, session: str, engine_id: str, submit: Sequence[Frame], seed: int | None, live: Served) -> None:
        """Store a group. submit: as received. live: the oldest weights that may sample it after a restart."""

    def ended(self, engine_id: str, index: int, reason: FinishReason, sample: Sequence[Frame]) -> None:
        """Store a finished child until it is acknowledged."""

    def acked(self, engine_id: str, index: int) -> None:
        """Delete the sample of an acknowledged child."""

    def dropped(self, engine_id: str) -> None:
        """Delete a group."""

    def served(self, live: Served) -> None:
        """Write which weights are live, if they are new."""

    def commit(self, live: Served) -> None:
        """Write everything since the last commit, atomically. live: the live weights."""

    def close(self, live: Served | None = None) -> None:
        """Commit if `live` is given, then close the file. May be repeated."""
