"""K and V in one byte a number: e4m3 (OCP FP8: four bits of exponent, three of mantissa, at most 448), with a scale for each
token and head.

    scale    the largest of the numbers / 448, in bf16
    code     number · (1 / scale), rounded to e4m3

What is stored of a token follows from its own K and V, so it does not depend on who was computed beside it; and every rounding
is to the nearest and written here, so all devices store the same bytes. The scale is 0 in memory where nothing was written.
Numbers that are not finite are kept as 0 with an infinite scale: whatever reads them is NaN.
"""

from __future__ import annotations

import torch

SCALE_BYTES = 4
"""of K and V of one token and head: two scales, side by side"""
SHARE_OF_MOST = 1 / 448
LEAST_SCALE = 2.0**-126
"""so that dividing by it gives a number"""


def encode(numbers: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return codes [..., width] as uint8, and scales [...] in bf16, of numbers [..., width] in any float dtype."""
    wide = numbers.float()
    largest = wide.abs().amax(-1)
    scale = (largest * SHARE_OF_MOST).clamp(min=LEAST_SCALE).bfloat16()
    scale = torch.where(largest.isfinite(), scale, torch.inf)
    factor = (1 / scale.float())[..., None]  # 0 of an infinite scale
    return torch.where(factor > 0, wide * factor, 0).to(torch.float8_e4m3fn).view(torch.uint8), scale


def decode(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return the numbers [..., width] in fp32 of what `encode` has returned."""
    return codes.view(torch.float8_e4m3fn).float() * scales.float()[..., None]


def is_fp8(pool: torch.Tensor) -> bool:
    """Whether a pool holds codes and scales."""
    return pool.dtype == torch.uint8


def scales_as(pool: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """View a pool in the dtype by which a kernel reads or writes scales; a pool without any as it is."""
    return pool.view(dtype) if is_fp8(pool) else pool
