"""KV with one byte per number: e4m3 (OCP FP8: four exponent bits, three mantissa bits, at most 448), and one scale per token
and head.

    scale    largest magnitude / 448, in bf16
    code     number · (1 / scale), rounded to e4m3

The stored bytes of a token depend only on its own K and V, not on the rest of the batch. Every rounding is to nearest and
defined here, so all devices store the same bytes. Slots that were never written have scale 0. If a number is not finite, the
code is 0 and the scale infinite, so that reading it gives NaN.
"""

from __future__ import annotations

import torch

SHARE_OF_MOST = 1 / 448
LEAST_SCALE = 2.0**-126
"""smallest scale, so that 1 / scale is finite"""


def encode(numbers: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return codes [..., width] uint8 and scales [...] bf16 of numbers [..., width] of any float dtype."""
    wide = numbers.float()
    largest = wide.abs().amax(-1)
    scale = (largest * SHARE_OF_MOST).clamp(min=LEAST_SCALE).bfloat16()
    scale = torch.where(largest.isfinite(), scale, torch.inf)
    factor = (1 / scale.float())[..., None]  # 0 if the scale is infinite
    return torch.where(factor > 0, wide * factor, 0).to(torch.float8_e4m3fn).view(torch.uint8), scale


def decode(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return numbers [..., width] fp32 of the codes and scales that `encode` returns."""
    return codes.view(torch.float8_e4m3fn).float() * scales.float()[..., None]


def is_fp8(pool: torch.Tensor) -> bool:
    """Return whether a pool stores fp8 codes and scales."""
    return pool.dtype == torch.uint8


def scales_as(pool: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """View a pool in the dtype that a kernel uses for scales; a pool without scales is returned unchanged."""
    return pool.view(dtype) if is_fp8(pool) else pool
