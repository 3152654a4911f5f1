"""Names the arithmetic that an engine computes."""

from __future__ import annotations

from typing import Any

import torch

from rollout.engine.values.arithmetic import Arithmetic


def arithmetic_of(
    computes: Any, backend: Any, *, fp8: bool = False, latent: bool = False, int8: bool = False, sums: str = ""
) -> Arithmetic:
    """Return the engine's arithmetic. computes: `rollout.engine.forward.interface.ExecutionPath`; None: the module itself. The
    others: as in `Arithmetic`."""
    products = torch_arithmetic() if computes is None else computes.arithmetic
    attention = getattr(backend, "arithmetic", torch_arithmetic())
    base = products if attention == products else f"{products}+{attention}"
    return Arithmetic(base, int8, sums, latent, fp8)


def torch_arithmetic() -> str:
    """Return the name of torch's own products."""
    return f"torch/{torch.__version__.split('+')[0]}"
