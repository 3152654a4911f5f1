"""Names of the arithmetic that an engine computes (docs/decisions/arithmetic.md)."""

from __future__ import annotations

from typing import Any

import torch

FP8 = "+fp8_e4m3/1"
"""suffix of a name if KV is stored in fp8"""
TREE = "+tree8/1"
"""suffix of a name, before LATENT and FP8, if products whose inputs tensor parallelism cuts are summed in a tree over eight
slices"""
RANKS = "+ranks{}/1"
"""suffix of a name in place of TREE, with the number of ranks: if each rank's sum is the library's, rounded to the model's
dtype, and these are added in the order of the ranks"""
LATENT = "+latent/1"
"""suffix of a name, before FP8, if layers of latent attention store latents"""
INT8 = "+int8_g64/1"
"""suffix of a name, before LATENT, if every nn.Linear multiplies in eight bits, 64 inputs to a scale"""


def arithmetic(
    computes: Any, backend: Any, *, fp8: bool = False, latent: bool = False, int8: bool = False, sums: str = ""
) -> str:
    """Return the versioned name of the engine's arithmetic: its products, "+" its attention if that has another name, INT8 if
    weights are read so, `sums`, LATENT and FP8 if KV is stored so. Engines with equal names, weights, tokens,
    seeds and torch versions give equal samples, to the bit.

    Args:
        computes: `rollout.engine.forward.model.ExecutionPath`; None: the module itself.
        sums: TREE, RANKS with a number, or "" if sums are whole.
    """
    products = torch_arithmetic() if computes is None else computes.arithmetic
    attention = getattr(backend, "arithmetic", torch_arithmetic())
    both = products if attention == products else f"{products}+{attention}"
    return both + (INT8 if int8 else "") + sums + (LATENT if latent else "") + (FP8 if fp8 else "")


def without_fp8(name: str) -> str:
    """Return the name of the same arithmetic with KV in the model's dtype."""
    return name.removesuffix(FP8)


def without_latent(name: str) -> str:
    """Return the name of the same arithmetic with K and V of every head stored; it has no FP8."""
    return name.removesuffix(LATENT)


def without_tree(name: str) -> str:
    """Return the name of the same arithmetic with whole sums; it has no LATENT and no FP8."""
    return name.removesuffix(TREE)


def without_int8(name: str) -> str:
    """Return the name of the same arithmetic with weights in the model's dtype; it has no LATENT and no FP8."""
    return name.removesuffix(INT8)


def torch_arithmetic() -> str:
    """Return the name of torch's own products."""
    return f"torch/{torch.__version__.split('+')[0]}"
