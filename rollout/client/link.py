"""The client's I/O thread. It owns the socket and everything that callers wait for.

    user threads --CallQueue--> I/O thread --> Handle / Future

A message counts as received when its answer arrives. On every new connection the thread sends Hello with the digests of the
groups it still needs, and submits again what Welcome does not list; repeated samples are identified by (group id, index). So a
broken link loses nothing.

libzmq's I/O threads exchange pings, so neither a long engine step nor a busy trainer looks like a dead peer. A service that
keeps its connection but sends nothing fails after `LinkTiming.stall_s`.
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

from rollout.client.connection import AckQueue, ConnectionState, LinkTiming, SendQueue, check_same_service, restarted
from rollout.client.handle import OpenHandle
from rollout.client.pending import PendingRequests, child_aborts
from rollout.engine.values import Limits, Served
from rollout.logs import Repeats, logger
from rollout.transport import messages as m
from rollout.transport.columns import unpack_samples
from rollout.transport.errors import (
    ClientClosed,
    IdConflict,
    KeyRefused,
    NoSession,
    NotBelieved,
    ProtocolError,
    RolloutError,
    ServiceLost,
    copy_of,
    from_wire,
)
from rollout.transport.frames import Decoder, Frame, pack
from rollout.transport.sockets import ClientTransport

log = logger(__name__)


class CallQueue:
    """Passes calls from user threads to the I/O thread. wake: makes the I/O thread `run` them."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self.ended: RolloutError | None = None
        """why the I/O thread has ended; calls then run in the caller's thread, and fail"""
        self._wake = wake
        self._woken = False
        """a wake is in flight, after which all waiting calls run"""
        self._waiting: queue.SimpleQueue[tuple[Callable[[Any], None], Any]] = queue.SimpleQueue()
        self._lock = threading.Lock()

    def put(self, function: Callable[[Any], None], argument: Any, wake: bool = True) -> None:
        """Have the I/O thread call `function(argument)`: now, or without `wake`, after the next `wake`. For any thread; the I/O
        thread needs no `wake`, its calls run when what has arrived is handed on."""
        with self._lock:
            if self.ended is None:
                self._waiting.put((function, argument))
                if wake:
                    self.wake()
                return
        function(argument)

    def wake(self) -> None:
        """Wake the I/O thread if calls wait. For any thread."""
        if not self._woken and not self._waiting.empty():
            self._woken = True
            self._wake()

    def run(self) -> None:
        """Make the waiting calls. For the I/O thread."""
        self._woken = False  # before looking: what is put from here on wakes again
        while True:
            try:
                function, argument = self._waiting.get_nowait()
            except queue.Empty:
                return
            function(argument)

    def end(self, error: RolloutError) -> None:
        """Make the waiting calls; later ones find `ended`. For the I/O thread."""
        with self._lock:
            self.ended = error
        self.run()


class Link:
    """Connects to one service and runs the I/O thread. Public methods are for any thread; the state is the I/O thread's.

    Args:
        transport: the client's end of the connection.
        session: 128 random bits in hex.
        name: shown in the service's logs and status.
        timing: timeouts and intervals.
        budget: maximum tokens of sent groups, see `RolloutClient`.
        resubmit: submit open groups again to a service that lost them.
        capabilities: for Hello, besides DIGESTS.
        alone, header_bytes: see `Hello.alone`, and `answer_limits`.
        clock: seconds, as time.monotonic."""

    def __init__(
        self,
        transport: ClientTransport,
        session: str,
        name: str,
        timing: LinkTiming | None = None,
        *,
        budget: int | None = None,
        resubmit: bool = False,
        capabilities: tuple[str, ...] = (),
        alone: bool = False,
        header_bytes: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.welcome: m.Welcome | None = None
        """of the current incarnation"""
        self.calls = CallQueue(transport.wake)
        self._transport, self._header_bytes, self._clock = transport, header_bytes, clock
        self._timing = timing = LinkTiming() if timing is None else timing
        self.session = session
        self._hello_fields = name, (m.DIGESTS, *capabilities), alone
        self._resubmit = resubmit
        self._decoder: Decoder[m.ServiceMessage] = Decoder(m.ServiceMessage, m.answer_limits(Limits(), header_bytes))
        self._closing = False
        self._connection = ConnectionState(clock(), timing)
        self._request_ids = itertools.count(1)
        self._pending = PendingRequests(budget)
        self._groups = self._pending.groups
        self.first_welcome = self._pending.first_welcome
        """raises what the service refuses"""
        self.weights = self._pending.weights
        self._outgoing, self._acks, self._refusals = SendQueue(), AckQueue(timing.ack_s), Repeats(log.error)
        self._thread = threading.Thread(target=self._run, name="rollout-client", daemon=True)
        self._thread.start()

    # any thread

    def submit(self, handle: OpenHandle, wake: bool = True) -> None:
        """Send a group; the handle gets its samples or its error. wake: send now; otherwise after `calls.wake()`."""
        self.calls.put(self._submit, handle, wake)

    def cancel(self, handle: OpenHandle, indices: frozenset[int] | None) -> None:
        """Abort a group, or some of its children."""
        self.calls.put(self._cancel, (handle, indices))

    def request(self, make: Callable[[int], Any]) -> Future[Any]:
        """Send the message that `make` builds for a request id. The future gets the answer or a typed error; the request is
        repeated after a reconnect."""
        request_id, future = next(self._request_ids), Future[Any]()
        message = make(request_id)
        self.calls.put(self._request, (request_id, pack(message), type(message), future))
        return future

    def close(self) -> None:
        """Say goodbye and wait until the thread has ended. May be repeated."""
        self._closing = True
        self._transport.wake()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    # the loop

    def _run(self) -> None:
        error: RolloutError = ClientClosed("the client was closed")
        try:
            while not self._closing:
                self._run_once()
            if self._connection.ready:
                say_goodbye(self._transport, self._outgoing, self._timing.goodbye_s)
        except Exception as failure:  # callers must not wait for ever because of an error here
            log.exception("the client's I/O thread failed")
            error = RolloutError(f"the client's I/O thread failed: {type(failure).__name__}: {failure}")
        finally:
            self._connection.ready = False
            self.calls.end(error)
            self._fail_all(error)
            self._refusals.end()
            self._transport.close(self._timing.goodbye_s)

    def _run_once(self) -> None:
        wait_s = min(self._timing.ack_s, self._timing.poll_s) if self._acks else self._timing.poll_s
        for frames in self._transport.receive(wait_s, sending=bool(self._outgoing) and not self._outgoing.blocked):
            self._receive(frames)
        self.calls.run()
        self._check_timers(self._clock())
        self.calls.run()  # those that errors have put
        self._send_waiting()
        self._outgoing.send(self._transport.send)

    def _check_timers(self, now: float) -> None:
        """Send Hello on a new connection and heartbeats, and fail what has waited too long."""
        transport, connection, timing = self._transport, self._connection, self._timing
        if transport.connected:
            connection.connected(transport.connections, now)
            if connection.hello_due(now):
                self._send_hello()
            elif connection.heartbeat_due(now):
                self._send(m.Heartbeat())
            if now - connection.last_received_at > timing.stall_s:
                connection.last_received_at = now
                reason = f"{transport.address} is connected, but its loop said nothing for {timing.stall_s} s"
                self._fail_and_resync(ServiceLost(reason))
            return
        waited_s = connection.disconnected(now)
        if transport.refusal:
            self._fail_all(KeyRefused(transport.refusal))
        elif waited_s > (timeout_s := timing.outage_s(self.welcome, self._resubmit)):
            self._fail_all(ServiceLost(f"{transport.address} is dead or unreachable: no connection for {timeout_s} s"))
        if not self._pending:
            connection.idle(now)

    # out

    def _send(self, message: Any) -> None:
        self._outgoing.add(pack(message))

    def _send_hello(self) -> None:
        """Greet the service. Messages for the old connection are dropped: Welcome tells which to send again."""
        self._outgoing.restart(paced=False)
        self._acks.reconnected()
        name, capabilities, alone = self._hello_fields
        number, digests = self._connection.hello_number, self._groups.digests()
        self._send(m.Hello(m.PROTOCOL, self.session, number, name, capabilities, digests, alone))

    def _submit(self, handle: OpenHandle) -> None:
        if self.calls.ended is not None:
            handle.fail(copy_of(self.calls.ended, handle.group_id))
        elif not self._groups.add(handle):
            handle.fail(IdConflict("this client has a live group of that id; use another one", handle.group_id))
        else:
            self._send_waiting()  # now: before the next request of this caller

    def _send_waiting(self) -> None:
        if not self._connection.ready:
            return
        assert self.welcome is not None
        limits, now = self.welcome.limits, self._clock()
        if self._groups.unsent or self._acks.due(now):
            for ack in self._acks.take(limits, now):  # before Submits: one may reuse the id of an acknowledged group
                self._send(ack)
        while handle := self._groups.pop_sendable(limits):
            handle.sent_at = now
            self._outgoing.add(handle.frames)
            for abort in child_aborts([handle], limits):
                self._send(abort)

    def _cancel(self, argument: tuple[OpenHandle, frozenset[int] | None]) -> None:
        assert self.welcome is not None, "the client's constructor waits for it"
        for abort in list(self._groups.cancel(*argument, self.welcome.limits)):
            if self._connection.ready:
                self._send(abort)

    def _request(self, argument: tuple[int, list[Frame], type, Future[Any]]) -> None:
        request_id, frames, kind, future = argument
        if self.calls.ended is not None:
            future.set_exception(copy_of(self.calls.ended))
            return
        self._pending.add(request_id, frames, future, m.ANSWERS[kind])
        if kind is m.Chunk:
            self._outgoing.add_chunk(request_id, frames)
        if self._connection.ready:
            self._outgoing.add(frames)

    # in

    def _receive(self, frames: list[Frame]) -> None:
        self._connection.last_received_at = self._clock()
        try:
            self._dispatch(self._decoder.unpack(frames))
        except (ValueError, TypeError, RecursionError, ProtocolError) as error:
            reason = error.message if isinstance(error, ProtocolError) else str(error)
            log.error("unreadable message from the service reason=%r", reason)
            # any request may have lost its answer with this message
            self._fail_and_resync(NotBelieved(f"the service sent an invalid message: {reason}"))
        if self._groups.must_resync:
            self._groups.must_resync = False
            self._connection.resync(self._clock())

    def _dispatch(self, message: m.ServiceMessage) -> None:
        match message:
            case m.Welcome():
                self._welcomed(message)
            case m.SamplesDone():
                self._acks.samples += self._groups.add_samples(unpack_samples(message))
            case m.Progress() if self.welcome is not None:
                self._groups.add_progress(message, self.welcome.limits)
                self._acks.progress = message.number
            case m.StatusReply():
                self._answer(message.request_id, _status_dict(message.status))
            case m.Lease() | m.Staged() | m.Applied() | m.Asleep() | m.Done():
                self._answer(message.request_id, message)
            case m.Refused():
                self._refused(message)
            case m.Closing():
                self._send(m.Goodbye())  # the service waits for it
                self._connection.expect_close(self._connection.last_received_at)
                self._fail_all(ServiceLost(f"the service is closing: {message.reason}"))
            case m.Alive():
                self._outgoing.taken(message.taken_bytes)
                self._set_live(message)

    def _welcomed(self, welcome: m.Welcome) -> None:
        if welcome.protocol != m.PROTOCOL:
            raise ProtocolError(f"service: protocol {welcome.protocol}, client: {m.PROTOCOL}; install the same version")
        if self._connection.ready or welcome.hello != self._connection.hello_number:
            return  # the answer to a repeated or an outdated Hello
        check_same_service(self.welcome, welcome)
        if self.welcome is not None and restarted(self.welcome, welcome):
            for request_id in self._pending.restarted(self.welcome, welcome, self._transport.address, self._resubmit):
                self._outgoing.answered(request_id)
        self.welcome = welcome
        self._groups.welcomed(welcome)
        self._decoder = Decoder(m.ServiceMessage, m.answer_limits(welcome.limits, self._header_bytes))
        self._connection.welcomed(self._clock())
        self._set_live(welcome)
        self._outgoing.restart(paced=True)
        self._outgoing.add(*self._groups.resent(welcome.groups))
        for abort in self._groups.aborts(welcome.limits):
            self._send(abort)
        self._outgoing.add(*self._pending.frames())
        if not self.first_welcome.done():
            self.first_welcome.set_result(welcome)

    def _set_live(self, message: m.Welcome | m.Alive) -> None:
        """Note which weights are live. If groups cannot continue under them, Hello makes the service drop these."""
        if self._pending.set_live(Served(message.version, message.digest), self._transport.address):
            self._connection.greet_again(self._clock())

    def _refused(self, refused: m.Refused) -> None:
        error = from_wire(refused.kind, refused.message, refused.group_id)
        if isinstance(error, NoSession):  # the refused message is sent again after Welcome
            if self._connection.ready:  # otherwise Hello is in flight
                self._connection.greet_again(self._clock())
        elif refused.request_id is not None:
            self._answer(refused.request_id, error)
        elif refused.group_id is not None:
            handle = self._groups.sent.get(refused.group_id)
            if handle is not None:
                self._groups.remove(handle)
                handle.fail(error)
        else:
            self._refusals.say(f"message refused kind={refused.kind} reason={refused.message!r}")
            self._fail_and_resync(error)

    # ends

    def _answer(self, request_id: int, result: Any) -> None:
        """Complete a request with its answer or an error."""
        self._outgoing.answered(request_id)
        self._pending.answer(request_id, result)

    def _fail_and_resync(self, error: RolloutError) -> None:
        """Fail all callers, and have the service drop their groups."""
        self._fail_all(error)
        self._connection.resync(self._clock())

    def _fail_all(self, error: RolloutError) -> None:
        for request_id in self._pending.fail(error):
            self._outgoing.answered(request_id)


def say_goodbye(transport: ClientTransport, outgoing: SendQueue, seconds: float) -> None:
    """Send Goodbye in place of all waiting messages; wait at most `seconds` until it is sent."""
    outgoing.restart(paced=False)
    outgoing.add(pack(m.Goodbye()))
    deadline = time.monotonic() + seconds
    while outgoing and time.monotonic() < deadline and transport.connected:
        outgoing.send(transport.send)
        if outgoing:
            transport.receive(0.01, sending=True)


def _status_dict(text: bytes) -> dict[str, Any]:
    status = json.loads(text)
    if not isinstance(status, dict):
        raise ValueError("a status must be a JSON object")
    return status
