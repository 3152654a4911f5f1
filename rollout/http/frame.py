"""What all routes have in common: who may ask, how much, and how it is refused.

    request -> Guard (token, web pages, host) -> route -> body (size, time, JSON) -> dialect -> response
                                                    └──── any error ────> errors.response_of

A body is read into memory whole, so all bodies together have a budget as well as each of them.
"""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Awaitable, Callable, Iterable
from typing import TypeVar

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from rollout.http.errors import HttpError, bad, response_of
from rollout.http.upstream import Gone

Handler = Callable[[Request], Awaitable[Response]]
T = TypeVar("T")

LOOPBACK = {"127.0.0.1", "::1", "localhost"}


class Bounds(msgspec.Struct, frozen=True, kw_only=True):
    """What one process of the facade takes in. Everything over it is refused before it is kept."""

    max_body_bytes: int = 32 << 20
    """of one request"""
    max_buffered_bytes: int = 256 << 20
    """of all requests whose bodies are being read"""
    max_connections: int = 4096
    max_prompts: int = 4096
    """prompts of one request"""
    head_timeout_s: float = 10.0
    """from a connection, or the first byte of a request on it, to the end of its head"""
    body_timeout_s: float = 30.0
    """from the head to the last byte of a body"""
    idle_timeout_s: float = 75.0
    """that a connection is kept between two requests"""
    grace_s: float = 10.0
    """that requests have to finish once the process was told to end"""


class Bodies:
    """Reads bodies, within `bounds`. For one event loop."""

    def __init__(self, bounds: Bounds) -> None:
        self._bounds = bounds
        self._held = 0

    async def read(self, request: Request) -> bytes:
        """Read a body. Raises HttpError 413, 503 when too much is being read at once, 408."""
        bounds, length = self._bounds, request.headers.get("content-length")
        if length is not None and int(length) > bounds.max_body_bytes:
            raise self._too_large()
        parts: list[bytes] = []
        held = 0
        try:
            async with asyncio.timeout(bounds.body_timeout_s):
                async for part in request.stream():
                    parts.append(part)
                    held += len(part)
                    self._held += len(part)
                    if held > bounds.max_body_bytes:
                        raise self._too_large()
                    if self._held > bounds.max_buffered_bytes:
                        raise HttpError(503, f"bodies of {self._held} bytes are being read; try again (max_buffered_bytes)")
        except TimeoutError:
            raise HttpError(408, f"the body did not come within {bounds.body_timeout_s} s") from None
        except ClientDisconnect:
            raise Gone from None
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
        except (msgspec.ValidationError, msgspec.DecodeError) as error:
            raise bad(str(error)) from None
        except (RecursionError, UnicodeDecodeError) as error:
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


class Guard:
    """Lets in whoever may ask. Loopback is open to its machine, but not to the web pages that a browser on it shows."""

    def __init__(self, app: ASGIApp, token: str | None) -> None:
        self._app, self._token = app, None if token is None else b"Bearer " + token.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refusal = self._refusal(scope) if scope["type"] == "http" else None
        if refusal is None:
            await self._app(scope, receive, send)
        else:
            await response_of(refusal)(scope, receive, send)

    def _refusal(self, scope: Scope) -> HttpError | None:
        if scope["path"] in ("/health", "/liveness"):
            return None
        if self._token is not None:
            given = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
            return None if hmac.compare_digest(given, self._token) else HttpError(401, "give Authorization: Bearer TOKEN")
        if any(name == b"origin" for name, _ in scope["headers"]):
            return HttpError(403, "web pages may not ask a facade without a token: start it with --token-file")
        return None


def route(method: str, path: str, handler: Handler) -> Route:
    """Make a route whose every error is answered in the dialect's form."""

    async def endpoint(request: Request) -> Response:
        try:
            return await handler(request)
        except Gone:
            return Response(status_code=499)  # nobody reads it
        except Exception as error:
            return response_of(error)

    return Route(path, endpoint, methods=[method])


def app_of(routes: Iterable[BaseRoute], token: str | None) -> ASGIApp:
    """Join routes to an application; a path that is none of them is refused in the same form."""

    async def failed(request: Request, error: Exception) -> Response:
        return response_of(error)

    return Guard(Starlette(routes=list(routes), exception_handlers={HTTPException: failed}), token)


async def unless_gone(request: Request, work: Awaitable[T]) -> T:
    """Await `work`, and cancel it if whoever asked hangs up. Raises Gone then."""

    async def hung_up() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    task, watch = asyncio.ensure_future(work), asyncio.ensure_future(hung_up())
    watch.add_done_callback(lambda _: task.cancel())
    try:
        return await task
    except asyncio.CancelledError:
        if watch.done() and not watch.cancelled():
            raise Gone from None
        raise
    finally:
        watch.cancel()
