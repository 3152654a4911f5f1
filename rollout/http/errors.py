"""Errors of all HTTP APIs.

A body has the fields of vLLM and OpenAI (`error.message`, `error.type`, `error.param`, `error.code`) and those of SGLang
(`object`, `message`, `success`), so clients of each find theirs.
"""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from rollout.logs import logger
from rollout.transport.errors import (
    Busy,
    ClientClosed,
    GroupFailed,
    IdConflict,
    InvalidRequest,
    LimitExceeded,
    RequestTimeout,
    RolloutError,
    ServiceLost,
    SourceUnreachable,
    StaleWeights,
    WeightsRefused,
)

log = logger(__name__)

STATUS: dict[type[RolloutError], int] = {
    InvalidRequest: 400,
    LimitExceeded: 400,
    WeightsRefused: 400,
    SourceUnreachable: 400,
    IdConflict: 500,
    Busy: 503,
    StaleWeights: 503,
    ServiceLost: 503,
    ClientClosed: 503,
    RequestTimeout: 504,
    GroupFailed: 500,
}
NO_JSON = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""raised by a JSON decoder; RecursionError: nested too deeply"""
TYPES = {401: "authentication_error", 404: "not_found_error"}
MAX_MESSAGE = 2000
"""characters"""
RETRY = {503: {"retry-after": "1"}, 500: {"x-should-retry": "false"}}
"""headers by status. OpenAI's client repeats a request with 408, 409, 429 or 5xx unless `x-should-retry` forbids it. It would
fail again after a 500, not after a 503"""


class HttpError(Exception):
    """A request is refused. param: name of the invalid field. passes: the error of a status of 5xx may pass."""

    def __init__(self, status: int, message: str, param: str | None = None, passes: bool = False) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.passes = status, message, param, passes


def bad(message: str, param: str | None = None) -> HttpError:
    """Make the error of an invalid field."""
    return HttpError(400, message, param)


def not_served(what: str, instead: str, param: str | None = None) -> HttpError:
    """Make the error of an unsupported feature. instead: the alternative. Not 501: clients repeat what has a status of 5xx."""
    return HttpError(400, f"{what} is not supported: {instead}", param)


def status_of(error: Exception) -> int:
    """Return the HTTP status of an error."""
    if isinstance(error, HttpError):
        return error.status
    if isinstance(error, RecursionError):
        return 400  # only a nested request recurses
    return next((status for kind, status in STATUS.items() if isinstance(error, kind)), 500)


def body_of(status: int, message: str, kind: str | None = None, param: str | None = None) -> bytes:
    """Encode the body of an error. Long messages, which may quote a request, are shortened."""
    if len(message) > MAX_MESSAGE:
        message = f"{message[: MAX_MESSAGE // 2]} … {message[-MAX_MESSAGE // 2 :]}"
    kind = kind or TYPES.get(status) or ("invalid_request_error" if status < 500 else "server_error")
    fields: dict[str, Any] = {"message": message, "type": kind, "param": param, "code": status}
    return msgspec.json.encode({"error": fields, "object": "error", "message": message, "success": False})


def response_of(error: Exception) -> Response:
    """Make the response for an error. An unexpected one is logged; its response names only its type."""
    status = status_of(error)
    kind = error.kind if isinstance(error, RolloutError) else None
    if isinstance(error, HttpError | RolloutError):
        message = error.message
    elif isinstance(error, RecursionError):
        message = "the request is nested too deeply"
    else:
        log.error("request failed", exc_info=error)
        message = f"the gateway failed on this request: {type(error).__name__}"
    param = error.param if isinstance(error, HttpError) else None
    headers = None if isinstance(error, HttpError) and error.passes else RETRY.get(status)
    return Response(body_of(status, message, kind, param), status, headers, "application/json")


async def handle_error(request: Request, error: Exception) -> Response:
    """Handle any exception of a route, as Starlette's exception handler."""
    if isinstance(error, ClientDisconnect):
        return Response(status_code=499)  # uvicorn discards it
    if isinstance(error, HTTPException):  # of Starlette's router
        path = request.scope["path"][:200]
        allowed = sorted((error.headers or {}).get("Allow", "").split(", "))
        message = f"{path} takes {', '.join(allowed)}" if allowed != [""] else f"there is no {path!r}: GET / lists the routes"
        error = HttpError(error.status_code, message)
    return response_of(error)
