"""What all routes have in common: who may ask, how much, and how it is refused.

    request -> App (Host, token, web pages) -> route -> body (size, time, JSON) -> dialect -> response
                                                    └──── any error ────> errors.response_of

A body is read into memory whole, so all bodies together have a budget as well as each of them.
"""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Iterable
from contextlib import aclosing
from typing import Any, TypeVar, Union

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from rollout.http.errors import NO_JSON, HttpError, bad, response_of
from rollout.http.hosts import check_host
from rollout.http.upstream import Gone

Answer = Union[Response, "EventStream"]
Handler = Callable[[Request], Awaitable[Answer]]
T = TypeVar("T")

GONE = "rollout.gone"
"""in the scope of a request: a future that is done when whoever asked has hung up"""


class RequestLimits(msgspec.Struct, frozen=True, kw_only=True):
    """What one process of the facade takes in. Everything over it is refused before it is kept."""

    max_body_bytes: int = 32 << 20
    """of one request"""
    max_buffered_bytes: int = 256 << 20
    """of all requests whose bodies are being read"""
    stream_every: int = 4
    """tokens of a child between two parts of a stream"""
    max_connections: int = 4096
    max_prompts: int = 4096
    """prompts of one request"""
    max_samples: int = 16_384
    """of one request: n of each prompt"""
    prompt_processes: int = 2
    """that render templates and tokenize, at most"""
    prompt_timeout_s: float = 20.0
    """for one of them to render and tokenize a prompt"""
    prompt_memory_bytes: int = 1 << 30
    """that one of them may take for it"""
    head_timeout_s: float = 10.0
    """from a connection, or the first byte of a request on it, to the end of its head"""
    body_timeout_s: float = 30.0
    """from the head to the last byte of a body"""
    idle_timeout_s: float = 75.0
    """that a connection is kept between two requests"""
    grace_s: float = 10.0
    """that requests have to finish once the process was told to end"""


class BodyReader:
    """Reads bodies, within `bounds`. For one event loop."""

    def __init__(self, bounds: RequestLimits) -> None:
        self._bounds = bounds
        self._held = 0

    async def read(self, request: Request) -> bytes:
        """Read a body. Raises HttpError 413, 503 when too much is being read at once; Gone."""
        bounds, parts, held, more = self._bounds, [], 0, True
        try:
            while more:
                message = await request.receive()
                if message["type"] == "http.disconnect":
                    raise Gone
                part, more = message.get("body", b""), message.get("more_body", False)
                parts.append(part)
                held += len(part)
                self._held += len(part)
                if held > bounds.max_body_bytes:
                    raise self._too_large()
                if self._held > bounds.max_buffered_bytes:
                    raise HttpError(503, f"bodies of {self._held} bytes are being read; try again (max_buffered_bytes)")
        finally:
            self._held -= held
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _too_large(self) -> HttpError:
        return HttpError(413, f"the body is larger than {self._bounds.max_body_bytes} bytes (max_body_bytes)")

    async def decode(self, request: Request, decoder: msgspec.json.Decoder[T]) -> T:
        """Read a body of JSON. Raises HttpError naming the field."""
        body = await self.read(request)
        try:
            return decoder.decode(body or b"{}")
        except msgspec.ValidationError as error:
            raise bad(str(error)) from None
        except NO_JSON as error:
            raise bad(f"this is no JSON that can be read: {error}") from None


def flag(request: Request, name: str, default: bool) -> bool:
    """Read a query parameter that is true or false. Raises HttpError."""
    text = request.query_params.get(name)
    if text is None:
        return default
    if text.lower() not in ("true", "false", "0", "1"):
        raise bad(f"{name}={text!r}: must be true or false", name)
    return text.lower() in ("true", "1")


def only_parameters(request: Request, *names: str) -> None:
    """Raise HttpError for a query parameter that is not one of `names`."""
    unknown = sorted(set(request.query_params) - set(names))
    if unknown:
        raise bad(f"unknown query parameter {unknown[0]!r}: this route takes {', '.join(names) or 'none'}", unknown[0])


class Route(msgspec.Struct, frozen=True):
    """A method and a path, whole, and what serves them."""

    method: str
    path: str
    handler: Handler


class App:
    """An ASGI application of routes. Loopback is open to its machine, but not to the web pages that a browser on it shows.

    Args:
        token: that `Authorization: Bearer` must have; None = nobody needs one.
        hosts: names that `Host` may have; None = any.
    """

    def __init__(self, routes: Iterable[Route], token: str | None, hosts: frozenset[str] | None) -> None:
        self._handlers = {(route.path, route.method): route.handler for route in routes}
        self._methods: dict[str, list[str]] = {}
        for path, method in self._handlers:
            self._methods.setdefault(path, []).append(method)
        self._token = None if token is None else token.encode()
        self._hosts = hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request; every error is answered in the dialects' form."""
        try:
            handler = self._handler(scope)
            response = await handler(Request(scope, receive))
            await response(scope, receive, send)
        except Gone:
            return  # nobody reads an answer
        except Exception as error:
            await response_of(error)(scope, receive, send)

    def _handler(self, scope: Scope) -> Handler:
        """Find who serves a request. Raises HttpError."""
        path = scope["path"]
        if self._hosts is not None:
            check_host(scope["headers"], scope["http_version"], self._hosts)
        if path not in ("/health", "/liveness"):
            self._admit(scope["headers"])
        handler = self._handlers.get((path, scope["method"]))
        if handler is None and path in self._methods:
            raise HttpError(405, f"{path[:200]} takes {', '.join(self._methods[path])}")
        if handler is None:
            raise HttpError(404, f"there is no {path[:200]!r}: docs/http.md lists the routes")
        return handler

    def _admit(self, headers: Iterable[tuple[bytes, bytes]]) -> None:
        """Raise HttpError for who may not ask."""
        if self._token is not None:
            given = next((value for name, value in headers if name == b"authorization"), b"")
            scheme, _, token = given.partition(b" ")
            if scheme.lower() != b"bearer" or not hmac.compare_digest(token.strip(b" "), self._token):
                raise HttpError(401, "give Authorization: Bearer TOKEN")
        elif any(name == b"origin" for name, _ in headers):
            raise HttpError(403, "web pages may not ask a facade without a token: start it with --token-file")


async def unless_gone(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Await `work`, and cancel it if whoever asked hangs up. Raises Gone then."""
    task, over = asyncio.current_task(), False
    gone: asyncio.Future[None] = request.scope[GONE]
    assert task is not None

    def cancel(_: asyncio.Future[None]) -> None:
        if not over:
            task.cancel()

    gone.add_done_callback(cancel)
    try:
        return await work
    except asyncio.CancelledError:
        if gone.done():
            raise Gone from None
        raise
    finally:
        over = True
        gone.remove_done_callback(cancel)


class EventStream:
    """An answer of server-sent events, sent as they come. Whoever hangs up ends what makes them. An error before the first one
    is answered as any other, a later one is the last event.

    Args:
        contents: what each event holds, as JSON.
    """

    def __init__(self, request: Request, contents: AsyncGenerator[Any, None]) -> None:
        self._request, self._contents = request, contents

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send them, and [DONE]. Raises Gone, and what came in place of the first event."""
        async with aclosing(self._contents) as contents:
            await unless_gone(self._request, self._send(contents, send))

    async def _send(self, contents: AsyncGenerator[Any, None], send: Send) -> None:
        headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
        first = await anext(contents, None)
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        try:
            if first is not None:
                await send(event_of(msgspec.json.encode(first)))
            async for content in contents:
                await send(event_of(msgspec.json.encode(content)))
            await send(event_of(b"[DONE]"))
        except Exception as error:
            await send(event_of(bytes(response_of(error).body)))
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def event_of(data: bytes) -> dict[str, Any]:
    """Make the message of one event."""
    return {"type": "http.response.body", "body": b"data: " + data + b"\n\n", "more_body": True}
