"""An EngineConfig from flat options."""

from __future__ import annotations

from typing import Any

from rollout.engine.config import AdvancedConfig, EngineConfig


def engine_config(**options: Any) -> EngineConfig:
    """Make an EngineConfig; fields of `[engine.advanced]` are given by their names."""
    advanced = {name: options.pop(name) for name in AdvancedConfig.__struct_fields__ if name in options}
    return EngineConfig(advanced=AdvancedConfig(**advanced), **options)
