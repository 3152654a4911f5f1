"""The name of what an engine computes (docs/decisions/arithmetic.md)."""

from __future__ import annotations

from typing import Any

import torch

FP8 = "+fp8_e4m3/1"
"""at the end of a name: KV is kept so"""


def arithmetic(computes: Any, backend: Any, fp8: bool = False) -> str:
    """Name what computes, with a version: the products, behind a + the attention where that is another one, and FP8 where KV is
    kept so. Equal names, weights, tokens and seeds give equal samples, to the bit, on one torch. computes:
    `engine.forward.model.Computes`, None = the module as it comes."""
    products = torch_arithmetic() if computes is None else computes.arithmetic
    attention = getattr(backend, "arithmetic", torch_arithmetic())
    return (products if attention == products else f"{products}+{attention}") + (FP8 if fp8 else "")


def without_fp8(name: str) -> str:
    """Name the same arithmetic with KV in the model's dtype."""
    return name.removesuffix(FP8)


def torch_arithmetic() -> str:
    """Name what torch's own products compute."""
    return f"torch/{torch.__version__.split('+')[0]}"
