"""Groups of requests, from the event loop to the client and back.

    request --PromptRequest--> RequestQueue: equal ones become one group --submit--> client's I/O thread
                                                                                        │ Handle.listen, Handle.on_tokens
    request <--future, parts-- PromptRequest <--call_soon_threadsafe, once per batch-- deque

No thread waits for a sample. HTTP trainers send a group as n requests with n = 1. Each alone would cost a message, a prefill
that waits for the prompt's KV, and an entry in every table of the service; joined, they are an ordinary group.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial

import msgspec
import numpy as np

from rollout.client.api import RolloutClient
from rollout.client.handle import Handle
from rollout.engine.values import Sample, Sampling, TokenChunk
from rollout.http.errors import HttpError
from rollout.http.settings import RequestLimits
from rollout.transport.errors import LimitExceeded

Submit = Callable[[np.ndarray, Sampling], Handle]
Part = TokenChunk | Sample
"""new tokens of a running child, or a finished one"""


class PromptRequest:
    """The children of one prompt of one request. For the event loop.

    Args:
        prompt: token ids, [prompt_tokens] int32.
        sampling: `n` is the number of children. They may be part of a larger group; here their indices start at 0.
        on_part: called with new tokens of a child (`Sampling.stream_every`) and with its sample, and with None at the end.
        names: by which `RequestQueue.abort` can select it.
    """

    def __init__(
        self,
        prompt: np.ndarray,
        sampling: Sampling,
        on_part: Callable[[Part | None], None] | None = None,
        names: Collection[str] = (),
    ) -> None:
        self.prompt, self.sampling, self.names = prompt, sampling, names
        self.samples: list[Sample] = []
        """finished children; sorted by index once all are"""
        self.ended = False
        """all children have finished, the group failed, or the request was closed"""
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.shared: SharedGroup | None = None
        """the group with its children; None before it is sent"""
        self.first = 0
        """index in the group of its child 0"""
        self._on_part = on_part

    def add(self, part: Part) -> None:
        """Take new tokens of a child, or a finished child."""
        if self.ended:
            return
        if self.first:
            part = msgspec.structs.replace(part, index=part.index - self.first)
        if isinstance(part, Sample):
            self.samples.append(part)
        if self._on_part is not None:
            self._on_part(part)
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
            self.done.exception()  # a stream that is closed early does not retrieve it
        if self._on_part is not None:
            self._on_part(None)

    def abort(self) -> None:
        """Abort its children; they return with their tokens so far."""
        if self.shared is not None and not self.ended:
            self.shared.abort(self)


class SharedGroup:
    """A group of the service, and the request of each child."""

    def __init__(self, handle: Handle, owners: list[PromptRequest]) -> None:
        self.handle = handle
        self.owners = owners
        """by index of the child"""
        self._open = set(owners)
        """neither finished nor aborted"""

    def abort(self, request: PromptRequest) -> None:
        """Abort the children of one request; the whole group if no other request is open."""
        self._open.discard(request)
        first = request.first
        self.handle.cancel(range(first, first + request.sampling.n) if self._open else None)

    def add(self, part: Part | None) -> None:
        """Pass a part to its request; None: the group failed."""
        if part is not None:
            request = self.owners[part.index]
            request.add(part)
            if request.ended:
                self._open.discard(request)
            return
        assert self.handle.error is not None
        for request in set(self.owners):  # aborted ones too: their samples will not come
            request.fail(self.handle.error)


class RequestQueue:
    """All open requests of one event loop, over one client."""

    def __init__(self, client: RolloutClient, limits: RequestLimits) -> None:
        self._client, self._limits = client, limits
        self._loop = asyncio.get_running_loop()
        self._open: set[PromptRequest] = set()
        self._waiting: dict[tuple[bytes, bytes], list[PromptRequest]] = {}
        """requests that were not sent yet, by prompt and sampling options"""
        self._timer: asyncio.TimerHandle | None = None
        self._first_waiting = self._last_waiting = 0.0
        """loop times at which the first and the last request of `_waiting` came"""
        self._arrived: deque[tuple[SharedGroup, Part | None]] = deque()
        """from the client's I/O thread"""
        self._woken = False

    def open(self, requests: Sequence[PromptRequest], submit: Submit | None = None) -> None:
        """Send requests. One with a seed, or with its own `submit`, is sent at once and alone, any other with the equal ones
        that come at the same time. Raises HttpError 503, and the errors of `submit`."""
        most = self._limits.max_groups
        if len(self._open) + len(requests) > most:
            raise HttpError(503, f"{len(self._open)} groups are open, at most {most} may be (max_groups); try again")
        for request in requests:
            self._open.add(request)
            if submit is None and request.sampling.seed is None:
                self._hold(request)
            else:
                self._send([request], submit or self._client.submit)

    def close(self, requests: Iterable[PromptRequest]) -> None:
        """Remove requests. Children that have not finished are aborted."""
        for request in requests:
            self._open.discard(request)
            request.abort()
            request.ended = True

    def abort(self, selected: Callable[[PromptRequest], bool] = lambda _: True) -> int:
        """Abort all open requests, or the `selected` ones. They return with their tokens so far. Returns their number."""
        self.send_waiting()
        requests = [request for request in self._open if not request.ended and selected(request)]
        for request in requests:
            request.abort()
        return len(requests)

    # equal requests

    def _hold(self, request: PromptRequest) -> None:
        self._last_waiting = self._loop.time()
        if self._timer is None:
            self._first_waiting = self._last_waiting
            self._timer = self._loop.call_later(self._limits.join_quiet_s, self._on_timer)
        key = request.prompt.tobytes(), msgspec.msgpack.encode(request.sampling)
        self._waiting.setdefault(key, []).append(request)

    def _on_timer(self) -> None:
        """Send the waiting requests once none has followed for `join_quiet_s`, or after `join_wait_s`."""
        due = min(self._last_waiting + self._limits.join_quiet_s, self._first_waiting + self._limits.join_wait_s)
        if self._loop.time() < due:
            self._timer = self._loop.call_at(due, self._on_timer)
        else:
            self._timer = None
            self.send_waiting()

    def send_waiting(self) -> None:
        """Send the requests that wait for equal ones."""
        waiting, self._waiting = self._waiting, {}
        limits = self._client.info.limits
        most_children = min(self._limits.max_joined, limits.max_n, limits.max_samples_per_client)
        for requests in waiting.values():
            requests = [request for request in requests if not request.ended]  # others disconnected
            while requests:
                most = max(1, most_children // requests[0].sampling.n)
                joined, requests = requests[:most], requests[most:]
                try:
                    self._send(joined, self._client.submit)
                except Exception as error:
                    self._send_alone(joined, error)

    def _send_alone(self, requests: list[PromptRequest], error: Exception) -> None:
        """Send requests one by one after they could not be sent as one group: a client may have a budget of tokens."""
        for request in requests:
            try:
                if len(requests) == 1 or not isinstance(error, LimitExceeded):
                    raise error
                self._send([request], self._client.submit)
            except Exception as own:
                request.fail(own)

    def _send(self, requests: list[PromptRequest], submit: Submit) -> None:
        """Submit equal requests as one group."""
        sampling, n = requests[0].sampling, requests[0].sampling.n
        if len(requests) > 1:
            sampling = msgspec.structs.replace(sampling, n=n * len(requests))
        handle = submit(requests[0].prompt, sampling)
        shared = SharedGroup(handle, [request for request in requests for _ in range(n)])
        for i, request in enumerate(requests):
            request.shared, request.first = shared, i * n
        if sampling.stream_every:
            handle.on_tokens(partial(self._arrive, shared))
        handle.listen(partial(self._arrive, shared))

    # arrivals

    def _arrive(self, shared: SharedGroup, handle: Handle, part: Part | None) -> None:
        """Queue a part for the event loop, in the client's I/O thread. One wake-up serves all parts until the loop reads
        them."""
        self._arrived.append((shared, part))
        if not self._woken:
            self._woken = True
            self._loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        self._woken = False  # before reading: a part that arrives later wakes the loop again
        while self._arrived:
            shared, part = self._arrived.popleft()
            shared.add(part)
