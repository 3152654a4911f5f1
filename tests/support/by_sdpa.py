"""A stand-in for torch's `varlen_attn`, which runs on CUDA only: scaled_dot_product_attention, one prompt after the other."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch.nn.functional import scaled_dot_product_attention


class BySdpa:
    """`engine.cuda.varlen.Attend`. off: the window is so many tokens too wide."""

    def __init__(self, off: int = 0) -> None:
        self.off = off
        self.asked: list[tuple[list[int], int, int]] = []
        """where prompts begin and the last one ends, tokens of the longest, and the window, of every call"""

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, starts: torch.Tensor, longest: int, scaling: float, window: int
    ) -> torch.Tensor:
        self.asked.append((starts.tolist(), longest, window))
        out = torch.full_like(q, torch.nan)
        for first, end in pairwise(starts.tolist()):
            at = torch.arange(end - first, device=q.device)
            seen = at[None] <= at[:, None]
            if window:
                seen &= at[None] > at[:, None] - window - self.off
            one = (x[first:end].transpose(0, 1)[None] for x in (q, k, v))
            made = scaled_dot_product_attention(*one, attn_mask=seen, scale=scaling, enable_gqa=True)
            out[first:end] = made[0].transpose(0, 1)
        return out
