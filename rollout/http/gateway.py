"""The gateway process: one client, one tokenizer, one or two ports."""

from __future__ import annotations

import asyncio
import resource
import signal
import socket
from collections.abc import Callable, Iterable
from typing import Any

from starlette.exceptions import HTTPException
from starlette.middleware.exceptions import ExceptionMiddleware
from starlette.routing import BaseRoute, Route, Router
from starlette.types import ASGIApp

from rollout.client.api import RolloutClient
from rollout.config import InputError
from rollout.http.access import AccessMiddleware
from rollout.http.adapters import AdapterRoutes
from rollout.http.chat import ChatRoutes
from rollout.http.control import ServiceControl, SGLangControl, VllmControl, unsupported_routes
from rollout.http.endpoints import Endpoint, Endpoints
from rollout.http.errors import HttpError, handle_error
from rollout.http.generation import GenerationService
from rollout.http.index import index
from rollout.http.metrics import metrics_handler
from rollout.http.prompt_pool import PromptPool
from rollout.http.request_log import RequestLog
from rollout.http.server import listen, serve, server_of
from rollout.http.settings import Settings
from rollout.http.sglang import SGLangRoutes
from rollout.http.status import StatusRoutes
from rollout.http.text import Text
from rollout.http.upstream import Upstream
from rollout.http.vllm import CompletionRoutes


def main_and_admin(generation: GenerationService, settings: Settings, url: str) -> tuple[list[Route], list[Route]]:
    """Make the routes of the main port and, if there is one, of the administrators' port."""
    endpoints = Endpoints(settings.limits)
    completions, control, names = CompletionRoutes(generation), ServiceControl(generation), generation.models
    sampling = (completions, ChatRoutes(generation), SGLangRoutes(generation))
    controlling = (VllmControl(control), SGLangControl(control), AdapterRoutes(control, names))
    work = [route for each in sampling for route in each.routes(endpoints)]  # first: the router searches in order
    metrics = endpoints.get("/metrics", metrics_handler(generation.upstream, generation.meter, names[0]))
    status = [*StatusRoutes(generation, url).routes(endpoints), metrics]
    admin, missing = [route for each in controlling for route in each.routes(endpoints)], unsupported_routes(endpoints)
    if settings.admin_port is None:
        served = [*work, *status, *admin]
        return [index(endpoints, served, names), *served, *missing], []
    main, other = [*work, *status], [*admin, *status, endpoints.get("/v1/models", completions.models)]
    return (
        [index(endpoints, main, names), *main, *map(moved, admin), *missing],
        [index(endpoints, other, names), *other, *missing],
    )


def moved(route: Route) -> Route:
    """Make a route of the main port that refuses a request for the administrators' port."""

    async def refuse(request: Any) -> Any:
        raise HttpError(403, f"{route.path} is on the administrators' port (--admin-port)")

    return Route(route.path, Endpoint(refuse), methods=["POST"])


def application(routes: Iterable[BaseRoute], settings: Settings) -> ASGIApp:
    """Make the application of one port."""
    router = Router(list(routes), redirect_slashes=False)
    access = AccessMiddleware(router, settings.token, settings.hosts())
    app = ExceptionMiddleware(access, handlers={Exception: handle_error, HTTPException: handle_error})
    return RequestLog(app) if settings.request_log else app


async def run(
    client: RolloutClient,
    tokenizer: Any,
    settings: Settings,
    ready: Callable[[str, str], None],
    stop: asyncio.Event | None = None,
    stopping: Callable[[int], None] = lambda number: None,
) -> None:
    """Serve until `stop`, SIGINT or SIGTERM. Raises InputError for an address that cannot be bound.

    Args:
        ready: called with the main and the administrators' URL, which may be the same, once the process listens.
        stopping: called with the number of each signal."""
    stop, limits = stop or asyncio.Event(), settings.limits

    def on_signal(number: int) -> None:
        stopping(number)
        stop.set()

    raise_open_files(limits.max_connections)
    main = listen(settings.host, settings.port)
    admin = None if settings.admin_port is None else listen(settings.admin_host, settings.admin_port)
    upstream = Upstream(client, limits.status_age_s)
    prompts = PromptPool(tokenizer, min(upstream.info.context, upstream.info.limits.max_prompt_tokens), limits)
    generation = GenerationService(upstream, Text(tokenizer), prompts, settings)
    loop = asyncio.get_running_loop()
    try:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, on_signal, number)
    except (RuntimeError, ValueError):  # not the main thread; the caller has `stop`
        pass
    try:
        urls = url_of(main), url_of(admin or main)
        routes, admin_routes = main_and_admin(generation, settings, urls[0])
        servers = [(server_of(application(routes, settings), limits), main)]
        if admin is not None:
            servers.append((server_of(application(admin_routes, settings), limits), admin))
        main.listen(2048)  # before `ready`: a process that reads the URL may connect at once
        if admin is not None:
            admin.listen(128)
        ready(*urls)
        await serve(servers, stop, limits.grace_s, generation.abort)
    finally:
        prompts.close()
        upstream.close()


def url_of(bound: socket.socket) -> str:
    host, port = bound.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def raise_open_files(connections: int) -> None:
    """Raise the limit of open files for this number of connections. Raises InputError if the system refuses."""
    needed = connections + 256
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < needed:
        if hard != resource.RLIM_INFINITY and hard < needed:
            raise InputError(f"{connections} connections need {needed} open files, the limit is {hard}: ulimit -Hn, or fewer")
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
