"""The client: submits groups, receives samples, sends weights. Imports neither torch nor an engine.

api ──→ session ──→ link ──→ pending ──→ handle
  └─→ refresh, lora    └─→ connection
"""

from rollout.client.api import RolloutClient
from rollout.client.handle import Handle

__all__ = ["Handle", "RolloutClient"]
