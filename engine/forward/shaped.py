"""Shapes the results of autograd functions."""

from __future__ import annotations

import torch


def shaped(made: torch.Tensor, *shape: int) -> torch.Tensor:
    """Return a contiguous tensor that nothing else holds in another shape. An autograd function returns this and no view: torch
    refuses to modify a view from inside of a function in place, as the forward of Gemma 3n does."""
    out: torch.Tensor = torch.ops.aten._unsafe_view(made, shape)
    return out
