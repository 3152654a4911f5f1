"""RL rollout generation service: the names that a trainer imports."""

from engine.types import Sample, Sampling
from rollout.client.api import RolloutClient
from rollout.client.handle import Handle
from transport.errors import RolloutError

__version__ = "0.1.0"

__all__ = ["Handle", "RolloutClient", "RolloutError", "Sample", "Sampling", "__version__"]
