"""An in-process engine without sockets: `Engine`, and the value types of its input and output.

Names are imported at first use, so the value types do not import torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rollout.engine.config import EngineConfig
    from rollout.engine.engine import Engine
    from rollout.engine.values import Group, Limits, Sample, Sampling

_MODULES = {
    "Engine": "engine",
    "EngineConfig": "config",
    "Group": "values",
    "Limits": "values",
    "Sample": "values",
    "Sampling": "values",
}

__all__ = ["Engine", "EngineConfig", "Group", "Limits", "Sample", "Sampling"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES.get(name, 'values')}"), name)
