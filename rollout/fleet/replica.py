"""One replica as the front sees it: an ordinary service at the other end of a `Link`."""

from __future__ import annotations

import enum
import secrets
import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any

from engine.types import Limits
from rollout.client.link import Link
from rollout.client.patience import Patience
from rollout.fleet.inbox import Inbox
from transport.keys.files import ClientKeys
from transport.messages import GATHERS, StatusRequest, Welcome
from transport.sockets import ClientEnd

NEVER_S = 1e9
"""the front, not the link, judges how long a replica may be away"""
STALL_S = 300.0
"""longest that a connected replica's loop may say nothing; a single step may take minutes"""


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

    def __init__(self, name: str, inbox: Inbox) -> None:
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
        self.silent_since: float | None = None
        """when its link was seen to be down"""
        self.status: dict[str, Any] = {}
        """the last one that came"""
        self.asked_status = False
        self.deaths = 0
        self.leaving = False
        """it is given nothing more, and goes when nothing runs there"""
        self.restarting = False
        """it was asked to stop, and is given nothing until it is back"""
        self._inbox = inbox
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
        patience = Patience(NEVER_S, STALL_S, NEVER_S, resubmit=False)
        who = secrets.token_hex(16), f"front of {self.name}"
        # alone: what the replica still does for a front that is dead ends, its open refresh included
        self.link = Link(self._end, *who, patience, more=(GATHERS,), alone=True)
        self._answer(self.link.first_welcome, then)

    def ask(self, make: Callable[[int], Any], then: Callable[[Future[Any]], None] = lambda answer: None) -> None:
        """Send the request that `make` builds for an id. `then` is called in the service's thread with the answer, and never if
        the replica is lost before."""
        self._answer(self.request(make), then)

    def request(self, make: Callable[[int], Any]) -> Future[Any]:
        """Send the request that `make` builds for an id. The answer is the future's, or ClientClosed if the replica is lost."""
        assert self.link is not None
        return self.link.request(make)

    def ask_status(self, told: Callable[[dict[str, Any]], None]) -> None:
        """Ask for the status, unless that is under way; `told` is called with it as well."""
        if self.asked_status and self.status:
            return

        def then(answer: Future[Any]) -> None:
            self.asked_status = False
            if answer.exception() is None:
                self.status = answer.result()
                told(self.status)

        self.asked_status = True
        self.ask(StatusRequest, then)

    def disconnect(self) -> None:
        """Close the link. Nobody waits for that: it takes as long as the other end is given to hear the goodbye."""
        link, self.link, self._end, self._wanted = self.link, None, None, None
        if link is not None:
            threading.Thread(target=link.close, name="rollout-goodbye", daemon=True).start()

    def _answer(self, future: Future[Any], then: Callable[[Future[Any]], None]) -> None:
        link = self.link

        def call(answer: Future[Any]) -> None:
            if self.link is link:
                then(answer)

        # `answer` is given, not enclosed: a future keeps its callbacks, and would be garbage that holds all that `then` does
        future.add_done_callback(lambda answer: self._inbox.post(partial(call, answer)))
