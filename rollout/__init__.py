"""RL rollout generation service: the names that a trainer imports."""

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rollout.client.aio import AsyncRolloutClient
    from rollout.client.api import RolloutClient
    from rollout.client.async_handle import AsyncHandle
    from rollout.client.handle import Handle
    from rollout.client.streams import SampleStream
    from rollout.engine.types import Sample, Sampling
    from rollout.transport.errors import RolloutError

__version__ = "0.1.0"

if not (Path(__file__).parent / "engine").is_dir():
    # a checkout: engine/, transport/ and recipes/ lie beside this folder; a wheel has them in it
    __path__.append(str(Path(__file__).parent.parent))

__all__ = [
    "AsyncHandle",
    "AsyncRolloutClient",
    "Handle",
    "RolloutClient",
    "RolloutError",
    "Sample",
    "SampleStream",
    "Sampling",
    "__version__",
]

HOMES = {
    "AsyncHandle": "rollout.client.async_handle",
    "AsyncRolloutClient": "rollout.client.aio",
    "Handle": "rollout.client.handle",
    "RolloutClient": "rollout.client.api",
    "RolloutError": "rollout.transport.errors",
    "Sample": "rollout.engine.types",
    "SampleStream": "rollout.client.streams",
    "Sampling": "rollout.engine.types",
}
"""modules of the names"""


def __getattr__(name: str) -> Any:
    """Import a name when it is first asked for (PEP 562): `rollout --help` waits for no socket library."""
    if name not in HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(HOMES[name]), name)
