"""Connects a command to a running service."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING

from rollout.config import InputError
from rollout.transport.errors import ServiceLost

if TYPE_CHECKING:
    from rollout.client.api import RolloutClient


def connected(address: str, command: str, timeout_s: float = 10.0, wait_s: float = 0.0) -> RolloutClient:
    """Connect to a running service within `timeout_s` seconds, or try again for `wait_s` seconds to one that is starting.
    Raises InputError for an invalid address, ServiceLost, KeyRefused."""
    from rollout.client.api import RolloutClient  # imported here, so that `rollout --help` is fast

    until, reported = time.monotonic() + wait_s, False
    while True:
        left = until - time.monotonic()
        try:
            return RolloutClient(address, name=command, connect_timeout_s=min(timeout_s, left) if left > 0 else timeout_s)
        except ServiceLost as error:
            if time.monotonic() >= until:
                raise
            if not reported:
                reported = True
                print(f"{command}: {error.message}; waiting for it, {wait_s:.0f} s at most", file=sys.stderr, flush=True)
        except ValueError as error:
            raise InputError(str(error)) from None
