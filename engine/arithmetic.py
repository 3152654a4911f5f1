"""Which kernels an engine computes with, and the name of what they compute (docs/decisions/arithmetic.md)."""

from __future__ import annotations

from typing import Any

import torch

from engine.config import EngineConfig
from engine.cpu.kernels import Chosen, choose


def chosen_kernels(config: EngineConfig, model: Any) -> Chosen | None:
    """Those of the model, else of the configuration; None off the CPU. Raises ValueError where the two are not the same, and
    for an isa that cannot be had."""
    if model.device.type != "cpu":
        return None
    chosen: Chosen = getattr(model, "chosen", None) or choose(config.isa)
    if config.isa not in ("auto", chosen.isa):
        raise ValueError(f"isa={config.isa!r}: {model.name} was given with {chosen.isa}; give Model(module, name, isa=…)")
    return chosen


def arithmetic(model: Any, backend: Any) -> str:
    """Name and version of what computes: of the products, and behind a + of the attention where that is another one. Equal
    names, weights, tokens and seeds give equal samples, to the bit, on one torch."""
    computes = getattr(model, "computes", None)
    products = torch_arithmetic() if computes is None else computes.arithmetic
    attention = getattr(backend, "arithmetic", torch_arithmetic())
    return products if attention == products else f"{products}+{attention}"


def torch_arithmetic() -> str:
    """Name of what torch's own products compute."""
    return f"torch/{torch.__version__.split('+')[0]}"
