"""Modules of experts of a mixture: those that transformers' `use_experts_implementation` decorates. They are called with the
choices [tokens, chosen] of their router, in whatever arithmetic."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import torch
from torch import nn

DECORATED = ("has_gate", "has_bias", "is_transposed", "_apply_gate", "num_experts")
"""attributes of modules of experts that transformers' `use_experts_implementation` decorates"""
CHOICES = ("top_k_index", "router_indices", "selected_experts")
"""names of the second argument of such modules"""


class NoRoutes(ValueError):
    """The routes of this model cannot be recorded; the message says why."""


class ExpertsLayer(NamedTuple):
    """A module of experts."""

    name: str
    module: nn.Module
    layer: int
    """decoder layer"""

    @property
    def experts(self) -> int:
        return self.module.num_experts  # type: ignore[return-value]


def is_experts(module: nn.Module) -> bool:
    """Return whether a module is one of experts."""
    return all(hasattr(module, name) for name in DECORATED)


def norms_after(module: nn.Module) -> bool:
    """Return whether a module of experts has a norm behind them. Older versions of transformers have none."""
    return bool(getattr(module, "has_post_expert_norm", False))


def choices_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    """Return the choices among the arguments of a module of experts."""
    chosen: torch.Tensor = args[1] if len(args) > 1 else next(kwargs[name] for name in CHOICES if name in kwargs)
    return chosen


def experts_in(module: nn.Module) -> list[ExpertsLayer]:
    """List the modules of experts of a model, by decoder layer. Raises NoRoutes if there are none, or for layers without a
    number or with the same one, and for routers that choose other things than experts."""
    found = [(name, each) for name, each in module.named_modules() if is_experts(each)]
    kind = type(module).__name__
    if not found:
        raise NoRoutes(f"{kind} is no mixture of experts that transformers' use_experts_implementation decorates")
    if getattr(module.config.get_text_config(), "zero_expert_num", None):  # type: ignore[operator, union-attr]
        raise NoRoutes(f"{kind} has experts without weights, whose ids are not those of its experts")
    layers = []
    for name, each in found:
        number = re.search(r"\.(\d+)\.", name)
        if number is None:
            raise NoRoutes(f"{kind}: experts {name} are in no numbered layer")
        layers.append(ExpertsLayer(name, each, int(number[1])))
    layers.sort(key=lambda each: each.layer)
    if len({each.layer for each in layers}) < len(layers):
        raise NoRoutes(f"{kind} has several modules of experts in a layer")
    return layers
