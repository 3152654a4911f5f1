"""What requests ask the service for: their groups, from the event loop to the client and back.

    request --Ask--> Joining: equal ones become one group --submit--> client's I/O thread
                                                                          │ Handle.listen, Handle.on_tokens
    request <--future, parts--  Ask  <--call_soon_threadsafe, once a batch-- deque

No thread waits for a sample. A trainer of these dialects sends a group as n requests of one child. Each would be a message, a
row that waits for the KV of its prompt and an entry of every table of the service; joined, they are what that is made for.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial

import msgspec
import numpy as np

from engine.types import Sample, Sampling, TokenChunk
from rollout.client.api import RolloutClient
from rollout.client.handle import Handle
from rollout.http.errors import HttpError
from transport.errors import LimitExceeded

MAX_OPEN = 65_536
"""groups that may be open at a time"""
QUIET_S = 0.002
"""without a request, after which no equal ones are waited for"""
HOLD_S = 0.05
"""that a request waits for equal ones at most"""
MOST_JOINED = 64
"""children of a joined group: a fleet keeps a group on one replica"""

Submit = Callable[[np.ndarray, Sampling], Handle]
Part = TokenChunk | Sample


class PromptRequest:
    """One request's children of one prompt. For the event loop.

    Args:
        sampling: `n` is how many children it gets. They may be some of a larger group's, which nobody sees: their indices count
            from 0 here.
        tell: called with each part of a child as it comes (`Sampling.stream_every`), its sample last, and with None at the end.
        names: by which others may ask for its end.
    """

    def __init__(
        self,
        prompt: np.ndarray,
        sampling: Sampling,
        tell: Callable[[Part | None], None] | None = None,
        names: Collection[str] = (),
    ) -> None:
        self.prompt, self.sampling, self.names = prompt, sampling, names
        self.samples: list[Sample] = []
        self.ended = False
        """all its children are here, or it failed, or nobody wants it any more"""
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """to wait for it; whoever stops waiting cancels this"""
        self.shared: SharedGroup | None = None
        """the group that its children are in; None: it was not sent yet"""
        self.first = 0
        """index there of its child 0"""
        self._tell = tell

    def add(self, part: Part) -> None:
        """Take in tokens of a child, or a child that has ended."""
        if self.ended:
            return
        if self.first:
            part = msgspec.structs.replace(part, index=part.index - self.first)
        if isinstance(part, Sample):
            self.samples.append(part)
        if self._tell is not None:
            self._tell(part)
        if len(self.samples) == self.sampling.n:
            self.samples.sort(key=lambda sample: sample.index)
            self._end(None)

    def fail(self, error: Exception) -> None:
        if not self.ended:
            self._end(error)

    def _end(self, error: Exception | None) -> None:
        self.ended = True
        if self.done.done():
            pass
        elif error is None:
            self.done.set_result(None)
        else:
            self.done.set_exception(error)
            self.done.exception()  # a stream that ends early looks no more
        if self._tell is not None:
            self._tell(None)

    def abort(self) -> None:
        """Ask for its end: its children come back with what they have."""
        if self.shared is not None and not self.ended:
            self.shared.abort(self)


class SharedGroup:
    """A group in the service, and who asked for which of its children."""

    def __init__(self, handle: Handle, owners: list[PromptRequest]) -> None:
        self.handle = handle
        self.owners = owners
        """of each child"""
        self._open = set(owners)
        """whose children have not ended, and nobody has asked for their end"""

    def abort(self, ask: PromptRequest) -> None:
        """End one owner's children; the group, once nobody else waits for it."""
        self._open.discard(ask)
        self.handle.cancel(range(ask.first, ask.first + ask.sampling.n) if self._open else None)

    def add(self, part: Part | None) -> None:
        """Give its owner what has come; None: the group failed."""
        if part is not None:
            ask = self.owners[part.index]
            ask.add(part)
            if ask.ended:
                self._open.discard(ask)
            return
        assert self.handle.error is not None
        for ask in set(self.owners):  # also those whose end was asked for, and has not come
            ask.fail(self.handle.error)


class EventLoopWaker:
    """Wakes the event loop for what has come; `tell` is for the client's I/O thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._come: deque[tuple[SharedGroup, Part | None]] = deque()
        self._woken = False

    def tell(self, shared: SharedGroup, handle: Handle, part: Part | None) -> None:
        """Have a part given to its owner in the event loop. One wake-up serves all until it is looked at."""
        self._come.append((shared, part))
        if not self._woken:
            self._woken = True
            self._loop.call_soon_threadsafe(self._take)

    def _take(self) -> None:
        self._woken = False  # before the deque is read: what comes after wakes again
        while self._come:
            shared, part = self._come.popleft()
            shared.add(part)


class RequestQueue:
    """All that is open of one event loop, over one client."""

    def __init__(self, client: RolloutClient) -> None:
        self._client = client
        self._loop = asyncio.get_running_loop()
        self._arrivals = EventLoopWaker(self._loop)
        self._open: set[PromptRequest] = set()
        self._waiting: dict[tuple[bytes, bytes], list[PromptRequest]] = {}
        """asks that were not sent, by what they ask for"""
        self._timer: asyncio.TimerHandle | None = None
        self._held_since = self._last_held = 0.0

    def open(self, asks: Sequence[PromptRequest], submit: Submit | None = None) -> None:
        """Have groups sampled. Those with a seed, or that go by a `submit` of their own, are sent as they are, the others with
        their equals, if any come at once. Raises HttpError 503, and what `submit` does."""
        if len(self._open) + len(asks) > MAX_OPEN:
            raise HttpError(503, f"{len(self._open)} groups are open: at most {MAX_OPEN}; try again")
        for ask in asks:
            self._open.add(ask)
            if submit is None and ask.sampling.seed is None:
                self._hold(ask)
            else:
                self._send([ask], submit or self._client.submit)

    def close(self, asks: Iterable[PromptRequest]) -> None:
        """Forget asks; the children of those that are not done are cancelled."""
        for ask in asks:
            self._open.discard(ask)
            ask.abort()
            ask.ended = True

    def abort(self, wanted: Callable[[PromptRequest], bool] = lambda _: True) -> int:
        """Ask for the end of all that are open, or of those that are `wanted`. They come back with what they have. Returns how
        many there are."""
        self._send_held()
        asks = [ask for ask in self._open if not ask.ended and wanted(ask)]
        for ask in asks:
            ask.abort()
        return len(asks)

    def _hold(self, ask: PromptRequest) -> None:
        self._last_held = self._loop.time()
        if self._timer is None:
            self._held_since = self._last_held
            self._timer = self._loop.call_later(QUIET_S, self._look)
        key = ask.prompt.tobytes(), msgspec.msgpack.encode(ask.sampling)
        self._waiting.setdefault(key, []).append(ask)

    def _look(self) -> None:
        """Send what is held, once nothing comes right behind it any more."""
        due = min(self._last_held + QUIET_S, self._held_since + HOLD_S)
        if self._loop.time() < due:
            self._timer = self._loop.call_at(due, self._look)
        else:
            self._timer = None
            self._send_held()

    def _send_held(self) -> None:
        waiting, self._waiting = self._waiting, {}
        limits = self._client.info.limits
        most_children = min(MOST_JOINED, limits.max_n, limits.max_samples_per_client)
        for asks in waiting.values():
            asks = [ask for ask in asks if not ask.ended]  # others hung up
            while asks:
                most = max(1, most_children // asks[0].sampling.n)
                some, asks = asks[:most], asks[most:]
                try:
                    self._send(some, self._client.submit)
                except Exception as error:  # whoever asked is told
                    self._send_alone(some, error)

    def _send_alone(self, asks: list[PromptRequest], error: Exception) -> None:
        """Send asks that could not be sent together: a client may have a budget of tokens."""
        for ask in asks:
            try:
                if len(asks) == 1 or not isinstance(error, LimitExceeded):
                    raise error
                self._send([ask], self._client.submit)
            except Exception as own:
                ask.fail(own)

    def _send(self, asks: list[PromptRequest], submit: Submit) -> None:
        """Submit equal asks as one group."""
        sampling, n = asks[0].sampling, asks[0].sampling.n
        if len(asks) > 1:
            sampling = msgspec.structs.replace(sampling, n=n * len(asks))
        handle = submit(asks[0].prompt, sampling)
        shared = SharedGroup(handle, [ask for ask in asks for _ in range(n)])
        for i, ask in enumerate(asks):
            ask.shared, ask.first = shared, i * n
        if sampling.stream_every:
            handle.on_tokens(partial(self._arrivals.tell, shared))
        handle.listen(partial(self._arrivals.tell, shared))
