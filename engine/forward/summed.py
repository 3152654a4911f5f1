"""Products whose inputs tensor parallelism cuts, and the exchange of ranks that adds them up. A device implements both:
`rollout.engine.cpu.sums`, `rollout.engine.cuda.reduce`.

    mark       sum_slices(modules, Summed(slices, exchange))     whoever loads the model: these products are summed
    install    use_products, make_exact, sum_over_ranks          the device: by these kernels, over this exchange"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn

from rollout.engine.config import EngineConfig
from rollout.engine.weights.layer_cuts import summed_products

SLICES = 8
"""of the inputs of a product, over all ranks"""


class RankExchange(Protocol):
    """One rank's view of what the ranks of a replica exchange. All ranks call the same in the same order."""

    @property
    def rank(self) -> int: ...

    @property
    def ranks(self) -> int: ...

    @property
    def on_host(self) -> bool:
        """Whether the model is in host memory, which the ranks of a host divide."""

    @property
    def lost(self) -> int | None:
        """Return the rank that has ended; None: all run."""

    @property
    def failed(self) -> bool:
        """Return whether no exchange will succeed any more."""

    def gather(self, tensor: torch.Tensor, shapes: Sequence[Sequence[int]]) -> list[torch.Tensor]:
        """Return the tensors on the model's device that the ranks give, in their order. shapes: of each rank's; all have one
        dtype. Raises RankLost."""

    def numbers(self, tensor: torch.Tensor, shapes: Sequence[Sequence[int]]) -> list[torch.Tensor]:
        """Do the same with a small tensor in host memory."""

    def wait(self, reached: Callable[[], bool]) -> None:
        """Wait until the device has done what was launched. reached: returns whether it has. Raises RankLost if a rank has
        ended, or does not answer in time."""

    def patience(self, seconds: float) -> None:
        """Set how long this rank waits for another one."""

    def lose(self, rank: int) -> None:
        """Tell all ranks that one has ended: whoever waits raises RankLost. For any thread."""

    def close(self) -> None:
        """End what this exchange has started."""


class Summed(NamedTuple):
    """Marks an nn.Linear, or experts, whose inputs are cut into eight slices; of experts, those of the second product."""

    slices: int
    """of the eight that it has"""
    exchange: RankExchange | None
    """with the ranks that have the others; None: it has all"""


def summed_of(module: nn.Module) -> Summed | None:
    """Return how an nn.Linear, or the second product of experts, is summed over slices; None: it is not."""
    return getattr(module, "summed", None)


def sum_slices(modules: Iterable[nn.Module], summed: Summed) -> None:
    """Mark products that are summed over slices, for the kernels that are installed next."""
    each: Any
    for each in modules:
        each.summed = summed


def whole_sums(module: nn.Module) -> None:
    """Undo `sum_slices`."""
    for each in module.modules():
        if summed_of(each) is not None:
            del each.summed


def mark_sums(module: nn.Module, config: EngineConfig) -> None:
    """Mark the products of a whole model that are summed over slices. Those of several ranks are marked when they are
    loaded."""
    if config.tp == 1:
        whole_sums(module)
        if config.sums_in_tree:
            sum_slices(summed_products(module), Summed(SLICES, None))
