"""Sockets, connection limits and graceful shutdown, around uvicorn.

uvicorn limits how long a connection may be idle between two requests. It does not limit the time or size of a head, the time of
a body, or the number of connections before a request has arrived; `LimitedConnection` does, with errors in the format of the
APIs.
"""

from __future__ import annotations

import asyncio
import http
import math
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from rollout.config import InputError
from rollout.http.endpoints import DISCONNECTED
from rollout.http.errors import body_of
from rollout.http.settings import RequestLimits


def refusal(status: int, message: str) -> bytes:
    """Encode a whole response that closes its connection."""
    body = body_of(status, message)
    head = f"HTTP/1.1 {status} {http.HTTPStatus(status).phrase}\r\ncontent-type: application/json\r\n"
    return f"{head}content-length: {len(body)}\r\nconnection: close\r\n\r\n".encode() + body


class LimitedConnection(HttpToolsProtocol):  # type: ignore[misc]
    """One connection within limits. options: as uvicorn gives them."""

    def __init__(self, limits: RequestLimits, **options: Any) -> None:
        super().__init__(**options)
        self._limits = limits
        self._disconnected: asyncio.Future[None] = self.loop.create_future()
        self._in_head = True
        self._head_bytes = 0
        self._refused = False
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        most = self._limits.max_connections
        if len(self.connections) > most:
            self._refuse(503, f"{most} connections are open, the maximum (max_connections)")
        else:
            self._time_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        self._disconnected.set_result(None)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        super().data_received(data)
        if self._in_head and not self._refused:
            self._head_bytes += len(data)
            if self._head_bytes > self._limits.max_head_bytes:
                self._refuse(431, f"the head of the request is larger than {self._limits.max_head_bytes} bytes")

    def on_message_begin(self) -> None:
        self._in_head, self._head_bytes = True, 0
        if self._timer is None:
            self._time_head()
        super().on_message_begin()
        self.scope[DISCONNECTED] = self._disconnected

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._stop_timer()
        self._timer = self.loop.call_later(self._limits.body_timeout_s, self._on_body_timeout)
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._stop_timer()
        super().on_message_complete()

    def eof_received(self) -> bool:
        """Keep the connection open while a complete request is being processed: its client may have closed only its sending
        side (`nc -N`). A client that is gone looks the same at first, so `_probe` tells them apart."""
        cycle = self.cycle
        pending = cycle is not None and not cycle.response_complete and not cycle.more_body and not self._refused
        if pending and cycle.scope["http_version"] != "1.0":
            cycle.keep_alive = False
            self.loop.call_later(self._limits.probe_interval_s, self._probe, cycle)
            return True
        return False

    def _probe(self, cycle: Any, sent: bool = False) -> None:
        """Check periodically that the client is still connected. The kernel reports a closed peer after bytes were sent to it;
        before a response these bytes are an interim response, which HTTP/1.1 clients skip."""
        if self.transport.is_closing() or cycle.response_complete:
            return
        if self.transport.get_extra_info("socket").getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self.transport.abort()
            return
        if not sent and not cycle.response_started:
            self.transport.write(b"HTTP/1.1 102 Processing\r\n\r\n")
        self.loop.call_later(self._limits.probe_interval_s, self._probe, cycle, True)

    def send_400_response(self, msg: str) -> None:
        """Refuse invalid HTTP; uvicorn calls this."""
        self._refuse(400, "the request is not valid HTTP")

    def _time_head(self) -> None:
        self._timer = self.loop.call_later(self._limits.head_timeout_s, self._on_head_timeout)

    def _on_head_timeout(self) -> None:
        if self.cycle is not None and not self.cycle.response_complete:
            self._time_head()  # a pipelined request: the previous one is still being processed
        else:
            self._refuse(408, f"the head of a request did not come within {self._limits.head_timeout_s} s")

    def _on_body_timeout(self) -> None:
        if self.cycle.response_started:
            self.transport.close()  # it was refused for another reason
        else:
            self._refuse(408, f"the body did not come within {self._limits.body_timeout_s} s")

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _refuse(self, status: int, message: str) -> None:
        self._refused = True
        self._stop_timer()
        if not self.transport.is_closing():
            self.transport.write(refusal(status, message))
            self.transport.close()


class HttpServer(uvicorn.Server):  # type: ignore[misc]
    """One port. Signals are handled by the process, which may have two ports."""

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
    except (OSError, ValueError) as error:  # ValueError: an invalid host name
        bound.close()
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"{host} port {port}: {reason}; give another --host or --port") from error
    return bound


def server_of(app: ASGIApp, limits: RequestLimits) -> HttpServer:
    """Make the server of an application."""
    protocol: Any = partial(LimitedConnection, limits)
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
        timeout_keep_alive=int(limits.idle_timeout_s),
        timeout_graceful_shutdown=math.ceil(limits.grace_s + limits.abort_grace_s),
    )
    return HttpServer(config)


async def serve(
    servers: Sequence[tuple[HttpServer, socket.socket]], stop: asyncio.Event, grace_s: float, abort: Callable[[], Any]
) -> None:
    """Serve until `stop`. Requests then have `grace_s` seconds to finish; `abort` is called for the remaining ones."""
    running = [asyncio.create_task(server.serve([bound])) for server, bound in servers]
    stopped = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait([stopped, *running], return_when=asyncio.FIRST_COMPLETED)
        for server, _ in servers:
            server.should_exit = True
        _, late = await asyncio.wait(running, timeout=grace_s)
        if late:
            abort()
        await asyncio.gather(*running)
    finally:
        stopped.cancel()
