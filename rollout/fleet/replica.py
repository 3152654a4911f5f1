"""The router's connection to one replica, which is an ordinary service, and the replica's state."""

from __future__ import annotations

import enum
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from functools import partial
from typing import Any

from rollout.client.connection import LinkTiming
from rollout.client.link import Link
from rollout.engine.values import Limits
from rollout.fleet.event_queue import EventQueue
from rollout.fleet.owners import Owner
from rollout.fleet.replica_status import ProgressWatch, ReplicaStatus, read_status
from rollout.fleet.timing import TIMING, Timing
from rollout.logs import logger
from rollout.transport.errors import NotBelieved
from rollout.transport.keys.files import ClientKeys
from rollout.transport.messages import GATHERS, REPLICA_HEADER_BYTES, StatusRequest, Welcome
from rollout.transport.sockets import ClientEnd

NEVER_S = 1e9
"""the router, not the link, decides how long a replica may be away"""

Make = Callable[[int], Any]
"""builds a message for the id of a request"""

log = logger(__name__)


class State(enum.Enum):
    """State of a replica. docs/fleet.md shows the transitions."""

    JOINING = "joining"
    """its process starts, or its Welcome has not arrived"""
    STALE = "stale"
    """it lacks the live weights, and gets no groups"""
    SERVING = "serving"
    SUSPECT = "suspect"
    """its link is down: it keeps its groups and gets no others"""
    DEAD = "dead"


class Replica:
    """Written by `ReplicaSet`, in the service's thread.

    Args:
        inbox: queue by which answers reach that thread."""

    def __init__(self, name: str, inbox: EventQueue, timing: Timing = TIMING) -> None:
        self.name = name
        self.state = State.JOINING
        self.why = "its process starts"
        """reason for the state"""
        self.link: Link | None = None
        self.owner = Owner(name, name)
        """who runs it, once it has joined"""
        self.version = -1
        self.digest = ""
        self.base_digest = ""
        """of its weights without an adapter, as reported when it joined"""
        self.load = 0
        """outstanding tokens: prompts, and the most that their children may generate; 0: idle. Written by `FleetGroups`"""
        self.failing: set[str] = set()
        """groups that it has failed on since it last succeeded"""
        self.invalid = ""
        """what it sent that cannot be true; "": nothing"""
        self.stopping_since: float | None = None
        """when it first returned a child that was not aborted, as a replica does that stops; it gets no groups"""
        self.silent_since: float | None = None
        """when its link was seen to be down"""
        self.status: dict[str, Any] = {}
        """the last one"""
        self.status_requested_at: float | None = None
        """None: no request for a status is open"""
        self.progress = ProgressWatch(timing.no_progress_s)
        self.deaths = 0
        self.draining = False
        """it gets no groups, and is removed once it is idle"""
        self.restarting = False
        """it was asked to stop, and gets no groups until it is back"""
        self._inbox = inbox
        self._timing = timing
        self._requested_at: dict[Future[Any], float] = {}
        """of requests without an answer"""
        self._end: ClientEnd | None = None
        self._to_connect: tuple[str | ClientKeys, Callable[[Future[Any]], None]] | None = None
        """a link that could not be opened yet"""

    @property
    def welcome(self) -> Welcome:
        assert self.link is not None and self.link.welcome is not None
        return self.link.welcome

    @property
    def connected(self) -> bool:
        return self._end is not None and self._end.connected

    def connect(self, address: str | ClientKeys, then: Callable[[Future[Any]], None]) -> None:
        """Open a link to a new process. `then` is called in the service's thread with the Welcome or the refusal."""
        self.failing.clear()
        self.invalid, self.stopping_since, self.silent_since, self.restarting = "", None, None, False
        self.progress, self.status_requested_at = ProgressWatch(self._timing.no_progress_s), None
        self._requested_at.clear()
        self._to_connect = address, then
        self.retry_connect()

    def retry_connect(self) -> None:
        """Open the link that `connect` could not open because this process had no descriptors."""
        if self._to_connect is None:
            return
        address, then = self._to_connect
        try:
            self._end = ClientEnd(address, Limits())
        except OSError as error:
            self.why = f"the router cannot connect to it, and tries again: {error}"
            return
        self._to_connect = None
        timing = LinkTiming(link_s=NEVER_S, stall_s=self._timing.stalled_s, restart_s=NEVER_S)
        session = secrets.token_hex(16), f"router of {self.name}"
        # alone: the replica ends what it still does for a router that is dead, including an open refresh
        self.link = Link(self._end, *session, timing, capabilities=(GATHERS,), alone=True, header_bytes=REPLICA_HEADER_BYTES)
        self._on_answer(self.link.first_welcome, then)

    def request(self, make: Make) -> Future[Any]:
        """Send the request that `make` builds for an id. The future has the answer, or ClientClosed if the replica is lost."""
        assert self.link is not None
        return self.link.request(make)

    def request_then(self, make: Make, then: Callable[[Future[Any]], None] = lambda answer: None) -> None:
        """Send a request. `then` is called in the service's thread with the answer, and never if the replica is lost before."""
        self._on_answer(self.request(make), then)

    def set_state(self, state: State, why: str) -> None:
        if self.state is not state:
            log.info("replica name=%s %s -> %s why=%r", self.name, self.state.value, state.value, why)
        self.state, self.why = state, why

    def request_status(self, then: Callable[[ReplicaStatus, float], None]) -> None:
        """Request the status, unless a request is open. `then` is called with it and the time of the request."""
        if self.status_requested_at is not None:
            return
        self.status_requested_at = requested_at = time.monotonic()

        def arrived(answer: Future[Any]) -> None:
            self.status_requested_at = None
            if answer.exception() is None:
                status = read_status(answer.result())
                self.status = answer.result()
                then(status, requested_at)

        self.request_then(StatusRequest, arrived)

    def overdue(self, now: float) -> str:
        """Return why the replica is lost if an answer is overdue, "" if none is."""
        overdue = any(now - at > self._timing.overdue_s for at in self._requested_at.values())
        return f"it has not answered a request for {self._timing.overdue_s} s, and is connected" if overdue else ""

    def silent(self, now: float) -> str:
        """Update `silent_since`. Returns why the replica is lost if its link was down for too long, "" if not."""
        welcomed = self.link is not None and self.link.welcome is not None
        if welcomed and self.connected:
            self.silent_since = None
            return ""
        if self.silent_since is None:
            self.silent_since = now
        if not welcomed:
            slow = now - self.silent_since > self._timing.welcome_s
            return f"it has not answered for {self._timing.welcome_s} s" if slow else ""
        down = now - self.silent_since > self._timing.lost_s
        return f"its link was down for {self._timing.lost_s} s" if down else ""

    def returned_unasked(self) -> None:
        """Record that it returned a child that was not aborted: it is stopping. If it does not stop, that is a failure."""
        self.stopping_since = self.stopping_since or time.monotonic()

    def disconnect(self) -> None:
        """Close the link, without waiting for the other end to receive the goodbye."""
        link, self.link, self._end, self._to_connect = self.link, None, None, None
        if link is not None:
            threading.Thread(target=link.close, name="rollout-goodbye", daemon=True).start()

    def _on_answer(self, future: Future[Any], then: Callable[[Future[Any]], None]) -> None:
        link = self.link
        self._requested_at[future] = time.monotonic()

        def call(answer: Future[Any]) -> None:
            self._requested_at.pop(answer, None)
            if self.link is not link:
                return
            try:
                if isinstance(error := answer.exception(), NotBelieved):
                    self.invalid = error.message
                then(answer)
            except (ValueError, TypeError, LookupError, AttributeError) as wrong:
                self.invalid = str(wrong) or repr(wrong)
                log.error("invalid answer of a replica name=%s reason=%r", self.name, self.invalid)

        # `answer` is an argument, not a captured variable: a future keeps its callbacks, which would keep what `then` refers to
        future.add_done_callback(lambda answer: self._inbox.post(partial(call, answer)))


def serving(replicas: Mapping[str, Replica]) -> list[Replica]:
    """List the replicas that may get groups: they have the live weights and a link, and do not stop."""
    there = [one for one in replicas.values() if one.state is State.SERVING and one.stopping_since is None]
    return [one for one in there if not one.draining | one.restarting]


def linked(replicas: Mapping[str, Replica]) -> list[Replica]:
    """List the replicas that may be sent requests."""
    return [one for one in replicas.values() if one.state in (State.STALE, State.SERVING, State.SUSPECT)]
