"""The facade put together: one client, one tokenizer, one or two ports."""

from __future__ import annotations

import asyncio
import resource
import signal
import socket
from collections.abc import Callable
from typing import Any

import msgspec

from rollout.client.api import RolloutClient
from rollout.config import InputError
from rollout.http import metrics
from rollout.http.adapters import AdapterRoutes
from rollout.http.app import App, BodyReader, Handler, RequestLimits, Route
from rollout.http.chat import Chat
from rollout.http.control import ControlRoutes
from rollout.http.data import CompletionRoutes, Overlong
from rollout.http.errors import HttpError
from rollout.http.hosts import LOOPBACK, check_names, named
from rollout.http.prompt_pool import PromptPool
from rollout.http.server import listen, serve, server_of
from rollout.http.sglang import SGLang
from rollout.http.text import Text
from rollout.http.upstream import Upstream


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """How a facade listens and what it takes."""

    host: str = "127.0.0.1"
    port: int = 8000
    """0 = a free one"""
    admin_host: str = "127.0.0.1"
    admin_port: int | None = None
    """of pause, weights, sleep; None = those of `port`"""
    token: str | None = None
    """that `Authorization: Bearer` must have; needed for any address but loopback"""
    allowed_hosts: tuple[str, ...] = ()
    """names that `Host` may have, besides those that this process listens at"""
    names: tuple[str, ...] = ()
    """of the model, () = the service's own"""
    overlong: Overlong = "refuse"
    bounds: RequestLimits = RequestLimits()

    def __post_init__(self) -> None:
        """Raises ValueError for an address that would be open to everybody, or that is none."""
        for name, port in (("--port", self.port), ("--admin-port", self.admin_port or 0)):
            if not 0 <= port <= 65_535:
                raise ValueError(f"{name} {port}: must be 1 to 65535, or 0 for a free one")
        check_names(self.allowed_hosts)
        for host in (self.host, *([self.admin_host] if self.admin_port is not None else [])):
            if host not in LOOPBACK and self.token is None:
                raise ValueError(f"{host} is open to other machines: give --token-file, or listen at 127.0.0.1")
        if self.token is not None and (len(self.token) < 16 or not self.token.isascii() or not self.token.isprintable()):
            raise ValueError("the token must be at least 16 printable ASCII characters")

    def hosts(self) -> frozenset[str] | None:
        """Return the names that `Host` may have, None = any. At an address of other machines requests need the token, which no
        web page has, and call this process by names that it cannot know (those of pods, services, proxies)."""
        bound = {self.host} if self.admin_port is None else {self.host, self.admin_host}
        if not bound <= LOOPBACK and not self.allowed_hosts:
            return None
        return frozenset(map(named, {*LOOPBACK, *bound, *self.allowed_hosts}))


def apps(upstream: Upstream, text: Text, prompts: PromptPool, settings: Settings, url: str) -> tuple[App, App | None]:
    """Make the applications of the main port and, if it has one of its own, of the administrators' port."""
    bodies, names = BodyReader(settings.bounds), settings.names or (upstream.info.model,)
    data = CompletionRoutes(upstream, text, prompts, names, bodies, settings.bounds, settings.overlong)
    control, sglang = ControlRoutes(upstream, bodies), SGLang(data, upstream, bodies, url)
    looks = [*control.looks(), *sglang.looks(), *metrics.routes(upstream, names[0])]
    admin = [*control.routes(), *sglang.routes(), *AdapterRoutes(data, bodies).routes()]
    work = [*data.routes(), *Chat(data).routes()]
    if settings.admin_port is None:
        return App([*work, *looks, *admin], settings.token, settings.hosts()), None
    moved = [Route("POST", one.path, elsewhere(one.path)) for one in admin]
    main, own = [*work, *looks, *moved], [*admin, *looks, *data.routes()[2:]]
    return App(main, settings.token, settings.hosts()), App(own, settings.token, settings.hosts())


def elsewhere(path: str) -> Handler:
    """Make the handler of a path that administrators find on their own port."""

    async def refuse(request: Any) -> Any:
        raise HttpError(403, f"{path} is on the administrators' port (--admin-port)")

    return refuse


async def run(
    client: RolloutClient,
    tokenizer: Any,
    settings: Settings,
    ready: Callable[[str, str], None],
    stop: asyncio.Event | None = None,
) -> None:
    """Serve until `stop`, SIGINT or SIGTERM. `ready`: called with the two URLs once it listens (the same one twice if there is
    one port). Raises InputError for an address that cannot be bound."""
    stop = stop or asyncio.Event()
    raise_open_files(settings.bounds.max_connections)
    main = listen(settings.host, settings.port)
    admin = None if settings.admin_port is None else listen(settings.admin_host, settings.admin_port)
    upstream = Upstream(client)
    prompts = PromptPool(tokenizer, min(upstream.info.context, upstream.info.limits.max_prompt_tokens), settings.bounds)
    loop = asyncio.get_running_loop()
    try:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, stop.set)
    except (RuntimeError, ValueError):  # not the main thread: whoever runs it there has `stop`
        pass
    try:
        urls = url_of(main), url_of(admin or main)
        app, admin_app = apps(upstream, Text(tokenizer), prompts, settings, urls[0])
        servers = [(server_of(app, settings.bounds), main)]
        if admin is not None and admin_app is not None:
            servers.append((server_of(admin_app, settings.bounds), admin))
        main.listen(2048)  # whoever reads the URL may connect
        if admin is not None:
            admin.listen(128)
        ready(*urls)
        await serve(servers, stop, settings.bounds, upstream.abort_own)
    finally:
        prompts.close()
        upstream.close()


def url_of(bound: socket.socket) -> str:
    host, port = bound.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def raise_open_files(connections: int) -> None:
    """Let this process have so many sockets. Raises InputError where the system does not."""
    needed = connections + 256
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < needed:
        if hard != resource.RLIM_INFINITY and hard < needed:
            raise InputError(f"{connections} connections need {needed} open files, the limit is {hard}: ulimit -Hn, or fewer")
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
