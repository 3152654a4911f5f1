"""Errors as these dialects write them, made in one place.

A body has the fields of vLLM and OpenAI (`error.message`, `error.type`, `error.param`, `error.code`) and those of SGLang
(`object`, `message`, `success`), so each client finds its own.
"""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.responses import Response

from rollout.logs import logger
from transport.errors import (
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
    IdConflict: 409,
    Busy: 503,
    StaleWeights: 503,
    ServiceLost: 503,
    ClientClosed: 503,
    RequestTimeout: 504,
    GroupFailed: 500,
}
NO_JSON = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""what decoding raises; the last one for what is nested too deeply"""
TYPES = {401: "authentication_error", 404: "not_found_error", 501: "not_implemented_error"}
MAX_MESSAGE = 2000
"""characters of an error that are told"""
RETRY_AFTER = {503: "1"}


class HttpError(Exception):
    """A request is not served. `param`: the field it is about."""

    def __init__(self, status: int, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.param = status, message, param


def bad(message: str, param: str | None = None) -> HttpError:
    """Make the error of a field that cannot be served as it stands."""
    return HttpError(400, message, param)


def not_served(what: str, instead: str, param: str | None = None) -> HttpError:
    """Make the error of what this service does not do; `instead`: what to use."""
    return HttpError(501, f"{what} is not served here: {instead}", param)


def status_of(error: Exception) -> int:
    """Return the HTTP status of an error."""
    if isinstance(error, HttpError):
        return error.status
    if isinstance(error, RecursionError):
        return 400  # nothing here goes deeper than what a request brings
    return next((status for kind, status in STATUS.items() if isinstance(error, kind)), 500)


def body_of(status: int, message: str, kind: str | None = None, param: str | None = None) -> bytes:
    """Write the body of an error, the superset of the dialects. What a long message quotes of a request is cut."""
    if len(message) > MAX_MESSAGE:
        message = f"{message[: MAX_MESSAGE // 2]} … {message[-MAX_MESSAGE // 2 :]}"
    kind = kind or TYPES.get(status) or ("invalid_request_error" if status < 500 else "server_error")
    fields: dict[str, Any] = {"message": message, "type": kind, "param": param, "code": status}
    return msgspec.json.encode({"error": fields, "object": "error", "message": message, "success": False})


def response_of(error: Exception) -> Response:
    """Answer with an error. What nobody foresaw is logged, and told by its type alone."""
    status = status_of(error)
    kind = error.kind if isinstance(error, RolloutError) else None
    if isinstance(error, HttpError | RolloutError):
        message = error.message
    elif isinstance(error, RecursionError):
        message = "the request is nested too deeply"
    else:
        log.error("request failed", exc_info=error)
        message = f"the facade failed on this request: {type(error).__name__}"
    param = error.param if isinstance(error, HttpError) else None
    headers = {"retry-after": RETRY_AFTER[status]} if status in RETRY_AFTER else None
    return Response(body_of(status, message, kind, param), status, headers, "application/json")
