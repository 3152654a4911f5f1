"""RL rollout generation service: the names that a trainer imports."""

from engine.request import Sample, Sampling
from rollout.client import RolloutClient
from rollout.handle import Handle
from transport.errors import RolloutError

__version__ = "0.1.0"

__all__ = ["Handle", "RolloutClient", "RolloutError", "Sample", "Sampling", "__version__"]
