"""The client's I/O thread: the only owner of the socket and of what is open.

    user threads --(call, argument)--> queue + wake --> this thread --> Handle / Future

Nothing that was sent is trusted to have arrived until its answer is here. On every new connection the thread says Hello with
the digests of the groups it still wants, and repeats their Submits: repeating is harmless at the service, and samples that
come twice are told by (group, index). So a link that breaks and heals loses nothing.

Death is told by the connection: libzmq's I/O threads exchange pings, so neither a long engine step nor a busy trainer looks
like it. A service whose loop stands still behind a living connection is given `stall_timeout_s`.
"""

from __future__ import annotations

import json
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import numpy as np

from engine.request import Limits
from rollout.handle import Handle
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

log = logging.getLogger("rollout.client")


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
        self._decoder: Decoder[m.ServiceMessage] = Decoder(m.ServiceMessage, Limits())
        self._calls: queue.SimpleQueue[tuple[Callable[[Any], None], Any]] = queue.SimpleQueue()
        self._closing = False
        self._door = threading.Lock()
        self._ended: RolloutError | None = None
        """set once the thread serves nobody any more; calls then run, and fail, in their own thread"""

        self._handles: dict[str, Handle] = {}
        """open groups by id, sent and unsent"""
        self._unsent: deque[Handle] = deque()
        self._sent: dict[str, Handle] = {}
        self._sent_samples = 0
        self._requests: dict[int, Future[dict[str, Any]]] = {}
        self._made_requests = 0
        self._outgoing: deque[list[Frame]] = deque()
        """messages of this connection that the socket has not taken"""
        self._acks: list[tuple[str, int]] = []

        now = time.monotonic()
        self._connection = 0
        """of `transport.connections`, the one that Hello went to"""
        self._ready = False
        """Welcome has come on this connection"""
        self._hello_at = now
        self._beat_at = now
        self._connected_at = now
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

    def status(self, future: Future[dict[str, Any]]) -> None:
        self._call(self._status, future)

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
        for frames in self._transport.receive(POLL_S, sending=bool(self._outgoing)):
            self._take(frames)
        self._take_calls()
        self._tend(time.monotonic())
        if self._ready:
            if self._acks:  # before Submits: one of them may use the id of a group that ends with these
                self._send(m.Ack(self._acks))
                self._acks = []
            self._send_unsent()
        while self._outgoing and self._transport.send(self._outgoing[0]):
            self._outgoing.popleft()

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
                self._connection, self._ready = transport.connections, False
                self._hello_at = self._heard_at = now
            if not self._ready and now >= self._hello_at:
                self._send_hello(now)
            elif self._ready and now >= self._beat_at:
                self._beat_at = now + HEARTBEAT_S
                self._send(m.Heartbeat())
            self._connected_at = now
            if now - self._heard_at > self._stall_timeout_s:
                self._fail_all(
                    ServiceLost(f"{transport.address} is connected, but its loop said nothing for {self._stall_timeout_s} s")
                )
                self._ready, self._hello_at, self._heard_at = False, now, now
        else:
            self._ready = False
            if now - self._connected_at > self._link_timeout_s:
                self._fail_all(
                    ServiceLost(f"{transport.address} is dead or unreachable: no connection for {self._link_timeout_s} s")
                )

    # out

    def _send(self, message: Any) -> None:
        self._outgoing.append(pack(message))

    def _send_hello(self, now: float) -> None:
        """What waited for the old connection is dropped: all of it follows from what is open."""
        digests = b"".join(handle.digest for handle in self._sent.values())
        groups = np.frombuffer(digests, np.uint8).reshape(-1, m.DIGEST_BYTES)
        self._outgoing.clear()
        self._acks.clear()
        self._send(m.Hello(m.PROTOCOL, self._session, self._name, groups=groups))
        self._hello_at = now + HELLO_RETRY_S

    def _submit(self, handle: Handle) -> None:
        if self._ended is not None:
            handle.fail(self._ended)
        elif handle.group_id in self._handles:
            handle.fail(IdConflict("this client has a live group of that id", handle.group_id))
        else:
            self._handles[handle.group_id] = handle
            self._unsent.append(handle)

    def _send_unsent(self) -> None:
        """As many as the service takes from one client; the others wait here, so that a trainer may submit any number."""
        assert self.welcome is not None
        limits = self.welcome.limits
        while self._unsent:
            handle = self._unsent[0]
            if self._handles.get(handle.group_id) is not handle:  # ended while it waited
                self._unsent.popleft()
                continue
            room = len(self._sent) < limits.max_groups_per_client
            room = room and self._sent_samples + handle.n <= limits.max_samples_per_client
            if self._sent and not room:
                return
            self._unsent.popleft()
            self._sent[handle.group_id] = handle
            self._sent_samples += max(handle.n, 0)
            self._outgoing.append(handle.frames)

    def _cancel(self, handle: Handle) -> None:
        if self._handles.get(handle.group_id) is not handle:
            return
        handle.cancelled = True
        if handle.group_id in self._sent:
            if self._ready:
                self._send(m.Abort([handle.group_id]))
        else:
            handle.abort_unsent()
            self._remove(handle)

    def _status(self, future: Future[dict[str, Any]]) -> None:
        if self._ended is not None:
            future.set_exception(self._ended)
            return
        self._made_requests += 1
        self._requests[self._made_requests] = future
        if self._ready:
            self._send(m.StatusRequest(self._made_requests))

    def _say_goodbye(self) -> None:
        if not self._ready:
            return
        self._send(m.Goodbye())
        deadline = time.monotonic() + GOODBYE_S
        while self._outgoing and time.monotonic() < deadline and self._transport.connected:
            if self._transport.send(self._outgoing[0]):
                self._outgoing.popleft()
            else:
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
                    handle = self._sent.get(sample.group_id)
                    if handle is not None:
                        handle.take(sample)
                        if handle.done:
                            self._remove(handle)
                    self._acks.append((sample.group_id, sample.index))
                case m.StatusReply():
                    future = self._requests.pop(message.request_id, None)
                    if future is not None:
                        future.set_result(_status_dict(message.status))
                case m.Refused():
                    self._refused(message)
                case m.Closing():
                    self._ready = False
                    self._fail_all(ServiceLost(f"the service is closing: {message.reason}"))
                case m.Alive():
                    pass
        except ValueError as error:
            self._broken(str(error))
        except ProtocolError as error:
            self._broken(error.message)

    def _broken(self, reason: str) -> None:
        """What was lost in it nobody can tell, so whoever waits is told."""
        log.error("the service sent what cannot be read: %s", reason)
        self._fail_all(ProtocolError(f"the service sent what cannot be read: {reason}"))

    def _welcomed(self, welcome: m.Welcome) -> None:
        if welcome.protocol != m.PROTOCOL:
            raise ProtocolError(f"Welcome of protocol {welcome.protocol}; this client speaks {m.PROTOCOL}")
        if self.welcome is not None and self.welcome.incarnation != welcome.incarnation:
            # unsent groups were never in the old one, but their caller chose it, its model and its weights
            self._fail_all(ServiceRestarted(f"{self._transport.address} was restarted; what ran there is gone"))
        self.welcome = welcome
        self._decoder = Decoder(m.ServiceMessage, welcome.limits)
        self._ready = True
        self._beat_at = time.monotonic() + HEARTBEAT_S
        self._outgoing.extend(handle.frames for handle in self._sent.values())
        cancelled = [handle.group_id for handle in self._sent.values() if handle.cancelled]
        if cancelled:
            self._send(m.Abort(cancelled))
        for request_id in self._requests:
            self._send(m.StatusRequest(request_id))
        if not self.first_welcome.done():
            self.first_welcome.set_result(welcome)

    def _refused(self, refused: m.Refused) -> None:
        error = from_wire(refused.kind, refused.message, refused.group_id)
        if refused.request_id is not None:
            future = self._requests.pop(refused.request_id, None)
            if future is not None:
                future.set_exception(error)
        elif refused.group_id is not None:
            handle = self._sent.get(refused.group_id)
            if handle is not None:
                handle.fail(error)
                self._remove(handle)
        elif isinstance(error, NoSession):
            if self._ready:  # otherwise Hello is on its way
                self._ready, self._hello_at = False, time.monotonic()
        else:
            log.error("refused: %s: %s", refused.kind, refused.message)
            self._fail_all(error)

    # ends

    def _remove(self, handle: Handle) -> None:
        self._handles.pop(handle.group_id, None)
        if self._sent.pop(handle.group_id, None) is not None:
            self._sent_samples -= max(handle.n, 0)

    def _fail_all(self, error: RolloutError) -> None:
        """Everybody who waits gets this error, each an object of its own: tracebacks are written into it."""
        for handle in list(self._handles.values()):
            handle.fail(type(error)(error.message, handle.group_id))
            self._remove(handle)
        self._unsent.clear()
        for future in self._requests.values():
            future.set_exception(type(error)(error.message))
        self._requests.clear()
        if not self.first_welcome.done() and not isinstance(error, ServiceLost):
            self.first_welcome.set_exception(type(error)(error.message))


def _status_dict(text: bytes) -> dict[str, Any]:
    status = json.loads(text)
    if not isinstance(status, dict):
        raise ValueError("a status must be a JSON object")
    return status
