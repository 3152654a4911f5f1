"""The trainer's end: groups out, samples in, weights out. Imports neither torch nor the engine's own rooms."""

from rollout.client.api import RolloutClient
from rollout.client.handle import Handle

__all__ = ["Handle", "RolloutClient"]
