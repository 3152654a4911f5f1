"""Groups to samples, in process and without sockets: `Engine` and the value types that go in and out.

Names are loaded when they are asked for, so that the value types come without torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from engine.config import EngineConfig
    from engine.engine import Engine
    from engine.types import Group, Limits, Sample, Sampling

_HOMES = {
    "Engine": "engine",
    "EngineConfig": "config",
    "Group": "types",
    "Limits": "types",
    "Sample": "types",
    "Sampling": "types",
}

__all__ = ["Engine", "EngineConfig", "Group", "Limits", "Sample", "Sampling"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES.get(name, 'types')}"), name)
