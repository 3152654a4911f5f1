"""The client's I/O thread: the only owner of the socket and of what is open.

    user threads --(call, argument)--> queue + wake --> this thread --> Handle / Future

Nothing that was sent is trusted to have arrived until its answer is here. On every new connection the thread says Hello with
the digests of the groups it still wants, and submits again what Welcome does not list; samples that come twice are told by
(group, index). So a link that breaks and heals loses nothing.

Death is told by the connection: libzmq's I/O threads exchange pings, so neither a long engine step nor a busy trainer looks
like it. A service whose loop stands still behind a living connection is given `stall_timeout_s`.
"""

from __future__ import annotations

import itertools
import json
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from engine.types import Limits
from rollout.client.handle import Handle
from rollout.client.open_groups import OpenGroups
from rollout.client.outgoing import Outgoing, portions
from rollout.logs import logger
from transport import messages as m
from transport.errors import (
    ClientClosed,
    IdConflict,
    NoSession,
    ProtocolError,
    RolloutError,
    ServiceLost,
    ServiceRestarted,
    from_wire,
)
from transport.frames import Decoder, Frame, pack
from transport.sockets import ClientTransport

POLL_S = 0.25
HEARTBEAT_S = 1.0
HELLO_RETRY_S = 2.0
GOODBYE_S = 0.5

log = logger("rollout.client.api")


class Link:
    """Runs the thread. Methods without an underscore are for any thread, the state is the I/O thread's alone."""

    def __init__(
        self, transport: ClientTransport, session: str, name: str, link_timeout_s: float, stall_timeout_s: float
    ) -> None:
        self.welcome: m.Welcome | None = None
        """of the present incarnation"""
        self.first_welcome: Future[m.Welcome] = Future()
        self._transport = transport
        self._session = session
        self._name = name
        self._link_timeout_s = link_timeout_s
        self._stall_timeout_s = stall_timeout_s
        self._decoder: Decoder[m.ServiceMessage] = Decoder(m.ServiceMessage, m.answer_limits(Limits()))
        self._calls: queue.SimpleQueue[tuple[Callable[[Any], None], Any]] = queue.SimpleQueue()
        self._closing = False
        self._door = threading.Lock()
        self._ended: RolloutError | None = None
        """set once the thread serves nobody any more; calls then run, and fail, in their own thread"""

        self._groups = OpenGroups()
        self._request_ids = itertools.count(1)
        self._requests: dict[int, tuple[list[Frame], Future[Any]]] = {}
        """not answered yet"""
        self._outgoing = Outgoing()
        self._acks: list[tuple[str, int]] = []

        now = time.monotonic()
        self._connection = 0
        """of `transport.connections`, the one that Hello went to"""
        self._hello_number = 0
        """raised whenever what the service knows of this session has to be put right"""
        self._ready = False
        """Welcome to that Hello has come, on this connection"""
        self._hello_at = now
        self._beat_at = now
        self._waited_since = now
        """when there was a connection last, or nobody who waited for one"""
        self._heard_at = now
        self._thread = threading.Thread(target=self._run, name="rollout-client", daemon=True)
        self._thread.start()

    # any thread

    def _call(self, function: Callable[[Any], None], argument: Any) -> None:
        with self._door:
            if self._ended is None:
                self._calls.put((function, argument))
                self._transport.wake()
                return
        function(argument)

    def submit(self, handle: Handle) -> None:
        self._call(self._submit, handle)

    def cancel(self, handle: Handle) -> None:
        self._call(self._cancel, handle)

    def request(self, make: Callable[[int], Any]) -> Future[Any]:
        """Send the message that `make` builds for a request id. The answer comes as the future's result, or its typed error; it
        is asked for again after a reconnect."""
        request_id, future = next(self._request_ids), Future[Any]()
        message = make(request_id)
        self._call(self._request, (request_id, pack(message), isinstance(message, m.Chunk), future))
        return future

    def close(self) -> None:
        self._closing = True
        self._transport.wake()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    # the loop

    def _run(self) -> None:
        error: RolloutError = ClientClosed("the client was closed")
        try:
            while not self._closing:
                self._turn()
            self._say_goodbye()
        except Exception as failure:  # a mistake in here must not leave anybody waiting
            log.exception("the client's I/O thread failed")
            error = RolloutError(f"the client's I/O thread failed: {type(failure).__name__}: {failure}")
        finally:
            self._ready = False
            with self._door:
                self._ended = error
            self._take_calls()
            self._fail_all(error)
            self._transport.close(GOODBYE_S)

    def _turn(self) -> None:
        for frames in self._transport.receive(POLL_S, sending=bool(self._outgoing) and not self._outgoing.blocked):
            self._take(frames)
        self._take_calls()
        self._tend(time.monotonic())
        self._send_waiting()
        self._outgoing.send(self._transport.send)

    def _take_calls(self) -> None:
        while True:
            try:
                function, argument = self._calls.get_nowait()
            except queue.Empty:
                return
            function(argument)

    def _tend(self, now: float) -> None:
        """Whatever time decides: Hello on a new connection, heartbeats, and when to give up."""
        transport = self._transport
        if transport.connected:
            if transport.connections != self._connection:
                self._connection, self._heard_at = transport.connections, now
                self._greet_again(now)
            if not self._ready and now >= self._hello_at:
                self._send_hello(now)
            elif self._ready and now >= self._beat_at:
                self._beat_at = now + HEARTBEAT_S
                self._send(m.Heartbeat())
            self._waited_since = now
            if now - self._heard_at > self._stall_timeout_s:
                self._heard_at = now
                silent = f"its loop said nothing for {self._stall_timeout_s} s"
                self._start_over(ServiceLost(f"{transport.address} is connected, but {silent}"))
        else:
            self._ready = False
            if now - self._waited_since > self._link_timeout_s:
                self._fail_all(
                    ServiceLost(f"{transport.address} is dead or unreachable: no connection for {self._link_timeout_s} s")
                )
            if not self._groups and all(future.cancelled() for _, future in self._requests.values()):
                self._waited_since = now  # whoever comes later has all of the time-out

    # out

    def _send(self, message: Any) -> None:
        self._outgoing.add(pack(message))

    def _greet_again(self, now: float) -> None:
        self._hello_number += 1
        self._ready, self._hello_at = False, now

    def _send_hello(self, now: float) -> None:
        """What waited for the old connection is dropped: all of it follows from what is open."""
        self._outgoing.clear()
        self._outgoing.start(paced=False)
        self._acks.clear()
        self._send(m.Hello(m.PROTOCOL, self._session, self._hello_number, self._name, (m.TAKEN,), self._groups.digests()))
        self._hello_at = now + HELLO_RETRY_S

    def _submit(self, handle: Handle) -> None:
        if self._ended is not None:
            handle.fail(_copy(self._ended, handle.group_id))
        elif not self._groups.add(handle):
            handle.fail(IdConflict("this client has a live group of that id", handle.group_id))
        else:
            self._send_waiting()  # now, so that it is there before what this caller asks next

    def _send_waiting(self) -> None:
        if not self._ready:
            return
        assert self.welcome is not None
        limits = self.welcome.limits
        for some in portions(self._acks, limits):  # before Submits: one of them may use the id of a group that ends with these
            self._send(m.Ack(some))
        self._acks = []
        while handle := self._groups.send_next(limits):
            self._outgoing.add(handle.frames)

    def _cancel(self, handle: Handle) -> None:
        if not self._groups.has(handle):
            return
        handle.cancelled = True
        if handle.group_id in self._groups.sent:
            if self._ready:
                self._send(m.Abort([handle.group_id]))
        else:
            assert self.welcome is not None, "the client's constructor waits for it"
            self._groups.remove(handle)
            handle.abort_unsent(self.welcome.limits.max_n)

    def _request(self, argument: tuple[int, list[Frame], bool, Future[Any]]) -> None:
        request_id, frames, is_chunk, future = argument
        if self._ended is not None:
            future.set_exception(_copy(self._ended))
            return
        self._requests[request_id] = frames, future
        if is_chunk:
            self._outgoing.add_chunk(request_id, frames)
        if self._ready:
            self._outgoing.add(frames)

    def _say_goodbye(self) -> None:
        if not self._ready:
            return
        self._outgoing.clear()  # nothing else matters any more
        self._outgoing.start(paced=False)
        self._send(m.Goodbye())
        deadline = time.monotonic() + GOODBYE_S
        while self._outgoing and time.monotonic() < deadline and self._transport.connected:
            self._outgoing.send(self._transport.send)
            if self._outgoing:
                self._transport.receive(0.01, sending=True)

    # in

    def _take(self, frames: list[Frame]) -> None:
        self._heard_at = time.monotonic()
        try:
            message = self._decoder.unpack(frames)
            match message:
                case m.Welcome():
                    self._welcomed(message)
                case m.SampleDone(sample):
                    handle = self._groups.sent.get(sample.group_id)
                    if handle is not None:
                        handle.take(sample)
                        if handle.done:
                            self._groups.remove(handle)
                    self._acks.append((sample.group_id, sample.index))
                case m.StatusReply():
                    status = _status_dict(message.status)
                    if future := self._answered(message.request_id):
                        future.set_result(status)
                case m.Lease() | m.Staged() | m.Applied() | m.Asleep() | m.Done():
                    if future := self._answered(message.request_id):
                        future.set_result(message)
                case m.Refused():
                    self._refused(message)
                case m.Closing():
                    self._send(m.Goodbye())  # it waits for this
                    self._ready, self._hello_at = False, self._heard_at + HELLO_RETRY_S
                    self._fail_all(ServiceLost(f"the service is closing: {message.reason}"))
                case m.Alive():
                    self._outgoing.taken(message.taken_bytes)
        except (ValueError, TypeError, RecursionError) as error:
            self._broken(str(error))
        except ProtocolError as error:
            self._broken(error.message)

    def _broken(self, reason: str) -> None:
        """What was lost in it nobody can tell, so whoever waits is told."""
        log.error("the service sent what cannot be read: %s", reason)
        self._start_over(ProtocolError(f"the service sent what cannot be read: {reason}"))

    def _welcomed(self, welcome: m.Welcome) -> None:
        if welcome.protocol != m.PROTOCOL:
            raise ProtocolError(f"Welcome of protocol {welcome.protocol}; this client speaks {m.PROTOCOL}")
        if self._ready or welcome.hello != self._hello_number:
            return  # the answer to a repeated or an outdated Hello
        if self.welcome is not None and self.welcome.incarnation != welcome.incarnation:
            # unsent groups were never in the old one, but their caller chose it, its model and its weights
            self._fail_all(ServiceRestarted(f"{self._transport.address} was restarted; what ran there is gone"))
        self.welcome = welcome
        self._decoder = Decoder(m.ServiceMessage, m.answer_limits(welcome.limits))
        self._ready = True
        self._outgoing.start(paced=m.TAKEN in welcome.capabilities)
        self._beat_at = time.monotonic() + HEARTBEAT_S
        self._outgoing.add(*(handle.frames for handle in self._groups.missing(welcome.groups)))
        cancelled = [handle.group_id for handle in self._groups.sent.values() if handle.cancelled]
        for some in portions(cancelled, welcome.limits):
            self._send(m.Abort(some))
        self._outgoing.add(*(frames for frames, future in self._requests.values() if not future.cancelled()))
        if not self.first_welcome.done():
            self.first_welcome.set_result(welcome)

    def _refused(self, refused: m.Refused) -> None:
        error = from_wire(refused.kind, refused.message, refused.group_id)
        if isinstance(error, NoSession):  # whatever it is about: it is sent again after Welcome
            if self._ready:  # otherwise Hello is on its way
                self._greet_again(time.monotonic())
        elif refused.request_id is not None:
            if future := self._answered(refused.request_id):
                future.set_exception(error)
        elif refused.group_id is not None:
            handle = self._groups.sent.get(refused.group_id)
            if handle is not None:
                self._groups.remove(handle)
                handle.fail(error)
        else:
            log.error("refused: %s: %s", refused.kind, refused.message)
            self._start_over(error)

    # ends

    def _answered(self, request_id: int) -> Future[Any] | None:
        """The future to answer, unless its caller has given up or it has been answered before."""
        self._outgoing.answered(request_id)
        _, future = self._requests.pop(request_id, (None, None))
        return future if future is not None and future.set_running_or_notify_cancel() else None

    def _start_over(self, error: RolloutError) -> None:
        """Everybody fails, and the service is told to drop what it still runs for them: a new group may use the same id."""
        self._fail_all(error)
        if self._ready:
            self._greet_again(time.monotonic())
        else:  # Hello is on its way, or is what went wrong: it has its own pace, and what answers it is of before this
            self._hello_number += 1

    def _fail_all(self, error: RolloutError) -> None:
        """Everybody who waits gets this error, each an object of its own: tracebacks are written into it."""
        for handle in self._groups.clear():
            handle.fail(_copy(error, handle.group_id))
        for request_id in list(self._requests):
            if future := self._answered(request_id):
                future.set_exception(_copy(error))
        if not self.first_welcome.done() and not isinstance(error, ServiceLost):
            self.first_welcome.set_exception(_copy(error))


def _copy(error: RolloutError, group_id: str | None = None) -> RolloutError:
    return type(error)(error.message, group_id)


def _status_dict(text: bytes) -> dict[str, Any]:
    status = json.loads(text)
    if not isinstance(status, dict):
        raise ValueError("a status must be a JSON object")
    return status
