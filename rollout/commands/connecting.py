"""Connects a command to a running service."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rollout.config import InputError

if TYPE_CHECKING:
    from rollout.client.api import RolloutClient


def connected(address: str, command: str, timeout_s: float = 10.0) -> RolloutClient:
    """Connect to a running service within `timeout_s` seconds. Raises InputError for an invalid address, ServiceLost,
    KeyRefused."""
    from rollout.client.api import RolloutClient  # imported here, so that `rollout --help` is fast

    try:
        return RolloutClient(address, name=command, connect_timeout_s=timeout_s)
    except ValueError as error:
        raise InputError(str(error)) from None
