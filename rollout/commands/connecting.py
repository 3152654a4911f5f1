"""The client of a command, for the address that a person gave."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rollout.config import InputError

if TYPE_CHECKING:
    from rollout.client.api import RolloutClient


def connected(address: str, command: str, timeout_s: float = 10.0) -> RolloutClient:
    """Connect to a running service, for at most so many seconds. Raises InputError for an address that cannot be used,
    ServiceLost, KeyRefused."""
    from rollout.client.api import RolloutClient  # `rollout --help` waits for no socket library

    try:
        return RolloutClient(address, name=command, connect_timeout_s=timeout_s)
    except ValueError as error:
        raise InputError(str(error)) from None
