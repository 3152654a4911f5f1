"""A model with what a CPU runs it by, without an engine."""

from __future__ import annotations

from rollout.engine.config import EngineConfig
from rollout.engine.cpu.device import CpuDevice
from rollout.engine.forward.interface import ExecutionPath
from rollout.engine.forward.model import Model
from rollout.engine.forward.reference import ReferenceAttention


def equip(model: Model, isa: str = "auto") -> ExecutionPath:
    config = EngineConfig(isa=isa)  # type: ignore[arg-type]
    computes = CpuDevice(config).equip(model, config, ReferenceAttention())
    assert computes is not None
    return computes
