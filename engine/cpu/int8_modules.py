"""Installs products in eight bits in the modules of a model, in place.

    use_int8(module, isa, kept)   every nn.Linear, the LM head included, computes with `rollout.engine.cpu.int8`; parameters,
                                  names and state_dict stay unchanged. kept: codes are kept beside the parameters
    plain_weights(module)         undoes it

Embeddings, norms and what else a model computes are as before.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from rollout.engine.cpu.exact_modules import ExactLinear, NotServed, is_depthwise
from rollout.engine.cpu.int8 import Int8Codes, Int8Linear, int8_kernels
from rollout.engine.memory import host_buffer

ALIGNMENT = 4096
"""of the codes of a weight in memory"""


def use_int8(module: nn.Module, isa: str, kept: bool) -> None:
    """Let every nn.Linear of a module compute in eight bits.

    Raises NotServed for experts, routers and other matrices than those of nn.Linear and embeddings, for subclasses of nn.Linear
    (quantised ones), for parts of adapters, and for weights that are not finite; NativeUnavailable. The module is unchanged
    then."""
    kernels = int8_kernels(isa)
    linears: list[Any] = []
    for name, each in module.named_modules():
        if hasattr(each, "base_layer"):
            raise NotServed(f"{name} has an adapter, which is rounded apart from its weight: merge it first")
        if isinstance(each, nn.Linear):
            linears.append(_served(name, each))
        elif not isinstance(each, nn.Embedding) and not is_depthwise(each):
            for key, tensor in each.named_parameters(recurse=False):
                if tensor.squeeze().ndim > 1:
                    raise NotServed(f"{name}.{key} is a matrix of a {type(each).__name__}, not of an nn.Linear")
    sizes = [-(-kernels.nbytes(each.weight) // ALIGNMENT) * ALIGNMENT for each in linears if kept]
    memory, start = host_buffer(sum(sizes), pin=False), 0
    codes: list[Int8Codes | None] = [None] * len(linears)
    for i, (linear, size) in enumerate(zip(linears, sizes, strict=False)):
        data = memory[start : start + kernels.nbytes(linear.weight)]
        kernels.encode(linear.weight.detach(), data, 0, len(linear.weight))
        codes[i], start = Int8Codes(isa, data), start + size
    for linear, twin in zip(linears, codes, strict=True):
        linear.__class__, linear.isa, linear.twin = Int8Linear, isa, twin


def plain_weights(module: nn.Module) -> None:
    """Undo `use_int8`."""
    modules: list[Any] = [each for each in module.modules() if type(each) is Int8Linear]
    for each in modules:
        each.__class__ = nn.Linear
        del each.isa, each.twin


def codes_in(module: nn.Module) -> list[torch.Tensor]:
    """Return the codes that are kept beside the parameters of a module."""
    return [each.twin.data for each in module.modules() if type(each) is Int8Linear and each.twin is not None]


def _served(name: str, linear: nn.Linear) -> nn.Linear:
    kind = type(linear).__name__ if type(linear.weight) is nn.Parameter else type(linear.weight).__name__
    if type(linear) not in (nn.Linear, ExactLinear, Int8Linear) or type(linear.weight) is not nn.Parameter:
        raise NotServed(f"{name} is a {kind}: need a plain nn.Linear, neither quantised nor parametrised")
    weight = linear.weight
    if not weight.is_cpu or weight.dtype not in (torch.bfloat16, torch.float32) or not weight.is_contiguous():
        raise NotServed(f"{name} is in {weight.dtype} on {weight.device}: need bfloat16 or float32 on the CPU")
    if not bool(torch.isfinite(torch.stack(weight.detach().aminmax())).all()):
        raise NotServed(f"{name} holds NaN or infinity")
    return linear
