"""Access control: `Host`, `Authorization` and `Origin` of each request.

A web page can make the name of its own site resolve to 127.0.0.1 (DNS rebinding). The browser then treats this process as the
page's origin: the page can read responses, and its GET requests have no `Origin`. Their `Host` still holds the name of the
site. An IP address in `Host` is safe: DNS cannot change it, so the page itself was loaded from this address.
"""

from __future__ import annotations

import hmac
import ipaddress
import re
from collections.abc import Iterable

from starlette.types import ASGIApp, Receive, Scope, Send

from rollout.http.errors import HttpError, bad

LOOPBACK = frozenset({"127.0.0.1", "::1", "localhost"})
PROBES = ("/health", "/liveness")
"""paths that need no token"""
HOST = re.compile(r"(?:\[([0-9A-Fa-f:.]{2,45})\]|([^\[\]:/@\s]+))(?::\d{0,5})?")


class AccessMiddleware:
    """Refuses requests by host name, token and origin; see docs/http.md, Access.

    Args:
        token: required in `Authorization: Bearer`; None = not required, and web pages (`Origin`) are refused instead.
        hosts: names accepted in `Host`; None = any.
    """

    def __init__(self, app: ASGIApp, token: str | None, hosts: frozenset[str] | None) -> None:
        self._app, self._hosts = app, hosts
        self._token = None if token is None else token.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on. Raises HttpError 400, 401, 403 or 421."""
        if self._hosts is not None:
            check_host(scope["headers"], scope["http_version"], self._hosts)
        if scope["path"] not in PROBES:
            self._authorize(scope["headers"])
        scope["app"] = self  # Starlette's router then raises HTTPException instead of sending an error of its own
        await self._app(scope, receive, send)

    def _authorize(self, headers: Iterable[tuple[bytes, bytes]]) -> None:
        if self._token is not None:
            given = next((value for name, value in headers if name == b"authorization"), b"")
            scheme, _, token = given.partition(b" ")
            if scheme.lower() != b"bearer" or not hmac.compare_digest(token.strip(b" "), self._token):
                raise HttpError(401, "give Authorization: Bearer TOKEN")
        elif any(name == b"origin" for name, _ in headers):
            raise HttpError(403, "a gateway without a token refuses web pages (Origin): start it with --token-file")


def normalized(host: str) -> str:
    """Return a host name in the form used for comparison: lower case, without the dot of the root."""
    return host.lower().removesuffix(".")


def is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def check_names(names: Iterable[str]) -> None:
    """Raise ValueError for an invalid host name."""
    for name in names:
        found = HOST.fullmatch(name)
        if found is None or name not in (found[1], found[2]):
            raise ValueError(f"--allowed-hosts {name!r}: give host names without scheme, port and path")


def check_host(headers: Iterable[tuple[bytes, bytes]], version: str, allowed: frozenset[str]) -> None:
    """Check the `Host` header of a request. Raises HttpError 400 or 421.

    Args:
        version: of HTTP; from 1.1 on `Host` is required.
        allowed: names as returned by `normalized`; addresses are always allowed."""
    given = [value.decode("latin-1") for name, value in headers if name == b"host"]
    if len(given) > 1 or (not given and version != "1.0"):
        raise bad(f"{len(given)} Host headers: a request must have one")
    if not given:
        return
    found = HOST.fullmatch(given[0])
    host = normalized(found[1] or found[2]) if found else None
    if host is None or not (host in allowed or is_address(host)):
        raise HttpError(
            421,
            f"Host {given[0][:100]!r} is not a name of this gateway ({', '.join(sorted(allowed))}): use one of these or an "
            "address, or start it with --allowed-hosts and this name",
        )
