"""RL rollout generation service: the names that a trainer imports."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rollout.client.api import RolloutClient
    from rollout.client.handle import Handle
    from rollout.client.streams import SampleStream
    from rollout.engine.types import Sample, Sampling
    from rollout.transport.errors import RolloutError

__version__ = "0.1.0"

if not (Path(__file__).parent / "engine").is_dir():
    # a checkout: engine/, transport/ and recipes/ lie beside this folder; a wheel has them in it
    __path__.append(str(Path(__file__).parent.parent))

__all__ = ["SampleStream", "Handle", "RolloutClient", "RolloutError", "Sample", "Sampling", "__version__"]


def __getattr__(name: str) -> Any:
    """Import a name when it is first asked for (PEP 562): `rollout --help` waits for no socket library."""
    if name in ("Sample", "Sampling"):
        from rollout.engine import types

        return getattr(types, name)
    if name == "RolloutClient":
        from rollout.client.api import RolloutClient

        return RolloutClient
    if name == "SampleStream":
        from rollout.client.streams import SampleStream

        return SampleStream
    if name == "Handle":
        from rollout.client.handle import Handle

        return Handle
    if name == "RolloutError":
        from rollout.transport.errors import RolloutError

        return RolloutError
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
