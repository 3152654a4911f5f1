"""The client: submits groups, receives samples, sends weights. Imports neither torch nor an engine.

api ──→ session ──→ link ──→ pending ──→ handle
  └─→ refresh, lora    └─→ connection
"""

from rollout.client.api import RolloutClient
from rollout.client.connection import LinkTiming
from rollout.client.handle import Handle
from rollout.client.refresh import RefreshHandle
from rollout.client.streams import SampleStream

__all__ = ["Handle", "LinkTiming", "RefreshHandle", "RolloutClient", "SampleStream"]
