"""State of each client's connection and of its groups. Written by the proxy's thread."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

from rollout.cache.answers import Answer
from rollout.cache.upstream import UpstreamLike
from rollout.engine.types import Sample
from rollout.transport.frames import Frame, frame_bytes
from rollout.transport.messages import Alive, Submit


@dataclass(eq=False)
class Recording:
    """A group that the service computes, until all of its samples have passed."""

    name: str
    """of its entry"""
    version: int
    """live at its submission"""
    wanted: set[int]
    """children that have not passed"""
    samples: list[Sample] = field(default_factory=list)


@dataclass
class Tally:
    """Counts of groups: of one client, or of all."""

    hits: int = 0
    misses: int = 0
    uncacheable: int = 0
    first_miss: dict[str, Any] | None = None


class NotConnected:
    """Before the connection to the service is opened."""

    patient = False

    def send(self, frames: list[Frame]) -> None: ...
    def close(self) -> None: ...


@dataclass(eq=False)
class CachedClient:
    """Connection of a client."""

    id: bytes
    session: str
    last_received_at: float
    upstream: UpstreamLike = field(default_factory=NotConnected)
    out: deque[list[Frame]] = field(default_factory=deque)
    """messages that its socket has not taken"""
    out_bytes: int = 0
    answered_bytes: int = 0
    """bytes of messages that were answered from the folder since Hello"""
    reported_bytes: int = 0
    """how many of these the client knows of"""
    last_alive: Alive | None = None
    """of the service, on this connection"""
    recordings: dict[str, Recording] = field(default_factory=dict)
    status_requests: set[int] = field(default_factory=set)
    begun: dict[str, tuple[str, bool]] = field(default_factory=dict)
    """entry of a refresh, and whether it is an adapter, by push id"""
    commits: dict[int, tuple[str, bool]] = field(default_factory=dict)
    """the same of open commits, by request id"""
    tally: Tally = field(default_factory=Tally)

    def say(self, frames: list[Frame]) -> None:
        """Queue a message to the client."""
        self.out.append(frames)
        self.out_bytes += frame_bytes(frames)


@dataclass(eq=False)
class HeldGroup:
    """A group with a stored answer, until the weights of that answer are live."""

    client: CachedClient
    submit: Submit
    frames: list[Frame]
    answer: Answer
    version: int
    """live at its submission"""
    at: float
