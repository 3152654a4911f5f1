"""Whom a request may call by `Host`.

A web page can have the name of its own site resolve to 127.0.0.1 (DNS rebinding). For the browser this process is then the
page's own origin: the page reads answers, and a GET brings no `Origin`. But `Host` is the name of its site, whatever it does.
An address in `Host` is no such name: a page that was loaded from an address is that host's own.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable

from rollout.http.errors import HttpError, bad

LOOPBACK = frozenset({"127.0.0.1", "::1", "localhost"})
HOST = re.compile(r"(?:\[([0-9A-Fa-f:.]{2,45})\]|([^\[\]:/@\s]+))(?::\d{0,5})?")


def named(host: str) -> str:
    """Return a host as it is compared: lower case, without the dot of the root."""
    return host.lower().removesuffix(".")


def is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def check_names(names: Iterable[str]) -> None:
    """Raise ValueError for what is no name of a host."""
    for name in names:
        found = HOST.fullmatch(name)
        if found is None or name not in (found[1], found[2]):
            raise ValueError(f"--allowed-hosts {name!r}: give names of hosts alone, without scheme, port and path")


def check_host(headers: Iterable[tuple[bytes, bytes]], version: str, allowed: frozenset[str]) -> None:
    """Raise HttpError for a request that calls this process by a name that is not its own.

    Args:
        version: of HTTP; from 1.1 on a request must have one `Host`.
        allowed: names, as `named` writes them. Addresses are always allowed."""
    given = [value.decode("latin-1") for name, value in headers if name == b"host"]
    if len(given) > 1 or (not given and version != "1.0"):
        raise bad(f"{len(given)} Host headers: a request has one")
    if not given:
        return
    found = HOST.fullmatch(given[0])
    host = named(found[1] or found[2]) if found else None
    if host is None or not (host in allowed or is_address(host)):
        shown = given[0][:100]
        raise HttpError(
            421,
            f"Host {shown!r} is none of this facade's names ({', '.join(sorted(allowed))}): ask at one of them, or at an "
            "address; or start it with --allowed-hosts and this name",
        )
