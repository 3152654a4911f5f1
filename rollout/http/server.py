"""Sockets, connections and a graceful end, around uvicorn.

uvicorn bounds how long a connection may idle between two requests. `LimitedConnection` also bounds how long the head of a
request may take, how large it may be, and how many connections there are; each is refused in the dialect's form.
"""

from __future__ import annotations

import asyncio
import math
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from rollout.config import InputError
from rollout.http.app import GONE, App, RequestLimits
from rollout.http.errors import body_of

MAX_HEAD_BYTES = 65_536
LOOK_S = 0.25
"""from the end of what a connection sends to the first look whether its other end is there, and between looks"""
AFTER_ABORT_S = 10
"""that the samples of requests which were ended have to come back"""
REASONS = {400: "Bad Request", 408: "Request Timeout", 431: "Request Header Fields Too Large", 503: "Service Unavailable"}


def refusal(status: int, message: str) -> bytes:
    """Write a whole answer for a connection that gets no further."""
    body = body_of(status, message)
    head = f"HTTP/1.1 {status} {REASONS[status]}\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
    return head.encode() + b"connection: close\r\n\r\n" + body


class LimitedConnection(HttpToolsProtocol):  # type: ignore[misc]
    """One connection. Subclasses say the `bounds`."""

    bounds: RequestLimits
    _gone: asyncio.Future[None]
    _in_head = True
    _head_bytes = 0
    _refused = False
    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        self._gone = self.loop.create_future()
        if len(self.connections) > self.bounds.max_connections:
            self._refuse(503, f"{self.bounds.max_connections} connections are open, the most allowed (max_connections)")
        else:
            self._time_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timing()
        self._gone.set_result(None)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        super().data_received(data)
        if self._in_head and not self._refused:
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES:
                self._refuse(431, f"the head of the request is larger than {MAX_HEAD_BYTES} bytes")

    def on_message_begin(self) -> None:
        self._in_head, self._head_bytes = True, 0
        if self._timer is None:
            self._time_head()
        super().on_message_begin()
        self.scope[GONE] = self._gone

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._stop_timing()
        self._timer = self.loop.call_later(self.bounds.body_timeout_s, self._body_is_late)
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._stop_timing()
        super().on_message_complete()

    def eof_received(self) -> bool:
        """Keep the connection for the answer of a whole request: the other end may have closed its sending side alone (nc -N).
        Nothing tells that from one that has gone, so `_look` finds out."""
        cycle = self.cycle
        waits = cycle is not None and not cycle.response_complete and not cycle.more_body and not self._refused
        if waits and cycle.scope["http_version"] != "1.0":
            cycle.keep_alive = False
            self.loop.call_later(LOOK_S, self._look, cycle)
            return True
        return False

    def _look(self, cycle: Any, probed: bool = False) -> None:
        """Look whether anybody is at the other end, every so often until the answer is there. Any bytes make one that has gone
        say so; before an answer these are an interim response, which every client of HTTP/1.1 skips."""
        if self.transport.is_closing() or cycle.response_complete:
            return
        if self.transport.get_extra_info("socket").getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self.transport.abort()
            return
        if not probed and not cycle.response_started:
            self.transport.write(b"HTTP/1.1 102 Processing\r\n\r\n")
        self.loop.call_later(LOOK_S, self._look, cycle, True)

    def send_400_response(self, msg: str) -> None:
        """Answer what is no HTTP."""
        self._refuse(400, "this is no HTTP request that can be read")

    def _time_head(self) -> None:
        self._timer = self.loop.call_later(self.bounds.head_timeout_s, self._head_is_late)

    def _head_is_late(self) -> None:
        if self.cycle is not None and not self.cycle.response_complete:
            self._time_head()  # half of the next request lies behind one that is being answered
        else:
            self._refuse(408, f"the head of a request did not come within {self.bounds.head_timeout_s} s")

    def _stop_timing(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _body_is_late(self) -> None:
        if self.cycle.response_started:
            self.transport.close()  # it was refused for another reason
        else:
            self._refuse(408, f"the body did not come within {self.bounds.body_timeout_s} s")

    def _refuse(self, status: int, message: str) -> None:
        self._refused, self._timer = True, None
        if not self.transport.is_closing():
            self.transport.write(refusal(status, message))
            self.transport.close()


class HttpServer(uvicorn.Server):  # type: ignore[misc]
    """One port. Signals are the process's, which may have two."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def listen(host: str, port: int) -> socket.socket:
    """Bind a port, 0 to 65,535; 0 = a free one. Raises InputError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((host, port))
    except (OSError, ValueError) as error:  # ValueError: what is no name of a host
        bound.close()
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"{host} port {port}: {reason}; give another --host or --port") from error
    return bound


def server_of(app: App, bounds: RequestLimits) -> HttpServer:
    """Make the server of an application."""
    protocol: Any = type("BoundConnection", (LimitedConnection,), {"bounds": bounds})
    config = uvicorn.Config(
        app,
        http=protocol,
        ws="none",
        lifespan="off",
        access_log=False,
        log_config=None,
        server_header=False,
        date_header=False,
        proxy_headers=False,
        backlog=2048,
        timeout_keep_alive=int(bounds.idle_timeout_s),
        timeout_graceful_shutdown=math.ceil(bounds.grace_s) + AFTER_ABORT_S,
    )
    return HttpServer(config)


async def serve(
    servers: Sequence[tuple[HttpServer, socket.socket]], stop: asyncio.Event, bounds: RequestLimits, end: Any
) -> None:
    """Serve until `stop`. Requests then have `bounds.grace_s` to finish; `end` is called for those that have not."""
    running = [asyncio.create_task(server.serve([bound])) for server, bound in servers]
    stopped = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait([stopped, *running], return_when=asyncio.FIRST_COMPLETED)
        for server, _ in servers:
            server.should_exit = True
        _, late = await asyncio.wait(running, timeout=bounds.grace_s)
        if late:
            end()
        await asyncio.gather(*running)
    finally:
        stopped.cancel()
