"""The client: submits groups, receives samples, sends weights. Imports neither torch nor an engine.

api (with proofs), aio ──→ base ──→ session ──→ link ──→ pending ──→ handle
                             │                    └─→ connection
                             └─→ text, refresh, lora, replaying ──→ verification ──→ receipts
"""

from rollout.client.aio import AsyncRolloutClient
from rollout.client.api import RolloutClient
from rollout.client.async_handle import AsyncHandle, AsyncRefreshHandle
from rollout.client.connection import LinkTiming
from rollout.client.handle import Handle
from rollout.client.receipts import Receipt
from rollout.client.refresh import RefreshHandle
from rollout.client.replaying import Change, Reproduced
from rollout.client.streams import SampleStream
from rollout.client.verification import Verified

__all__ = [
    "AsyncHandle",
    "AsyncRefreshHandle",
    "AsyncRolloutClient",
    "Change",
    "Handle",
    "LinkTiming",
    "Receipt",
    "RefreshHandle",
    "Reproduced",
    "RolloutClient",
    "SampleStream",
    "Verified",
]
