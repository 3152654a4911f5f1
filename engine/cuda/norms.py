"""RMSNorm in two kernels instead of eight, for CUDA.

transformers writes RMSNorm as eight operators. In a CUDA graph, each is still a kernel of a few microseconds, and a layer of
Qwen3 has four norms: 32 of its 57 kernels. `torch.nn.functional.rms_norm` does all but the last operator in one kernel, with
the same roundings: squares, their mean and the product in fp32, rounded once to the dtype, and then the weight. The mean is
summed in another order.
"""

from __future__ import annotations

import copy
import inspect
import logging
from collections.abc import Callable, Iterator
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.nn.functional import rms_norm

log = logging.getLogger(__name__)

SAMPLES = 64
"""rows on which both implementations of a norm are compared"""


def fuse_norms(module: nn.Module) -> int:
    """Make the RMSNorms of a model use torch's kernel if it computes the same. Returns their number. Parameters are read at
    each call, so in-place updates take effect."""
    same: dict[tuple[type, int], bool] = {}
    fused = 0
    for norm in candidates(module):
        kind = type(norm), norm.weight.numel()
        if kind not in same:
            same[kind] = agree(norm, _forward)
        if same[kind]:
            norm.forward = MethodType(_forward, norm)
            fused += 1
    others = sorted({kind.__name__ for (kind, _), ok in same.items() if not ok})
    log.info("norms run fused count=%d of_another_kind=%s", fused, ",".join(others) or "none")
    return fused


def candidates(module: nn.Module) -> Iterator[Any]:
    for each in module.modules():
        norm: Any = each
        parameters = [name for name, _ in norm.named_parameters(recurse=False)]
        if parameters == ["weight"] and hasattr(norm, "variance_epsilon") and norm.weight.dim() == 1:
            if len(inspect.signature(norm.forward).parameters) == 1:  # gated norms have more
                yield norm


def _forward(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
    weight: torch.Tensor = self.weight
    return weight * rms_norm(hidden_states, list(weight.shape), None, self.variance_epsilon)


@torch.inference_mode()
def agree(norm: Any, forward: Callable[[Any, torch.Tensor], torch.Tensor]) -> bool:
    """Return whether `forward` computes what the norm does: with a weight that is not all ones, nearly all results are equal,
    and none differs by more than rounding explains."""
    twin, generator = copy.deepcopy(norm), torch.Generator().manual_seed(0)
    weight, dtype = twin.weight, norm.weight.dtype
    weight.copy_(torch.rand(weight.shape, generator=generator) + 0.5)
    hidden = torch.randn((SAMPLES, weight.numel()), generator=generator).to(weight.device, dtype)
    want, made = twin(hidden), forward(twin, hidden)
    exact = want.dtype == torch.float32 == dtype
    rtol = (16 if exact else 2) * torch.finfo(dtype).eps
    if want.dtype != made.dtype or not torch.allclose(made, want, rtol=rtol, atol=0):
        return False
    return exact or bool((made == want).float().mean() > 0.98)
