"""Which kernels an engine computes with, and the name of what they compute (docs/decisions/arithmetic.md)."""

from __future__ import annotations

from typing import Any

import torch

from engine.config import EngineConfig
from engine.cpu.kernels import Chosen, choose


def chosen_kernels(config: EngineConfig, model: Any) -> Chosen | None:
    """Those of the model, else of the configuration; None off the CPU. Raises ValueError where the two are not the same, and for
    an isa that cannot be had."""
    if model.device.type != "cpu":
        return None
    chosen: Chosen = getattr(model, "chosen", None) or choose(config.isa)
    if config.isa not in ("auto", chosen.isa):
        raise ValueError(f"isa={config.isa!r}: {model.name} was given with {chosen.isa}; give Model(module, name, isa=…)")
    return chosen


def arithmetic(model: Any, backend: Any, chosen: Chosen | None) -> str:
    """Name and version of what computes: the kernels' where they run the whole forward, else torch's, and behind a + that of
    native attention. Equal names, weights, tokens and seeds give equal samples, to the bit, on one torch."""
    if getattr(model, "native", None) is not None and chosen is not None and chosen.kernels is not None:
        return chosen.kernels.arithmetic
    attention = getattr(backend, "arithmetic", None)
    return torch_arithmetic() if attention is None else f"{torch_arithmetic()}+{attention}"


def torch_arithmetic() -> str:
    """Name of what torch's own products compute."""
    return f"torch/{torch.__version__.split('+')[0]}"
