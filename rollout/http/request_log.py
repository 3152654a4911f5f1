"""One log line per request: client, method, path, status, duration, tokens."""

from __future__ import annotations

import logging
import time

from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rollout.logs import logger

log = logger(__name__)
MAX_PATH = 200
"""characters"""
TOKENS = "rollout.tokens"
"""key in the ASGI scope of [prompt tokens, sampled tokens], counted while a request is processed"""


def log_to_stderr(level: str) -> None:
    """Log to standard error: lines of `rollout` from this level on (debug, info, warning, error), warnings of others."""
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s", level=logging.WARNING)
    logging.getLogger("rollout").setLevel(level.upper())


class RequestLog:
    """Logs each request of an application when its response has been sent, or its client has disconnected."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        began, status = time.perf_counter(), 0
        tokens = scope[TOKENS] = [0, 0]

        async def noted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, noted)
        finally:
            client, *_ = scope["client"] or ("-",)
            seconds = time.perf_counter() - began
            counted = f" {tokens[0]} prompt and {tokens[1]} sampled tokens" if any(tokens) else ""
            path = scope["path"][:MAX_PATH]  # without the query, which may hold what is no one else's business
            log.info("%s %s %s %d %.1f ms%s", client, scope["method"], path, status, 1e3 * seconds, counted)


def count_tokens(request: Request, prompt: int, sampled: int) -> None:
    """Add to the counts of a request, if it is logged."""
    counts = request.scope.get(TOKENS)
    if counts is not None:
        counts[0] += prompt
        counts[1] += sampled
