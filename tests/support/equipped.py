"""A model with what a CPU runs it by, without an engine."""

from __future__ import annotations

from engine.config import EngineConfig
from engine.devices import CpuDevice
from engine.forward.model import ExecutionPath, Model
from engine.forward.reference import ReferenceAttention


def equip(model: Model, isa: str = "auto") -> ExecutionPath:
    config = EngineConfig(isa=isa)  # type: ignore[arg-type]
    computes = CpuDevice(config).equip(model, config, ReferenceAttention())
    assert computes is not None
    return computes
