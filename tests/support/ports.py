"""Ports for services that tests start in processes of their own."""

from __future__ import annotations

import random
import socket


def free_port() -> int:
    """Return a port of loopback at which nothing listens: below those that the system gives to connections and for port 0, so
    no other test is given it before the service listens. Raises OSError if a hundred are taken."""
    for _ in range(100):
        port = random.SystemRandom().randrange(20_000, 32_000)
        try:
            with socket.create_server(("127.0.0.1", port)):
                return port
        except OSError:
            continue
    raise OSError("a hundred ports are taken")
