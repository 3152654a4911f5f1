"""Products y = x · wᵀ + b in which a row's result does not depend on the other rows; for engines and trainers.

torch's own products choose the order of their sums by the number of rows: below a few rows on every CPU, and at any number of
rows on CPUs with AMX. These products give a row the same bits alone, in a batch and padded. `arithmetic` names these bits: with
the same name, weights and tokens, service and trainer get the same numbers. `rollout.engine.cpu.exact_modules` installs them in
a model."""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn

from rollout.engine.cpu.build import NativeUnavailable
from rollout.engine.cpu.experts import ExpertKernels
from rollout.engine.cpu.functions import in_whole_vectors
from rollout.engine.cpu.isa import here, isa_of
from rollout.engine.cpu.kernels import Kernels, choose
from rollout.engine.cpu.sums import SumKernels
from rollout.engine.forward.arithmetic import torch_arithmetic

DTYPES = (torch.bfloat16, torch.float32)


class Products(Protocol):
    isa: str
    """instruction set, or "torch\""""
    arithmetic: str
    experts: ExpertKernels | None
    """None: the products of experts are made one by one"""
    sums: SumKernels | None
    """products summed over slices; None: there are none"""

    def linear(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Return [T, inputs] · [outputs, inputs]ᵀ (+ [outputs]) → [T, outputs], all of one dtype of `DTYPES`, on the CPU."""

    def silu(self, x: torch.Tensor) -> torch.Tensor:
        """Return x · sigmoid(x), of any shape, in one of `DTYPES`."""


class Pieces(NamedTuple):
    """Numbers of rows in which a product is given to torch."""

    least: int
    step: int
    """numbers of rows are padded to a multiple of this"""
    most: int
    steady: bool
    """whether a row had the same bits in all numbers and positions that were tried"""

    def padded(self, rows: int) -> int:
        return max(self.least, -(-rows // self.step) * self.step)


class TorchProducts:
    """torch's products, in pieces of rows found by trial: all rows at once if torch gives a row the same bits at every
    position, else padded to whole tiles, else as few rows at a time as needed."""

    isa, arithmetic = "torch", torch_arithmetic()
    experts: ExpertKernels | None = None
    sums: SumKernels | None = None
    LEAST = {torch.bfloat16: 2, torch.float32: 16}
    """rows below which torch uses another code path on every CPU"""
    TRIED = (1, 2, 3, 4, 5, 7, 8, 9, 12, 16, 17, 31, 33, 129, 213, 513, 1000)
    STEPS = (1, 16, 64)
    MOST = (1024, 256, 64)
    MOST_WORK = 4e9
    """floating-point operations beyond which a larger piece brings nothing"""

    def __init__(self) -> None:
        self._pieces: dict[tuple[Any, ...], Pieces] = {}

    def linear(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        pieces = self.pieces(weight, bias)
        if len(x) == 0 or (len(x) <= pieces.most and pieces.padded(len(x)) == len(x)):
            return nn.functional.linear(x, weight, bias)
        return torch.cat([_padded_linear(part, weight, bias, pieces.padded(len(part))) for part in x.split(pieces.most)])

    def pieces(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Pieces:
        """Return the pieces for a product of this shape, with torch's current number of threads."""
        key = (*weight.shape, bias is None, weight.dtype, torch.get_num_threads())
        if key not in self._pieces:
            self._pieces[key] = self._try(weight, bias)
        return self._pieces[key]

    def silu(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = in_whole_vectors(nn.functional.silu, (x,), {})
        return out

    @torch.no_grad()
    def _try(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Pieces:
        sizes = [n for n in self.MOST if 2 * n * weight.numel() <= self.MOST_WORK] or [self.MOST[-1]]
        x, probe = sensitive(sizes[0], weight)
        for most in sizes:
            want = nn.functional.linear(x[:most], probe, bias)
            for step in self.STEPS:
                pieces = Pieces(self.LEAST[weight.dtype], step, most, True)
                if all(
                    torch.equal(_padded_linear(x[at], probe, bias, pieces.padded(n)), want[at])
                    for n in self.TRIED
                    if n <= most
                    for at in (slice(n), slice(most - n, most))
                ):
                    return pieces
        return Pieces(sizes[-1], sizes[-1], sizes[-1], False)


def sensitive(rows: int, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return x [rows, inputs] and a weight of the given shape whose exact product is 0, so that the result is the rounding
    error of the sums: another order of summation changes nearly every number, while rounding to bf16 would hide all but one in
    thousands. The magnitudes differ widely; otherwise sums of bf16 products would be exact in fp32 in any order."""
    outputs, inputs = weight.shape
    generator = torch.Generator().manual_seed(0)
    half = inputs // 2
    order = torch.randperm(2 * half, generator=generator)
    x, w = (torch.randn(n, half, generator=generator) for n in (rows, outputs))
    powers = (torch.randint(-8, 8, each.shape, generator=generator, dtype=torch.float32).exp2_() for each in (x, w))
    x, w = (each.mul_(power).to(weight.dtype) for each, power in zip((x, w), powers, strict=True))
    x, w = torch.cat([x, -x], 1)[:, order], torch.cat([w, w], 1)[:, order]
    return nn.functional.pad(x, (0, inputs - 2 * half)), nn.functional.pad(w, (0, inputs - 2 * half))


class NativeProducts:
    """The products of `c/products.h`."""

    def __init__(self, kernels: Kernels) -> None:
        self.kernels, self.isa, self.arithmetic = kernels, kernels.isa, kernels.arithmetic
        self.experts: ExpertKernels | None = ExpertKernels(kernels)
        self.sums: SumKernels | None = SumKernels(kernels)

    def linear(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return self.kernels.linear(x, weight, bias)

    def silu(self, x: torch.Tensor) -> torch.Tensor:
        return self.kernels.silu(x)


@cache
def products_of(isa: str) -> Products:
    """Return the products of an instruction set; torch's for "torch". Raises NativeUnavailable."""
    return TorchProducts() if isa == "torch" else NativeProducts(Kernels(isa))


def isas_for(arithmetic: str | None) -> tuple[str, str]:
    """Return the instruction sets of products and of attention that compute the arithmetic `engine.arithmetic` on this machine;
    None = the best one, as a service here uses. Raises ValueError, listing what is available, if it has none."""
    if arithmetic is None:
        best = choose().isa
        return products_of(best).isa, best
    of_products, of_attention = {}, {}
    for isa in reversed([*here(), "torch"]):
        try:
            of_products[products_of(isa).arithmetic] = isa
        except NativeUnavailable:
            continue
        of_attention[torch_arithmetic() if isa == "torch" else isa_of(isa).arithmetic] = isa
    first, _, second = arithmetic.partition("+")
    for name, have in ((first, of_products), (second or first, of_attention)):
        if name not in have:
            raise ValueError(
                f"the service computes with arithmetic {arithmetic!r}, and this machine has {', '.join(reversed(have))}: start "
                "the service with an isa whose arithmetic both machines have, or train on a machine like the service's"
            )
    return of_products[first], of_attention[second or first]


def _padded_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, rows: int) -> torch.Tensor:
    """Return the product of x, computed with the last row repeated until there are `rows`."""
    more = torch.cat([x, x[-1:].expand(rows - len(x), -1)]) if rows > len(x) else x
    return nn.functional.linear(more, weight, bias)[: len(x)]
