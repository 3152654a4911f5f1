"""Twins of parameters: another form of a weight, which the forward reads in its place, such as its codes in eight bits.

A module that has one beside its parameter `weight` holds it in the attribute `twin`. A refresh stages it with the parameter,
slice by slice as bytes arrive, and swaps and undoes both together. Digests, deltas and adapters are of the parameters alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Protocol

import torch

from rollout.engine.weights.staging import StagedTensor, TensorSlices

MARK = " (twin)"
"""behind the name of a parameter: the name of its twin among buffers"""


class Twin(Protocol):
    """Another form of a parameter [outputs, inputs]."""

    data: torch.Tensor
    """[bytes] uint8"""

    @property
    def unit(self) -> int:
        """Outputs that are filled together."""

    def fill(self, weight: torch.Tensor, data: torch.Tensor, first: int, end: int) -> None:
        """Write the form of the outputs from `first`, a multiple of `unit`, to `end`, another one or the last output, into
        `data`, laid out as `self.data`."""


class Twins:
    """The twins of a module's parameters. tensors: the parameters by name."""

    def __init__(self, module: torch.nn.Module | None, tensors: Mapping[str, torch.Tensor]) -> None:
        modules = [] if module is None else [each for each in module.modules() if vars(each).get("twin") is not None]
        found: dict[int, Twin] = {id(each.weight): vars(each)["twin"] for each in modules}
        self.of = {name: found[id(tensor)] for name, tensor in tensors.items() if id(tensor) in found}
        """by the name of the parameter"""

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """The tensors of all twins, by their own names."""
        return {name + MARK: twin.data for name, twin in self.of.items()}

    def staging(
        self, parts: Iterable[StagedTensor], place: Callable[[str], torch.Tensor], making: TensorSlices | None
    ) -> TensorSlices | None:
        """Return what fills staged twins as their parameters are staged."""
        return TwinStaging(self, parts, place, making) if self.of else making

    def beside(self, names: Iterable[str]) -> list[str]:
        """Return the names of the twins of these parameters, as far as they have some."""
        return [name + MARK for name in names if name in self.of]


class TwinStaging:
    """Fills staged twins as their parameters are staged.

    Args:
        place: returns the staged tensor of a name, that of a twin included.
        making: computes further tensors from the parts; None: the parts are all.
    """

    def __init__(
        self,
        twins: Twins,
        parts: Iterable[StagedTensor],
        place: Callable[[str], torch.Tensor],
        making: TensorSlices | None,
    ) -> None:
        self._twins, self._place, self._making = twins.of, place, making
        self.stands_for = sum(part.nbytes for part in parts) if making is None else making.stands_for
        self._filled: dict[str, int] = {}
        """outputs of each parameter that are in its staged twin"""

    @property
    def bases(self) -> Mapping[str, torch.Tensor]:
        return {} if self._making is None else self._making.bases

    def landed(self, part: StagedTensor, end: int) -> None:
        """Fill what the first `end` payload bytes of a part complete."""
        twin = self._twins.get(part.target or "")
        if twin is None or part.target is None:
            return
        weight = self._place(part.target)
        outputs, inputs = weight.shape
        complete = end // part.dtype.itemsize // inputs
        if complete < outputs:
            complete -= complete % twin.unit
        self._fill(part.target, weight, self._filled.get(part.target, 0), complete)
        self._filled[part.target] = complete

    def arrived(self, part: StagedTensor) -> dict[str, str]:
        """Fill the twins of what this part completes elsewhere. Returns the digests of the parameters written there."""
        digests = {} if self._making is None else self._making.arrived(part)
        for name in digests:
            if name in self._twins:
                weight = self._place(name)
                self._fill(name, weight, 0, len(weight))
        return digests

    def _fill(self, name: str, weight: torch.Tensor, first: int, end: int) -> None:
        if end > first:
            self._twins[name].fill(weight, self._place(name + MARK), first, end)
