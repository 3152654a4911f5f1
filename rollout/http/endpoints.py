"""Parts shared by all routes: bodies, query parameters, JSON responses, server-sent events, disconnected clients."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing, suppress
from typing import Any, TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from rollout.config import nearest
from rollout.http.errors import NO_JSON, HttpError, bad, response_of
from rollout.http.json_cost import check_cost
from rollout.http.settings import RequestLimits

T = TypeVar("T")
Handler = Callable[..., Awaitable[Any]]
"""takes the request and, if the route has a body, the decoded body; returns a response, or content for a JSON response"""

DISCONNECTED = "rollout.disconnected"
"""key in the ASGI scope of a future that is done once the client has disconnected. uvicorn reports a disconnect only to the
last request of a connection, not to one with others pipelined after it"""


UNKNOWN = re.compile(r"unknown field `(\w+)`$")
"""of the body itself, as msgspec words it"""


class Endpoints:
    """Makes routes of handlers, and reads their bodies within the limits. Bodies are read into memory whole, so all of them
    together are limited as well. For one event loop."""

    def __init__(self, limits: RequestLimits) -> None:
        self._limits = limits
        self._buffered = 0

    def get(self, path: str, handler: Handler) -> Route:
        return Route(path, Endpoint(handler), methods=["GET"])

    def post(self, path: str, handler: Handler, body: type[Any] | None = None) -> Route:
        """Make a route. body: type of the JSON body; None: no body is read."""
        if body is None:
            return Route(path, Endpoint(handler), methods=["POST"])
        decoder = msgspec.json.Decoder(body)

        async def decode(request: Request) -> Any:
            return await handler(request, await self._decode(request, decoder))

        return Route(path, Endpoint(decode, handler.__doc__), methods=["POST"])

    async def _decode(self, request: Request, decoder: msgspec.json.Decoder[T]) -> T:
        """Read a JSON body. Raises HttpError naming the invalid field, and as `_read`."""
        body = await self._read(request)
        check_cost(body, self._limits, "the body")
        try:
            return decoder.decode(body or b"{}")
        except msgspec.ValidationError as error:
            raise bad(f"{error}{near(str(error), decoder.type)}") from None
        except NO_JSON as error:
            raise bad(f"the body is not valid JSON: {error}") from None

    async def _read(self, request: Request) -> bytearray:
        """Read a body. Raises HttpError 413, 503 when all bodies together are too large; ClientDisconnect."""
        limits, body, more = self._limits, bytearray(), True
        try:
            while more:
                message = await request.receive()
                if message["type"] == "http.disconnect":
                    raise ClientDisconnect
                part, more = message.get("body", b""), message.get("more_body", False)
                body += part
                self._buffered += len(part)
                if len(body) > limits.max_body_bytes:
                    raise HttpError(413, f"the body is larger than {limits.max_body_bytes} bytes (max_body_bytes)")
                if self._buffered > limits.max_buffered_bytes:
                    raise HttpError(
                        503, f"bodies of {self._buffered} bytes are being read; try again later (max_buffered_bytes)"
                    )
        finally:
            self._buffered -= len(body)
        return body


class Endpoint:
    """The ASGI application of one route. Its handler returns a response, or content for a JSON response.

    Args:
        about: the first paragraph describes the route; by default the handler's docstring.
    """

    def __init__(self, handler: Handler, about: str | None = None) -> None:
        self._handler = handler
        self.summary = " ".join((about or handler.__doc__ or "").split("\n\n")[0].split())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        result = await self._handler(Request(scope, receive))
        if not isinstance(result, Response):
            result = Response(msgspec.json.encode(result), media_type="application/json")
        await result(scope, receive, send)


def flag(request: Request, name: str, default: bool) -> bool:
    """Read a boolean query parameter. Raises HttpError."""
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


async def unless_disconnected(request: Request, work: Awaitable[T]) -> T:
    """Await `work`, and cancel it when the client disconnects. Raises ClientDisconnect then."""
    task, done = asyncio.current_task(), False
    disconnected: asyncio.Future[None] = request.scope[DISCONNECTED]
    assert task is not None

    def cancel(_: asyncio.Future[None]) -> None:
        if not done:
            task.cancel()

    disconnected.add_done_callback(cancel)
    try:
        return await work
    except asyncio.CancelledError:
        if disconnected.done():
            raise ClientDisconnect from None
        raise
    finally:
        done = True
        disconnected.remove_done_callback(cancel)


class EventStream(StreamingResponse):  # type: ignore[misc]
    """Server-sent events, one for each JSON object of `contents`, then [DONE]. When the client disconnects, `contents` is
    closed, which aborts its samples. An error before the first event is raised; a later one is sent as the last event."""

    media_type = "text/event-stream"

    def __init__(self, request: Request, contents: AsyncGenerator[Any, None]) -> None:
        super().__init__(contents, headers={"cache-control": "no-cache"})
        self._request, self._contents = request, contents

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with suppress(ClientDisconnect):
            async with aclosing(self._contents) as contents:
                first = await unless_disconnected(self._request, anext(contents, None))
                self.body_iterator = events(first, contents)
                await unless_disconnected(self._request, self.stream_response(send))


async def events(first: Any, contents: AsyncGenerator[Any, None]) -> AsyncGenerator[bytes, None]:
    """Encode events. first: content of the first one; None = there is none."""
    try:
        if first is not None:
            yield event_of(msgspec.json.encode(first))
        async for content in contents:
            yield event_of(msgspec.json.encode(content))
        yield event_of(b"[DONE]")
    except Exception as error:
        yield event_of(bytes(response_of(error).body))


SEPARATORS = {b"\xc2\x85": b"\\u0085", b"\xe2\x80\xa8": b"\\u2028", b"\xe2\x80\xa9": b"\\u2029"}
"""characters that JSON does not escape and that end a line for Python's clients, and their escapes"""


def event_of(data: bytes) -> bytes:
    """Make the event of JSON text in UTF-8."""
    for character, escaped in SEPARATORS.items():
        data = data.replace(character, escaped)
    return b"data: " + data + b"\n\n"


def near(error: str, body: Any) -> str:
    """Name the field of a body that was probably meant by an unknown one; "" for other errors."""
    unknown = UNKNOWN.search(error)
    return "" if unknown is None else nearest(unknown[1], getattr(body, "__struct_encode_fields__", ()))
