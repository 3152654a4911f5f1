"""Whether two ways to write an address mean the same socket.

tcp://localhost:5655, tcp://127.0.0.1:5655, tcp://[::ffff:127.0.0.1]:5655, tcp://0.0.0.0:5655    one socket that is bound to all
"""

from __future__ import annotations

import ipaddress
import os
import socket
from contextlib import suppress

IP = ipaddress.IPv4Address | ipaddress.IPv6Address


def reaches(address: str, bound: str) -> bool:
    """Return whether a socket that connects to `address` from this host reaches the socket that is bound to `bound` here. No
    name is looked up, so another name of this host than its own and localhost is not seen."""
    if address == bound:
        return True
    if address.startswith("ipc://") and bound.startswith("ipc://"):
        return _same_file(address.removeprefix("ipc://"), bound.removeprefix("ipc://"))
    if not (address.startswith("tcp://") and bound.startswith("tcp://")):
        return False
    (host, port), (bound_host, bound_port) = _split(address), _split(bound)
    if port != bound_port:
        return False
    target, place = _ip(host), _ip(bound_host)
    if target is None:
        return host.lower() in (socket.gethostname().lower(), bound_host.lower())
    if place is not None and not place.is_unspecified:
        return target == place or (target.is_unspecified and place.is_loopback)
    return is_own(target)


def is_own(ip: IP) -> bool:
    """Return whether an address is one of this host: a socket can be bound to it."""
    if ip.is_unspecified or ip.is_loopback:
        return True
    with suppress(OSError), socket.socket(socket.AF_INET if ip.version == 4 else socket.AF_INET6, socket.SOCK_DGRAM) as probe:
        probe.bind((str(ip), 0))
        return True
    return False


def _split(address: str) -> tuple[str, int | str]:
    """Return host and port of tcp://[SOURCE;]HOST:PORT."""
    host, _, port = address.removeprefix("tcp://").rpartition(";")[2].rpartition(":")
    return host.strip("[]"), int(port) if port.isascii() and port.isdigit() else port


def _ip(host: str) -> IP | None:
    """Return the address that a host is written as; None for a name. As libc reads them: 127.1 is 127.0.0.1."""
    if host in ("localhost", "*", ""):
        return ipaddress.ip_address("127.0.0.1" if host == "localhost" else "0.0.0.0")
    try:
        ip = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        try:
            return ipaddress.ip_address(socket.inet_aton(host))
        except OSError:
            return None
    mapped = ip.ipv4_mapped if ip.version == 6 else None
    return ip if mapped is None else mapped


def _same_file(one: str, other: str) -> bool:
    """Return whether two paths lead to one socket; those of abstract sockets (@NAME) are names."""
    if one.startswith("@") or other.startswith("@"):
        return False
    with suppress(OSError, ValueError):
        return os.path.samefile(one, other)
    return False
