"""RL rollout generation service: the names that a trainer imports."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from engine.types import Sample, Sampling
    from rollout.client.api import RolloutClient
    from rollout.client.arrivals import Arrivals
    from rollout.client.handle import Handle
    from transport.errors import RolloutError

__version__ = "0.1.0"

__all__ = ["Arrivals", "Handle", "RolloutClient", "RolloutError", "Sample", "Sampling", "__version__"]

HOMES = {
    "Arrivals": "rollout.client.arrivals",
    "Handle": "rollout.client.handle",
    "RolloutClient": "rollout.client.api",
    "RolloutError": "transport.errors",
    "Sample": "engine.types",
    "Sampling": "engine.types",
}


def __getattr__(name: str) -> Any:
    """Import a name when it is first asked for (PEP 562): `rollout --help` waits for no socket library."""
    if name not in HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(HOMES[name]), name)
