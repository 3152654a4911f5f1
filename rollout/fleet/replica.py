"""One replica as the front sees it: an ordinary service at the other end of a `Link`."""

from __future__ import annotations

import enum
import secrets
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any

from engine.types import Limits
from rollout.client.connection import LinkTiming
from rollout.client.link import Link
from rollout.fleet.event_queue import EventQueue
from rollout.fleet.told import ProgressWatch, Told, told
from rollout.logs import logger
from transport.errors import NotBelieved
from transport.keys.files import ClientKeys
from transport.messages import GATHERS, StatusRequest, Welcome
from transport.sockets import ClientEnd

NEVER_S = 1e9
"""the front, not the link, judges how long a replica may be away"""
STALL_S = 300.0
"""longest that a connected replica's loop may say nothing; a single step may take minutes"""
OVERDUE_S = 600.0
"""longest that an answer may take, of staging all weights as well"""

log = logger(__name__)


class State(enum.Enum):
    """What a replica may do. docs/fleet.md draws the ways between them."""

    JOINING = "joining"
    """its process starts, or it has not said yet who it is"""
    STALE = "stale"
    """it has not the live weights, and is given nothing to sample"""
    SERVING = "serving"
    SUSPECT = "suspect"
    """its link is down: what runs there stays, nothing more is given to it"""
    DEAD = "dead"


class Replica:
    """Written by `Members`, in the service's thread."""

    def __init__(self, name: str, inbox: EventQueue, wrong: Callable[[Replica, str], None]) -> None:
        """wrong: called with what makes an answer useless; the replica is lost then."""
        self.name = name
        self.state = State.JOINING
        self.why = "its process starts"
        """it is in this state"""
        self.link: Link | None = None
        self.version = -1
        self.digest = ""
        self.base_digest = ""
        """of its weights without an adapter, as it told when it came"""
        self.load = 0
        """outstanding tokens: prompts, and what their children may make; 0: nothing runs there. Written by `Groups`"""
        self.failing: set[str] = set()
        """groups that it has failed on since it last succeeded"""
        self.believed = True
        """nothing has come of it that cannot be"""
        self.gave_back_at: float | None = None
        """when it gave back a child that nobody had ended, as one that stops does; it is given nothing meanwhile"""
        self.silent_since: float | None = None
        """when its link was seen to be down"""
        self.status: dict[str, Any] = {}
        """the last one that came"""
        self.asked_status = False
        self.status_asked_at = 0.0
        self.progress = ProgressWatch()
        self.deaths = 0
        self.leaving = False
        """it is given nothing more, and goes when nothing runs there"""
        self.restarting = False
        """it was asked to stop, and is given nothing until it is back"""
        self._inbox = inbox
        self._wrong = wrong
        self._asked_at: dict[Future[Any], float] = {}
        """of what has not been answered"""
        self._end: ClientEnd | None = None
        self._wanted: tuple[str | ClientKeys, Callable[[Future[Any]], None]] | None = None
        """a link that is not open yet, and who hears of it"""

    @property
    def welcome(self) -> Welcome:
        assert self.link is not None and self.link.welcome is not None
        return self.link.welcome

    @property
    def connected(self) -> bool:
        return self._end is not None and self._end.connected

    def connect(self, address: str | ClientKeys, then: Callable[[Future[Any]], None]) -> None:
        """Open a link. `then` is called in the service's thread with the first Welcome, or with what was refused."""
        self._wanted = address, then
        self.connect_again()

    def connect_again(self) -> None:
        """Open the link that `connect` could not open. That this process had no descriptors is no fault of the replica."""
        if self._wanted is None:
            return
        address, then = self._wanted
        try:
            self._end = ClientEnd(address, Limits())
        except OSError as error:
            self.why = f"the front cannot connect to it, and tries again: {error}"
            return
        self._wanted = None
        timing = LinkTiming(link_s=NEVER_S, stall_s=STALL_S, restart_s=NEVER_S)
        who = secrets.token_hex(16), f"front of {self.name}"
        # alone: what the replica still does for a front that is dead ends, its open refresh included
        self.link = Link(self._end, *who, timing, capabilities=(GATHERS,), alone=True)
        self._answer(self.link.first_welcome, then)

    def ask(self, make: Callable[[int], Any], then: Callable[[Future[Any]], None] = lambda answer: None) -> None:
        """Send the request that `make` builds for an id. `then` is called in the service's thread with the answer, and never if
        the replica is lost before."""
        self._answer(self.request(make), then)

    def request(self, make: Callable[[int], Any]) -> Future[Any]:
        """Send the request that `make` builds for an id. The answer is the future's, or ClientClosed if the replica is lost."""
        assert self.link is not None
        return self.link.request(make)

    def overdue(self, now: float) -> bool:
        """Whether it has not answered something for too long."""
        return any(now - asked_at > OVERDUE_S for asked_at in self._asked_at.values())

    def gives_back(self) -> None:
        """Note that it has ended a child for no reason of its group's: it stops. Nothing is given to it until it is back, or
        has not stopped after all, which is a failure."""
        self.gave_back_at = self.gave_back_at or time.monotonic()

    def fresh(self) -> None:
        """Begin again with a new process: nothing is held against it, or awaited of it."""
        self.failing.clear()
        self.believed, self.gave_back_at, self.silent_since, self.restarting = True, None, None, False
        self.progress, self.asked_status = ProgressWatch(), False
        self._asked_at.clear()

    def ask_status(self, look: Callable[[Told], None]) -> None:
        """Ask for the status, unless that is under way; `look` is called with it."""
        if self.asked_status:
            return

        def then(answer: Future[Any]) -> None:
            self.asked_status = False
            if answer.exception() is None:
                status = told(answer.result())
                self.status = answer.result()
                look(status)

        self.asked_status, self.status_asked_at = True, time.monotonic()
        self.ask(StatusRequest, then)

    def disconnect(self) -> None:
        """Close the link. Nobody waits for that: it takes as long as the other end is given to hear the goodbye."""
        link, self.link, self._end, self._wanted = self.link, None, None, None
        if link is not None:
            threading.Thread(target=link.close, name="rollout-goodbye", daemon=True).start()

    def _answer(self, future: Future[Any], then: Callable[[Future[Any]], None]) -> None:
        link = self.link
        self._asked_at[future] = time.monotonic()

        def call(answer: Future[Any]) -> None:
            self._asked_at.pop(answer, None)
            if self.link is not link:
                return
            try:
                if isinstance(error := answer.exception(), NotBelieved):
                    self.believed = False
                then(answer)
            except (ValueError, TypeError, LookupError, AttributeError) as wrong:
                log.exception("answer of a replica not understood name=%s", self.name)
                self.believed, error = False, wrong
            if not self.believed:
                self._wrong(self, f"it answered what cannot be: {error}")

        # `answer` is given, not enclosed: a future keeps its callbacks, and would be garbage that holds all that `then` does
        future.add_done_callback(lambda answer: self._inbox.post(partial(call, answer)))
