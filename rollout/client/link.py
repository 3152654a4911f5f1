"""The client's I/O thread: the only owner of the socket and of what is open.

    user threads --Calls--> this thread --> Handle / Future

Nothing that was sent is trusted to have arrived until its answer is here. On every new connection the thread says Hello with
the digests of the groups it still wants, and submits again what Welcome does not list; samples that come twice are told by
(group, index). So a link that breaks and heals loses nothing.

Death is told by the connection: libzmq's I/O threads exchange pings, so neither a long engine step nor a busy trainer looks
like it. A service whose loop stands still behind a living connection is given `stall_timeout_s`.
"""

from __future__ import annotations

import itertools
import json
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from engine.types import Limits, Served
from rollout.client.acks import ACK_S, AckQueue
from rollout.client.calls import CallQueue
from rollout.client.connection import ConnectionState
from rollout.client.handle import Handle
from rollout.client.open_groups import aborts_of_children
from rollout.client.pending import PendingRequests
from rollout.client.send_queue import SendQueue
from rollout.client.timeouts import Timeouts, check_same, restarted
from rollout.logs import Repeats, logger
from transport import messages as m
from transport.columns import unpack_samples
from transport.errors import (
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
from transport.frames import Decoder, Frame, pack
from transport.sockets import ClientTransport

POLL_S = 0.25
GOODBYE_S = 0.5

log = logger(__name__)


def unreadable(error: Exception) -> NotBelieved:
    """Log why a message of the service cannot be read. Returns what those who wait for it get."""
    reason = error.message if isinstance(error, ProtocolError) else str(error)
    log.error("unreadable message from the service reason=%r", reason)
    return NotBelieved(f"the service sent what cannot be read: {reason}")


class Link:
    """Runs the thread. Methods without an underscore are for any thread, the state is the I/O thread's alone."""

    def __init__(
        self,
        transport: ClientTransport,
        session: str,
        name: str,
        patience: Timeouts,
        budget: int | None = None,
        more: tuple[str, ...] = (),
        alone: bool = False,
    ) -> None:
        """alone: other sessions of this client's key end, see `Hello.alone`."""
        self.welcome: m.Welcome | None = None
        """of the present incarnation"""
        self._transport = transport
        self._session, self._name, self._alone = session, name, alone
        self._patience = patience
        self._capabilities = (m.DIGESTS, *more)
        self._decoder: Decoder[m.ServiceMessage] = Decoder(m.ServiceMessage, m.answer_limits(Limits()))
        self._closing = False
        self.calls = CallQueue(transport.wake)
        self._connection = ConnectionState(time.monotonic())
        self._request_ids = itertools.count(1)
        self._waiters = PendingRequests(budget)
        self._groups, self._requests = self._waiters.groups, self._waiters.requests
        self.first_welcome, self.seen = self._waiters.first_welcome, self._waiters.seen
        self._outgoing, self._acks, self._refusals = SendQueue(), AckQueue(), Repeats(log.error)
        self._thread = threading.Thread(target=self._run, name="rollout-client", daemon=True)
        self._thread.start()

    # any thread

    def submit(self, handle: Handle, wake: bool = True) -> None:
        """Send a group; its samples, or why it is not served, come to the handle. wake: now; otherwise with `calls.wake()`."""
        self.calls.put(self._submit, handle, wake)

    def cancel(self, handle: Handle, indices: frozenset[int] | None) -> None:
        """Ask for the early end of a group, or of some children of it."""
        self.calls.put(self._cancel, (handle, indices))

    def request(self, make: Callable[[int], Any]) -> Future[Any]:
        """Send the message that `make` builds for a request id. The answer comes as the future's result, or its typed error; it
        is asked for again after a reconnect."""
        request_id, future = next(self._request_ids), Future[Any]()
        message = make(request_id)
        self.calls.put(self._request, (request_id, pack(message), type(message), future))
        return future

    def close(self) -> None:
        """Say goodbye, and return when the thread has ended. May be repeated."""
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
                say_goodbye(self._transport, self._outgoing)
        except Exception as failure:  # a mistake in here must not leave anybody waiting
            log.exception("the client's I/O thread failed")
            error = RolloutError(f"the client's I/O thread failed: {type(failure).__name__}: {failure}")
        finally:
            self._connection.ready = False
            self.calls.end(error)
            self._fail_all(error)
            self._refusals.end()
            self._transport.close(GOODBYE_S)

    def _run_once(self) -> None:
        wait_s = ACK_S if self._acks else POLL_S
        for frames in self._transport.receive(wait_s, sending=bool(self._outgoing) and not self._outgoing.blocked):
            self._receive(frames)
        self.calls.run()
        self._check_timers(time.monotonic())
        self._send_waiting()
        self._outgoing.send(self._transport.send)

    def _check_timers(self, now: float) -> None:
        """Do what time decides: Hello on a new connection, heartbeats, and when to give up."""
        transport, connection = self._transport, self._connection
        if transport.connected:
            connection.connected(transport.connections, now)
            if connection.hello_due(now):
                self._send_hello()
            elif connection.heartbeat_due(now):
                self._send(m.Heartbeat())
            if now - connection.last_received_at > (stall_s := self._patience.stall_s):
                connection.last_received_at = now
                self._start_over(ServiceLost(f"{transport.address} is connected, but its loop said nothing for {stall_s} s"))
        else:
            waited_s = connection.disconnected(now)
            if transport.refusal:
                self._fail_all(KeyRefused(transport.refusal))
            elif waited_s > (patience_s := self._patience.seconds(self.welcome)):
                self._fail_all(ServiceLost(f"{transport.address} is dead or unreachable: no connection for {patience_s} s"))
            if not self._waiters:
                connection.nobody_waits(now)

    # out

    def _send(self, message: Any) -> None:
        self._outgoing.add(pack(message))

    def _send_hello(self) -> None:
        """Greet the service. What waited for the old connection is dropped: all of it follows from what is open."""
        self._outgoing.clear()
        self._outgoing.start(paced=False)
        self._acks.reconnected()
        who = self._session, self._connection.hello_number, self._name
        self._send(m.Hello(m.PROTOCOL, *who, self._capabilities, self._groups.digests(), self._alone))

    def _submit(self, handle: Handle) -> None:
        if self.calls.ended is not None:
            handle.fail(copy_of(self.calls.ended, handle.group_id))
        elif not self._groups.add(handle):
            handle.fail(IdConflict("this client has a live group of that id", handle.group_id))
        else:
            self._send_waiting()  # now, so that it is there before what this caller asks next

    def _send_waiting(self) -> None:
        if not self._connection.ready:
            return
        assert self.welcome is not None
        limits, now = self.welcome.limits, time.monotonic()
        if self._groups.unsent or self._acks.due(now):
            for ack in self._acks.take(limits, now):  # before Submits: one may use the id of a group that ends with these
                self._send(ack)
        while handle := self._groups.pop_sendable(limits):
            self._outgoing.add(handle.frames)
            for abort in aborts_of_children([handle], limits):
                self._send(abort)

    def _cancel(self, argument: tuple[Handle, frozenset[int] | None]) -> None:
        assert self.welcome is not None, "the client's constructor waits for it"
        for abort in list(self._groups.cancel(*argument, self.welcome.limits)):
            if self._connection.ready:
                self._send(abort)

    def _request(self, argument: tuple[int, list[Frame], type, Future[Any]]) -> None:
        request_id, frames, kind, future = argument
        if self.calls.ended is not None:
            future.set_exception(copy_of(self.calls.ended))
            return
        self._requests.add(request_id, frames, future, m.ANSWERS[kind])
        if kind is m.Chunk:
            self._outgoing.add_chunk(request_id, frames)
        if self._connection.ready:
            self._outgoing.add(frames)

    # in

    def _receive(self, frames: list[Frame]) -> None:
        self._connection.last_received_at = time.monotonic()
        try:
            message = self._decoder.unpack(frames)
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
                    self._send(m.Goodbye())  # it waits for this
                    self._connection.expect_close(self._connection.last_received_at)
                    self._fail_all(ServiceLost(f"the service is closing: {message.reason}"))
                case m.Alive():
                    self._outgoing.taken(message.taken_bytes)
                    self._told(message)
        except (ValueError, TypeError, RecursionError, ProtocolError) as error:
            self._start_over(unreadable(error))  # nobody can tell what was lost with it
        if self._groups.disbelieved:
            self._groups.disbelieved = False
            self._connection.put_right(time.monotonic())

    def _welcomed(self, welcome: m.Welcome) -> None:
        if welcome.protocol != m.PROTOCOL:
            raise ProtocolError(f"Welcome of protocol {welcome.protocol}; this client speaks {m.PROTOCOL}")
        if self._connection.ready or welcome.hello != self._connection.hello_number:
            return  # the answer to a repeated or an outdated Hello
        check_same(self.welcome, welcome)
        if self.welcome is not None and restarted(self.welcome, welcome):
            for request_id in self._waiters.restarted(self.welcome, welcome, self._transport.address, self._patience.resubmit):
                self._outgoing.answered(request_id)
        self.welcome = welcome
        self._groups.welcomed(welcome)
        self._decoder = Decoder(m.ServiceMessage, m.answer_limits(welcome.limits))
        self._connection.welcomed(time.monotonic())
        self._told(welcome)
        self._outgoing.start(paced=True)
        self._outgoing.add(*self._groups.resent(welcome.groups))
        for abort in self._groups.aborts(welcome.limits):
            self._send(abort)
        self._outgoing.add(*self._requests.wanted())
        if not self.first_welcome.done():
            self.first_welcome.set_result(welcome)

    def _told(self, message: m.Welcome | m.Alive) -> None:
        """Note which weights are live; Hello has the service drop groups that do not go on under them."""
        if self._waiters.told(Served(message.version, message.digest), self._transport.address):
            self._connection.renew(time.monotonic())

    def _refused(self, refused: m.Refused) -> None:
        error = from_wire(refused.kind, refused.message, refused.group_id)
        if isinstance(error, NoSession):  # whatever it is about: it is sent again after Welcome
            if self._connection.ready:  # otherwise Hello is on its way
                self._connection.renew(time.monotonic())
        elif refused.request_id is not None:
            self._answer(refused.request_id, error)
        elif refused.group_id is not None:
            handle = self._groups.sent.get(refused.group_id)
            if handle is not None:
                self._groups.remove(handle)
                handle.fail(error)
        else:
            self._refusals.say(f"message refused kind={refused.kind} reason={refused.message!r}")
            self._start_over(error)

    # ends

    def _answer(self, request_id: int, result: Any) -> None:
        """Give the caller of a request its result, or raise an error there."""
        self._outgoing.answered(request_id)
        self._waiters.answer(request_id, result)

    def _start_over(self, error: RolloutError) -> None:
        """Fail everybody, and have the service drop what it still runs for them."""
        self._fail_all(error)
        self._connection.put_right(time.monotonic())

    def _fail_all(self, error: RolloutError) -> None:
        for request_id in self._waiters.fail(error):
            self._outgoing.answered(request_id)


def say_goodbye(transport: ClientTransport, outgoing: SendQueue) -> None:
    """Send Goodbye in place of all that waits, for GOODBYE_S at most."""
    outgoing.clear()
    outgoing.start(paced=False)
    outgoing.add(pack(m.Goodbye()))
    deadline = time.monotonic() + GOODBYE_S
    while outgoing and time.monotonic() < deadline and transport.connected:
        outgoing.send(transport.send)
        if outgoing:
            transport.receive(0.01, sending=True)


def _status_dict(text: bytes) -> dict[str, Any]:
    status = json.loads(text)
    if not isinstance(status, dict):
        raise ValueError("a status must be a JSON object")
    return status
