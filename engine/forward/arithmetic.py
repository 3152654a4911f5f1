"""The name of what an engine computes (docs/decisions/arithmetic.md)."""

from __future__ import annotations

from typing import Any

import torch


def arithmetic(computes: Any, backend: Any) -> str:
    """Name what computes, with a version: the products, and behind a + the attention where that is another one. Equal names,
    weights, tokens and seeds give equal samples, to the bit, on one torch. computes: `engine.forward.model.Computes`, None =
    the module as it comes."""
    products = torch_arithmetic() if computes is None else computes.arithmetic
    attention = getattr(backend, "arithmetic", torch_arithmetic())
    return products if attention == products else f"{products}+{attention}"


def torch_arithmetic() -> str:
    """Name what torch's own products compute."""
    return f"torch/{torch.__version__.split('+')[0]}"
