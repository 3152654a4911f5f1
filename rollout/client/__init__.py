"""The client: submits groups, receives samples, sends weights. Imports neither torch nor an engine.

api, aio ──→ base ──→ session ──→ link ──→ pending ──→ handle
               │                    └─→ connection
               ├─→ text
               └─→ parts: weights, adapters, proofs and a memo, imported by who uses them
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rollout.client.aio import AsyncRolloutClient
    from rollout.client.api import RolloutClient
    from rollout.client.async_handle import AsyncHandle, AsyncRefreshHandle
    from rollout.client.config import ClientConfig
    from rollout.client.connection import LinkTiming
    from rollout.client.handle import Handle
    from rollout.client.receipts import Receipt
    from rollout.client.refresh import RefreshHandle
    from rollout.client.replaying import Change, Reproduced
    from rollout.client.streams import SampleStream
    from rollout.client.verification import Verified

HOMES = {
    "AsyncHandle": "async_handle",
    "AsyncRefreshHandle": "async_handle",
    "AsyncRolloutClient": "aio",
    "Change": "replaying",
    "ClientConfig": "config",
    "Handle": "handle",
    "LinkTiming": "connection",
    "Receipt": "receipts",
    "RefreshHandle": "refresh",
    "Reproduced": "replaying",
    "RolloutClient": "api",
    "SampleStream": "streams",
    "Verified": "verification",
}
"""modules of the names that are imported when they are first asked for (PEP 562)"""
__all__ = [
    "AsyncHandle",
    "AsyncRefreshHandle",
    "AsyncRolloutClient",
    "Change",
    "ClientConfig",
    "Handle",
    "LinkTiming",
    "Receipt",
    "RefreshHandle",
    "Reproduced",
    "RolloutClient",
    "SampleStream",
    "Verified",
]


def __getattr__(name: str) -> Any:
    """Import a public name."""
    if name in HOMES:
        return getattr(import_module(f"rollout.client.{HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """List the public names too, which are not imported yet."""
    return sorted({*globals(), *__all__})
